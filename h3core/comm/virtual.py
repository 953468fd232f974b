"""Virtual ranks: the same partition in one process, one thread a rank, exchanging through memory.

It is the oracle of a sharded run: same shapes, same kernels, same order, and no transport. A baton lets
one rank compute at a time; it is handed over at exchanges. What a real run computes otherwise is a fault
of transport, hardware or software, never rounding.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from h3core.comm.base import Comm
from h3core.partition import Span, spans_of

T = TypeVar("T")


class ThreadGroup:
    """What the virtual ranks of one world share: a barrier, the baton and a mailbox.

    `timeout` bounds each wait in seconds: a rank that returns early leaves the others waiting.
    """

    def __init__(self, world: int, timeout: float = 300.0) -> None:
        self.world = world
        self.baton = threading.Lock()
        self.barrier = threading.Barrier(world, timeout=timeout)
        # Two boxes in turn: a rank can post its next exchange while a slower one still reads this one,
        # but not the one after that, because the barrier in between needs both.
        self.boxes: list[list[Any]] = [[None] * world, [None] * world]


class ThreadComm(Comm):
    """One virtual rank. Readers copy: a received tensor never aliases the sender's."""

    def __init__(self, rank: int, group: ThreadGroup, *, digest: bool = False) -> None:
        super().__init__(rank, group.world, digest=digest)
        self._threads = group
        self._round = 0

    def _swap(self, item: Any) -> list[Any]:
        """Post `item`, hand the baton over until every rank has posted, and return all ranks' items."""
        box = self._threads.boxes[self._round % 2]
        self._round += 1
        box[self.rank] = item
        self._threads.baton.release()
        try:
            self._threads.barrier.wait()
        finally:
            self._threads.baton.acquire()
        return list(box)

    def _all_to_all(self, payload: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        sources = self._swap((payload, spans_of(list(send))))
        parts = []
        for source, (data, spans) in enumerate(sources):
            part = data[spans[self.rank].start : spans[self.rank].stop]
            if part.numel() != receive[source]:
                raise ValueError(
                    f"rank {self.rank}: rank {source} sent {part.numel()} elements, expected {receive[source]}"
                )
            parts.append(part)
        return torch.cat(parts)

    def _gather(self, own: Tensor, rows: Sequence[Span]) -> Tensor:
        return torch.cat(self._swap(own))

    def _max(self, value: Tensor) -> Tensor:
        return torch.stack(self._swap(value)).amax()

    def _gather_bytes(self, data: bytes) -> list[bytes]:
        return list(self._swap(data))


def alone(*, digest: bool = False) -> ThreadComm:
    """The `Comm` of a world of one, in the calling thread."""
    group = ThreadGroup(1)
    group.baton.acquire()
    return ThreadComm(0, group, digest=digest)


def run_virtual(
    world: int, task: Callable[[ThreadComm], T], *, device: torch.device | str = "cpu", digest: bool = False
) -> list[T]:
    """Run `task(comm)` on `world` virtual ranks; returns their results in rank order.

    Inference mode, the CUDA device and one intra-op thread are set in each thread: none of them is inherited.
    Raises the first rank's own error; ranks that were only left waiting by it are not reported.
    """
    group = ThreadGroup(world)
    results: list[Any] = [None] * world
    errors: list[BaseException | None] = [None] * world

    def rank_main(rank: int) -> None:
        group.baton.acquire()
        try:
            torch.set_num_threads(1)
            if torch.device(device).type == "cuda":
                torch.cuda.set_device(device)
            with torch.inference_mode():
                results[rank] = task(ThreadComm(rank, group, digest=digest))
        except BaseException as error:  # every kind: an error kept back here would leave the other ranks waiting
            errors[rank] = error
            group.barrier.abort()
        finally:
            group.baton.release()

    threads = [threading.Thread(target=rank_main, args=(rank,), name=f"virtual-rank-{rank}") for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failed = [(rank, error) for rank, error in enumerate(errors) if error is not None]
    if failed:
        rank, error = min(failed, key=lambda item: (isinstance(item[1], threading.BrokenBarrierError), item[0]))
        if isinstance(error, threading.BrokenBarrierError):
            raise RuntimeError(f"virtual rank {rank} of {world} waited for a rank that never came") from error
        error.add_note(f"raised by virtual rank {rank} of {world}")
        raise error
    return results
