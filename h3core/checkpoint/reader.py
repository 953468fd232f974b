"""Load a denoiser, or one rank's shard of it, from any layout into the normal form of `h3core.weights`.

A rank reads the bytes that it will hold and no others. Every linear goes through one path, `ShardLoader.linear_rows` or
`linear_columns`, which moves weight and block scales by the same rows or columns: a scale that stays behind when its
row moves gives a picture of noise and no error. Fused tensors are cut by logical part (q, k, v; gate, up), never as one
matrix: that has the right shape and the wrong rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from h3core.checkpoint.detect import Detected, detect
from h3core.checkpoint.errors import CheckpointError, bullets
from h3core.checkpoint.layout import CURVE_TABLE, Piece, fc1_pieces, names_of, qkv_pieces
from h3core.checkpoint.shards import open_checkpoint
from h3core.checkpoint.slices import SliceReader
from h3core.checkpoint.values import float_problems, nvfp4_problems
from h3core.config import H3Config
from h3core.nvfp4 import NVFP4Weight, check_cut
from h3core.partition import Shard, Span
from h3core.weights import (
    Affine,
    AttentionWeights,
    BlockWeights,
    CurveAdaLN,
    DenoiserWeights,
    FullAdaLN,
    MLPWeights,
    Weight,
)

DTYPES: Final = (torch.bfloat16, torch.float32, torch.float64)
"""Activation dtypes: bf16 is the model's; the wider ones serve comparisons."""


