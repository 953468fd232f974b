"""Faults of what a rank sends: the denoising loop with one faulty rank, judged as the loop of sound ranks is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from h3core.comm import PhaseStats, ProcessGroupComm
from h3core.partition import Span, spans_of
from h3core.qualify.checks.compare import equal_facts
from h3core.qualify.checks.loop import Case, Outcome, comm_of, real_ranks, run_case
from h3core.qualify.checks.parity import PARTS, Unequal, equals_virtual
from h3core.qualify.controls.base import (
    GUILTY,
    Bench,
    Caught,
    Control,
    MissedControl,
    NotPlanted,
    name_ranks,
    with_digests,
)
from h3core.ranks import Rank

Spoil = Callable[[Tensor, Span, int], None]
"""Changes a flat payload in place, given the span of its elements that go to one neighbour and the sender's rows."""


def flip_lowest_bit(payload: Tensor, wire: Span, rows: int) -> None:
    """The lowest bit of the first element to the neighbour: what a bad link does."""
    # Little-endian: an element's first byte holds its lowest bit.
    payload.view(torch.uint8)[wire.start * payload.element_size()] ^= 1


def swap_two_rows(payload: Tensor, wire: Span, rows: int) -> None:
    """The sender's first two rows, of which the neighbour gets a part each, in each other's place: a wrong offset."""
    parts = payload[wire.start : wire.stop].view(rows, -1)
    parts[:2] = parts[:2].flip(0)


def leave_out(payload: Tensor, wire: Span, rows: int) -> None:
    """Zeros to everyone: what a peer-to-peer copy that never took place leaves behind."""
    payload.zero_()


@dataclass(frozen=True, slots=True)
class Plant:
    """Call number `call` of `phase`, counted from 0 at the start of the loop, and what is done to its payload.

    `rows`: token rows that the sender holds.
    """

    phase: str
    call: int
    rows: int
    spoil: Spoil


class SpoilingComm(ProcessGroupComm):
    """Spoils what this rank sends in a single exchange. `planted` counts the payloads of which it changed any byte."""

    def __init__(self, rank: Rank, plant: Plant, *, digest: bool) -> None:
        if rank.group is None:
            raise ValueError(f"rank {rank.rank}: expected a process group")
        super().__init__(rank.group, rank.device, digest=digest)
        self.planted = 0
        self._plant = plant
        self._due = False

    def _phase(self, name: str) -> PhaseStats:
        stats = super()._phase(name)
        self._due = (name, stats.calls) == (self._plant.phase, self._plant.call)
        return stats

    def _all_to_all(self, payload: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        if self._due:
            sound, payload = payload, payload.clone()
            neighbour = (self.rank + 1) % self.world
            self._plant.spoil(payload, spans_of(list(send))[neighbour], self._plant.rows)
            self.planted += not torch.equal(payload.view(torch.uint8), sound.view(torch.uint8))
        return super()._all_to_all(payload, send, receive)


def spoiled_ranks(rank: Rank, case: Case, plant: Plant) -> tuple[Outcome, int]:
    """Task: the loop with one faulty rank; this rank's outcome, and how many payloads it spoiled."""
    spoiling = SpoilingComm(rank, plant, digest=case.digest) if rank.rank == GUILTY else None
    with torch.inference_mode():
        outcome = run_case(spoiling or comm_of(rank, digest=case.digest), case, rank.device)
    return outcome, spoiling.planted if spoiling else 0


@dataclass(frozen=True, slots=True)
class PayloadControl(Control):
    """One rank spoils what it sends in the last call of `phase`; one of the parts in `seen_by` has to see it."""

    phase: str
    spoil: Spoil
    seen_by: tuple[str, ...] = PARTS

    def run(self, bench: Bench) -> Caught:
        """See `Control.run`: sound ranks must equal virtual ranks, faulty ones must not, by the same judgement."""
        case, virtual, world = with_digests(bench.case, self.mode), bench.virtual[self.mode], bench.pool.world
        evidence = []
        # A judgement that fails whatever it is given would catch every fault.
        for (real,), expected in zip(bench.pool.run(real_ranks, [case]), virtual, strict=True):
            evidence += equals_virtual(f"sound ranks before {self.name}", real, expected)
        guilty = virtual[GUILTY]
        plant = Plant(self.phase, guilty.phases[self.phase]["calls"] - 1, guilty.own_rows, self.spoil)
        answers = bench.pool.run(spoiled_ranks, case, plant)
        counts = [planted for _, planted in answers]
        once = [int(rank == GUILTY) for rank in range(world)]
        if counts != once:
            raise NotPlanted(f"{self.name}: payloads spoiled per rank {counts}, expected {once}")
        evidence.append(equal_facts(f"{self.name}: payloads spoiled per rank", counts, once, rank=GUILTY))
        seen: dict[str, list[int]] = {part: [] for part in PARTS}
        for (real, _), expected in zip(answers, virtual, strict=True):
            try:
                equals_virtual(self.name, real, expected)
            except Unequal as unequal:
                for part in unequal.parts:
                    seen[part].append(real.rank)
        how = "; ".join(f"{part}: {name_ranks(ranks) if ranks else 'not seen'}" for part, ranks in seen.items())
        if not any(seen[part] for part in self.seen_by):
            raise MissedControl(f"{self.name}: not seen in {' or '.join(self.seen_by)} ({how})")
        return Caught(self.name, world, how, evidence)
