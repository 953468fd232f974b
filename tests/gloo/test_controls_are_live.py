"""The negative controls and the determinism screen can fail, with real ranks: what is broken is the control itself.

A pass means that a fault which was not planted, or which a blinded comparison did not see, is never counted as caught,
and that the screen names a rank which computes other bytes. It tests the suite, not the machine, so it carries no
marker. Run it with: pytest tests/gloo/test_controls_are_live.py
"""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from h3core.qualify.checks import determinism
from h3core.qualify.checks.compare import ComparisonError, Identical, compare
from h3core.qualify.checks.determinism import Corruption, Work, judge, screen
from h3core.qualify.checks.loop import Case
from h3core.qualify.checks.parity import AUDIO, DIGESTS, VIDEO, Unequal, equals_virtual
from h3core.qualify.controls import CONTROLS, GUILTY, Bench, MissedControl, NotPlanted, lost, payload, run_control
from h3core.qualify.controls.lost import LostRank
from h3core.qualify.controls.payload import PayloadControl, SpoilingComm
from h3core.ranks import Rank, RankError, RankPool
from tests.gloo.conftest import MIXED

WORLD = 3
SMALL = Work(rows=40, inner=128, columns=128, heads=1, width=64)
SPOILED = [control for control in CONTROLS if isinstance(control, PayloadControl)]
FLIPPED, SWAPPED, LEFT_OUT = SPOILED
DIES, ABSENT = (control for control in CONTROLS if isinstance(control, LostRank))


@pytest.fixture(scope="module")
def ranks():
    with RankPool(WORLD) as pool:
        yield pool


@pytest.fixture(scope="module")
def bench(ranks, checkpoints):
    return Bench.build(ranks, Case(checkpoints.nvfp4, "ulysses", MIXED.latents, MIXED.text, 2), timeout=1.5)


# Spoils and tasks. They are module-level, because ranks find them by name.


def change_nothing(payload, wire, rows) -> None:
    pass


def spoil_twice(rank: Rank, case: Case, plant):
    """Task: as `spoiled_ranks`, but the fault is due at every call of its phase."""
    spoiled = SpoilingComm._phase

    def always(self, name):
        stats = spoiled(self, name)
        self._due = name == plant.phase
        return stats

    with patch.object(SpoilingComm, "_phase", always):
        return payload.spoiled_ranks(rank, case, plant)


def nobody_is_lost(rank: Rank) -> None:
    lost.exchange(rank)


def another_dies(rank: Rank) -> None:
    lost.exchange(rank)
    if rank.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        lost.exchange(rank)


def raises_instead(rank: Rank) -> None:
    if rank.rank == GUILTY:
        raise ValueError("planted")
    lost.exchange(rank)


def comes_after_all(rank: Rank) -> None:
    """All meet in the exchange; it is another rank that then stays outside of the next."""
    lost.exchange(rank)
    if rank.rank == 2:
        lost.time.sleep(lost.NEVER)
    dist.barrier(rank.group)


def faulty_screen(rank: Rank, guilty: int, operation: str, how: str) -> dict[str, determinism.Result]:
    """Task: the screen, with one bit off on one rank: of the output at repeat 2, of each, or of an input."""
    table = determinism.operations

    def broken(work, device):
        found = table(work, device)
        sound, calls = found[operation], 0
        if how == "input":
            flip(sound.inputs[0])

        def compute():
            nonlocal calls
            calls += 1
            output = sound.compute()
            if how == "always" or (how == "repeat 2" and calls == 2):
                flip(output)
            return torch.zeros_like(output) if how == "zeros" else output

        return found | {operation: determinism.Operation(sound.inputs, compute)}

    with ExitStack() as stack:
        if rank.rank == guilty:
            stack.enter_context(patch.object(determinism, "operations", broken))
        return screen(rank, SMALL, 3)


def flip(x: torch.Tensor) -> None:
    x.view(torch.uint8).flatten()[:1].bitwise_xor_(1)


# Controls of what is sent.


def only(*parts: str):
    """The comparison, blind for all other parts."""

    def blinded(what, real, virtual):
        try:
            return equals_virtual(what, real, virtual)
        except Unequal as unequal:
            if seen := tuple(part for part in unequal.parts if part in parts):
                raise Unequal(str(unequal), seen) from None
            return [compare(what, virtual.video, virtual.video, Identical())]

    return blinded


@pytest.mark.parametrize("control", SPOILED, ids=lambda control: control.slug)
def test_a_fault_that_changes_nothing_is_not_counted_as_caught(bench, control):
    with pytest.raises(NotPlanted, match=r"payloads spoiled per rank \[0, 0, 0\], expected \[0, 1, 0\]"):
        run_control(replace(control, spoil=change_nothing), bench)


