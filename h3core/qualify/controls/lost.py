"""Faults of a rank itself: it dies, or never comes, in a pool of the control's own that works before and after."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from h3core.qualify.checks.compare import Evidence, equal_facts
from h3core.qualify.checks.transport import rows_heads_rows
from h3core.qualify.controls.base import GUILTY, Bench, Caught, Control, MissedControl, name_ranks
from h3core.ranks import Rank, RankError, RankFailure, RankPool

NEVER: Final = 3600.0
"""Seconds that a rank sleeps that never comes; the pool's timeout ends it long before."""


def exchange(rank: Rank) -> None:
    """All-to-all of 1,024 values a peer; returns when it is complete here."""
    dist.all_to_all_single(values(rank), values(rank), group=rank.group)
    dist.barrier(rank.group)  # NCCL's exchange is only queued so far: its barrier waits for it, where a stack shows


def values(rank: Rank) -> Tensor:
    """1,024 values a peer, on this rank's device."""
    return torch.full((1024 * rank.world,), float(rank.rank), device=rank.device)


def dies_inside(rank: Rank) -> None:
    """Task: one rank kills itself once it has begun an exchange; the others go on exchanging."""
    exchange(rank)
    if rank.rank == GUILTY:
        out, payload = values(rank), values(rank)
        dist.all_to_all_single(out, payload, group=rank.group, async_op=True)
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        exchange(rank)


def never_enters(rank: Rank) -> None:
    """Task: one rank sleeps outside of the exchange in which the others wait for it."""
    exchange(rank)
    if rank.rank == GUILTY:
        time.sleep(NEVER)
    exchange(rank)


@dataclass(frozen=True, slots=True)
class LostRank(Control):
    """In `task` one rank is lost: it has to be named first, as `kind`, and all others be found in a collective."""

    task: Callable[[Rank], None]
    kind: str

    def run(self, bench: Bench) -> Caught:
        """See `Control.run`. No rank may outlive the pool that it belonged to."""
        world = bench.pool.world
        with RankPool(world, backend=bench.pool.backend, device=bench.pool.device, env=bench.env) as pool:
            evidence = works(pool)
            born = {facts.pid: started(facts.pid) for facts in pool.facts}
            begin = time.monotonic()
            try:
                pool.run(self.task, timeout=bench.timeout)
            except RankError as error:
                how = f"{self.judge(error, world)}; told after {time.monotonic() - begin:.1f} s"
            else:
                raise MissedControl(f"{self.name}: every rank answered, as if nothing had been planted")
            evidence += works(pool)
            born |= {facts.pid: started(facts.pid) for facts in pool.facts}
        left = [pid for pid, since in born.items() if since is not None and started(pid) == since]
        if left:
            raise MissedControl(f"{self.name}: processes {left} outlive the pool whose ranks they were")
        evidence.append(equal_facts(f"{self.name}: ranks, old and new, that ended with the pool", len(born), 2 * world))
        return Caught(self.name, world, how, evidence)

    def judge(self, error: RankError, world: int) -> str:
        """How the lost rank was told. Raises MissedControl where it was not, or where others stand outside."""
        first, *others = error.failures
        outside = [failure.rank for failure in others if not in_collective(failure)]
        if (first.rank, first.kind) != (GUILTY, self.kind):
            problem = f"rank {first.rank} is named first, as {first.kind}; planted: rank {GUILTY}, {self.kind}"
        elif first.kind == "died" and first.exitcode != -signal.SIGKILL:
            problem = f"rank {GUILTY} ended with code {first.exitcode}, planted: {-signal.SIGKILL}"
        elif first.kind == "hung" and in_collective(first):
            problem = f"rank {GUILTY} is shown inside a collective, planted: outside"
        elif len(others) != world - 1:
            problem = f"{len(others)} other ranks failed with it, expected {world - 1}: they wait for it"
        elif outside:
            problem = f"{name_ranks(outside)} not shown inside a collective"
        else:
            kinds = sorted({failure.kind for failure in others})
            ends = [f"{name_ranks(sorted(f.rank for f in others if f.kind == kind))} {kind}" for kind in kinds]
            return f"{name_ranks([GUILTY])} {first.kind}: {first.message}; inside a collective: {', '.join(ends)}"
        raise MissedControl(f"{self.name}: {problem}\n{error}")


def works(pool: RankPool) -> list[Evidence]:
    """Ragged exchanges of known data, there and back."""
    per_rank = pool.run(rows_heads_rows, 4 * pool.world + 1, 2 * pool.world + 1, 8, (torch.bfloat16,))
    return [evidence for items in per_rank for evidence in items]


def in_collective(failure: RankFailure) -> bool:
    """Whether a frame of torch.distributed is among those that the rank left."""
    return "torch/distributed/" in (failure.stacks or failure.traceback or "")


def started(pid: int) -> str | None:
    """When process `pid` was started, in the kernel's ticks (a reused number differs); None where it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else fields[18]
