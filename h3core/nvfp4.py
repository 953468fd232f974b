"""One NVFP4 weight: packed E2M1 codes, swizzled E4M3 block scales, one FP32 scale.

Quantising, dequantising and the native product are comfy-kitchen's. Ours is the cutting, because
comfy-kitchen's tensor subclass dequantises when it is sliced.

Storage of a weight W of shape (N, K), as in the published checkpoints:
- `codes` uint8 (N, K/2): two E2M1 codes a byte, the HIGH nibble is the even column.
- `scales` float8_e4m3fn (N, K/16): one scale per 16 columns, in cuBLAS' 128x4 blocked order
  (SWIZZLE_32_4_4): the shape reads row-major, the bytes are not.
- `scale_2` float32 (): one scale for the whole tensor.
W[n, k] = e2m1(code) * e4m3(scale) * scale_2.

A tile is 128 rows x 64 columns: 512 bytes of scales. A cut on tile edges moves whole tiles and
needs no un-swizzling; a finer one would have to re-order scale bytes, and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import comfy_kitchen as ck
import torch
from torch import Tensor

TILE_ROWS: Final = 128
TILE_COLS: Final = 64
BLOCK: Final = 16
"""Columns that share one E4M3 scale."""
TILE_BYTES: Final = TILE_ROWS * TILE_COLS // BLOCK
AMAX_TO_SCALE: Final = 448.0 * 6.0
"""Largest E4M3 value times largest E2M1 value: scale_2 = amax(|W|) / 2688."""


def check_cut(start: int, stop: int, total: int, dim: str) -> None:
    """Refuse a cut that is not on tile edges. `dim` is "rows" or "columns".

    Raises `ValueError` that says which alignment is wanted and why.
    """
    tile = TILE_ROWS if dim == "rows" else TILE_COLS
    if not 0 <= start < stop <= total:
        raise ValueError(f"NVFP4 cut of {dim}: got [{start}, {stop}), expected a non-empty range inside [0, {total})")
    if start % tile or stop % tile:
        raise ValueError(
            f"NVFP4 cut of {dim}: got [{start}, {stop}), expected multiples of {tile}: block scales are stored in "
            f"swizzled tiles of {TILE_ROWS} rows x {TILE_COLS} columns, and a cut through a tile would re-order them"
        )


@dataclass(frozen=True, slots=True)
class NVFP4Weight:
    """A weight (N, K), N a multiple of 128 and K of 64. Raises `ValueError` where the parts do not fit."""

    codes: Tensor
    scales: Tensor
    scale_2: Tensor

    def __post_init__(self) -> None:
        rows, cols = self.shape
        if rows % TILE_ROWS or cols % TILE_COLS:
            raise ValueError(
                f"NVFP4 weight: got {rows} x {cols}, expected multiples of {TILE_ROWS} rows and {TILE_COLS} columns"
            )
        for name, tensor, dtype, shape in (
            ("codes", self.codes, torch.uint8, (rows, cols // 2)),
            ("scales", self.scales, torch.float8_e4m3fn, (rows, cols // BLOCK)),
            ("scale_2", self.scale_2, torch.float32, ()),
        ):
            if tensor.dtype != dtype or tuple(tensor.shape) != shape:
                raise ValueError(f"NVFP4 {name}: got {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {shape}")

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the weight that the codes stand for."""
        return self.codes.shape[0], self.codes.shape[1] * 2

    @property
    def nbytes(self) -> int:
        """Bytes held: codes, block scales and the one scale."""
        return self.codes.nbytes + self.scales.nbytes + self.scale_2.nbytes

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.codes.device

    def to(self, device: torch.device | str) -> NVFP4Weight:
        """The same weight on `device`."""
        return NVFP4Weight(self.codes.to(device), self.scales.to(device), self.scale_2.to(device))

    def rows(self, start: int, stop: int) -> NVFP4Weight:
        """Rows [start, stop), multiples of 128: contiguous bytes of both tensors."""
        check_cut(start, stop, self.shape[0], "rows")
        return NVFP4Weight(self.codes[start:stop], self.scales[start:stop], self.scale_2)

    def columns(self, start: int, stop: int) -> NVFP4Weight:
        """Columns [start, stop), multiples of 64: whole tile columns of the scales."""
        check_cut(start, stop, self.shape[1], "columns")
        rows = self.shape[0]
        return NVFP4Weight(
            self.codes[:, start // 2 : stop // 2].contiguous(),
            cut_scale_columns(self.scales, start, stop).view(rows, (stop - start) // BLOCK),
            self.scale_2,
        )

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight (N, K) in `dtype`, rounded once from the fp32 product code * (scale * scale_2).

        That is what comfy-kitchen's CUDA kernel does for any dtype. Its CPU code rounds the scales to
        `dtype` first, so there we ask it for fp32 and cast once.
        """
        if self.device.type == "cuda" and dtype in (torch.bfloat16, torch.float16, torch.float32):
            weight: Tensor = ck.dequantize_nvfp4(self.codes, self.scale_2, self.scales, dtype)
            return weight
        exact: Tensor = ck.dequantize_nvfp4(self.codes, self.scale_2, self.scales, torch.float32)
        return exact.to(dtype)


def cut_scale_columns(scales: Tensor, start: int, stop: int) -> Tensor:
    """Tile columns of the swizzled scales (N, K/16) for weight columns [start, stop) (multiples of 64).

    Returns a contiguous (N/128, (stop-start)/64, 512) tensor in the dtype of `scales`.
    """
    rows, blocks = scales.shape
    tiles = scales.view(torch.uint8).view(rows // TILE_ROWS, blocks * BLOCK // TILE_COLS, TILE_BYTES)
    return tiles[:, start // TILE_COLS : stop // TILE_COLS].contiguous().view(scales.dtype)


def concat_rows(parts: Sequence[NVFP4Weight]) -> NVFP4Weight:
    """Stack weights of one tensor along rows (its q, k and v, or gate and up, parts): they share scale_2.

    Raises `ValueError` where the parts' scale_2 differ: one scalar cannot stand for both.
    """
    first = parts[0]
    if any(not torch.equal(part.scale_2, first.scale_2) for part in parts):
        raise ValueError(f"NVFP4 parts to stack have scale_2 {[float(p.scale_2) for p in parts]}, expected one value")
    return NVFP4Weight(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn),
        first.scale_2,
    )


def check_quantisable(x: Tensor) -> None:
    """Raise `ValueError` for a dtype that comfy-kitchen's quantiser does not take on the device of `x`."""
    if x.device.type == "cuda" and x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"NVFP4 on a GPU: got {x.dtype} to quantise, expected bfloat16 or float16; quantise on the CPU"
        )


def quantize(weight: Tensor) -> NVFP4Weight:
    """Quantise a weight (N, K), N a multiple of 128 and K of 64, with scale_2 = amax / 2688 (fp32).

    Raises `ValueError` for a dtype that the quantiser of the weight's device does not take.
    """
    check_quantisable(weight)
    scale_2 = weight.abs().amax().float() / AMAX_TO_SCALE
    codes, scales = ck.quantize_nvfp4(weight.contiguous(), scale_2)
    return NVFP4Weight(codes, scales, scale_2)
