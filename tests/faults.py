"""Faults to plant, each a context manager that breaks one thing in h3core for as long as it is open.

They show that the checks are live. `rank` is the rank that is to be faulty, where a fault sits on one rank;
None plants it wherever the code runs. Nothing here can be reached from the runtime or the environment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import comfy_kitchen as ck
import torch
import torch.nn.functional as F
from comfy_kitchen.float_utils import to_blocked

from h3core import adaln, denoiser, linear, packing, parallel
from h3core.checkpoint import reader
from h3core.comm.base import Comm
from h3core.nvfp4 import NVFP4Weight
from h3core.partition import Shard
from h3core.qualify.checks import blocks, loop

Fault = Callable[[], Any]
GUILTY = 1
"""The rank that is faulty, where one is."""

_dequantize = NVFP4Weight.dequantize


@contextmanager
def swapped_nibbles() -> Iterator[None]:
    def broken(self: NVFP4Weight, dtype: torch.dtype) -> torch.Tensor:
        return _dequantize(NVFP4Weight(ck.swap_nibbles(self.codes), self.scales, self.scale_2), dtype)

    with patch.object(NVFP4Weight, "dequantize", broken):
        yield


@contextmanager
def row_major_scales() -> Iterator[None]:
    def broken(self: NVFP4Weight, dtype: torch.dtype) -> torch.Tensor:
        swizzled_again = to_blocked(self.scales.view(torch.uint8), flatten=False).view(torch.float8_e4m3fn)
        return _dequantize(NVFP4Weight(self.codes, swizzled_again, self.scale_2), dtype)

    with patch.object(NVFP4Weight, "dequantize", broken):
        yield


@contextmanager
def qkv_left_interleaved() -> Iterator[None]:
    def broken(y, weight, width, multiply, *, sharded):
        return multiply(y, weight, sharded=sharded).view(y.shape[0], -1, 3, width).unbind(2)

    with patch.object(parallel, "qkv_heads", broken):
        yield


@contextmanager
def gate_and_up_swapped() -> Iterator[None]:
    def broken(gate_up: torch.Tensor) -> torch.Tensor:
        up, gate = gate_up.chunk(2, dim=-1)
        return up * F.silu(gate)

    with patch.object(parallel, "swiglu", broken):
        yield


@contextmanager
def bias_on_every_rank() -> Iterator[None]:
    def broken(self, x, weight, phase, bias=None):
        partial = self.linear(x, weight, sharded=True, out_dtype=self._reduce_dtype)
        return self.comm.reduce_scatter_rows(partial if bias is None else partial + bias, self.plan, phase, x.dtype)

    with patch.object(parallel.TensorParallel, "row_parallel", broken):
        yield


@contextmanager
def segment_not_rebased() -> Iterator[None]:
    def broken(segments, rows):
        clipped = [packing.Segment(s.rows.clip(rows), s.tag, s.clock) for s in segments]
        return tuple(s for s in clipped if s.rows.size)

    with ExitStack() as stack:
        for module in (denoiser, blocks):
            stack.enter_context(patch.object(module, "clip_segments", broken))
        yield


@contextmanager
def heads_off_by_one_on_one_rank() -> Iterator[None]:
    """Tensor: another head's weights are loaded. Ulysses: heads are sent one place off."""
    shard_for, rows_to_heads = loop.shard_for, Comm.rows_to_heads

    def other_heads(mode, config, rank, world):
        shard = shard_for(mode, config, rank, world)
        return Shard(shard.heads.shifted(-1), shard.ffn) if mode == "tensor" and rank == GUILTY else shard

    def other_places(self, parts, plan, phase):
        return rows_to_heads(self, [p.roll(1, 1) for p in parts] if self.rank == GUILTY else parts, plan, phase)

    with ExitStack() as stack:
        for module in (loop, blocks):
            stack.enter_context(patch.object(module, "shard_for", other_heads))
        stack.enter_context(patch.object(Comm, "rows_to_heads", other_places))
        yield


