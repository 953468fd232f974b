"""Rank task: the NVFP4 shard of one block that a rank reads, as logical rows and columns.

Codes are hashed as stored; scales after un-swizzling them, so that a shard whose tiles were moved wrongly
has another hash, however well-formed it looks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import comfy_kitchen as ck
import torch
from torch import Tensor

from h3core.checkpoint import Detected, open_checkpoint
from h3core.checkpoint.reader import ShardLoader
from h3core.checkpoint.slices import SliceReader
from h3core.config import H3Config
from h3core.nvfp4 import BLOCK, NVFP4Weight
from h3core.partition import Shard, Span, shards
from h3core.ranks import Rank
from h3core.weights import Weight

LINEARS = ("qkv", "out", "fc1", "fc2")


def plain_scales(weight: NVFP4Weight) -> Tensor:
    """Block scales as bytes in row-major order (N, K/16), by comfy-kitchen's own inverse of the swizzle."""
    rows, cols = weight.shape
    scales: Tensor = ck.from_blocked(weight.scales.view(torch.uint8), rows, cols // BLOCK)
    return scales


def digest(*parts: Tensor) -> str:
    """SHA-256 of tensors of bytes."""
    state = hashlib.sha256()
    for part in parts:
        state.update(part.contiguous().numpy().data)
    return state.hexdigest()


def block_shard(rank: Rank, path: str, config: H3Config) -> dict[str, tuple[tuple[int, int], str, int]]:
    """Read this rank's shard of block 0 of a pruned NVFP4 file; per linear: shape, digest, bytes held."""
    detected = Detected("pruned", "nvfp4", config, adaln_rank=8, adaln_grid=1025)
    shard = shards(config, rank.world)[rank.rank]
    with SliceReader(open_checkpoint(Path(path))) as slices:
        block = ShardLoader(detected, slices, torch.bfloat16, rank.device).block("blocks.0", shard, nvfp4=True)
        read = slices.bytes_read
    found = {}
    for name, weight in zip(LINEARS, (block.attn.qkv, block.attn.out, block.mlp.fc1, block.mlp.fc2), strict=True):
        cut = nvfp4(name, weight)
        found[name] = (cut.shape, digest(cut.codes, plain_scales(cut)), cut.nbytes)
    held = sum(size for _, _, size in found.values())
    norms = 2 * (2 * config.hidden_size + 2 * config.attention_head_dim)
    if read != held + norms:
        raise ValueError(f"rank {rank.rank}: read {read} bytes for a shard of {held} and norms of {norms}")
    return found


def nvfp4(name: str, weight: Weight) -> NVFP4Weight:
    """`weight`, which must be NVFP4. Raises `TypeError` where it is not."""
    if not isinstance(weight, NVFP4Weight):
        raise TypeError(f"{name}: got a {type(weight).__name__}, expected an NVFP4Weight")
    return weight


def expected_shard(
    config: H3Config, shard: Shard, codes: Mapping[str, Tensor], scales: Mapping[str, Tensor]
) -> dict[str, tuple[tuple[int, int], str]]:
    """Shape and digest that a shard must have, cut from whole codes (N, K/2) and un-swizzled scales (N, K/16)."""
    width, inner, ffn = config.attention_head_dim, config.inner_dim, config.ffn_dim
    heads = shard.heads.scaled(width)
    rows = {
        "qkv": [heads.shifted(part * inner) for part in range(3)],
        "fc1": [shard.ffn.shifted(part * ffn) for part in range(2)],
    }
    columns = {"out": heads, "fc2": shard.ffn}
    expected = {}
    for name in LINEARS:
        spans = rows.get(name, [Span(0, codes[name].shape[0])])
        span = columns.get(name, Span(0, codes[name].shape[1] * 2))
        parts = [
            torch.cat([table[slice(*r), span.start // step : span.stop // step] for r in spans])
            for table, step in ((codes[name], 2), (scales[name], BLOCK))
        ]
        expected[name] = ((parts[0].shape[0], parts[0].shape[1] * 2), digest(*parts))
    return expected
