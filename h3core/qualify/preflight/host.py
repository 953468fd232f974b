"""The machine around the GPUs: interpreter, platform, processor."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from h3core.qualify.preflight.finding import Reading, Unreadable, attempt


@dataclass(frozen=True, slots=True)
class Host:
    """`cpu` is the processor's name; `cpu_capability` what torch's kernels use of it, as "AVX512"."""

    python: str
    platform: str
    cpu: Reading[str]
    cpu_capability: Reading[str]
    cores: int | None
    """Logical CPUs of the host, whatever this process may use of them."""


def read_host(root: Path) -> Host:
    """Ask the interpreter, torch and /proc/cpuinfo."""
    return Host(
        python=platform.python_version(),
        platform=platform.platform(),
        cpu=attempt(lambda: processor_in((root / "proc/cpuinfo").read_text())),
        cpu_capability=attempt(torch.backends.cpu.get_cpu_capability),
        cores=os.cpu_count(),
    )


def processor_in(text: str) -> str:
    """The first "model name" of /proc/cpuinfo. Raises `Unreadable` where there is none, as on Arm."""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    raise Unreadable("/proc/cpuinfo names no model")
