"""The collectives of both modes, written once over four primitives.

Suffixes: R own rows, T all rows, N heads, D head width, H hidden. Sizes on the wire are exact: ranks
with fewer rows or heads send less, and nothing is padded. Every payload is contiguous (Gloo writes into
a non-contiguous output without complaint, and wrongly).
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from h3core.comm.timing import Stopwatch
from h3core.partition import Partition, Span, spans_of


@dataclass(slots=True)
class PhaseStats:
    """What one phase moved: `bytes_sent` is payload handed over, the rank's own part left out."""

    calls: int = 0
    bytes_sent: int = 0
    watch: Stopwatch = field(default_factory=Stopwatch)
    digest: Any = None

    def report(self) -> dict[str, Any]:
        """calls, bytes_sent, seconds and, where it was asked for, the digest of all received payloads."""
        return {
            "calls": self.calls,
            "bytes_sent": self.bytes_sent,
            "seconds": self.watch.seconds(),
            "received_digest": self.digest.hexdigest() if self.digest else None,
        }


class Comm(ABC):
    """One rank's view of its group. Errors name the rank; a wrong shape is a `ValueError` before any exchange."""

    def __init__(self, rank: int, world: int, *, digest: bool = False) -> None:
        """`digest` keeps a running hash of every received payload, per phase. It copies payloads to the host."""
        self.rank = rank
        self.world = world
        self.phases: dict[str, PhaseStats] = {}
        self._digest = digest

    # -- primitives: what a backend provides -----------------------------------------------------------

    @abstractmethod
    def _all_to_all(self, payload: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Exchange a flat payload: `send[p]` elements go to rank p, `receive[p]` come from it, in rank order."""

    @abstractmethod
    def _gather(self, own: Tensor, rows: Sequence[Span]) -> Tensor:
        """All ranks' rows (T, ...) from the own ones (R, ...), received in place."""

    @abstractmethod
    def _max(self, value: Tensor) -> Tensor:
        """The largest of the ranks' scalars."""

    @abstractmethod
    def _gather_bytes(self, data: bytes) -> list[bytes]:
        """Each rank's `data`, of one length on all ranks."""

    # -- collectives -------------------------------------------------------------------------------------

    def rows_to_heads(self, parts: Sequence[Tensor], plan: Partition, phase: str) -> Tensor:
        """Own rows of all heads to all rows of the own heads, the C parts (q, k, v) in one exchange.

        `parts`: C tensors (R, N, D). Returns (T, C, own N, D). The payload is written once, laid out by
        receiving rank; what arrives is in row order already and is not copied again.
        """
        rows, heads = plan.rows[self.rank], plan.heads[self.rank]
        width = parts[0].shape[-1]
        for part in parts:
            self._expect(part, (rows.size, plan.total_heads, width), f"{phase}: rows to heads")
        count = len(parts)
        send = [rows.size * count * span.size * width for span in plan.heads]
        receive = [span.size * count * heads.size * width for span in plan.rows]
        payload = torch.empty(sum(send), dtype=parts[0].dtype, device=parts[0].device)
        for block, span in zip(payload.split(send), plan.heads, strict=True):
            for index, part in enumerate(parts):
                block.view(rows.size, count, span.size, width)[:, index].copy_(part[:, span.start : span.stop])
        received = self._exchange(phase, payload, send, receive)
        return received.view(plan.total_rows, count, heads.size, width)

    def heads_to_rows(self, x_TND: Tensor, plan: Partition, phase: str) -> Tensor:
        """All rows of the own heads (T, own N, D) back to own rows of all heads (R, N, D)."""
        rows, heads = plan.rows[self.rank], plan.heads[self.rank]
        width = x_TND.shape[-1]
        self._expect(x_TND, (plan.total_rows, heads.size, width), f"{phase}: heads to rows")
        send = [span.size * heads.size * width for span in plan.rows]
        receive = [rows.size * span.size * width for span in plan.heads]
        received = self._exchange(phase, x_TND.contiguous().view(-1), send, receive)
        out = torch.empty(rows.size, plan.total_heads, width, dtype=x_TND.dtype, device=x_TND.device)
        for block, span in zip(received.split(receive), plan.heads, strict=True):
            out[:, span.start : span.stop].copy_(block.view(rows.size, span.size, width))
        return out

    def gather_rows(self, own: Tensor, rows: Sequence[Span], phase: str) -> Tensor:
        """All ranks' rows (T, ...) in rank order from the own ones (R, ...); `rows` may hold empty spans."""
        if tuple(rows) != spans_of([span.size for span in rows]):
            raise ValueError(f"rank {self.rank}: {phase}: got row spans {list(rows)}, expected consecutive ones from 0")
        self._expect(own, (rows[self.rank].size, *own.shape[1:]), f"{phase}: gather of rows")
        stats = self._phase(phase)
        with stats.watch.lap(own.device):
            out = self._gather(own.contiguous(), rows)
        self._account(stats, own.nbytes * (self.world - 1), out)
        return out

    def reduce_scatter_rows(self, partial_TH: Tensor, plan: Partition, phase: str, dtype: torch.dtype) -> Tensor:
        """The own rows (R, H) of the sum over ranks of `partial` (T, H), in `dtype`.

        An all-to-all of partial rows and a local sum in rank order, in fp32 or wider, rounded once: the bytes
        of a ring, ragged without padding, and the same bits every time.
        """
        rows = plan.rows[self.rank]
        width = partial_TH.shape[-1]
        self._expect(partial_TH, (plan.total_rows, width), f"{phase}: reduce-scatter")
        send = [span.size * width for span in plan.rows]
        receive = [rows.size * width] * self.world
        received = self._exchange(phase, partial_TH.contiguous().view(-1), send, receive)
        total, *rest = received.view(self.world, rows.size, width).unbind(0)
        total = total.to(torch.promote_types(partial_TH.dtype, torch.float32), copy=True)
        for part in rest:
            total += part
        return total.to(dtype)

    def max(self, value: Tensor, phase: str) -> Tensor:
        """The largest of the ranks' scalars (shape ())."""
        stats = self._phase(phase)
        with stats.watch.lap(value.device):
            out = self._max(value.clone())
        self._account(stats, value.nbytes * (self.world - 1), out)
        return out

    def check_plan(self, plan: Partition) -> None:
        """Compare the split plan over the ranks before the first exchange.

        Raises `ValueError` with every distinct plan and who has it: ranks that disagree about sizes would
        otherwise hang, or exchange the wrong rows in silence.
        """
        if plan.world != self.world:
            raise ValueError(f"split plan is for {plan.world} ranks, the group has {self.world}")
        digests = self._gather_bytes(plan.digest())
        if len(set(digests)) == 1:
            return
        plans = self.gather_text(plan.describe())
        holders: dict[str, list[int]] = {}
        for rank, other in enumerate(plans):
            holders.setdefault(other, []).append(rank)
        lines = "\n".join(f"  ranks {ranks}: {other}" for other, ranks in holders.items())
        raise ValueError(
            f"ranks disagree on the split plan:\n{lines}\nstart every rank with the same geometry, prompt and config"
        )

    def gather_text(self, text: str) -> list[str]:
        """Each rank's text, on every rank: problems before a start, facts after an end."""
        data = text.encode()
        length = max(int.from_bytes(size, "big") for size in self._gather_bytes(len(data).to_bytes(8, "big")))
        if not length:
            return [""] * self.world
        return [other.rstrip(b"\0").decode() for other in self._gather_bytes(data.ljust(length, b"\0"))]

    def reset(self) -> None:
        """Forget all counts, times and digests."""
        self.phases.clear()

    def report(self) -> dict[str, dict[str, Any]]:
        """Per phase: calls, bytes_sent, seconds, received_digest."""
        return {name: stats.report() for name, stats in self.phases.items()}

    # -- accounting ----------------------------------------------------------------------------------------

    def _exchange(self, phase: str, payload: Tensor, send: list[int], receive: list[int]) -> Tensor:
        stats = self._phase(phase)
        with stats.watch.lap(payload.device):
            out = self._all_to_all(payload, send, receive)
        self._account(stats, (sum(send) - send[self.rank]) * payload.element_size(), out)
        return out

    def _phase(self, name: str) -> PhaseStats:
        if name not in self.phases:
            self.phases[name] = PhaseStats(digest=hashlib.blake2b(digest_size=16) if self._digest else None)
        return self.phases[name]

    def _account(self, stats: PhaseStats, sent: int, received: Tensor) -> None:
        stats.calls += 1
        stats.bytes_sent += sent
        if stats.digest is not None:
            stats.digest.update(received.contiguous().view(-1).view(torch.uint8).cpu().numpy().data)

    def _expect(self, x: Tensor, shape: tuple[int, ...], what: str) -> None:
        if tuple(x.shape) != shape:
            raise ValueError(f"rank {self.rank}: {what}: got shape {tuple(x.shape)}, expected {shape}")
