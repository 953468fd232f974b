"""The two flow-matching schedules: their grids, their updates and the timesteps that a forward pass sees.

A pass means: the grids have the published values, every sigma, timestep and update has diffusers 0.42.1's bits, and a
number of evaluations that cannot be told apart is refused instead of being quietly made smaller.
Run: pytest tests/unit/test_schedule.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from h3core.packing import LatentShape, PackedSequence
from h3core.qualify.checks.compare import Identical, compare
from h3core.schedule import AUDIO_SHIFT, VIDEO_SHIFT, Schedule, Schedules

SHIFTS = {"video": 12.0, "audio": 3.0}

# By diffusers' number of inference steps, which counts grid points: one more than evaluations.
SIGMAS = {
    ("video", 13): "1 .99248 .98361 .97297 .96 .94382 .92308 .89552 .85714 .8 .70588 .52174 0",
    ("audio", 13): "1 .97059 .9375 .9 .85714 .80769 .75 .68182 .6 .5 .375 .21429 0",
    ("video", 21): (
        "1 .99563 .99083 .98551 .97959 .97297 .96552 .95706 .94737 .93617 .92308 .90756 .88889 .86598 .83721 .8 .75 "
        ".67925 .57143 .3871 0"
    ),
    ("audio", 21): (
        "1 .98276 .96429 .94444 .92308 .9 .875 .84783 .81818 .78571 .75 .71053 .66667 .61765 .5625 .5 .42857 .34615 "
        ".25 .13636 0"
    ),
}


def test_the_shifts_are_the_released_ones() -> None:
    assert {"video": VIDEO_SHIFT, "audio": AUDIO_SHIFT} == SHIFTS
    both = Schedules.build(12)
    assert torch.equal(both.video.sigmas, Schedule.build(12, 12.0).sigmas)
    assert torch.equal(both.audio.sigmas, Schedule.build(12, 3.0).sigmas)


@pytest.mark.parametrize(("clock", "points"), SIGMAS)
def test_sigmas_have_the_published_values(clock: str, points: int) -> None:
    published = [float(text) for text in SIGMAS[clock, points].split()]
    schedule = Schedule.build(points - 1, SHIFTS[clock])
    assert len(published) == points
    assert [round(sigma, 5) for sigma in schedule.sigmas.tolist()] == published
    assert len(schedule.timesteps) == points - 1, "one evaluation less than grid points"
    assert schedule.sigmas[0] == 1.0
    assert schedule.sigmas[-1] == 0.0
    assert schedule.sigmas.dtype == schedule.timesteps.dtype == torch.float32


@pytest.fixture(scope="module")
def oracle() -> Any:
    """diffusers' scheduler."""
    return pytest.importorskip("diffusers").MiniMaxH3Scheduler


@pytest.mark.parametrize("evaluations", [1, 2, 4, 8, 12, 20, 49])
@pytest.mark.parametrize("clock", SHIFTS)
def test_a_whole_run_has_the_bits_of_diffusers(oracle: Any, clock: str, evaluations: int) -> None:
    theirs = oracle(SHIFTS[clock])
    theirs.set_timesteps(evaluations + 1)
    ours = Schedule.build(evaluations, SHIFTS[clock])
    compare("sigmas", ours.sigmas, theirs.sigmas, Identical())
    assert torch.equal(ours.timesteps, theirs.timesteps)

    generator = torch.Generator().manual_seed(evaluations)
    x = y = torch.randn(50, 96, generator=generator)
    for index, timestep in enumerate(theirs.timesteps):
        velocity = torch.randn(50, 96, generator=generator) - y
        x = ours.step(x, velocity, index)
        y = theirs.step(velocity, timestep, y, return_dict=False)[0]
        compare(f"rows after evaluation {index}", x, y, Identical())


def test_a_step_moves_by_the_difference_of_sigmas() -> None:
    schedule = Schedule.build(12, 12.0)
    generator = torch.Generator().manual_seed(1)
    x, velocity = (torch.randn(20, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    for index in range(12):
        moved = schedule.step(x, velocity, index)
        assert moved.dtype == torch.float64
        by = (schedule.sigmas[index] - schedule.sigmas[index + 1]).double()
        torch.testing.assert_close(moved, x + by * velocity, rtol=0, atol=1e-6)


def test_the_true_velocity_leads_to_the_clean_rows() -> None:
    generator = torch.Generator().manual_seed(2)
    noise, clean = (torch.randn(20, 8, generator=generator) for _ in range(2))
    for schedule in (Schedules.build(5).video, Schedules.build(5).audio):
        x = noise
        for index in range(5):
            x = schedule.step(x, clean - noise, index)
        torch.testing.assert_close(x, clean, rtol=0, atol=1e-5)


def test_the_first_evaluation_has_one_timestep_and_later_ones_two() -> None:
    schedules = Schedules.build(12)
    assert len(schedules) == 12
    first = schedules.evaluation(0)
    assert first.timesteps.tolist() == [0.0]
    assert first.clocks == {"video": 0, "audio": 0}
    for index in range(1, 12):
        evaluation = schedules.evaluation(index)
        video, audio = schedules.video.timesteps[index], schedules.audio.timesteps[index]
        assert evaluation.timesteps.tolist() == [video.item(), audio.item()]
        assert evaluation.clocks == {"video": 0, "audio": 1}, "the larger shift lags behind"
        assert video < audio


@pytest.mark.parametrize("index", [0, 1, 3])
def test_every_row_has_the_timestep_that_diffusers_gives_it(index: int) -> None:
    module = pytest.importorskip("diffusers.modular_pipelines.minimax_h3.before_denoise")
    schedules = Schedules.build(4)
    sequence = PackedSequence.build(LatentShape(2, 4, 4, 8), 5, (1, 2, 2))
    distinct, inverse = module.MiniMaxH3SetTimestepsStep.build_row_timesteps(
        torch.arange(*sequence.video),
        torch.arange(*sequence.audio),
        0,
        0,
        sequence.text.size,
        schedules.video.timesteps[index].item(),
        schedules.audio.timesteps[index].item(),
        0.999,
        1.0,
    )
    evaluation = schedules.evaluation(index)
    ours = [evaluation.clocks[segment.clock] for segment in sequence.segments for _ in range(segment.rows.size)]
    assert torch.equal(evaluation.timesteps, distinct)
    assert ours == inverse.tolist()


@pytest.mark.parametrize("evaluations", [0, -1])
def test_no_evaluations_are_refused(evaluations: int) -> None:
    with pytest.raises(ValueError, match=f"evaluations: got {evaluations}, expected at least 1"):
        Schedules.build(evaluations)


def test_one_evaluation_is_a_whole_run() -> None:
    schedules = Schedules.build(1)
    assert schedules.video.sigmas.tolist() == schedules.audio.sigmas.tolist() == [1.0, 0.0]


def test_more_evaluations_than_fp32_can_tell_apart_are_refused(oracle: Any) -> None:
    many = 1_000_000
    theirs = oracle(12.0)
    theirs.set_timesteps(many + 1)
    kept = len(theirs.timesteps)
    assert kept < many, "the reference collapses them in silence"
    with pytest.raises(
        ValueError, match=rf"got {many}, of which fp32 keeps only {kept} apart at shift 12\.0; use fewer"
    ):
        Schedules.build(many)
