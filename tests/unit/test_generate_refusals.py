"""Input that `python -m h3core generate` cannot use.

A pass means: it ends with exit code 2 and one line on stderr that says what was got, leaves no file and shows no
traceback. Run: pytest tests/unit/test_generate_refusals.py
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from h3core.config import TINY
from tests.unit.generate_calls import Inputs, check_refused, edited, folder, listing, options, run, spoil_norm, written

pytestmark = pytest.mark.usefixtures("process_state")


Change = Callable[[Inputs, Path], dict[str, Any]]


def saved(path: Path, **tensors: Tensor) -> Path:
    save_file(tensors, path)
    return path


def embedding(make: Callable[[Path], Path]) -> Change:
    return lambda inputs, side: {"prompt_embeds": make(side / "prompt.safetensors")}


def checkpoint(make: Callable[[Inputs, Path], Path]) -> Change:
    return lambda inputs, side: {"checkpoint": make(inputs, side / "model.safetensors")}


def drop_two(tensors: dict[str, Tensor]) -> None:
    del tensors["blocks.1.norm1.weight"], tensors["final_layer.norm.weight"]


def misshape_and_retype(tensors: dict[str, Tensor]) -> None:
    tensors["blocks.1.norm1.weight"] = torch.ones(7, dtype=torch.bfloat16)
    tensors["final_layer.norm.weight"] = tensors["final_layer.norm.weight"].float()


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