def load_denoiser(
    path: str | Path,
    *,
    shard: Shard | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> tuple[H3Config, DenoiserWeights]:
    """The sizes and the weights of a checkpoint; see `DenoiserReader`, which also counts the bytes read."""
    reader = DenoiserReader(path)
    return reader.config, reader.load(shard, dtype=dtype, device=device)


class DenoiserReader:
    """An open checkpoint whose headers have been checked; `load` reads one shard of it, as often as wanted.

    `path` is what `open_checkpoint` takes. Raises `CheckpointError` for files that are not sound and for tensors
    that are not those of a supported layout.
    """

    def __init__(self, path: str | Path) -> None:
        """Read headers, `.comfy_quant` texts and rope.inv_freq; no weight is read."""
        self.checkpoint = open_checkpoint(path)
        self.detected: Detected = detect(self.checkpoint)
        self.bytes_read = 0
        """Bytes of weights that `load` has copied out of the files so far."""

    @property
    def config(self) -> H3Config:
        """The model's sizes."""
        return self.detected.config

    def load(
        self,
        shard: Shard | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> DenoiserWeights:
        """The weights of `shard` (default: all), tensor by tensor onto `device`.

        `dtype` is the activation dtype (bf16, fp32 or fp64). Tensors stored in bf16 take it; the fp32 islands (patch
        projections, time embedder, output heads) and the pruned AdaLN take the wider of it and fp32; NVFP4 stays NVFP4.
        Host memory stays within the shard plus one tensor, and nothing returned refers to the files.
        Raises `ValueError` for a dtype or shard that does not fit, and `CheckpointError` naming every tensor with NaN
        or infinite values or impossible scales.
        """
        if dtype not in DTYPES:
            raise ValueError(f"dtype: got {dtype}, expected one of {', '.join(map(str, DTYPES))}")
        held = Shard.whole(self.config) if shard is None else shard
        _check_shard(self.config, held)
        with SliceReader(self.checkpoint) as slices:
            loader = ShardLoader(self.detected, slices, dtype, torch.device(device))
            try:
                weights = loader.denoiser(held)
            finally:
                self.bytes_read += slices.bytes_read
        if loader.problems:
            raise bullets(
                f"{self.checkpoint.path}: {len(loader.problems)} problems in the values; download it again and compare "
                "its sha256 with the publisher's:",
                _bounded(loader.problems),
            )
        return weights


class ShardLoader:
    """One pass over the tensors of one shard; problems in values are collected, so that all are reported."""

    def __init__(self, detected: Detected, slices: SliceReader, dtype: torch.dtype, device: torch.device) -> None:
        self.config = detected.config
        self.layout = detected.layout
        self.names = names_of(detected.layout)
        self.nvfp4 = detected.quant == "nvfp4"
        self.slices = slices
        self.dtype = dtype
        self.wide = torch.promote_types(dtype, torch.float32)
        self.device = device
        self.problems: list[str] = []

    def denoiser(self, shard: Shard) -> DenoiserWeights:
        """Everything, in the order of the structure."""
        names, config = self.names, self.config
        refiner_shard = Shard.whole(config)
        refiner = [f"{names.refiner}.{index}" for index in range(config.num_refiner_layers)]
        blocks = [f"{names.blocks}.{index}" for index in range(config.num_layers)]
        return DenoiserWeights(
            video_in=self.affine(names.video_in, self.wide),
            audio_in=self.affine(names.audio_in, self.wide),
            text_in=self.affine(names.text_in, self.dtype),
            refiner=[self.block(block, refiner_shard, nvfp4=False) for block in refiner],
            refiner_norm=self.tensor(f"{names.refiner_norm}.weight", self.dtype),
            adaln=self.adaln(blocks),
            blocks=[self.block(block, shard, nvfp4=self.nvfp4) for block in blocks],
            final_norm=self.tensor(f"{names.final_norm}.weight", self.dtype),
            video_out=self.affine(names.video_out, self.wide),
            audio_out=self.affine(names.audio_out, self.wide),
        )

    def adaln(self, blocks: list[str]) -> FullAdaLN | CurveAdaLN:
        """The time-dependent modulation, whole on every rank."""
        names = self.names
        # Stored in F16 or not, the curve's projections are evaluated in fp32; the full ones in the activation dtype.
        dtype = self.wide if self.layout == "pruned" else self.dtype
        projections = [self.affine(f"{block}.{names.adaln}", dtype) for block in blocks]
        final = self.affine(names.final_adaln, dtype)
        if self.layout == "pruned":
            return CurveAdaLN(self.tensor(CURVE_TABLE, self.wide), projections, final)
        return FullAdaLN(
            self.affine(names.time_in, self.wide), self.affine(names.time_out, self.wide), projections, final
        )

    def block(self, block: str, shard: Shard, *, nvfp4: bool) -> BlockWeights:
        """One block's attention and MLP, cut to the shard."""
        names, config = self.names, self.config
        return BlockWeights(
            norm1=self.tensor(f"{block}.{names.norm1}.weight", self.dtype),
            attn=AttentionWeights(
                qkv=self.linear_rows(qkv_pieces(config, self.layout, block, shard.heads), nvfp4=nvfp4),
                out=self.linear_columns(
                    f"{block}.{names.out}", shard.heads.scaled(config.attention_head_dim), nvfp4=nvfp4
                ),
                q_norm=self.tensor(f"{block}.{names.q_norm}.weight", self.dtype),
                k_norm=self.tensor(f"{block}.{names.k_norm}.weight", self.dtype),
            ),
            norm2=self.tensor(f"{block}.{names.norm2}.weight", self.dtype),
            mlp=MLPWeights(
                fc1=self.linear_rows(fc1_pieces(config, self.layout, block, shard.ffn), nvfp4=nvfp4),
                fc2=self.linear_columns(f"{block}.{names.fc2}", shard.ffn, nvfp4=nvfp4),
            ),
        )

    def linear_rows(self, pieces: Sequence[Piece], *, nvfp4: bool) -> Weight:
        """Rows of one linear, from one or several tensors, in the order of the pieces."""
        names = sorted({piece.name for piece in pieces})
        if not nvfp4:
            weight = self.slices.rows(pieces, ".weight")
            return self.placed(" + ".join(f"{name}.weight" for name in names), weight, self.dtype)
        for piece in pieces:
            check_cut(*piece.rows, self.slices.info(f"{piece.name}.weight").shape[0], "rows")
        codes = self.slices.rows(pieces, ".weight").to(self.device)
        scales = self.slices.rows(pieces, ".weight_scale").to(self.device)
        return self.packed(names[0], codes, scales)

    def linear_columns(self, name: str, columns: Span, *, nvfp4: bool) -> Weight:
        """Columns of one linear."""
        rows, stored = self.slices.info(f"{name}.weight").shape
        total = stored * 2 if nvfp4 else stored
        if columns == (0, total):
            # All columns are all rows: one read in file order instead of a copy by columns.
            return self.linear_rows([Piece(name, Span(0, rows))], nvfp4=nvfp4)
        if not nvfp4:
            return self.placed(f"{name}.weight", self.slices.columns(f"{name}.weight", columns), self.dtype)
        check_cut(*columns, total, "columns")
        packed = Span(columns.start // 2, columns.stop // 2)
        codes = self.slices.columns(f"{name}.weight", packed).to(self.device)
        scales = self.slices.scale_columns(f"{name}.weight_scale", columns).to(self.device)
        return self.packed(name, codes, scales)

    def packed(self, name: str, codes: Tensor, scales: Tensor) -> NVFP4Weight:
        """An NVFP4 weight whose scales have been looked at. Its scale_2 is the whole tensor's, so it is every cut's."""
        scale_2 = self.slices.whole(f"{name}.weight_scale_2").to(self.device)
        weight = NVFP4Weight(codes, scales, scale_2)
        self.problems += [f"{name}: {problem}" for problem in nvfp4_problems(weight)]
        return weight

    def affine(self, name: str, dtype: torch.dtype) -> Affine:
        """A whole linear with a bias."""
        return Affine(self.tensor(f"{name}.weight", dtype), self.tensor(f"{name}.bias", dtype))

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """A whole tensor."""
        return self.placed(name, self.slices.whole(name), dtype)

    def placed(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor on the device, its values looked at, in its dtype."""
        moved = tensor.to(self.device)
        self.problems += [f"{name}: {problem}" for problem in float_problems(moved)]
        return moved.to(dtype)


def _check_shard(config: H3Config, shard: Shard) -> None:
    """Refuse a shard of another model."""
    for what, span, total in (
        ("heads", shard.heads, config.num_attention_heads),
        ("FFN columns", shard.ffn, config.ffn_dim),
    ):
        if not 0 <= span.start < span.stop <= total:
            raise CheckpointError(
                f"shard: got {what} [{span.start}, {span.stop}), expected a non-empty range inside [0, {total}) of "
                "this checkpoint; build the shards from the checkpoint's own config"
            )


def _bounded(problems: list[str], shown: int = 40) -> list[str]:
    """The first problems, and how many more there are."""
    return problems if len(problems) <= shown else [*problems[:shown], f"and {len(problems) - shown} more"]
