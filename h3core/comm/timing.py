"""Time spent in a phase, by the clock of the device that it runs on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up laps: host time on a CPU, device events on a GPU, read when the sum is asked for."""

    __slots__ = ("_events", "_seconds")

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def lap(self, device: torch.device) -> Iterator[None]:
        """Time the body on `device`. On a GPU the host does not wait."""
        if device.type != "cuda":
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._events.append((begin, end))

    def seconds(self) -> float:
        """All laps so far, in seconds; waits for the last one."""
        for begin, end in self._events:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1e3
        self._events.clear()
        return self._seconds
