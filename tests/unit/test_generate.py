"""`python -m h3core generate` from end to end on one rank, and everything that it refuses.

A pass means: a run writes latents and a report that say what was asked, the same seed gives the same bytes, and wrong
input ends with exit code 2 and one line on stderr that says what was got, leaves no file and shows no traceback.
Run: pytest tests/unit/test_generate.py
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from h3core import __version__, generate
from h3core.__main__ import main
from h3core.checkpoint import DenoiserReader
from h3core.checkpoint.synthesize import synthesize
from h3core.comm import alone
from h3core.config import TINY
from h3core.denoise import denoise
from h3core.denoiser import Denoiser
from h3core.generate import Job, prepare, refuse
from h3core.launch import Launch, pick_device
from h3core.packing import Geometry, Noise, PackedSequence, audio_rows_to_latents, unpatchify
from h3core.parallel import build_mode
from h3core.qualify.compare import Identical, compare
from h3core.schedule import Schedules

SMALL = "96x64x22"
"""Shorter than the model was released for, so that a run of it warns."""
QUIET = "96x64x107"
"""Of a released length; what refuses it says nothing else."""
TEXT_ROWS = 19
LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK")

short_clips = pytest.mark.filterwarnings("default:geometry frames:UserWarning")


@pytest.fixture(autouse=True)
def process_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`main` belongs to a process of its own: put back what it sets."""
    for name in LAUNCH:
        monkeypatch.delenv(name, raising=False)
    threads, show = torch.get_num_threads(), warnings.showwarning
    yield
    torch.set_num_threads(threads)
    warnings.showwarning = show


