"""`python -m h3core generate` as one rank among others, and as a process.

A pass means: half a launch, a rank outside its world, a GPU that is not there and a job that the ranks cannot share
are refused before the ranks meet, in one line that is told once. Run: pytest tests/unit/test_generate_launch.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from h3core.config import TINY
from h3core.generate import Job, prepare, refuse
from h3core.launch import Launch, pick_device
from h3core.packing import Geometry
from tests.unit.generate_calls import (
    LAUNCH,
    QUIET,
    SMALL,
    TEXT_ROWS,
    Inputs,
    Outcome,
    check_refused,
    edited,
    folder,
    listing,
    options,
    run,
    spoil_norm,
)

pytestmark = pytest.mark.usefixtures("process_state")


@pytest.fixture
def job(inputs: Inputs, tmp_path: Path) -> Job:
    return Job(
        checkpoint=inputs.checkpoint,
        prompt_embeds=inputs.embeds,
        out=tmp_path / "latents.safetensors",
        report=tmp_path / "report.json",
        geometry=Geometry.parse(QUIET),
        evaluations=2,
        seed=5,
        mode="ulysses",
        attention="sdpa",
        linear="w4a16",
        reduce_dtype="activation",
        device="cpu",
        force=False,
    )


@pytest.mark.parametrize(
    ("changes", "launch", "pattern"),
    [
        ({"mode": "single"}, Launch(0, 2, 0), r"mode single: got 2 ranks, expected 1; use ulysses or tensor"),
        ({"mode": "pipeline"}, Launch(0, 2, 0), r"mode: got 'pipeline', expected one of single, ulysses, tensor"),
        ({"attention": "flash3"}, Launch(0, 2, 0), r"attention: got 'flash3', expected one of sdpa, math"),
        ({"linear": "w8a8"}, Launch(0, 2, 0), r"linear: got 'w8a8', expected one of w4a16, w4a4"),
        ({"reduce_dtype": "fp16"}, Launch(0, 2, 0), r"reduce_dtype: got 'fp16', expected one of activation, fp32"),
        ({"device": "tpu"}, Launch(0, 2, 0), r"device: got 'tpu', expected auto, cpu or cuda"),
        ({}, Launch(0, 10, 0), r"9 attention heads over 10 ranks leaves rank 9 with none"),
        ({"mode": "tensor"}, Launch(3, 10, 3), r"9 attention heads over 10 ranks leaves rank 9 with none"),
    ],
)
def test_a_job_that_its_ranks_cannot_share_is_refused_before_they_meet(
    job: Job, changes: dict[str, Any], launch: Launch, pattern: str
) -> None:
    with pytest.raises(ValueError, match=pattern):
        prepare(replace(job, **changes), launch)


def test_only_the_rank_that_writes_looks_at_the_output(job: Job) -> None:
    job.out.write_text("older")
    with pytest.raises(ValueError, match="exists"):
        prepare(job, Launch(0, 2, 0))
    prepared = prepare(job, Launch(1, 2, 1))
    assert (prepared.sequence.text.size, prepared.reader.config) == (TEXT_ROWS, TINY)


@pytest.mark.parametrize(
    ("environment", "launch"),
    [
        ({}, Launch(0, 1, 0)),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, Launch(0, 1, 0)),
        ({"RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3"}, Launch(11, 16, 3)),
    ],
)
def test_a_launch_is_read_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], launch: Launch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Launch.from_environment() == launch


@pytest.mark.parametrize(
    "environment",
    [
        {"LOCAL_RANK": "0"},
        {"RANK": "0"},
        {"WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        {"RANK": "zero", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        {"RANK": "", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        {"RANK": "-1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
    ],
    ids=lambda environment: " ".join(f"{name}={value}" for name, value in environment.items()),
)
def test_half_a_launch_is_refused(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    line = check_refused(run(*options(inputs, tmp_path)), "launch: got .*expected all three as numbers; .*torchrun")
    for name in LAUNCH:
        assert f"'{name}': {environment.get(name)!r}" in line
    assert listing(tmp_path) == {}


@pytest.mark.parametrize(
    ("rank", "world", "local"), [("2", "2", "0"), ("9", "2", "1"), ("0", "0", "0"), ("0", "2", "2")]
)
def test_a_rank_outside_its_world_is_refused(
    monkeypatch: pytest.MonkeyPatch, rank: str, world: str, local: str
) -> None:
    for name, value in zip(LAUNCH, (rank, world, local), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"launch: got .*expected"):
        Launch.from_environment()


def test_a_gpu_that_is_not_there_is_refused(inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    outcome = run(*options(inputs, tmp_path, device="cuda"))
    check_refused(outcome, r"device cuda: rank 0 wants GPU 0, 0 visible; .*--device cpu")
    assert listing(tmp_path) == {}


def test_each_rank_takes_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick_device("cpu", Launch(5, 8, 1)) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("auto", Launch(5, 8, 1)) == torch.device("cuda", 1)
    assert pick_device("cuda", Launch(4, 8, 0)) == torch.device("cuda", 0)
    with pytest.raises(ValueError, match=r"device cuda: rank 6 wants GPU 2, 2 visible"):
        pick_device("auto", Launch(6, 8, 2))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert pick_device("auto", Launch(0, 1, 0)) == torch.device("cpu")


@pytest.mark.parametrize(
    ("problems", "rank", "lines"),
    [
        (["a"], 0, ["a"]),
        (["a", "a", "a"], 0, ["a"]),
        (["a", "", "a"], 0, ["a (rank 0, 2)"]),
        (["", "b", "a"], 0, ["b (rank 1)", "a (rank 2)"]),
        (["a", "b"], 1, []),
        (["one\n  - two\n  - three"], 0, ["one - two - three"]),
    ],
)
def test_problems_of_several_ranks_are_told_once_each(
    capsys: pytest.CaptureFixture[str], problems: list[str], rank: int, lines: list[str]
) -> None:
    assert refuse(problems, Launch(rank, len(problems), rank)) == 2
    seen = capsys.readouterr()
    assert seen.err.splitlines() == [f"h3core: error: {line}" for line in lines]
    assert seen.out == ""


# --- as a process ------------------------------------------------------------------------------------------------


def process(*words: str, **environment: str) -> Outcome:
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCH}
    done = subprocess.run(
        [sys.executable, "-m", "h3core", *words],
        capture_output=True,
        text=True,
        timeout=120,
        env=inherited | environment,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def test_the_command_runs_as_a_process(inputs: Inputs, tmp_path: Path) -> None:
    outcome = process("generate", *options(inputs, tmp_path, geometry=SMALL))
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("\n") == 2
    assert outcome.err.startswith("h3core: warning: geometry frames: 22")
    assert outcome.err.count("\n") == 1, outcome.err
    assert sorted(listing(tmp_path)) == ["latents.safetensors", "report.json"]


def test_a_refusal_is_one_line_of_a_process_too(inputs: Inputs, tmp_path: Path) -> None:
    results = folder(tmp_path / "results")
    spoilt = edited(inputs, tmp_path / "model.safetensors", spoil_norm)
    outcome = process("generate", *options(inputs, results, checkpoint=spoilt))
    check_refused(outcome, r"model\.safetensors: .*blocks\.1\.norm1\.weight: .*NaN")
    assert listing(results) == {}


def test_half_a_launch_is_one_line_of_a_process_too(inputs: Inputs, tmp_path: Path) -> None:
    outcome = process("generate", *options(inputs, tmp_path), LOCAL_RANK="0")
    check_refused(outcome, "launch: got .*'RANK': None")
    assert listing(tmp_path) == {}
