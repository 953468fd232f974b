"""Random denoiser weights that behave like a model, in every layout, for machines without the real ones.

What "behave" means: activations stay of order one through any number of blocks, attention is neither flat nor
one-hot, AdaLN moves with the timestep and the modality, the velocity is of order one, and every row and every
weight reaches the output. A check that runs on such weights can therefore see a fault in any of them.

This module writes the files; `synthetic_tensors` says what each tensor is, `streams` where its random bits come from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

from h3core.checkpoint.folder_writer import plan_shards, write_sharded
from h3core.checkpoint.layout import TensorSpec, expected_tensors
from h3core.checkpoint.synthetic_tensors import synthetic_tensor
from h3core.checkpoint.writer import Progress, write_file
from h3core.config import H3Config

DEFAULT_SEED: Final = 440420

BASENAME: Final[Mapping[str, str]] = {"native": "model", "diffusers": "diffusion_pytorch_model"}
"""File names of the layouts that are folders; `pruned` is one file."""

SHARD_BYTES: Final[Mapping[str, int]] = {"native": 5 << 30, "diffusers": 5_000_000_000}
"""Limits that cut the released sizes into as many files as were published: 13 and 14."""


def synthesize(
    out: Path,
    *,
    config: H3Config,
    layout: str,
    quant: str,
    seed: int = DEFAULT_SEED,
    force: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write a synthetic checkpoint, all of it or nothing, and return the bytes of its safetensors files.

    `pruned`, and any layout whose `out` ends in `.safetensors` other than `diffusers`, is one file; the others are
    a folder, of several files where one would be too large. Raises as `write_file` does, and `CheckpointError`
    for a layout, quantisation or size that does not exist.
    """
    specs = expected_tensors(config, layout, quant)
    produce = partial(synthetic_tensor, config, layout, quant, seed=seed)
    files = plan_files(out, specs, layout)
    if out in files:
        return write_file(out, specs, produce, force=force, progress=progress)
    return write_sharded(
        out,
        specs,
        produce,
        max_shard_bytes=SHARD_BYTES[layout],
        basename=BASENAME[layout],
        extra={"config.json": _config_json(config)} if layout == "diffusers" else None,
        force=force,
        progress=progress,
    )


def plan_files(out: Path, specs: Mapping[str, TensorSpec], layout: str) -> dict[Path, dict[str, TensorSpec]]:
    """The safetensors files that `synthesize` would write, and the tensors of each, in order."""
    if layout == "pruned" or (layout == "native" and out.suffix == ".safetensors"):
        return {out: dict(specs)}
    return {out / name: part for name, part in plan_shards(specs, SHARD_BYTES[layout], BASENAME[layout]).items()}


def _config_json(config: H3Config) -> bytes:
    values: dict[str, Any] = {"_class_name": "MiniMaxH3Transformer3DModel", **asdict(config)}
    return (json.dumps(values, indent=2) + "\n").encode()
