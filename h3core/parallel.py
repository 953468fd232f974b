"""The modes: how a block's attention and MLP cross the ranks.

All of them hold the residual stream as the rank's own token rows and give back own rows.
- `single`: one rank, no exchange.
- `ulysses`: whole weights on every rank. Attention exchanges rows for heads and back; the MLP is local.
- `tensor`: each rank holds some heads and FFN columns. Rows are gathered before and reduce-scattered after.

Suffixes: R own rows, T all rows, N heads, n own heads, D head width, H hidden, F own FFN columns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

import torch
from torch import Tensor

from h3core.attention import Attention, attention_backend
from h3core.comm import Comm
from h3core.config import H3Config
from h3core.layers import rms_norm, rotate, swiglu
from h3core.linear import Linear
from h3core.partition import Partition, Shard, Span, shards
from h3core.weights import AttentionWeights, MLPWeights, Weight

Rotary = tuple[Tensor, Tensor]
"""cos and sin (rows, rotated channels)."""

MODES: Final = ("single", "ulysses", "tensor")
REDUCE_DTYPES: Final = {"activation": None, "fp32": torch.float32}
"""What tensor mode's partial sums travel in: rounded to the activation dtype, or unrounded at twice the bytes."""


def qkv_heads(y_TH: Tensor, weight: Weight, width: int, linear: Linear, *, sharded: bool) -> tuple[Tensor, ...]:
    """q, k, v (T, n, D) of the heads whose rows `weight` holds, from one product."""
    qkv = linear(y_TH, weight, sharded=sharded)
    q, k, v = qkv.view(y_TH.shape[0], 3, -1, width).unbind(1)
    return q, k, v


def qk_norm_rotate(x_TND: Tensor, norm_D: Tensor, rotary: Rotary | None, eps: float) -> Tensor:
    """RMSNorm over each head's channels, then RoPE; `rotary` None leaves the rotation out (the text refiner)."""
    x_TND = rms_norm(x_TND, norm_D, eps)
    return x_TND if rotary is None else rotate(x_TND, *rotary)


class Mode(ABC):
    """One rank's way through a block.

    `rows`: the token rows of the residual stream that this rank holds. `rotary_rows`: those whose RoPE
    tables its attention needs.
    """

    rotary_rows: Span

    def __init__(self, config: H3Config, plan: Partition, rank: int, attention: str, linear: Linear) -> None:
        self.config = config
        self.plan = plan
        self.rows = plan.rows[rank]
        self.backend = attention
        self.attend: Attention = attention_backend(attention)
        self.linear = linear

    def alone(self, rows: int) -> Single:
        """The same backend without any other rank, for `rows` rows that every rank holds whole."""
        return Single(self.config, rows, attention=self.backend)

    @abstractmethod
    def attention(self, y_RH: Tensor, weights: AttentionWeights, rotary: Rotary | None) -> Tensor:
        """Attention of all rows, as seen from the own ones: (R, H) to (R, H)."""

    @abstractmethod
    def mlp(self, y_RH: Tensor, weights: MLPWeights) -> Tensor:
        """SwiGLU MLP: (R, H) to (R, H)."""

    @abstractmethod
    def gather(self, own: Tensor, modality: Span) -> Tensor:
        """All ranks' rows of one modality, which spans `modality` in the sequence: once, at the end."""

    def owned(self, modality: Span) -> tuple[Span, ...]:
        """Each rank's rows among those of one modality, counted from its first; a rank may own none."""
        return tuple(modality.clip(rows).shifted(-modality.start) for rows in self.plan.rows)

    def own_heads(self, y: Tensor, weights: AttentionWeights, rotary: Rotary | None, *, sharded: bool) -> list[Tensor]:
        """q, k (normed and rotated) and v, each (rows of y, held heads, D)."""
        config = self.config
        q, k, v = qkv_heads(y, weights.qkv, config.attention_head_dim, self.linear, sharded=sharded)
        q = qk_norm_rotate(q, weights.q_norm, rotary, config.qk_norm_eps)
        k = qk_norm_rotate(k, weights.k_norm, rotary, config.qk_norm_eps)
        return [q, k, v]


class Single(Mode):
    """One rank holds every row and every weight. The text refiner runs like this in every mode."""

    def __init__(self, config: H3Config, rows: int, *, attention: str = "sdpa", linear: Linear | None = None) -> None:
        super().__init__(config, Partition.build(config, rows, 1), 0, attention, linear or Linear())
        self.rotary_rows = self.rows

    def attention(self, y_RH: Tensor, weights: AttentionWeights, rotary: Rotary | None) -> Tensor:
        """See `Mode.attention`."""
        q, k, v = self.own_heads(y_RH, weights, rotary, sharded=False)
        return self.linear(self.attend(q, k, v).flatten(1), weights.out, sharded=False)

    def mlp(self, y_RH: Tensor, weights: MLPWeights) -> Tensor:
        """See `Mode.mlp`."""
        return self.linear(swiglu(self.linear(y_RH, weights.fc1, sharded=False)), weights.fc2, sharded=False)

    def gather(self, own: Tensor, modality: Span) -> Tensor:
        """The rows themselves."""
        return own


