"""What a denoiser holds: plain tensors and NVFP4 weights, in one normal form for every layout on disk.

The normal form: qkv rows are [all q; all k; all v] of the held heads, fc1 rows are [gate; up] of the
held columns. Whatever order a checkpoint has, its reader brings it into this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from h3core.nvfp4 import NVFP4Weight

Weight = Tensor | NVFP4Weight
"""The matrix of one linear, (out, in)."""


@dataclass(slots=True)
class Affine:
    """A linear with a bias: weight (out, in), bias (out,)."""

    weight: Tensor
    bias: Tensor


@dataclass(slots=True)
class AttentionWeights:
    """qkv (3*H*D, hidden), rows [q; k; v]; out (hidden, H*D); q_norm and k_norm (D,). H: held heads."""

    qkv: Weight
    out: Weight
    q_norm: Tensor
    k_norm: Tensor


@dataclass(slots=True)
class MLPWeights:
    """fc1 (2*F, hidden), rows [gate; up]; fc2 (hidden, F). F: held FFN columns."""

    fc1: Weight
    fc2: Weight


@dataclass(slots=True)
class BlockWeights:
    """One transformer or refiner block; norm1 and norm2 (hidden,)."""

    norm1: Tensor
    attn: AttentionWeights
    norm2: Tensor
    mlp: MLPWeights


@dataclass(slots=True)
class FullAdaLN:
    """The original AdaLN: a time MLP in fp32 and one projection (adaln_dim, time_embed_dim) a block."""

    time_in: Affine
    time_out: Affine
    blocks: list[Affine]
    final: Affine


@dataclass(slots=True)
class CurveAdaLN:
    """The pruned AdaLN: a curve c(t) of shape (grid, rank), fp32, and fp32 projections (adaln_dim, rank).

    SiLU and the time MLP are folded into the curve.
    """

    table: Tensor
    blocks: list[Affine]
    final: Affine


@dataclass(slots=True)
class DenoiserWeights:
    """All weights that one rank holds. In mode tensor, `blocks` is cut; everything else is whole."""

    video_in: Affine
    audio_in: Affine
    text_in: Affine
    refiner: list[BlockWeights]
    refiner_norm: Tensor
    adaln: FullAdaLN | CurveAdaLN
    blocks: list[BlockWeights]
    final_norm: Tensor
    video_out: Affine
    audio_out: Affine


def named_tensors(weights: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor below `weights`, depth first, with a dotted path (`blocks.0.attn.qkv.codes`)."""
    if isinstance(weights, Tensor):
        yield prefix, weights
    elif isinstance(weights, list):
        for index, item in enumerate(weights):
            yield from named_tensors(item, f"{prefix}.{index}" if prefix else str(index))
    elif is_dataclass(weights):
        for field in fields(weights):
            path = f"{prefix}.{field.name}" if prefix else field.name
            yield from named_tensors(getattr(weights, field.name), path)


def held_bytes(weights: Any) -> int:
    """Bytes of every tensor below `weights`."""
    return sum(tensor.nbytes for _, tensor in named_tensors(weights))


def move(weights: Any, device: torch.device | str) -> Any:
    """The same weights with every tensor on `device`."""
    if isinstance(weights, Tensor):
        return weights.to(device)
    if isinstance(weights, list):
        return [move(item, device) for item in weights]
    return type(weights)(**{f.name: move(getattr(weights, f.name), device) for f in fields(weights)})
