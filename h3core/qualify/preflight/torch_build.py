"""What this torch was built for, and whether it holds code for a GPU.

CUDA is not initialised: `torch.cuda.get_device_properties` would, so compute capabilities come from NVML instead.
Rules of the CUDA Programming Guide: binary code sm_XY runs on the same major version and the same or a later minor
one; PTX compute_XY is compiled for anything from XY on; suffix `a` is for XY alone; `f` for XY's family.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
import torch.cuda.nccl

from h3core.qualify.preflight.finding import (
    Finding,
    NotMeasured,
    Reading,
    Unreadable,
    attempt,
    gpu_names,
    not_measured,
    ok,
)
from h3core.qualify.preflight.gpu import Gpu

IMAGES: Final = "kernel images"
_ARCH: Final = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")
_WHEELS: Final = "https://download.pytorch.org/whl/"


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """`cuda` is the CUDA version torch was built with, None for a CPU build; `devices` the GPUs that it counts."""

    version: str
    cuda: str | None
    archs: tuple[str, ...]
    devices: Reading[int]
    nccl: Reading[str]


def read_torch() -> TorchBuild:
    """Ask torch; nothing that is asked makes a CUDA context."""

    def nccl() -> str:
        if torch.version.cuda is None:
            raise Unreadable(f"torch {torch.__version__} has no CUDA, so no NCCL")
        return ".".join(map(str, torch.cuda.nccl.version()))

    archs = attempt(torch.cuda.get_arch_list)
    return TorchBuild(
        version=torch.__version__,
        cuda=torch.version.cuda,
        archs=() if isinstance(archs, NotMeasured) else tuple(archs),
        devices=attempt(torch.cuda.device_count),
        nccl=attempt(nccl),
    )


def code_for(capability: tuple[int, int], archs: Sequence[str]) -> Literal["binary", "ptx"] | None:
    """What of `archs` (such as sm_90a, compute_120) a GPU of this compute capability can run."""
    kinds = set()
    for arch in archs:
        match = _ARCH.fullmatch(arch)
        if match is None:
            continue
        kind, major, minor, suffix = match[1], int(match[2]), int(match[3]), match[4]
        if suffix == "a":
            fits = capability == (major, minor)
        elif suffix == "f" or kind == "sm":
            fits = capability[0] == major and capability[1] >= minor
        else:
            fits = capability >= (major, minor)
        if fits:
            kinds.add(kind)
    return "binary" if "sm" in kinds else "ptx" if kinds else None


def judge_images(build: TorchBuild, gpus: Reading[tuple[Gpu, ...]]) -> Finding:
    """Whether this torch holds code for every GPU; without it the first kernel says "no kernel image"."""
    if build.cuda is None:
        return Finding(
            IMAGES,
            "problem",
            f"torch {build.version} is built without CUDA",
            "a torch built with CUDA",
            f"install one: pip install torch --index-url {_WHEELS}cu130",
            "stack",
        )
    if isinstance(gpus, NotMeasured):
        return not_measured(IMAGES, gpus)
    if not build.archs:
        return not_measured(IMAGES, f"torch {build.version} does not say what it was built for")
    unknown = {gpu.index: gpu.capability for gpu in gpus if isinstance(gpu.capability, NotMeasured)}
    known = {gpu.index: gpu.capability for gpu in gpus if not isinstance(gpu.capability, NotMeasured)}
    code = {index: code_for(capability, build.archs) for index, capability in known.items()}
    without = [index for index, kind in code.items() if kind is None]
    compiled = [index for index, kind in code.items() if kind == "ptx"]
    has = f"torch {build.version} holds {' '.join(build.archs)}"
    if without:
        needed = _sm(known[index] for index in without)
        return Finding(
            IMAGES,
            "problem",
            f"{gpu_names(without)}: {needed}; {has}",
            f"code for {needed}",
            f"install a newer torch (sm_120 needs CUDA 12.8 or later: --index-url {_WHEELS}cu130)",
            "stack",
        )
    if unknown:
        reason = next(iter(unknown.values())).reason
        return not_measured(IMAGES, f"compute capability of {gpu_names(unknown)}: {reason}")
    if compiled:
        return Finding(
            IMAGES,
            "warning",
            f"{gpu_names(compiled)}: {_sm(known[index] for index in compiled)} runs from PTX alone; {has}",
            "binary code for the GPU",
            "expect a slow first use, and libraries without code for it; a newer torch has binaries",
            "stack",
        )
    return ok(IMAGES, f"{_sm(known.values())}: torch {build.version} holds code for it")


def _sm(capabilities: Iterable[tuple[int, int]]) -> str:
    return ", ".join(f"sm_{major}{minor}" for major, minor in sorted(set(capabilities)))
