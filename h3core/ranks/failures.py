"""What is known about ranks that failed, and how it is told: the cause first, then the victims."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["raised", "died", "exited", "hung"]

STACK_LINES: Final = 12
"""Innermost frames of a rank still inside that go into the error's message."""

_PEER_IS_GONE: Final = re.compile(
    r"connection (was )?(reset|closed|refused|aborted)|broken pipe|gloo.*time(d )?out|timed out waiting"
    r"|ncclRemoteError|remote process exited|communicator was aborted|watchdog caught collective",
    re.IGNORECASE,
)
_IN_COLLECTIVE: Final = re.compile(r"torch/distributed/|torch\.distributed|c10d")


@dataclass(frozen=True)
class RankFailure:
    """One rank without a positive reply.

    kind: "raised" an exception; "died" of a signal; "exited" without an answer; "hung", still inside when time was up.
    message: one line. traceback: the rank's own, outermost frame first. stacks: its threads' frames, innermost first.
    """

    rank: int
    kind: Kind
    message: str
    traceback: str | None = None
    stacks: str | None = None
    exitcode: int | None = None

    @property
    def severity(self) -> int:
        """Sort key, likely cause first.

        When a rank dies its peers see "connection reset", often before the parent sees the death; of the ranks that
        hang, the one outside a collective is the one that the others wait for.
        """
        if self.kind in ("died", "exited"):
            return 0
        if self.kind == "raised":
            return 2 if _PEER_IS_GONE.search(self.message) else 1
        return 4 if _IN_COLLECTIVE.search(self.stacks or "") else 3


class RankError(RuntimeError):
    """Some ranks gave no positive reply.

    failures: likely cause first. absent: ranks from which no answer came at all, neither result nor exception.
    """

    failures: tuple[RankFailure, ...]
    absent: tuple[int, ...]

    def __init__(self, failures: Sequence[RankFailure], *, world: int, doing: str) -> None:
        """Order `failures` (given in order of arrival) and compose the message about what was `doing`."""
        self.failures = tuple(sorted(failures, key=lambda failure: failure.severity))
        self.absent = tuple(sorted(failure.rank for failure in failures if failure.kind != "raised"))
        super().__init__(_describe(self.failures, self.absent, world, doing))


def _describe(failures: Sequence[RankFailure], absent: Sequence[int], world: int, doing: str) -> str:
    first, *others = failures
    lines = [f"rank {first.rank} of {world} {first.kind} in {doing}: {first.message}"]
    if first.traceback:
        lines += ["", first.traceback.rstrip(), ""]
    lines += [f"rank {failure.rank} {failure.kind}: {failure.message}" for failure in others]
    inside: dict[str, list[int]] = {}
    for failure in failures:
        if failure.stacks:
            inside.setdefault(_innermost(failure.stacks), []).append(failure.rank)
    for frames, ranks in inside.items():
        lines += ["", f"{_ranks(ranks)} inside:", frames]
    if absent:
        lines += ["", f"no answer from {_ranks(absent)} of {world}"]
    return "\n".join(lines)


def _innermost(stacks: str) -> str:
    """The frames of the thread that took the signal, else of the main thread, which faulthandler puts last."""
    threads = stacks.split("\n\n")
    chosen = next((thread for thread in threads if thread.startswith("Current thread")), threads[-1])
    return "\n".join(chosen.splitlines()[1 : STACK_LINES + 1])


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s'[: len(ranks) > 1]} {', '.join(map(str, ranks))}"
