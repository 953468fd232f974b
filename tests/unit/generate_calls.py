"""Calls of `python -m h3core generate` for its tests: good inputs, changed options, and what a refusal looks like."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from h3core.__main__ import main
from h3core.checkpoint.synthesize import synthesize
from h3core.config import TINY

SMALL = "96x64x22"
"""Shorter than the model was released for, so that a run of it warns."""
QUIET = "96x64x107"
"""Of a released length; what refuses it says nothing else."""
TEXT_ROWS = 19
LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


short_clips = pytest.mark.filterwarnings("default:geometry frames:UserWarning")


@dataclass(frozen=True)
class Inputs:
    """A checkpoint and an embedding that fit each other."""

    checkpoint: Path
    embeds: Path
    prompt: Tensor


def make_inputs(folder: Path) -> Inputs:
    """A tiny NVFP4 checkpoint and a prompt embedding, as files."""
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


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def edited(inputs: Inputs, path: Path, edit: Callable[[dict[str, Tensor]], Any]) -> Path:
    """The checkpoint with some tensors edited."""
    tensors = load_file(inputs.checkpoint)
    edit(tensors)
    save_file(tensors, path)
    return path


def spoil_norm(tensors: dict[str, Tensor]) -> None:
    tensors["blocks.1.norm1.weight"][5] = float("nan")


def folder(path: Path) -> Path:
    path.mkdir()
    return path
