"""The small maths of one block. Every function is row-wise, and rounds where the model rounds.

In bf16 each elementwise result is rounded before the next operation reads it: fusing two of them in
fp32 moves a long denoising run off the reference. Suffixes: T rows, H hidden, N heads, D head width.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dim, in the dtype of `x`."""
    return F.rms_norm(x_TH, (x_TH.shape[-1],), weight_H, eps)


def modulate(x_TH: Tensor, scale_H: Tensor, shift_H: Tensor) -> Tensor:
    """x * (1 + scale) + shift, one rounding per operation."""
    return x_TH * (1.0 + scale_H) + shift_H


def swiglu(gate_up_T2F: Tensor) -> Tensor:
    """up * silu(gate) of [gate | up]: (T, 2F) to (T, F)."""
    gate, up = gate_up_T2F.chunk(2, dim=-1)
    return up * F.silu(gate)


def inverse_frequencies(freq_dim: int, theta: float) -> Tensor:
    """(freq_dim,) fp32: 1 / theta^(2i / 2n), the expression that the checkpoint's rope.inv_freq holds."""
    return 1.0 / theta ** (torch.arange(0, 2 * freq_dim, 2, dtype=torch.float32) / (2 * freq_dim))


def rotary_tables(positions_T3: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin (T, 6 * freq_dim) in fp32 from positions (T, 3), which are rounded to fp32 first.

    Angles are [t | h | w], then the same again: channel i is paired with channel i + half.
    """
    angles = positions_T3.to(torch.float32)[:, :, None] * inv_freq
    half = angles.flatten(1)
    both = torch.cat([half, half], dim=-1)
    return both.cos(), both.sin()


def rotate(x_TND: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate the leading R channels of each head; cos and sin are rounded to the dtype of `x` first."""
    width = cos_TR.shape[-1]
    cos = cos_TR.to(x_TND.dtype)[:, None, :]
    sin = sin_TR.to(x_TND.dtype)[:, None, :]
    turned = x_TND[..., :width]
    first, second = turned.chunk(2, dim=-1)
    swapped = torch.cat([-second, first], dim=-1)
    return torch.cat([turned * cos + swapped * sin, x_TND[..., width:]], dim=-1)


def timestep_embedding(timesteps_M: Tensor, dim: int) -> Tensor:
    """(M, dim) fp32: [cos(t w) | sin(t w)], w_k = 10000^(-k / (dim/2)); an odd dim is zero-filled at the end."""
    half = dim // 2
    exponent = -math.log(10000.0) * torch.arange(half, dtype=torch.float32, device=timesteps_M.device) / half
    angles = timesteps_M[:, None].float() * torch.exp(exponent)[None, :]
    return F.pad(torch.cat([angles.cos(), angles.sin()], dim=-1), (0, dim % 2))
