"""The shards of all ranks are the whole weights cut, to the byte, and no rank reads what another one holds.

A pass means: what is cut is read once in all, what is replicated once a rank, and NVFP4 cuts dequantise to cuts.
Run: pytest tests/unit/test_checkpoint_rank_shards.py
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import comfy_kitchen as ck
import pytest
import torch
from torch import Tensor

from h3core.checkpoint.reader import DenoiserReader, load_denoiser
from h3core.config import H3Config
from h3core.nvfp4 import NVFP4Weight, quantize
from h3core.partition import shards
from h3core.weights import DenoiserWeights
from tests.unit.layout_files import CONFIG, KINDS, differing, logical

WORLDS = [2, 4, 6, 8]


@pytest.fixture(scope="module")
def whole(layouts: dict[str, Path]) -> dict[str, DenoiserWeights]:
    return {kind: load_denoiser(layouts[kind])[1] for kind in KINDS}


def joined(ranks: list[DenoiserWeights], config: H3Config) -> DenoiserWeights:
    """The whole weights out of all ranks' shards; what is replicated must be equal everywhere."""
    first = ranks[0]
    for rank in ranks[1:]:
        for field in dataclasses.fields(DenoiserWeights):
            if field.name != "blocks":
                assert differing([getattr(rank, field.name)], [getattr(first, field.name)]) == []

    def rows(pieces: list[Any], segments: int) -> Any:
        if isinstance(pieces[0], NVFP4Weight):
            codes = rows([piece.codes for piece in pieces], segments)
            scales = rows([piece.scales.view(torch.uint8) for piece in pieces], segments)
            return NVFP4Weight(codes, scales.view(torch.float8_e4m3fn), pieces[0].scale_2)
        return torch.cat([piece.chunk(segments)[segment] for segment in range(segments) for piece in pieces])

    def columns(pieces: list[Any]) -> Any:
        if isinstance(pieces[0], NVFP4Weight):
            count = pieces[0].shape[0]
            tiles = [piece.scales.view(torch.uint8).view(count // 128, -1, 512) for piece in pieces]
            scales = torch.cat(tiles, dim=1).reshape(count, -1).view(torch.float8_e4m3fn)
            return NVFP4Weight(columns([piece.codes for piece in pieces]), scales, pieces[0].scale_2)
        return torch.cat(pieces, dim=1)

    blocks = []
    for index in range(config.num_layers):
        held = [rank.blocks[index] for rank in ranks]
        attn = dataclasses.replace(
            held[0].attn,
            qkv=rows([block.attn.qkv for block in held], 3),
            out=columns([block.attn.out for block in held]),
        )
        mlp = dataclasses.replace(
            held[0].mlp, fc1=rows([block.mlp.fc1 for block in held], 2), fc2=columns([block.mlp.fc2 for block in held])
        )
        blocks.append(dataclasses.replace(held[0], attn=attn, mlp=mlp))
    return dataclasses.replace(first, blocks=blocks)


@pytest.mark.parametrize("n_ranks", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_shards_of_all_ranks_are_the_whole_and_each_byte_is_read_by_its_holder(
    layouts: dict[str, Path], whole: dict[str, DenoiserWeights], kind: str, n_ranks: int
) -> None:
    readers = [DenoiserReader(layouts[kind]) for _ in range(n_ranks)]
    ranks = [reader.load(shard) for reader, shard in zip(readers, shards(CONFIG, n_ranks), strict=True)]
    assert differing(joined(ranks, CONFIG), whole[kind]) == []
    stored = {name: info.stop - info.start for name, info in readers[0].checkpoint.tensors.items()}
    cut = re.compile(
        r"(transformer_)?blocks\.\d+\.(attn\.(qkv_proj|out_proj|to_.*)|mlp\.fc.|ff\.net.*)\.weight(_scale)?"
    )
    unread = re.compile(r"rope\.inv_freq|.*\.comfy_quant")
    sharded = sum(size for name, size in stored.items() if cut.fullmatch(name))
    replicated = sum(size for name, size in stored.items() if not cut.fullmatch(name) and not unread.fullmatch(name))
    assert sharded > 0.4 * replicated
    assert sum(reader.bytes_read for reader in readers) == sharded + n_ranks * replicated


def dense(weight: Any) -> Tensor:
    """comfy-kitchen's own dequantisation."""
    return ck.dequantize_nvfp4(weight.codes, weight.scale_2, weight.scales, torch.float32)


@pytest.fixture(scope="module")
def dense_whole() -> list[Tensor]:
    """qkv, out, fc1 and fc2 of block 1: quantised from the model, not read from a file."""
    model = logical(CONFIG)
    qkv = torch.cat([model[f"blocks.1.{part}"] for part in "qkv"])
    fc1 = torch.cat([model["blocks.1.gate"], model["blocks.1.up"]])
    matrices = [qkv, model["blocks.1.attn.out_proj.weight"], fc1, model["blocks.1.mlp.fc2.weight"]]
    return [dense(quantize(matrix)) for matrix in matrices]


@pytest.mark.parametrize("n_ranks", WORLDS)
def test_nvfp4_cut_dequantises_to_the_cut_of_the_dequantised_whole(
    layouts: dict[str, Path], dense_whole: list[Tensor], n_ranks: int
) -> None:
    qkv, out, fc1, fc2 = dense_whole
    inner, ffn = CONFIG.inner_dim, CONFIG.ffn_dim
    for shard in shards(CONFIG, n_ranks):
        block = load_denoiser(layouts["nvfp4"], shard=shard)[1].blocks[1]
        heads, columns = slice(*shard.heads.scaled(128)), slice(*shard.ffn)
        assert torch.equal(
            dense(block.attn.qkv), torch.cat([qkv[i * inner : (i + 1) * inner][heads] for i in range(3)])
        )
        assert torch.equal(dense(block.attn.out), out[:, heads])
        assert torch.equal(dense(block.mlp.fc1), torch.cat([fc1[:ffn][columns], fc1[ffn:][columns]]))
        assert torch.equal(dense(block.mlp.fc2), fc2[:, columns])
