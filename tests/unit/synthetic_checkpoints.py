"""Synthetic tensors and files for the tests of them; each set of tensors is made once a process."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from h3core.checkpoint.cli import FORMATS
from h3core.checkpoint.layout import expected_tensors
from h3core.checkpoint.synthesize import synthesize
from h3core.checkpoint.synthetic_tensors import synthetic_tensor
from h3core.config import TINY, H3Config

KINDS = list(FORMATS.values())
FLOATS = [("native", "bf16"), ("diffusers", "bf16"), ("pruned", "bf16")]
SEED = 440420


@cache
def tensors(layout: str, quant: str, seed: int = SEED, config: H3Config = TINY) -> dict[str, Tensor]:
    specs = expected_tensors(config, layout, quant)
    return {name: synthetic_tensor(config, layout, quant, name, spec, seed) for name, spec in specs.items()}


def written(folder: Path, layout: str, quant: str, seed: int = SEED, name: str = "out") -> Path:
    out = folder / name
    synthesize(out, config=TINY, layout=layout, quant=quant, seed=seed)
    return out


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
