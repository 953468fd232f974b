"""This process among its peers: torchrun's environment, this rank's device, its process group."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist

from h3core.comm import Comm, ProcessGroupComm, alone


@dataclass(frozen=True, slots=True)
class Launch:
    """This process among its peers, from torchrun's environment; alone without it."""

    rank: int
    world: int
    local_rank: int

    @classmethod
    def from_environment(cls) -> Launch:
        """Read RANK, WORLD_SIZE and LOCAL_RANK. Raises `ValueError` where only some of them are set."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        values = [os.environ.get(name) for name in names]
        if all(value is None for value in values):
            return cls(0, 1, 0)
        if any(value is None or not value.isdigit() for value in values):
            got = dict(zip(names, values, strict=True))
            raise ValueError(f"launch: got {got}, expected all three as numbers; start with torchrun, or unset them")
        launch = cls(*(int(value) for value in values if value is not None))
        if launch.rank >= launch.world or launch.local_rank >= launch.world:
            raise ValueError(f"launch: got {launch}, expected ranks below the world's size; start with torchrun")
        return launch


def pick_device(name: str, launch: Launch) -> torch.device:
    """`auto` is this rank's GPU where there are GPUs, else the CPU. Raises `ValueError` for a GPU that is not there."""
    count = torch.cuda.device_count()
    if name == "auto":
        name = "cuda" if count else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda":
        raise ValueError(f"device: got {name!r}, expected auto, cpu or cuda")
    if launch.local_rank >= count:
        raise ValueError(
            f"device cuda: rank {launch.rank} wants GPU {launch.local_rank}, {count} visible; "
            "start fewer ranks, or use --device cpu"
        )
    return torch.device("cuda", launch.local_rank)


def die_with_parent() -> None:
    """Ask Linux to end this rank when its launcher is gone: a killed torchrun would leave ranks on the GPUs."""
    pr_set_pdeathsig = 1
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


@contextmanager
def joined(launch: Launch, device: torch.device) -> Iterator[Comm]:
    """This rank's `Comm`; alone, it needs no process group."""
    if launch.world == 1:
        yield alone()
        return
    die_with_parent()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("torch.distributed has no process group after its own initialisation")
    try:
        yield ProcessGroupComm(group, device)
    finally:
        dist.destroy_process_group()