class Ulysses(Mode):
    """Token-sharded: all-to-all of fused QKV (rows to heads), attention of own heads, all-to-all back."""

    def __init__(self, config: H3Config, plan: Partition, comm: Comm, *, attention: str, linear: str) -> None:
        super().__init__(config, plan, comm.rank, attention, Linear(linear, lambda amax: comm.max(amax, "amax")))
        self.comm = comm
        self.rotary_rows = self.rows

    def attention(self, y_RH: Tensor, weights: AttentionWeights, rotary: Rotary | None) -> Tensor:
        """See `Mode.attention`."""
        q_k_v = self.own_heads(y_RH, weights, rotary, sharded=True)
        q, k, v = self.comm.rows_to_heads(q_k_v, self.plan, "qkv").unbind(1)
        attended = self.comm.heads_to_rows(self.attend(q, k, v), self.plan, "out")
        return self.linear(attended.flatten(1), weights.out, sharded=True)

    def mlp(self, y_RH: Tensor, weights: MLPWeights) -> Tensor:
        """See `Mode.mlp`; rows do not meet here, so nothing is exchanged (w4a4: one scalar a linear)."""
        return self.linear(swiglu(self.linear(y_RH, weights.fc1, sharded=True)), weights.fc2, sharded=True)

    def gather(self, own: Tensor, modality: Span) -> Tensor:
        """See `Mode.gather`."""
        return self.comm.gather_rows(own, self.owned(modality), "latents")


class TensorParallel(Mode):
    """Head- and FFN-sharded: gather rows, compute the own part of every row, reduce-scatter rows."""

    def __init__(
        self, config: H3Config, plan: Partition, comm: Comm, *, attention: str, linear: str, reduce_dtype: str
    ) -> None:
        super().__init__(config, plan, comm.rank, attention, Linear(linear, lambda amax: comm.max(amax, "amax")))
        if reduce_dtype not in REDUCE_DTYPES:
            raise ValueError(f"reduce_dtype: got {reduce_dtype!r}, expected one of {', '.join(REDUCE_DTYPES)}")
        self.comm = comm
        self.rotary_rows = Span(0, plan.total_rows)
        self._reduce_dtype = REDUCE_DTYPES[reduce_dtype]

    def attention(self, y_RH: Tensor, weights: AttentionWeights, rotary: Rotary | None) -> Tensor:
        """See `Mode.attention`."""
        y_TH = self.comm.gather_rows(y_RH, self.plan.rows, "attn_gather")
        q, k, v = self.own_heads(y_TH, weights, rotary, sharded=False)
        return self.row_parallel(self.attend(q, k, v).flatten(1), weights.out, "attn_reduce")

    def mlp(self, y_RH: Tensor, weights: MLPWeights) -> Tensor:
        """See `Mode.mlp`."""
        y_TH = self.comm.gather_rows(y_RH, self.plan.rows, "mlp_gather")
        hidden_TF = swiglu(self.linear(y_TH, weights.fc1, sharded=False))
        return self.row_parallel(hidden_TF, weights.fc2, "mlp_reduce")

    def row_parallel(self, x_TK: Tensor, weight: Weight, phase: str, bias: Tensor | None = None) -> Tensor:
        """Own rows (R, H) of x W^T + b, where each rank holds some columns of x and W.

        The bias is added once, after the sum: in the partials it would count once a rank. H3's have none.
        """
        partial_TH = self.linear(x_TK, weight, sharded=True, out_dtype=self._reduce_dtype)
        total_RH = self.comm.reduce_scatter_rows(partial_TH, self.plan, phase, x_TK.dtype)
        return total_RH if bias is None else total_RH + bias

    def gather(self, own: Tensor, modality: Span) -> Tensor:
        """See `Mode.gather`."""
        return self.comm.gather_rows(own, self.owned(modality), "latents")


def shard_for(mode: str, config: H3Config, rank: int, world: int) -> Shard:
    """The part of each block that a rank of `mode` holds. Raises `ValueError` for an unknown mode or a world
    that leaves a rank without heads or FFN units."""
    check_mode(mode, world)
    return shards(config, world)[rank] if mode == "tensor" else Shard.whole(config)


def check_mode(mode: str, world: int) -> None:
    """Raise `ValueError` for an unknown mode, and for `single` with more than one rank."""
    if mode not in MODES:
        raise ValueError(f"mode: got {mode!r}, expected one of {', '.join(MODES)}")
    if mode == "single" and world != 1:
        raise ValueError(f"mode single: got {world} ranks, expected 1; use ulysses or tensor")


def build_mode(
    mode: str,
    config: H3Config,
    rows: int,
    comm: Comm,
    *,
    attention: str = "sdpa",
    linear: str = "w4a16",
    reduce_dtype: str = "activation",
) -> Mode:
    """The mode by name, for a sequence of `rows` rows, after the ranks have compared their split plans.

    Raises `ValueError` for an unknown mode, backend or dtype, an empty range, and plans that differ.
    """
    check_mode(mode, comm.world)
    if mode == "single":
        return Single(config, rows, attention=attention, linear=Linear(linear))
    plan = Partition.build(config, rows, comm.world)
    built: Mode
    if mode == "ulysses":
        built = Ulysses(config, plan, comm, attention=attention, linear=linear)
    else:
        built = TensorParallel(config, plan, comm, attention=attention, linear=linear, reduce_dtype=reduce_dtype)
    comm.check_plan(plan)
    return built
