"""One linear: y = x W^T, for a plain or an NVFP4 weight, over rows that a rank may hold a part of.

The rows of a token linear are dealt over ranks, and a BLAS picks its kernel by the number of rows: a sharded
run would get other bits than one rank. Two mends, both without effect on the values:
- on a CPU every linear runs in blocks of exactly 32 rows, the last one filled up (MKL has other kernels below
  4 rows; on a CPU with AMX, oneDNN splits the sum of a bf16 product with K of 5,120 and more by the rows);
- on a GPU the fp32 input projections and output heads run in blocks of 1,024 rows (on an H200, cuBLAS picks
  another split-K for each number of rows).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import comfy_kitchen as ck
import torch
import torch.nn.functional as F
from torch import Tensor

from h3core.nvfp4 import AMAX_TO_SCALE, NVFP4Weight, check_quantisable
from h3core.weights import Affine, Weight

BLOCK_ROWS: Final = {"cpu": 32, "cuda": 1024}
"""Rows of a block."""
LINEAR_KINDS: Final = ("w4a16", "w4a4")
"""How NVFP4 weights are multiplied. `w4a16`: dequantised to the activation dtype. `w4a4`: activations
are quantised too; the product is native where the GPU has FP4 (compute capability 10 and up), emulated elsewhere."""


def filled(x_TK: Tensor, rows: int) -> Tensor:
    """`x` with zero rows appended up to `rows`."""
    return F.pad(x_TK, (0, 0, 0, rows - x_TK.shape[0]))


def dense(x_TK: Tensor, weight_NK: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """x W^T + b of shape (T, N), the same bits for a row whatever T is (on a CPU; see `row-invariance` for a GPU).

    `out_dtype` float32 keeps the fp32 accumulator of a bf16 product unrounded.
    """
    if x_TK.device.type == "cpu":
        return in_blocks(x_TK, lambda block: product(block, weight_NK, bias, out_dtype))
    return product(x_TK, weight_NK, bias, out_dtype)


def blocked(x_TK: Tensor, affine: Affine) -> Tensor:
    """x W^T + b in blocks of one size on every device, in the weight's dtype: the fp32 islands."""
    return in_blocks(x_TK.to(affine.weight.dtype), lambda block: product(block, affine.weight, affine.bias, None))


def in_blocks(x_TK: Tensor, linear: Callable[[Tensor], Tensor]) -> Tensor:
    """`linear` over blocks of exactly `BLOCK_ROWS` rows, the last one filled up with zeros."""
    size = BLOCK_ROWS[x_TK.device.type]
    blocks = [linear(filled(block, size))[: block.shape[0]] for block in x_TK.split(size)]
    return torch.cat(blocks) if len(blocks) != 1 else blocks[0]


def product(x_TK: Tensor, weight_NK: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None) -> Tensor:
    """x W^T + b in one call."""
    if out_dtype is None or out_dtype == x_TK.dtype:
        return F.linear(x_TK, weight_NK, bias)
    if x_TK.device.type == "cuda" and out_dtype == torch.float32:
        unrounded = torch.mm(x_TK, weight_NK.t(), out_dtype=torch.float32)
        return unrounded if bias is None else unrounded + bias
    return F.linear(x_TK.to(out_dtype), weight_NK.to(out_dtype), None if bias is None else bias.to(out_dtype))


def has_native_fp4(device: torch.device) -> bool:
    """Whether the GPU multiplies NVFP4 natively. Blackwell paths are coded from its documentation, not run."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (10, 0)


class Linear:
    """Multiplies by plain and NVFP4 weights, in the way that `kind` says.

    `reduce_max` gives the largest value of a scalar over the ranks that hold parts of one activation; it
    keeps the activation scale of `w4a4` that of the whole sequence, so that numbers do not depend on the world.
    Raises `ValueError` for an unknown kind.
    """

    def __init__(self, kind: str = "w4a16", reduce_max: Callable[[Tensor], Tensor] | None = None) -> None:
        if kind not in LINEAR_KINDS:
            raise ValueError(f"linear: got {kind!r}, expected one of {', '.join(LINEAR_KINDS)}")
        self.kind = kind
        self._reduce_max = reduce_max

    def __call__(self, x_TK: Tensor, weight: Weight, *, sharded: bool, out_dtype: torch.dtype | None = None) -> Tensor:
        """x W^T of shape (T, N) in the dtype of `x`, or `out_dtype`.

        `sharded` says that other ranks hold other rows or columns of the same activation.
        """
        if isinstance(weight, Tensor):
            return dense(x_TK, weight, out_dtype=out_dtype)
        if self.kind == "w4a16":
            return dense(x_TK, weight.dequantize(x_TK.dtype), out_dtype=out_dtype)
        amax = x_TK.abs().amax()
        if sharded and self._reduce_max is not None:
            amax = self._reduce_max(amax)
        return w4a4(x_TK, weight, activation_scale(amax), out_dtype or x_TK.dtype)


def activation_scale(amax: Tensor) -> Tensor:
    """amax / 2688, computed in the activation's dtype and then widened to fp32, as ComfyUI does."""
    return (amax / AMAX_TO_SCALE).float()


def w4a4(x_TK: Tensor, weight: NVFP4Weight, scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    """x W^T with `x` (T, K) quantised to NVFP4 under the per-tensor `scale`; result (T, N) in `out_dtype`.

    comfy-kitchen quantises, and multiplies where the GPU can. The emulation multiplies code x block scale,
    which has at most 6 significant bits and so is exact in bf16 and fp32, and applies both per-tensor scales
    to the fp32 sum: what the hardware does, up to the order of its sum.
    """
    rows, device = x_TK.shape[0], x_TK.device
    check_quantisable(x_TK)
    codes, scales = ck.quantize_nvfp4(x_TK.contiguous(), scale, pad_16x=rows % 16 != 0)
    alpha = scale * weight.scale_2
    if has_native_fp4(device):
        kernel_dtype = out_dtype if out_dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
        native: Tensor = ck.scaled_mm_nvfp4(
            codes, weight.codes, scale, weight.scale_2, scales, weight.scales, out_dtype=kernel_dtype, alpha=alpha
        )
        return native[:rows].to(out_dtype)
    one = torch.ones((), dtype=torch.float32, device=device)
    exact = torch.bfloat16 if device.type == "cuda" else torch.float32
    x_exact = ck.dequantize_nvfp4(codes, one, scales, exact)
    w_exact = ck.dequantize_nvfp4(weight.codes, one, weight.scales, exact)
    return (dense(x_exact, w_exact, out_dtype=torch.float32)[:rows] * alpha).to(out_dtype)
