"""Random streams: bits that are the same on every machine, read through tables of quantiles.

Streams are NumPy bit generators (their output is guaranteed across versions and processors; torch's is not). 16 random
bits pick one of 65,536 values of a distribution, already in the dtype of the file. That is eight times as fast as
drawing normal numbers and rounding them.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from h3core.checkpoint.layout import TensorSpec
from h3core.checkpoint.safetensors_format import torch_dtype

_CHUNK: Final = 1 << 16
"""Values looked up at once: fits the cache, and keeps NumPy's 64-bit copy of the indices small."""


@dataclass(frozen=True, slots=True)
class Law:
    """A distribution. normal: mean 0, std `scale`. uniform: mean `scale`, between 0.7 and 1.3 times it.

    around_one: 1 +- (0.1 .. 1) * `scale`, never 1 itself: a norm weight of 1 hides that it was not applied.
    signed: +-(0.75 .. 1.25) * `scale`, never near 0.
    """

    kind: str
    scale: float

    def quantiles(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Its 65,536 equally probable values, ascending."""
        u = (np.arange(65536) + 0.5) / 65536
        if self.kind == "normal":
            return _normal_quantiles() * self.scale
        if self.kind == "uniform":
            return self.scale * (0.7 + 0.6 * u)
        sign, inside = np.sign(u - 0.5), np.abs(2 * u - 1)
        if self.kind == "around_one":
            return 1 + sign * self.scale * (0.1 + 0.9 * inside)
        return sign * self.scale * (0.75 + 0.5 * inside)


@lru_cache(maxsize=1)
def _normal_quantiles() -> np.ndarray[Any, np.dtype[np.float64]]:
    inverse = NormalDist().inv_cdf
    return np.array([inverse((i + 0.5) / 65536) for i in range(65536)])


@lru_cache(maxsize=64)
def _table(law: Law, dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """The law's values in `dtype`, as bit patterns: NumPy has no bfloat16."""
    bits = torch.int32 if dtype.itemsize == 4 else torch.int16
    # Through fp32, so that a bf16 file holds the rounded values of an fp32 file of the same seed.
    table: np.ndarray[Any, Any] = torch.from_numpy(law.quantiles()).float().to(dtype).view(bits).numpy()
    return table


class Stream:
    """The random bits of one logical tensor, named by `seed` and `name`."""

    def __init__(self, seed: int, name: str) -> None:
        digest = hashlib.sha256(f"h3core synthetic 1:{seed}:{name}".encode()).digest()
        self._bits = np.random.SFC64(int.from_bytes(digest[:16], "little"))

    def words(self, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """`count` words of 64 random bits."""
        return self._bits.random_raw(count)

    def fill(self, out: Tensor, law: Law) -> None:
        """Overwrite `out`, contiguous, with values of `law`."""
        table = _table(law, out.dtype)
        flat = out.view(-1).view(torch.int32 if out.dtype.itemsize == 4 else torch.int16).numpy()
        for start in range(0, flat.size, _CHUNK):
            part = flat[start : start + _CHUNK]
            index = self.words(-(-part.size // 4)).view(np.uint16)[: part.size]
            # mode="clip" lets take write into `out` without a buffer; no index can be out of range.
            np.take(table, index, out=part, mode="clip")

    def tensor(self, law: Law, spec: TensorSpec) -> Tensor:
        """A new tensor of that dtype and shape."""
        out = torch.empty(spec.shape, dtype=torch_dtype(spec))
        self.fill(out, law)
        return out

    def bytes(self, shape: tuple[int, ...], mask: int = 0xFF, offset: int = 0) -> Tensor:
        """Bytes (random & mask) + offset, uint8; the sum must not pass 255."""
        count = math.prod(shape)
        words = self.words(-(-count // 8))
        if mask != 0xFF:
            lanes = np.uint64(0x0101010101010101)
            words &= lanes * np.uint64(mask)
            words += lanes * np.uint64(offset)
        return torch.from_numpy(words.view(np.uint8)[:count]).view(shape)
