"""Collectives over torch.distributed: Gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from h3core.comm.base import Comm
from h3core.partition import Span


class ProcessGroupComm(Comm):
    """A rank of a process group. Both backends run the same primitives, so that CPU tests run what GPUs run.

    `device` is where payloads live ("cpu" for Gloo).
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, *, digest: bool = False) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group), digest=digest)
        self._group = group
        self._device = device

    def _all_to_all(self, payload: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        out = torch.empty(sum(receive), dtype=payload.dtype, device=payload.device)
        dist.all_to_all_single(_bytes(out), _bytes(payload), list(receive), list(send), group=self._group)
        return out

    def _gather(self, own: Tensor, rows: Sequence[Span]) -> Tensor:
        # Gloo has no uneven all_gather, and all_to_all_single would copy the own rows once a peer: so point to point,
        # each peer's rows received in their place.
        out = torch.empty(rows[-1].stop, *own.shape[1:], dtype=own.dtype, device=own.device)
        out[rows[self.rank].start : rows[self.rank].stop].copy_(own)
        ops = []
        for step in range(1, self.world):
            to, source = (self.rank + step) % self.world, (self.rank - step) % self.world
            if own.numel():
                ops.append(dist.P2POp(dist.isend, _bytes(own), group=self._group, group_peer=to))
            if rows[source].size:
                part = out[rows[source].start : rows[source].stop]
                ops.append(dist.P2POp(dist.irecv, _bytes(part), group=self._group, group_peer=source))
        if ops:
            for work in dist.batch_isend_irecv(ops):
                work.wait()
        return out

    def _max(self, value: Tensor) -> Tensor:
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self._group)
        return value

    def _gather_bytes(self, data: bytes) -> list[bytes]:
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        out = torch.empty(self.world * len(data), dtype=torch.uint8, device=self._device)
        dist.all_gather(list(out.split(len(data))), own, group=self._group)
        return [part.cpu().numpy().tobytes() for part in out.split(len(data))]


def _bytes(x: Tensor) -> Tensor:
    """fp8 and packed FP4 travel as bytes: Gloo refuses fp8 in collectives."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
