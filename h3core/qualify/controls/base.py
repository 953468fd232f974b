"""What a negative control is, what it is run on, and how it ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from h3core.qualify.checks.compare import Evidence
from h3core.qualify.checks.loop import Case, Outcome, virtual_ranks
from h3core.ranks import RankPool

GUILTY: Final = 1
"""The rank that is faulty."""


class MissedControl(Exception):
    """A fault took place and was not caught as it must be: the checks of this run prove nothing."""


class NotPlanted(Exception):
    """A fault did not take place, or not once: nothing is known about the check."""


@dataclass(frozen=True, slots=True)
class Caught:
    """A control that did its work. `how`: what caught the fault; `evidence`: of sound ranks, and of the planting."""

    name: str
    world: int
    how: str
    evidence: list[Evidence]


@dataclass(frozen=True, slots=True)
class Bench:
    """What controls are run on: sound ranks, a denoising case, and virtual ranks' outcomes of it by mode.

    `timeout`: seconds after which lost ranks are given up. `env`: for pools of a control's own, as `RankPool` takes it.
    """

    pool: RankPool
    case: Case
    virtual: Mapping[str, Sequence[Outcome]]
    timeout: float = 2.5
    env: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def build(cls, pool: RankPool, case: Case, modes: Sequence[str] = ("ulysses", "tensor"), **options: Any) -> Bench:
        """With virtual ranks in a fresh process per mode, on the device of `pool`; the mode of `case` is ignored."""
        virtual = {}
        for mode in modes:
            with RankPool(1, backend=pool.backend, device=pool.device) as alone:
                ((virtual[mode],),) = alone.run(virtual_ranks, pool.world, [with_digests(case, mode)])
        return cls(pool, case, virtual, **options)


@dataclass(frozen=True, slots=True)
class Control(ABC):
    """One fault: its name, a short one for test ids, and how it is planted, in words.

    `mode`: whose denoising loop it is planted in; "collective": a bare exchange, no model runs.
    """

    name: str
    slug: str
    mode: str
    planted: str

    @abstractmethod
    def run(self, bench: Bench) -> Caught:
        """Plant the fault and see it caught. Raises as `run_control` does."""


def with_digests(case: Case, mode: str) -> Case:
    """`case` in `mode`, with a digest of every received payload."""
    return replace(case, mode=mode, digest=True)


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words: rank 1; ranks 1, 2."""
    return f"rank{'s'[: len(ranks) > 1]} {', '.join(map(str, ranks))}"