@contextmanager
def _payload(change: Callable[[Comm, str, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Change what a rank hands to exchanges and gathers."""
    exchange, gather = Comm._exchange, Comm.gather_rows

    def broken_exchange(self, phase, payload, send, receive):
        return exchange(self, phase, change(self, phase, payload), send, receive)

    def broken_gather(self, own, rows, phase):
        return gather(self, change(self, phase, own), rows, phase)

    with patch.object(Comm, "_exchange", broken_exchange), patch.object(Comm, "gather_rows", broken_gather):
        yield


@contextmanager
def partial_scaled_on_one_rank() -> Iterator[None]:
    reduce_scatter = Comm.reduce_scatter_rows

    def broken(self, partial, plan, phase, dtype):
        return reduce_scatter(self, partial * 1.004 if self.rank == GUILTY else partial, plan, phase, dtype)

    with patch.object(Comm, "reduce_scatter_rows", broken):
        yield


@contextmanager
def partial_left_out() -> Iterator[None]:
    reduce_scatter = Comm.reduce_scatter_rows

    def broken(self, partial, plan, phase, dtype):
        return reduce_scatter(self, partial * 0 if self.rank == GUILTY else partial, plan, phase, dtype)

    with patch.object(Comm, "reduce_scatter_rows", broken):
        yield


@contextmanager
def row_off_by_one() -> Iterator[None]:
    """One rank's rows arrive one place off, as a wrong offset would have it."""
    gather, rows_to_heads = Comm.gather_rows, Comm.rows_to_heads

    def broken_gather(self, own, rows, phase):
        return gather(self, own.roll(1, 0) if self.rank == GUILTY else own, rows, phase)

    def broken_exchange(self, parts, plan, phase):
        return rows_to_heads(self, [p.roll(1, 0) for p in parts] if self.rank == GUILTY else parts, plan, phase)

    with patch.object(Comm, "gather_rows", broken_gather), patch.object(Comm, "rows_to_heads", broken_exchange):
        yield


@contextmanager
def two_rows_swapped() -> Iterator[None]:
    def change(comm: Comm, phase: str, payload: torch.Tensor) -> torch.Tensor:
        if comm.rank != GUILTY or phase not in ("attn_gather", "mlp_gather") or payload.shape[0] < 2:
            return payload
        order = torch.arange(payload.shape[0])
        order[0], order[1] = 1, 0
        return payload[order]

    with _payload(change):
        yield


@contextmanager
def one_bit_in_one_payload() -> Iterator[None]:
    """The lowest mantissa bit of one element, in one call of each phase: what a bad link would do."""
    seen: set[tuple[int, str]] = set()

    def change(comm: Comm, phase: str, payload: torch.Tensor) -> torch.Tensor:
        if comm.rank != GUILTY or (id(comm), phase) in seen or phase == "latents":
            return payload
        seen.add((id(comm), phase))
        flipped = payload.contiguous().clone()
        raw = flipped.view(-1).view(torch.uint8)
        raw[0] ^= 1
        raw[-flipped.element_size()] ^= 1
        return flipped

    with _payload(change):
        yield


@contextmanager
def sum_in_another_order() -> Iterator[None]:
    """The reduction starts at the last rank."""
    exchange = Comm._exchange

    def broken(self, phase, payload, send, receive):
        out = exchange(self, phase, payload, send, receive)
        return out.view(self.world, -1).flip(0).reshape(-1) if "reduce" in phase else out

    with patch.object(Comm, "_exchange", broken):
        yield


@contextmanager
def silu_after_the_cast() -> Iterator[None]:
    def broken(self, timesteps):
        weights = self._weights
        x = adaln.timestep_embedding(timesteps, self._config.freq_dim).to(weights.time_in.weight.dtype)
        x = F.silu(F.linear(x, weights.time_in.weight, weights.time_in.bias))
        x = F.linear(x, weights.time_out.weight, weights.time_out.bias)
        return F.silu(x.to(self._dtype))

    with patch.object(adaln.FullModulation, "condition", broken):
        yield


@contextmanager
def adaln_as_one_gemm() -> Iterator[None]:
    """The product that a table over a whole schedule of 24 timesteps would be."""
    project = adaln._project

    def broken(condition, affine):
        return project(linear.filled(condition, 24), affine)[: condition.shape[0]]

    with patch.object(adaln, "_project", broken):
        yield


@contextmanager
def native_rows_read_as_contiguous() -> Iterator[None]:
    """A native checkpoint's qkv rows, interleaved per head, taken for [q; k; v]."""
    pieces = reader.qkv_pieces

    def broken(config, layout, block, heads):
        right = pieces(config, layout, block, heads)
        if layout != "native":
            return right
        span = heads.scaled(config.attention_head_dim)
        return [reader.Piece(right[0].name, span.shifted(part * config.inner_dim)) for part in range(3)]

    with patch.object(reader, "qkv_pieces", broken):
        yield


FAULTS: dict[str, Fault] = {
    "swapped nibbles": swapped_nibbles,
    "row-major scales": row_major_scales,
    "QKV left interleaved": qkv_left_interleaved,
    "gate and up swapped": gate_and_up_swapped,
    "segment not rebased": segment_not_rebased,
    "heads off by one on one rank": heads_off_by_one_on_one_rank,
    "partial scaled by 1.004 on one rank": partial_scaled_on_one_rank,
    "a partial left out": partial_left_out,
    "one rank's rows off by one": row_off_by_one,
    "two rows swapped": two_rows_swapped,
    "one bit in one payload": one_bit_in_one_payload,
    "sum in another order": sum_in_another_order,
    "SiLU after the cast": silu_after_the_cast,
    "AdaLN as one GEMM": adaln_as_one_gemm,
}


def with_fault(rank, name: str, task, *args):
    """Rank task: run `task` with the fault `name` planted; `none` plants nothing."""
    with FAULTS[name]() if name != "none" else nullcontext():
        return task(rank, *args)
