"""`python -m h3core generate` from end to end on one rank.

A pass means: a run writes latents and a report that say what was asked, and the same seed gives the same bytes.
Run: pytest tests/unit/test_generate.py
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from h3core import __version__, generate
from h3core.checkpoint import DenoiserReader
from h3core.comm import alone
from h3core.config import TINY
from h3core.denoise import denoise
from h3core.denoiser import Denoiser
from h3core.packing import Geometry, Noise, PackedSequence, audio_rows_to_latents, unpatchify
from h3core.parallel import build_mode
from h3core.qualify.checks.compare import Identical, compare
from h3core.schedule import Schedules
from tests.unit.generate_calls import SMALL, TEXT_ROWS, Inputs, Outcome, listing, options, run, short_clips

pytestmark = pytest.mark.usefixtures("process_state")


def latents_of(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118


@dataclass(frozen=True)
class Run:
    folder: Path
    outcome: Outcome
    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    report: dict[str, Any]


@pytest.fixture
def finished(inputs: Inputs, tmp_path: Path) -> Callable[..., Run]:
    """Runs the short clip with the given changes, in a folder of its own."""

    def make(name: str = "run", **changes: Any) -> Run:
        folder = tmp_path / name
        folder.mkdir()
        outcome = run(*options(inputs, folder, **({"geometry": SMALL, "seed": 5} | changes)))
        assert outcome.code == 0, outcome.err
        report = json.loads((folder / "report.json").read_text())
        return Run(folder, outcome, *latents_of(folder / "latents.safetensors"), report)

    return make


@short_clips
def test_a_run_writes_latents_and_a_report_of_what_was_asked(inputs: Inputs, finished: Callable[..., Run]) -> None:
    done = finished()
    assert sorted(listing(done.folder)) == ["latents.safetensors", "report.json"]
    assert {name: (tuple(t.shape), t.dtype) for name, t in done.tensors.items()} == {
        "video": ((1, 24, 7, 4, 6), torch.float32),
        "audio": ((2, 32, 37), torch.float32),
    }
    for tensor in done.tensors.values():
        assert tensor.isfinite().all()
        assert 0.1 < tensor.std() < 10

    asked = {
        "h3core": __version__,
        "torch": torch.__version__,
        "checkpoint": "tiny.safetensors",
        "checkpoint_layout": "pruned nvfp4",
        "prompt_embeds_sha256": hashlib.sha256(inputs.embeds.read_bytes()).hexdigest(),
        "geometry": SMALL,
        "evaluations": "2",
        "seed": "5",
        "mode": "single",
        "world": "1",
        "attention": "sdpa",
        "linear": "w4a16",
        "reduce_dtype": "activation",
    }
    assert done.metadata == asked
    report = done.report
    assert report["schema"] == "h3core-generate-1"
    assert {key: report[key] for key in asked} == asked
    assert set(report) == {"schema", *asked, "rows", "latents", "ranks"}
    assert report["rows"] == {"text": 19, "audio": 74, "video": 42}
    for name, tensor in done.tensors.items():
        assert report["latents"][name] == {"shape": list(tensor.shape), "std": pytest.approx(float(tensor.std()))}


@short_clips
def test_the_report_has_the_facts_of_the_one_rank(inputs: Inputs, finished: Callable[..., Run]) -> None:
    (rank,) = finished(steps=3).report["ranks"]
    assert {key: rank[key] for key in ("rank", "device", "rows", "heads", "transport", "peak_device_bytes")} == {
        "rank": 0,
        "device": "cpu",
        "rows": 19 + 74 + 42,
        "heads": 9,
        "transport": {},
        "peak_device_bytes": None,
    }
    assert len(rank["step_s"]) == 3
    assert all(seconds > 0 for seconds in [*rank["step_s"], rank["load_s"]])
    assert 0 < rank["checkpoint_bytes_read"] <= inputs.checkpoint.stat().st_size
    assert rank["weight_bytes"] >= rank["checkpoint_bytes_read"]


@short_clips
def test_a_run_says_what_it_wrote_and_warns_in_one_line(finished: Callable[..., Run]) -> None:
    done = finished()
    latents, report = done.outcome.out.splitlines()
    assert latents == f"{done.folder}/latents.safetensors: video (1, 24, 7, 4, 6), audio (2, 32, 37), fp32"
    assert re.fullmatch(rf"{done.folder}/report\.json: 1 ranks, slowest step \d+\.\d{{3}} s", report)
    assert done.outcome.err.startswith("h3core: warning: geometry frames: 22 (0.92 s) is outside")
    assert done.outcome.err.count("\n") == 1


@short_clips
def test_the_latents_are_those_of_the_loop(inputs: Inputs, finished: Callable[..., Run]) -> None:
    done = finished()
    torch.set_num_threads(1)
    shape = Geometry.parse(SMALL).latents
    sequence = PackedSequence.build(shape, TEXT_ROWS, TINY.patch_size)
    weights = DenoiserReader(inputs.checkpoint).load()
    with torch.inference_mode():
        denoiser = Denoiser(TINY, weights, build_mode("single", TINY, sequence.rows, alone()), torch.bfloat16)
        video, audio = denoise(denoiser, sequence, inputs.prompt, Noise.draw(TINY, shape, 5), Schedules.build(2))
    compare("video", done.tensors["video"], unpatchify(video, shape, TINY.patch_size), Identical())
    compare("audio", done.tensors["audio"], audio_rows_to_latents(audio), Identical())


@short_clips
def test_the_same_seed_gives_the_same_latents_and_another_one_others(finished: Callable[..., Run]) -> None:
    first, again, other = finished("a"), finished("b"), finished("c", seed=6)
    for name, tensor in first.tensors.items():
        compare(name, again.tensors[name], tensor, Identical())
        assert not torch.equal(other.tensors[name], tensor)


@short_clips
def test_the_same_seed_gives_the_same_file(finished: Callable[..., Run]) -> None:
    files = {finished(name).folder.joinpath("latents.safetensors").read_bytes() for name in "abc"}
    assert len(files) == 1, "the tensors are the same, so the header's order differs from run to run"


@short_clips
@pytest.mark.parametrize("mode", ["auto", "ulysses", "tensor"])
def test_every_mode_of_one_rank_gives_the_same_latents(finished: Callable[..., Run], mode: str) -> None:
    single, other = finished("single", mode="single"), finished(mode, mode=mode)
    for name, tensor in single.tensors.items():
        compare(name, other.tensors[name], tensor, Identical())
    assert other.report["mode"] == other.metadata["mode"] == ("single" if mode == "auto" else mode)


@short_clips
@pytest.mark.parametrize(("option", "value"), [("attention", "math"), ("linear", "w4a4")])
def test_a_chosen_kernel_is_used_and_recorded(finished: Callable[..., Run], option: str, value: str) -> None:
    plain, done = finished("plain"), finished("chosen", **{option: value})
    assert done.metadata[option] == done.report[option] == value
    assert not torch.equal(done.tensors["video"], plain.tensors["video"]), "another kernel has other bits"


@short_clips
def test_the_dtype_of_partial_sums_reaches_the_mode(
    finished: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []

    def noted(*args: Any, **chosen: Any) -> Any:
        built.append(chosen["reduce_dtype"])
        return build_mode(*args, **chosen)

    monkeypatch.setattr(generate, "build_mode", noted)
    done = finished(mode="tensor", reduce_dtype="fp32")
    assert built == [done.metadata["reduce_dtype"]] == ["fp32"]


@short_clips
def test_a_cpu_run_uses_one_thread_whatever_it_was_given(finished: Callable[..., Run]) -> None:
    torch.set_num_threads(2)
    finished()
    assert torch.get_num_threads() == 1, "the number of threads decides bits"


@short_clips
@pytest.mark.parametrize("kind", ["(1, L, width)", "float32", "more tensors in the file"])
def test_an_embedding_may_come_in_other_forms(
    inputs: Inputs, finished: Callable[..., Run], tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "other.safetensors"
    prompt = inputs.prompt[None] if kind == "(1, L, width)" else inputs.prompt
    prompt = prompt.float() if kind == "float32" else prompt
    save_file({"prompt_embeds": prompt.contiguous(), "token_ids": torch.arange(TEXT_ROWS)}, path)
    plain, done = finished("plain"), finished("other", prompt_embeds=path)
    for name, tensor in plain.tensors.items():
        compare(name, done.tensors[name], tensor, Identical())
