"""Values that no sound checkpoint holds: each check names what it found and how often.

One NaN in a weight makes every output NaN after a block; a wrong block scale makes 16 weights wrong and no NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from h3core.nvfp4 import BLOCK, TILE_BYTES, TILE_COLS, TILE_ROWS, NVFP4Weight

_NAN: Final = 0x7F
_SIGN: Final = 0x80
_SATURATED: Final = 7
"""The E2M1 code of 6, the largest magnitude."""
_AT_ONCE: Final = 1 << 18
"""Zero scales looked at together: a file with a large hole has millions."""


def float_problems(tensor: Tensor) -> Iterator[str]:
    """NaN and infinity in a floating-point tensor, with counts, and a matrix of nothing but zeros."""
    if tensor.numel() == 0:
        return
    # aminmax passes NaN on, and needs no mask of the tensor's size.
    low, high = torch.aminmax(tensor)
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        nan, inf = int(tensor.isnan().sum()), int(tensor.isinf().sum())
        yield f"got {nan} NaN and {inf} infinite of {tensor.numel()} values, expected finite ones"
    elif tensor.ndim == 2 and not bool(low) and not bool(high):
        yield f"got {tensor.numel()} zeros, expected a weight: the bytes are missing, as in a download that broke off"


def nvfp4_problems(weight: NVFP4Weight) -> Iterator[str]:
    """NaN, negative and impossible zero block scales, and a global scale that is not finite and positive."""
    scale_2 = float(weight.scale_2)
    if not 0 < scale_2 < float("inf"):
        yield f"weight_scale_2: got {scale_2}, expected a finite positive number"
    stored = weight.scales.view(torch.uint8)
    low, high = (int(value) for value in torch.aminmax(stored))
    if high >= _NAN:
        nan = int(((stored & _NAN) == _NAN).sum())
        negative = int(((stored >= _SIGN) & (stored != (_SIGN | _NAN))).sum())
        yield f"weight_scale: got {nan} NaN and {negative} negative of {stored.numel()} block scales, expected positive"
    if high == 0:
        yield f"weight_scale: got {stored.numel()} zeros, expected block scales: the bytes are missing"
    elif low == 0:
        empty, wrong = _zero_blocks(weight)
        if wrong:
            yield (
                f"weight_scale: {wrong} of {empty} zero block scales stand over codes that a zero block cannot have: "
                "bytes are missing there"
            )


def _zero_blocks(weight: NVFP4Weight) -> tuple[int, int]:
    """How many block scales are zero, and how many of these are over codes of an ordinary block.

    A block whose scale rounds to zero has only codes 0 and 6: comfy-kitchen's CPU quantiser writes zeros there, and its
    CUDA one divides by the zero scale and saturates (6, or 0 for an exact zero). Any other code says that a real scale
    was lost, as in a file with a hole.
    """
    rows, columns = weight.shape
    tile_cols = columns // TILE_COLS
    codes = weight.codes.view(rows, columns // BLOCK, BLOCK // 2)
    zero = (weight.scales.view(torch.uint8).view(-1) == 0).nonzero().view(-1)
    wrong = 0
    for at in zero.split(_AT_ONCE):
        tile, byte = at // TILE_BYTES, at % TILE_BYTES
        # Inside a tile, byte = (row % 32) * 16 + (row // 32) * 4 + block.
        row = tile // tile_cols * TILE_ROWS + byte // 16 + byte % 16 // 4 * 32
        block = tile % tile_cols * 4 + byte % 4
        held = codes[row, block]
        high, low = (held >> 4) & _SATURATED, held & _SATURATED
        ordinary = ((high != 0) & (high != _SATURATED)) | ((low != 0) & (low != _SATURATED))
        wrong += int(ordinary.any(dim=1).sum())
    return zero.numel(), wrong
