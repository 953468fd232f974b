"""AdaLN: a timestep's shift, scale and gate for each block and modality, in both published forms.

A table row belongs to (timestep, modality): row = timestep_index * 3 + tag. Each evaluation asks for its own
distinct timesteps in one call (one row of them at the first step, two later): one product over the whole
schedule would be another GEMM, with other bits than the reference.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from h3core.config import H3Config
from h3core.layers import timestep_embedding
from h3core.weights import Affine, CurveAdaLN, FullAdaLN


class AdaLN(Protocol):
    """Shift, scale and gate from the distinct timesteps (M,) of one evaluation."""

    def condition(self, timesteps_M: Tensor) -> Tensor:
        """What all projections of one evaluation read: (M, width)."""

    def block(self, index: int, condition: Tensor) -> Tensor:
        """(3 M, 6, hidden) in the activation dtype; chunks are shift, scale, gate of attention, then of the MLP."""

    def final(self, condition: Tensor) -> Tensor:
        """(M, 2, hidden): shift and scale of the last norm; one row a timestep, no modality."""


class FullModulation:
    """The original form: a time MLP in fp32, then one projection a block in the activation dtype."""

    def __init__(self, weights: FullAdaLN, config: H3Config, dtype: torch.dtype) -> None:
        self._weights = weights
        self._config = config
        self._dtype = dtype

    def condition(self, timesteps_M: Tensor) -> Tensor:
        """SiLU of the time embedding, computed in fp32 and rounded after it.

        A rounding before the SiLU would bias every block the same way at every step.
        """
        weights = self._weights
        x = timestep_embedding(timesteps_M, self._config.freq_dim).to(weights.time_in.weight.dtype)
        x = F.silu(F.linear(x, weights.time_in.weight, weights.time_in.bias))
        x = F.linear(x, weights.time_out.weight, weights.time_out.bias)
        return F.silu(x).to(self._dtype)

    def block(self, index: int, condition: Tensor) -> Tensor:
        """See `AdaLN.block`."""
        return _project(condition, self._weights.blocks[index]).view(-1, 6, self._config.hidden_size)

    def final(self, condition: Tensor) -> Tensor:
        """See `AdaLN.final`; in the activation dtype."""
        return _project(condition, self._weights.final).view(-1, 2, self._config.hidden_size)


class CurveModulation:
    """The pruned form: SiLU(time embedding) is a rank-8 curve, tabulated over t in [0, 1], all in fp32."""

    def __init__(self, weights: CurveAdaLN, config: H3Config, dtype: torch.dtype) -> None:
        self._weights = weights
        self._config = config
        self._dtype = dtype

    def condition(self, timesteps_M: Tensor) -> Tensor:
        """c(t), (M, rank): linear between the two grid points beside t, which is clamped to [0, 1]."""
        table = self._weights.table
        position = timesteps_M.to(table.dtype).clamp(0.0, 1.0) * (table.shape[0] - 1)
        below = position.floor().clamp(max=table.shape[0] - 2)
        index = below.long()
        return torch.lerp(table[index], table[index + 1], (position - below)[:, None])

    def block(self, index: int, condition: Tensor) -> Tensor:
        """See `AdaLN.block`: projected in fp32, then rounded to the activation dtype."""
        table = _project(condition, self._weights.blocks[index])
        return table.to(self._dtype).view(-1, 6, self._config.hidden_size)

    def final(self, condition: Tensor) -> Tensor:
        """See `AdaLN.final`; stays in fp32, so that the output heads read an unrounded modulation."""
        return _project(condition, self._weights.final).view(-1, 2, self._config.hidden_size)


def modulation(weights: FullAdaLN | CurveAdaLN, config: H3Config, dtype: torch.dtype) -> AdaLN:
    """The AdaLN of these weights, with block tables in `dtype`."""
    if isinstance(weights, FullAdaLN):
        return FullModulation(weights, config, dtype)
    return CurveModulation(weights, config, dtype)


def _project(condition: Tensor, affine: Affine) -> Tensor:
    return F.linear(condition, affine.weight, affine.bias)