@dataclass(frozen=True)
class Inputs:
    """A checkpoint and an embedding that fit each other."""

    checkpoint: Path
    embeds: Path
    prompt: Tensor


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("inputs")
    checkpoint, embeds = folder / "tiny.safetensors", folder / "prompt.safetensors"
    synthesize(checkpoint, config=TINY, layout="pruned", quant="nvfp4", seed=1)
    prompt = torch.randn(TEXT_ROWS, TINY.text_dim, generator=torch.Generator().manual_seed(3)).bfloat16()
    save_file({"prompt_embeds": prompt}, embeds)
    return Inputs(checkpoint, embeds, prompt)


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def run(*arguments: str | Path) -> Outcome:
    """The command in this process; a traceback would end the test."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(["generate", *map(str, arguments)])
        except SystemExit as left:
            code = int(left.code or 0)
    return Outcome(code, out.getvalue(), err.getvalue())


def options(inputs: Inputs, folder: Path, **changes: Any) -> list[str]:
    """The arguments of a good call with some of them changed; None leaves one out, True makes it a flag."""
    values: dict[str, Any] = {
        "checkpoint": inputs.checkpoint,
        "prompt_embeds": inputs.embeds,
        "out": folder / "latents.safetensors",
        "report": folder / "report.json",
        "geometry": QUIET,
        "steps": 2,
        "device": "cpu",
    }
    values |= changes
    words = []
    for name, value in values.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}" if value is True else f"--{name.replace('_', '-')}={value}"]
    return words


def listing(folder: Path) -> dict[str, bytes | None]:
    return {entry.name: entry.read_bytes() if entry.is_file() else None for entry in sorted(folder.iterdir())}


def check_refused(outcome: Outcome, pattern: str) -> str:
    """Exit code 2, nothing on stdout, one line on stderr that fits the pattern. Returns the line."""
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    assert outcome.err.startswith("h3core: error: "), outcome.err
    assert outcome.err.count("\n") == 1, outcome.err
    assert outcome.err.endswith("\n")
    assert re.search(pattern, outcome.err), outcome.err
    return outcome.err


# --- a run -------------------------------------------------------------------------------------------------------


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


@short_clips
def test_force_replaces_older_output(inputs: Inputs, tmp_path: Path) -> None:
    for name in ("latents.safetensors", "report.json"):
        (tmp_path / name).write_text("older")
    assert run(*options(inputs, tmp_path, geometry=SMALL, force=True)).code == 0
    assert sorted(listing(tmp_path)) == ["latents.safetensors", "report.json"]
    assert json.loads((tmp_path / "report.json").read_text())["geometry"] == SMALL
    assert load_file(tmp_path / "latents.safetensors").keys() == {"video", "audio"}


@short_clips
def test_latents_that_are_not_finite_are_not_written(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoilt(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        video, audio = denoise(*args, **options)
        audio[40, 7] = float("nan")
        return video, audio

    monkeypatch.setattr(generate, "denoise", spoilt)
    with pytest.raises(RuntimeError, match="NaN or infinite values; nothing was written"):
        run(*options(inputs, tmp_path, geometry=SMALL))
    assert listing(tmp_path) == {}


@short_clips
def test_a_full_disk_leaves_neither_output_nor_temporary_files(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(generate, "save_file", full)
    with contextlib.suppress(OSError):
        assert run(*options(inputs, tmp_path, geometry=SMALL)).code != 0
    assert listing(tmp_path) == {}


# --- refusals ----------------------------------------------------------------------------------------------------

Change = Callable[[Inputs, Path], dict[str, Any]]


def saved(path: Path, **tensors: Tensor) -> Path:
    save_file(tensors, path)
    return path


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def edited(inputs: Inputs, path: Path, edit: Callable[[dict[str, Tensor]], Any]) -> Path:
    """The checkpoint with some tensors edited."""
    tensors = load_file(inputs.checkpoint)
    edit(tensors)
    save_file(tensors, path)
    return path


def embedding(make: Callable[[Path], Path]) -> Change:
    return lambda inputs, side: {"prompt_embeds": make(side / "prompt.safetensors")}


def checkpoint(make: Callable[[Inputs, Path], Path]) -> Change:
    return lambda inputs, side: {"checkpoint": make(inputs, side / "model.safetensors")}


def spoil_norm(tensors: dict[str, Tensor]) -> None:
    tensors["blocks.1.norm1.weight"][5] = float("nan")


def drop_two(tensors: dict[str, Tensor]) -> None:
    del tensors["blocks.1.norm1.weight"], tensors["final_layer.norm.weight"]


def misshape_and_retype(tensors: dict[str, Tensor]) -> None:
    tensors["blocks.1.norm1.weight"] = torch.ones(7, dtype=torch.bfloat16)
    tensors["final_layer.norm.weight"] = tensors["final_layer.norm.weight"].float()


def folder(path: Path) -> Path:
    path.mkdir()
    return path


WIDTH = TINY.text_dim
CHECKPOINTS: dict[str, tuple[Change, str]] = {
    "missing": (checkpoint(lambda inputs, path: path), r"model\.safetensors: no such file"),
    "empty": (checkpoint(lambda inputs, path: written(path, b"")), r"model\.safetensors: .*(empty|0 bytes)"),
    "a web page": (
        checkpoint(lambda inputs, path: written(path, b"<!DOCTYPE html><html><body>404</body></html>" * 40)),
        r"model\.safetensors: .*(HTML|web page)",
    ),
    "noise": (
        checkpoint(lambda inputs, path: written(path, bytes(range(256)) * 99)),
        r"truncated or no safetensors file",
    ),
    "cut short": (
        checkpoint(lambda inputs, path: written(path, inputs.checkpoint.read_bytes()[:-1000])),
        r"model\.safetensors: .*download the file again",
    ),
    "an empty folder": (checkpoint(lambda inputs, path: folder(path)), r"a folder without \.safetensors files"),
    "another model": (
        checkpoint(lambda inputs, path: saved(path, w=torch.ones(3, 4))),
        r"unknown layout of 1 tensors, such as w",
    ),
    "two tensors missing": (
        checkpoint(lambda inputs, path: edited(inputs, path, drop_two)),
        r"2 tensors missing: .*blocks\.1\.norm1\.weight",
    ),
    "two kinds of problem": (
        checkpoint(lambda inputs, path: edited(inputs, path, misshape_and_retype)),
        r"1 tensors with a wrong shape: blocks\.1\.norm1\.weight.*1 tensors with a wrong dtype: final_layer\.norm",
    ),
    "NaN in a weight": (
        checkpoint(lambda inputs, path: edited(inputs, path, spoil_norm)),
        r"model\.safetensors: .*blocks\.1\.norm1\.weight: .*NaN",
    ),
}
EMBEDDINGS: dict[str, tuple[Change, str]] = {
    "missing": (embedding(lambda path: path), r"prompt embedding .*prompt\.safetensors: got no such file"),
    "a folder": (embedding(folder), r"prompt embedding .*prompt\.safetensors: got .*expected a safetensors file"),
    "empty file": (embedding(lambda path: written(path, b"")), r"prompt embedding .*: not a safetensors file"),
    "noise": (embedding(lambda path: written(path, b"x" * 999)), r"prompt embedding .*: not a safetensors file"),
    "another name": (
        embedding(lambda path: saved(path, embeds=torch.ones(3, WIDTH), ids=torch.ones(3))),
        r"got tensors \['embeds', 'ids'\], expected 'prompt_embeds'",
    ),
    "another width": (
        embedding(lambda path: saved(path, prompt_embeds=torch.ones(3, 5120))),
        r"prompt_embeds: got shape \(3, 5120\), expected \(tokens, 128\)",
    ),
    "no tokens": (
        embedding(lambda path: saved(path, prompt_embeds=torch.ones(0, WIDTH))),
        r"prompt_embeds: got shape \(0, 128\), expected \(tokens, 128\)",
    ),
    "a batch of two": (
        embedding(lambda path: saved(path, prompt_embeds=torch.ones(2, 3, WIDTH))),
        r"prompt_embeds: got shape \(2, 3, 128\), expected \(tokens, 128\)",
    ),
    "one axis": (
        embedding(lambda path: saved(path, prompt_embeds=torch.ones(WIDTH))),
        r"prompt_embeds: got shape \(128,\), expected \(tokens, 128\)",
    ),
    "integers": (
        embedding(lambda path: saved(path, prompt_embeds=torch.ones(3, WIDTH, dtype=torch.int64))),
        r"prompt_embeds: got torch\.int64, expected a floating-point dtype",
    ),
    "eight-bit floats": (
        embedding(lambda path: saved(path, prompt_embeds=torch.ones(3, WIDTH).to(torch.float8_e4m3fn))),
        r"prompt_embeds: got torch\.float8_e4m3fn, expected",
    ),
    "NaN": (
        embedding(lambda path: saved(path, prompt_embeds=torch.full((3, WIDTH), float("nan")))),
        r"prompt_embeds: got NaN or infinite values",
    ),
    "infinity": (
        embedding(lambda path: saved(path, prompt_embeds=torch.full((3, WIDTH), float("inf")))),
        r"prompt_embeds: got NaN or infinite values",
    ),
}
REQUESTS: dict[str, tuple[dict[str, Any], str]] = {
    "width off the grid": ({"geometry": "100x64x107"}, r"geometry width: got 100, .*try 96 or 128"),
    "height off the grid": ({"geometry": "96x65x107"}, r"geometry height: got 65, .*try 64 or 96"),
    "no frames": ({"geometry": "96x64x0"}, r"geometry frames: got 0, expected at least 1"),
    "misspelt geometry": ({"geometry": "96*64*107"}, r"geometry: got '96\*64\*107', expected WIDTHxHEIGHTxFRAMES"),
    "geometry without frames": ({"geometry": "96x64"}, r"geometry: got '96x64', expected WIDTHxHEIGHTxFRAMES"),
    "no steps": ({"steps": 0}, r"evaluations: got 0, expected at least 1"),
    "fewer than no steps": ({"steps": -3}, r"evaluations: got -3, expected at least 1"),
    "too many steps": ({"steps": 1_000_000}, r"evaluations: got 1000000, .*use fewer"),
    "a seed that no generator takes": ({"seed": 2**64}, r"seed"),
}


def check_refusal(inputs: Inputs, tmp_path: Path, changes: dict[str, Any], pattern: str) -> None:
    """The call is refused and leaves the output folder empty."""
    results = tmp_path / "results"
    results.mkdir()
    check_refused(run(*options(inputs, results, **changes)), pattern)
    assert listing(results) == {}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_a_checkpoint_that_cannot_be_used_is_refused(inputs: Inputs, tmp_path: Path, case: str) -> None:
    change, pattern = CHECKPOINTS[case]
    check_refusal(inputs, tmp_path, change(inputs, tmp_path), pattern)


@pytest.mark.parametrize("case", EMBEDDINGS)
def test_an_embedding_that_cannot_be_used_is_refused(inputs: Inputs, tmp_path: Path, case: str) -> None:
    change, pattern = EMBEDDINGS[case]
    check_refusal(inputs, tmp_path, change(inputs, tmp_path), pattern)


@pytest.mark.parametrize("case", REQUESTS)
def test_a_request_that_cannot_be_met_is_refused(inputs: Inputs, tmp_path: Path, case: str) -> None:
    changes, pattern = REQUESTS[case]
    check_refusal(inputs, tmp_path, changes, pattern)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mode": "pipeline"}, ["--mode", "'pipeline'", "ulysses"]),
        ({"attention": "flash3"}, ["--attention", "'flash3'", "sdpa"]),
        ({"linear": "w8a8"}, ["--linear", "'w8a8'", "w4a16"]),
        ({"device": "tpu"}, ["--device", "'tpu'", "cpu"]),
        ({"steps": "many"}, ["--steps", "'many'"]),
        ({"checkpoint": None}, ["--checkpoint", "required"]),
        ({"prompt_embeds": None}, ["--prompt-embeds", "required"]),
        ({"frames": 141}, ["--frames=141"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_call_that_is_no_command_shows_its_usage_and_names_the_word(
    inputs: Inputs, tmp_path: Path, changes: dict[str, Any], named: list[str]
) -> None:
    # argparse's own way: the usage, then one line with the error.
    outcome = run(*options(inputs, tmp_path, **changes))
    assert outcome.code == 2
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    line = outcome.err.splitlines()[-1]
    assert re.match(r"h3core.*: error: ", line)
    assert [word for word in named if word not in line] == []
    assert listing(tmp_path) == {}


# --- refusals: where to write ------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["out", "report"])
def test_existing_output_is_refused_and_kept(inputs: Inputs, tmp_path: Path, option: str) -> None:
    older = written(tmp_path / "older", b"older")
    line = check_refused(run(*options(inputs, tmp_path, **{option: older})), r"older: exists; .*--force")
    assert str(older) in line
    assert listing(tmp_path) == {"older": b"older"}


@pytest.mark.parametrize("option", ["out", "report"])
@pytest.mark.parametrize("force", [None, True])
def test_a_folder_as_output_is_refused(inputs: Inputs, tmp_path: Path, option: str, force: bool | None) -> None:
    outcome = run(*options(inputs, tmp_path, **{option: folder(tmp_path / "there"), "force": force}))
    check_refused(outcome, "there: exists and is no regular file")
    assert listing(tmp_path) == {"there": None}


@pytest.mark.parametrize("option", ["out", "report"])
def test_a_missing_output_folder_is_refused(inputs: Inputs, tmp_path: Path, option: str) -> None:
    path = tmp_path / "absent" / "file"
    check_refused(run(*options(inputs, tmp_path, **{option: path})), "got no folder .*absent, expected it to exist")
    assert listing(tmp_path) == {}


@pytest.mark.parametrize("option", ["out", "report"])
def test_a_device_as_output_is_refused(inputs: Inputs, tmp_path: Path, option: str) -> None:
    outcome = run(*options(inputs, tmp_path, **{option: os.devnull, "force": True}))
    check_refused(outcome, "null: exists and is no regular file")
    assert not os.path.isfile(os.devnull)


@pytest.mark.parametrize("spelling", ["same", "same/../same", "link"])
def test_one_name_for_latents_and_report_is_refused(inputs: Inputs, tmp_path: Path, spelling: str) -> None:
    (tmp_path / "same").mkdir()
    (tmp_path / "link").symlink_to("same")
    one, other = tmp_path / "same" / "file", tmp_path / spelling / "file"
    check_refused(run(*options(inputs, tmp_path, out=one, report=other)), "--out and --report are both .*two names")
    assert listing(tmp_path / "same") == {}


@pytest.mark.parametrize("option", ["out", "report"])
@pytest.mark.parametrize("victim", ["checkpoint", "prompt_embeds"])
def test_no_force_replaces_an_input(inputs: Inputs, tmp_path: Path, option: str, victim: str) -> None:
    mine = Inputs(tmp_path / "model.safetensors", tmp_path / "prompt.safetensors", inputs.prompt)
    mine.checkpoint.write_bytes(inputs.checkpoint.read_bytes())
    mine.embeds.write_bytes(inputs.embeds.read_bytes())
    before = listing(tmp_path)
    target = mine.checkpoint if victim == "checkpoint" else mine.embeds
    outcome = run(*options(mine, tmp_path, **{option: target, "force": True}))
    assert listing(tmp_path).get(target.name) == before[target.name], "an input was overwritten"
    check_refused(outcome, target.name)


@pytest.mark.skipif(not hasattr(os, "setresuid"), reason="needs a system on which root can become nobody")
@pytest.mark.parametrize("option", ["out", "report"])
def test_an_output_folder_that_cannot_be_written_is_refused_before_any_work(
    inputs: Inputs, tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    monkeypatch.setattr(generate, "run", lambda *args: ran.append(args))
    root = os.getuid() == 0
    with tempfile.TemporaryDirectory() as name:
        # Root may write anywhere, so it becomes nobody, who may not enter pytest's folders: all of it lies here.
        place = Path(name)
        place.chmod(0o755)
        mine = Inputs(place / "model.safetensors", place / "prompt.safetensors", inputs.prompt)
        mine.checkpoint.write_bytes(inputs.checkpoint.read_bytes())
        mine.embeds.write_bytes(inputs.embeds.read_bytes())
        closed, opened = folder(place / "closed"), folder(place / "opened")
        closed.chmod(0o555)
        opened.chmod(0o777)
        try:
            if root:
                os.setresuid(65534, 65534, 0)
            outcome = run(*options(mine, opened, **{option: closed / "file"}))
        finally:
            if root:
                os.setresuid(0, 0, 0)
            closed.chmod(0o755)
        assert ran == [], "the work was done before the folder was looked at"
        check_refused(outcome, str(closed))
        assert listing(opened) == listing(closed) == {}


# --- refusals: this process among others -------------------------------------------------------------------------


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
    change, pattern = CHECKPOINTS["NaN in a weight"]
    check_refused(process("generate", *options(inputs, results, **change(inputs, tmp_path))), pattern)
    assert listing(results) == {}


def test_half_a_launch_is_one_line_of_a_process_too(inputs: Inputs, tmp_path: Path) -> None:
    outcome = process("generate", *options(inputs, tmp_path), LOCAL_RANK="0")
    check_refused(outcome, "launch: got .*'RANK': None")
    assert listing(tmp_path) == {}
