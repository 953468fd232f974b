"""Each fault is planted in the ranks once, and named checks must go red: the checks are live.

The healthy side is computed without the fault. What only sits in code that both sides share is planted in
tests/unit/test_planted_faults.py, against oracles that are not ours. It tests the suite, not the machine, so it carries
no marker. Run it with: pytest tests/gloo/test_planted_faults.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from h3core.partition import split
from h3core.qualify.checks import blocks, transport
from h3core.qualify.checks.compare import ComparisonError, ErrorBudget, Identical, RelativeRows, compare, equal_facts
from h3core.qualify.checks.loop import Case, real_ranks, real_velocities, virtual_ranks
from h3core.ranks import RankPool
from tests.faults import with_fault
from tests.gloo.conftest import BUDGET, MIXED, Sequence

WORLD = 3
DIGESTS = {"ulysses digest", "tensor digest"}
LATENTS = {"ulysses virtual", "ulysses single", "tensor virtual"}
EVERYTHING = DIGESTS | LATENTS | {"fp64", "budget"}
TENSOR = {"tensor digest", "tensor virtual", "fp64", "parts"}

MUST_SEE = {
    "swapped nibbles": EVERYTHING,
    "row-major scales": EVERYTHING | {"parts"},
    "QKV left interleaved": EVERYTHING | {"parts"},
    "gate and up swapped": EVERYTHING,
    "segment not rebased": EVERYTHING | {"segments"},
    "heads off by one on one rank": EVERYTHING | {"parts", "exchange"},
    "partial scaled by 1.004 on one rank": TENSOR | {"reduce"},
    "a partial left out": TENSOR | {"reduce", "budget"},
    "one rank's rows off by one": EVERYTHING | {"parts", "exchange", "gather"},
    "two rows swapped": TENSOR | {"budget"},
    # One bit can vanish in the latents: it is the digest of received payloads that must see it.
    "one bit in one payload": DIGESTS | {"exchange", "gather", "reduce"},
    # On a bf16 wire the fp32 sum of a few partials has the same bits in any order: only fp32 partials tell.
    "sum in another order": {"reduce"},
    "SiLU after the cast": DIGESTS | LATENTS,
}
"""Checks that must go red for each fault; others may as well. What went red is printed."""


def tensor_case(path: str, sequence: Sequence, **options) -> Case:
    return Case(path, "tensor", sequence.latents, sequence.text, 2, **options)


@pytest.fixture(scope="module")
def healthy(checkpoints):
    """Cases, and what they give without a fault: on virtual ranks, and on one rank."""
    path = checkpoints.diffusers
    cases = {
        "ulysses": replace(tensor_case(path, MIXED), mode="ulysses"),
        "tensor": tensor_case(path, MIXED),
        "fp64": tensor_case(path, MIXED, dtype=torch.float64),
        "budget": tensor_case(path, BUDGET, keep=(1,)),
    }
    nvfp4 = {name: replace(case, checkpoint=checkpoints.nvfp4) for name, case in cases.items()}
    with RankPool(1) as one:
        return {kind: measure(one, table) for kind, table in (("full", cases), ("nvfp4", nvfp4))}


def measure(one: RankPool, cases: dict[str, Case]) -> dict:
    budget = cases.pop("budget")
    single = {name: one.run(real_ranks, [replace(case, mode="single")])[0][0] for name, case in cases.items()}
    ((at_budget,),) = one.run(real_ranks, [replace(budget, mode="single")])
    (reference,) = one.run(real_velocities, replace(budget, mode="single", dtype=torch.float32), at_budget.trajectory)
    (virtual,) = one.run(virtual_ranks, WORLD, [cases["ulysses"], cases["tensor"]])
    return {
        "cases": cases,
        "single": single,
        "budget": (budget, at_budget, reference[1]),
        "virtual": dict(zip(("ulysses", "tensor"), virtual, strict=True)),
    }


@pytest.fixture(scope="module")
def pool_of_three():
    with RankPool(WORLD, timeout=60) as ranks:
        yield ranks


def red_checks(pool: RankPool, fault: str, known: dict) -> set[str]:
    """Names of the checks that fail with the fault planted in the ranks."""
    cases, red = known["cases"], set()
    outcomes = dict(
        zip(cases, zip(*pool.run(with_fault, fault, real_ranks, list(cases.values())), strict=True), strict=True)
    )

    def judge(name: str, got, expected, demand) -> None:
        try:
            compare(name, got, expected, demand) if demand else equal_facts(name, got, expected)
        except ComparisonError:
            red.add(name)

    single = known["single"]
    for mode in ("ulysses", "tensor"):
        for real, virtual in zip(outcomes[mode], known["virtual"][mode], strict=True):
            judge(f"{mode} virtual", real.video, virtual.video, Identical())
            judge(f"{mode} virtual", real.audio, virtual.audio, Identical())
            judge(f"{mode} digest", digests(real), digests(virtual), None)
    fp64 = RelativeRows(1e-12, "as in test_denoise")
    for name, demand in (("ulysses single", Identical()), ("fp64", fp64)):
        got, expected = outcomes[name.split()[0]][0], single[name.split()[0]]
        judge(name, got.video, expected.video, demand)
        judge(name, got.audio, expected.audio, demand)
    budget, at_budget, reference = known["budget"]
    sharded, *_ = pool.run(with_fault, fault, real_velocities, budget, at_budget.trajectory)
    for part, high in ((0, 1.05), (1, 1.10)):
        demand = ErrorBudget(reference[part], 0.90, high)
        judge("budget", sharded[1][part], at_budget.velocities[1][part], demand)
    for red_here in pool.run(with_fault, fault, red_parts, cases["tensor"].checkpoint):
        red |= red_here
    return red


def digests(outcome) -> dict:
    return {phase: facts["received_digest"] for phase, facts in outcome.phases.items()}


def red_parts(rank, checkpoint: str) -> set[str]:
    """Task: the names of the tier's part checks that fail on this rank."""
    checks = {
        "exchange": lambda: transport.rows_heads_rows(rank, 37, 9, 8, (torch.bfloat16,)),
        "gather": lambda: transport.ragged_gather(rank, split(37, rank.world), 16, (torch.bfloat16,)),
        "reduce": lambda: transport.ragged_reduce_scatter(rank, 37, 16, (torch.float32,)),
        "segments": lambda: blocks.segments(rank, MIXED.latents, MIXED.text, 16),
        "parts": lambda: blocks.block_parts(rank, checkpoint, "tensor", MIXED.latents, MIXED.text, torch.float64),
    }
    red = set()
    for name, check in checks.items():
        try:
            check()
        except ComparisonError:
            red.add(name)
    return red


@pytest.mark.parametrize("fault", MUST_SEE)
def test_a_planted_fault_turns_its_checks_red(pool_of_three, healthy, fault, note, record):
    # The pruned checkpoint has no SiLU: it is folded into its curve.
    red = red_checks(pool_of_three, fault, healthy["full" if fault.startswith("SiLU") else "nvfp4"])
    note(
        "planted faults, and the checks that saw them (as they must)",
        [f"{fault:38} {', '.join(sorted(red)) or 'NONE'}"],
    )
    record(equal_facts(f"checks that see {fault!r}", red & MUST_SEE[fault], MUST_SEE[fault]))


def test_without_a_fault_no_check_is_red(pool_of_three, healthy):
    for kind in healthy:
        assert red_checks(pool_of_three, "none", healthy[kind]) == set()