@pytest.mark.parametrize("control", SPOILED, ids=lambda control: control.slug)
def test_a_fault_that_took_place_more_than_once_is_not_counted_as_caught(bench, control, monkeypatch):
    monkeypatch.setattr(payload, "spoiled_ranks", spoil_twice)
    with pytest.raises(NotPlanted, match=r"payloads spoiled per rank \[0, [2-9]\d*, 0\]"):
        run_control(control, bench)


@pytest.mark.parametrize("control", SPOILED, ids=lambda control: control.slug)
def test_a_comparison_that_sees_nothing_misses_the_control(bench, control, monkeypatch):
    monkeypatch.setattr(payload, "equals_virtual", only())
    with pytest.raises(MissedControl, match="not seen in"):
        run_control(control, bench)


def test_a_comparison_without_digests_misses_the_flipped_bit(bench, monkeypatch):
    monkeypatch.setattr(payload, "equals_virtual", only(VIDEO, AUDIO))
    with pytest.raises(MissedControl, match=f"not seen in {DIGESTS}"):
        run_control(FLIPPED, bench)


def test_a_flipped_bit_that_only_latents_see_is_missed_for_it_is_the_digest_that_has_to(bench, monkeypatch):
    monkeypatch.setattr(payload, "equals_virtual", only(VIDEO, AUDIO))
    loud = replace(LEFT_OUT, name="a loud fault")
    assert "latents: ranks" in run_control(loud, bench).how
    with pytest.raises(MissedControl, match=f"not seen in {DIGESTS} .*latents: ranks"):
        run_control(replace(loud, seen_by=FLIPPED.seen_by), bench)


def test_a_comparison_that_always_fails_catches_nothing(bench, monkeypatch):
    def always_fails(what, real, virtual):
        raise Unequal(f"{what}: unequal", (DIGESTS,))

    monkeypatch.setattr(payload, "equals_virtual", always_fails)
    with pytest.raises(ComparisonError, match="sound ranks before a flipped bit"):
        run_control(FLIPPED, bench)


def test_an_oracle_of_another_case_is_not_taken_for_a_catch(bench):
    other = replace(bench, case=replace(bench.case, seed=1))
    with pytest.raises(ComparisonError, match="sound ranks before two rows swapped"):
        run_control(SWAPPED, other)


# Controls of lost ranks.


@pytest.mark.parametrize(
    ("control", "task", "why"),
    [
        (DIES, nobody_is_lost, "every rank answered"),
        (DIES, another_dies, "rank 2 is named first, as died; planted: rank 1, died"),
        (DIES, raises_instead, "rank 1 is named first, as raised"),
        (DIES, lost.never_enters, "rank 1 is named first, as hung"),
        (ABSENT, nobody_is_lost, "every rank answered"),
        (ABSENT, comes_after_all, "rank 2 is named first, as hung"),
        (ABSENT, lost.dies_inside, "rank 1 is named first, as died"),
    ],
    ids=lambda value: getattr(value, "slug", None) or getattr(value, "__name__", ""),
)
def test_another_end_than_the_planted_one_is_missed(bench, control, task, why):
    with pytest.raises(MissedControl, match=why):
        run_control(replace(control, task=task), bench)


def test_ranks_that_outlive_their_pool_are_missed(bench, monkeypatch):
    left = []

    class Leaky(RankPool):
        def __exit__(self, *error):
            left.append(self)

    monkeypatch.setattr(lost, "RankPool", Leaky)
    try:
        with pytest.raises(MissedControl, match="outlive the pool"):
            run_control(DIES, bench)
    finally:
        for pool in left:
            pool.close()


# The determinism screen.


@pytest.mark.parametrize("operation", ["bf16 GEMM", "fp32 GEMM", "bf16 attention", "NVFP4 dequantisation"])
def test_a_bit_that_flips_at_one_repeat_names_rank_operation_and_repeat(ranks, operation):
    with pytest.raises(Corruption, match=f"{operation}: rank 2 of 3 disagrees with itself: repeat 2 of 3") as caught:
        judge(ranks.run(faulty_screen, 2, operation, "repeat 2"))
    assert [(finding.kind, finding.ranks) for finding in caught.value.findings] == [("self", (2,))]


@pytest.mark.parametrize(("how", "kind"), [("always", "odd"), ("input", "inputs")])
def test_a_rank_that_is_steadily_off_is_outvoted(ranks, how, kind):
    with pytest.raises(Corruption) as caught:
        judge(ranks.run(faulty_screen, 0, "fp32 GEMM", how))
    assert [(f.kind, f.operation, f.ranks) for f in caught.value.findings] == [(kind, "fp32 GEMM", (0,))]


def test_a_rank_that_computes_zeros_proves_nothing(ranks):
    with pytest.raises(RankError, match=r"bf16 GEMM: the output spans 0\.0: constant") as caught:
        ranks.run(faulty_screen, 1, "bf16 GEMM", "zeros")
    assert [failure.rank for failure in caught.value.failures] == [1]


def test_without_a_fault_the_screen_is_green(ranks):
    assert len(judge(ranks.run(faulty_screen, -1, "", ""))) == 4 * WORLD
