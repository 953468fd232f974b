"""What the tests of the checkpoint writers share: small state dicts, what makes or fails to make them, odd targets."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from h3core.checkpoint.layout import TensorSpec
from h3core.checkpoint.safetensors_format import TORCH_DTYPE


def small() -> tuple[dict[str, TensorSpec], dict[str, Tensor]]:
    """A state dict of every dtype in the published files, in the order in which the library stores it."""
    tensors = {
        "z.f32": torch.arange(6.0).view(2, 3),
        "z.scalar": torch.tensor(0.25),
        "a.bf16": torch.arange(5).bfloat16(),
        "a.f16": torch.arange(5).half() / 3,
        "a.f8": torch.arange(1, 8).to(torch.float8_e4m3fn),
        "a.i8": torch.arange(-3, 4, dtype=torch.int8),
        "a.ü8": torch.arange(11, dtype=torch.uint8),
        "b.empty": torch.empty(0, 4, dtype=torch.uint8),
    }
    names = {dtype: name for name, dtype in TORCH_DTYPE.items()}
    return {name: TensorSpec(names[t.dtype], tuple(t.shape)) for name, t in tensors.items()}, tensors


def producer(tensors: dict[str, Tensor]) -> Callable[[str, TensorSpec], Tensor]:
    return lambda name, spec: tensors[name]


def failing(tensors: dict[str, Tensor], error: BaseException) -> Callable[[str, TensorSpec], Tensor]:
    """Raises at the third tensor."""
    calls: list[str] = []

    def produce(name: str, spec: TensorSpec) -> Tensor:
        calls.append(name)
        if len(calls) == 3:
            raise error
        return tensors[name]

    return produce


def never(name: str, spec: TensorSpec) -> Tensor:
    raise AssertionError("a tensor was made for an output that cannot be written")


def existing(path: Path) -> Path:
    path.write_bytes(b"x")
    return path


def link(path: Path, to: str) -> Path:
    path.symlink_to(to)
    return path


def fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def disk_of(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - free, free))
