"""What the preflight says of one thing, and how a reading that failed is told from a good one.

A reading is a value or `NotMeasured` with the reason. Nothing turns the second into the first: a probe that could not
look has not seen a healthy box.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, TypeVar

State = Literal["ok", "warning", "problem", "not measured"]
FaultClass = Literal["hardware", "interconnect", "stack", "suite"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `got` holds the reason where the state is "not measured"."""

    name: str
    state: State
    got: str
    expected: str | None = None
    action: str | None = None
    """What to do about it."""
    fault_class: FaultClass | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a report."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class NotMeasured:
    """In place of a value that could not be read."""

    reason: str


Reading: TypeAlias = T | NotMeasured
"""A value, or why there is none."""


class Unreadable(Exception):
    """Raised by a reader that knows why it cannot read; the message is the reason, in words for a user."""


def attempt(read: Callable[[], T]) -> T | NotMeasured:
    """What `read` returns, or why it did not. Any exception counts: a probe must not end the run that it serves."""
    try:
        with warnings.catch_warnings():
            # torch and NVML warn of what the findings say better, and a caller may have made warnings errors.
            warnings.simplefilter("ignore")
            return read()
    except Unreadable as error:
        return NotMeasured(str(error))
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        return NotMeasured(f"cannot read{where}: {error.strerror or error}")
    except Exception as error:
        return NotMeasured(f"{type(error).__name__}: {' '.join(str(error).split())}")


def ok(name: str, got: str) -> Finding:
    """Looked at, and as it should be."""
    return Finding(name, "ok", got)


def not_measured(name: str, why: NotMeasured | str) -> Finding:
    """Not looked at, and why."""
    return Finding(name, "not measured", why if isinstance(why, str) else why.reason)


def amount(count: int) -> str:
    """A number of bytes, for people: 95.6 GiB, 64 MiB, 512 bytes."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f}".removesuffix(".0") + f" {name}"
    return f"{count} bytes"


def gpu_names(indices: Iterable[int]) -> str:
    """GPUs by CUDA's index, runs of them in short: "GPUs 0-3, 6"."""
    wanted = sorted(set(indices))
    starts = [i for i in wanted if i - 1 not in wanted]
    ends = [i for i in wanted if i + 1 not in wanted]
    runs = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"GPU{'s' if len(wanted) > 1 else ''} {', '.join(runs)}"
