"""RankPool: the face of the rank processes. Start once, run many tasks, survive failed ones."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Concatenate, Final, Self, TypeVar

import torch

from h3core.ranks.crew import Crew
from h3core.ranks.task import Rank, RankFacts, Request, TaskReference, encode

T = TypeVar("T")

_BACKENDS: Final = ("gloo", "nccl")
_DEVICES: Final = ("cpu", "cuda")


class RankPool:
    """`world` processes with one process group, which run one task after another.

    A task that fails costs the processes: they are ended, and the next `run` starts new ones. Tasks see torchrun's
    environment names, one torch thread, and random generators seeded by rank. Not for use from several threads.
    """

    def __init__(
        self,
        world: int,
        *,
        backend: str = "gloo",
        device: str = "cpu",
        timeout: float = 60.0,
        env: Mapping[str, str] | None = None,
        start_timeout: float = 60.0,
    ) -> None:
        """Start the ranks.

        timeout: seconds that a task may take, unless `run` says otherwise. start_timeout: seconds until all ranks have
        joined. env: set in each rank before CUDA, NCCL or gloo are touched; "{rank}" in a value becomes the rank.
        With device "cuda", rank r computes on GPU r modulo the number of GPUs.

        Raises ValueError for what this machine or torch cannot do, before anything is started; RankError when a rank
        does not come up; RuntimeError or TimeoutError when the fork server does not.
        """
        __tracebackhide__ = True
        _check(world, backend, device, timeout, start_timeout)
        self.world: Final = world
        self.backend: Final = backend
        self.device: Final = device
        self._timeout = timeout
        self._start_timeout = start_timeout
        self._env = dict(env or {})
        for name, value in self._env.items():
            if not isinstance(name, str) or not isinstance(value, str):
                raise TypeError(f"env holds strings, got {name!r}: {value!r}")
        self._serial = 0
        self._closed = False
        self._owner = os.getpid()
        self._crew: Crew | None = None
        self._ready()
        atexit.register(self.close)

    @property
    def facts(self) -> tuple[RankFacts, ...]:
        """What each rank said of itself when it came up, in rank order; starts new ranks if the last ones failed."""
        return self._ready().facts

    def run(
        self,
        task: Callable[Concatenate[Rank, ...], T],
        /,
        *args: Any,
        timeout: float | None = None,
        per_rank: Sequence[tuple[Any, ...]] | None = None,
        **kwargs: Any,
    ) -> list[T]:
        """Call `task(rank, *args, *per_rank[r], **kwargs)` in every rank; the replies in rank order.

        Returns only when every rank has replied that its call returned. Tensors cross by value and arrive on the CPU.

        Raises RankError when a rank raises, dies, leaves, or takes longer than `timeout` seconds; TypeError, before
        anything is sent, when `task` is not a module-level function; ValueError when `per_rank` is not one per rank.
        """
        __tracebackhide__ = True
        reference = TaskReference.of(task)
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout is in seconds and above 0, got {timeout}")
        if per_rank is not None and len(per_rank) != self.world:
            raise ValueError(f"per_rank has {len(per_rank)} entries for {self.world} ranks")
        if per_rank is None:
            arguments = [encode((args, kwargs))] * self.world
        else:
            arguments = [encode(((*args, *own), kwargs)) for own in per_rank]
        crew = self._ready()
        self._serial += 1
        path = tuple(entry or os.getcwd() for entry in sys.path)
        requests = [encode(Request(self._serial, path, reference, blob)) for blob in arguments]
        try:
            crew.send(requests)
            return crew.collect(
                self._serial,
                self._timeout if timeout is None else timeout,
                doing=f"{reference.module}.{reference.name}",
            )
        except BaseException:  # KeyboardInterrupt as well: ranks inside a task are of no further use
            self._crew = None
            crew.kill()
            raise

    def close(self) -> None:
        """End the ranks and remove their folder, within bounded time; a second call does nothing."""
        # A fork of this process inherits the pool at exit, but the ranks are not its own.
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        atexit.unregister(self.close)
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.close()

    def __enter__(self) -> Self:
        """The pool itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the pool."""
        self.close()

    def _ready(self) -> Crew:
        __tracebackhide__ = True
        if self._closed:
            raise RuntimeError("this RankPool is closed")
        if self._crew is None:
            self._crew = Crew(
                self.world,
                backend=self.backend,
                device=self.device,
                environment=self._env,
                start_timeout=self._start_timeout,
            )
        return self._crew


def _check(world: int, backend: str, device: str, timeout: float, start_timeout: float) -> None:
    if not isinstance(world, int) or world < 1:
        raise ValueError(f"world is a number of ranks, at least 1, got {world!r}")
    if backend not in _BACKENDS:
        raise ValueError(f"backend is one of {', '.join(_BACKENDS)}, got {backend!r}")
    if device not in _DEVICES:
        raise ValueError(f"device is one of {', '.join(_DEVICES)}, got {device!r}")
    if backend == "nccl" and device != "cuda":
        raise ValueError(f"backend nccl needs device cuda, got {device!r}")
    if not torch.distributed.is_backend_available(backend):
        raise ValueError(f"this torch ({torch.__version__}) is built without {backend}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda, but torch finds no usable CUDA GPU on this machine")
    if not (timeout > 0 and start_timeout > 0):
        raise ValueError(f"timeouts are in seconds and above 0, got {timeout} and {start_timeout}")
