"""What a task is, what it gets, and how tasks and replies travel between the parent and a rank.

Everything crosses by value, as bytes in one pipe per rank. torch's own reducers would send file descriptors of shared
memory instead: they run out, and they die with the rank that sent them.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Rank:
    """What a task gets as its first argument: who it is, where it computes, and whom it can talk to.

    `group` is the process group of all `world` ranks; code hands it on explicitly instead of reading a global.
    """

    rank: int
    world: int
    device: torch.device
    backend: str
    group: ProcessGroup | None


@dataclass(frozen=True)
class RankFacts:
    """What a rank says of itself when it has joined, each value read inside the rank: its proof of presence.

    `world` and `backend` are the process group's own. `device_uuid` is the GPU's ("GPU-..."), None on a CPU; `cpus` are
    the logical CPUs that the rank may run on. `preloaded`: the fork server had imported torch and h3core before it
    forked this rank; False means that ranks work but import everything anew, and that torch loaded without the
    server's environment.
    """

    rank: int
    world: int
    backend: str
    pid: int
    device: str
    device_name: str | None
    device_uuid: str | None
    cpus: tuple[int, ...]
    preloaded: bool


@dataclass(frozen=True)
class TaskReference:
    """A module-level function by name; `file` finds modules that pytest imported without a place on sys.path."""

    module: str
    name: str
    file: str | None

    @classmethod
    def of(cls, task: Callable[..., Any]) -> TaskReference:
        """The reference to a module-level function.

        Raises TypeError for anything that another process could not find by name: lambdas, nested functions, methods,
        partials, and functions hidden behind another object of the same name.
        """
        if not isinstance(task, FunctionType):
            raise TypeError(f"a task is a module-level function, got {task!r}; pass what it needs as arguments")
        module = sys.modules.get(task.__module__)
        if getattr(module, task.__qualname__, None) is not task:
            raise TypeError(
                f"a task is a module-level function, got {task.__module__}.{task.__qualname__}: ranks are other "
                "processes and find it by its name; move it to the top of a module and pass what it needs as arguments"
            )
        return cls(task.__module__, task.__qualname__, getattr(module, "__file__", None))

    def resolve(self) -> Callable[..., Any]:
        """The function itself, in a rank. Raises ImportError or AttributeError if it is not there."""
        try:
            module = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            # Only when this module is the one missing; an import that fails inside it is the user's to see.
            if self.file is None or error.name is None or not f"{self.module}.".startswith(f"{error.name}."):
                raise
            spec = importlib.util.spec_from_file_location(self.module, self.file)
            if spec is None or spec.loader is None:
                raise
            module = importlib.util.module_from_spec(spec)
            sys.modules[self.module] = module
            spec.loader.exec_module(module)
        function: Callable[..., Any] = getattr(module, self.name)
        return function


@dataclass(frozen=True)
class Request:
    """One task for one rank; `arguments` is encoded by itself, because decoding it may need `sys_path`."""

    serial: int
    sys_path: tuple[str, ...]
    task: TaskReference
    arguments: bytes


@dataclass(frozen=True)
class Done:
    """The positive reply to request `serial`: the task returned `value`."""

    serial: int
    value: Any


@dataclass(frozen=True)
class Raised:
    """The negative reply to request `serial`."""

    serial: int
    message: str
    traceback: str | None


class _ByValue(pickle.Pickler):
    """Plain pickle, with tensors as their own bytes only.

    Default pickling of a tensor sends its whole storage, so a row of a large buffer would send the buffer; and a CUDA
    tensor would create a CUDA context in the parent when it is read there.
    """

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or obj.layout is not torch.strided or obj.is_quantized:
            return NotImplemented
        plain = obj.detach().cpu().resolve_conj().resolve_neg().contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy()
        return _tensor, (bytearray(data), plain.dtype, tuple(plain.shape))


def _tensor(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:  # frombuffer refuses an empty buffer
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


def encode(value: Any) -> bytes:
    """`value` as bytes. Tensors arrive on the CPU, detached, contiguous, bit for bit.

    Raises what pickle raises (PicklingError, TypeError, AttributeError) for what cannot be pickled.
    """
    buffer = io.BytesIO()
    _ByValue(buffer, protocol=5).dump(value)
    return buffer.getvalue()


def decode(data: bytes) -> Any:
    """The value that `encode` was given."""
    return pickle.loads(data)
