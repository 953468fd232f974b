"""Attention backends by name. The layout over ranks does not depend on the backend.

Each takes q, k, v of shape (T, N, D), all of the sequence's rows, and returns (T, N, D): full
bidirectional attention, scale 1/sqrt(D), no mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).squeeze(0).transpose(0, 1)


def _sdpa_preferring_cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if q.device.type != "cuda":
        return _sdpa(q, k, v)
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        return _sdpa(q, k, v)


def _math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return _sdpa(q, k, v)


BACKENDS: Final[Mapping[str, Attention]] = MappingProxyType({"sdpa": _sdpa_preferring_cudnn, "math": _math})
"""`sdpa`: torch's fused kernels, cuDNN's first on a GPU. `math`: unfused, for reference."""


def attention_backend(name: str) -> Attention:
    """The backend called `name`. Raises `ValueError` that lists the known ones."""
    if name not in BACKENDS:
        raise ValueError(f"attention: got {name!r}, expected one of {', '.join(BACKENDS)}")
    return BACKENDS[name]
