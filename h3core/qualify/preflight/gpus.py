"""How many GPUs there are for how many ranks, and whether they are the GPUs that a run can be judged on."""

from __future__ import annotations

from collections import Counter
from typing import Final

from h3core.qualify.preflight.finding import (
    Finding,
    NotMeasured,
    Reading,
    amount,
    gpu_names,
    not_measured,
    ok,
)
from h3core.qualify.preflight.gpu import Gpu
from h3core.qualify.preflight.nvml import Nvml
from h3core.qualify.preflight.visible import Visible

COUNT: Final = "GPUs"
LIST: Final = "GPU list"
DUPLICATES: Final = "duplicate GPUs"
MODELS: Final = "GPU models"
LOST: Final = "lost GPUs"
MIG: Final = "MIG"

SAME_MEMORY: Final = 0.01
"""Relative difference of memory between GPUs of one model: ECC on one of them alone takes about 6% of it."""


def judge_count(
    count: Reading[int], nvml: Reading[Nvml], text: str | None, *, world: int | None, share_gpus: bool
) -> Finding:
    """Ranks against GPUs; `text` is CUDA_VISIBLE_DEVICES."""
    if isinstance(count, NotMeasured):
        return not_measured(COUNT, count)
    wanted = f"{world}, one for each rank" if world else "at least 1"
    if not count:
        return Finding(COUNT, "problem", "torch sees none", wanted, _why_none(nvml, text), "stack")
    if world is None or world <= count:
        return ok(COUNT, f"{count} visible" + (f" for {world} ranks" if world else ""))
    if share_gpus:
        got = f"{count} visible, shared by {world} ranks as asked"
        return Finding(COUNT, "warning", got, wanted, "says nothing about links between GPUs, nor about speed", "stack")
    fewer = f"ask for --world={count} or fewer, " if count > 1 else ""
    return Finding(
        COUNT,
        "problem",
        f"{count} visible, {world} ranks asked for",
        wanted,
        f"{fewer}show more GPUs (CUDA_VISIBLE_DEVICES is "
        f"{'not set' if text is None else repr(text)}), or let ranks share with --share-gpus, which tests no link",
        "stack",
    )


def judge_list(gpus: Reading[tuple[Gpu, ...]], visible: Reading[Visible]) -> Finding:
    """Which GPUs they are."""
    if isinstance(gpus, NotMeasured):
        return not_measured(LIST, gpus)
    kinds = Counter(_kind(gpu) for gpu in gpus)
    text = ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) or "none"
    if not isinstance(visible, NotMeasured) and visible.problem is not None:
        expected = "CUDA_VISIBLE_DEVICES names GPUs of this host"
        got = f"{text}; CUDA_VISIBLE_DEVICES={visible.text}"
        return Finding(LIST, "warning", got, expected, visible.problem, "stack")
    return ok(LIST, text)


def judge_duplicates(gpus: Reading[tuple[Gpu, ...]], *, share_gpus: bool) -> Finding:
    """One GPU under two numbers: NCCL refuses it, and CUDA shows no GPU at all."""
    if isinstance(gpus, NotMeasured):
        return not_measured(DUPLICATES, gpus)
    unknown = [gpu for gpu in gpus if isinstance(gpu.uuid, NotMeasured)]
    places: dict[str, list[int]] = {}
    for gpu in gpus:
        if isinstance(gpu.uuid, str):
            places.setdefault(gpu.uuid, []).append(gpu.index)
    twice = {uuid: indices for uuid, indices in places.items() if len(indices) > 1}
    if twice:
        return Finding(
            DUPLICATES,
            "warning" if share_gpus else "problem",
            "; ".join(f"{gpu_names(indices)} are one: {uuid}" for uuid, indices in twice.items()),
            "a different UUID for each GPU",
            "name each GPU once in CUDA_VISIBLE_DEVICES (CUDA shows none where one is repeated)",
            "stack",
        )
    if unknown:
        return not_measured(DUPLICATES, f"UUID of {gpu_names(gpu.index for gpu in unknown)}: {unknown[0].uuid}")
    return ok(DUPLICATES, f"{len(places)} different UUIDs")


def judge_models(gpus: Reading[tuple[Gpu, ...]], *, allow_mixed: bool) -> Finding:
    """Unlike GPUs: the slowest sets the pace, the smallest the size, and their results need not agree."""
    if isinstance(gpus, NotMeasured):
        return not_measured(MODELS, gpus)
    sizes = [gpu.memory_bytes for gpu in gpus if not isinstance(gpu.memory_bytes, NotMeasured)]
    uneven = bool(sizes) and min(sizes) < max(sizes) * (1 - SAME_MEMORY)
    if len({(gpu.name, _capability(gpu)) for gpu in gpus}) > 1 or uneven:
        groups: dict[str, list[int]] = {}
        for gpu in gpus:
            groups.setdefault(_kind(gpu), []).append(gpu.index)
        return Finding(
            MODELS,
            "warning" if allow_mixed else "problem",
            "; ".join(f"{gpu_names(indices)}: {kind}" for kind, indices in groups.items()),
            "one model with one size of memory",
            "name like GPUs in CUDA_VISIBLE_DEVICES, or choose another host",
            "hardware",
        )
    if len(sizes) < len(gpus):
        return not_measured(MODELS, "memory of some GPUs")
    return ok(MODELS, "all alike" if len(gpus) > 1 else "one GPU" if gpus else "no GPU")


def judge_lost(nvml: Reading[Nvml]) -> Finding:
    """GPUs that the driver counts and cannot reach."""
    if isinstance(nvml, NotMeasured):
        return not_measured(LOST, nvml)
    if nvml.lost:
        return Finding(
            LOST,
            "problem",
            "; ".join(nvml.lost),
            "every GPU answers",
            "give this host back, or reboot it; the kernel log (Xid 79) may say why",
            "hardware",
        )
    return ok(LOST, f"none: all {len(nvml.gpus)} that NVML counts answer")


def judge_mig(gpus: Reading[tuple[Gpu, ...]], *, world: int | None) -> Finding:
    """Slices of GPUs: CUDA shows a process one, and slices reach each other by no link."""
    if isinstance(gpus, NotMeasured):
        return not_measured(MIG, gpus)
    slices = [gpu for gpu in gpus if gpu.mig]
    if not slices:
        return ok(MIG, "whole GPUs")
    several = world is not None and world > 1
    return Finding(
        MIG,
        "problem" if several else "warning",
        f"{gpu_names(gpu.index for gpu in slices)}: {', '.join(sorted({gpu.name for gpu in slices}))}",
        "whole GPUs",
        "choose a host with whole GPUs: slices have no link to each other, and figures are those of a slice",
        "stack",
    )


def _why_none(nvml: Reading[Nvml], text: str | None) -> str:
    """What to do where no GPU is visible."""
    if text is not None:
        return f"CUDA_VISIBLE_DEVICES={text!r} shows none: unset it, or name each GPU once"
    if not isinstance(nvml, NotMeasured) and nvml.gpus:
        return f"NVML lists {len(nvml.gpus)}, so torch or its CUDA does not fit the driver: see driver, kernel images"
    return "give the container GPUs (docker run --gpus all), choose a host with GPUs, or use --device cpu"


def _kind(gpu: Gpu) -> str:
    size = "memory not measured" if isinstance(gpu.memory_bytes, NotMeasured) else amount(gpu.memory_bytes)
    return f"{gpu.name} ({size}, {_capability(gpu)})"


def _capability(gpu: Gpu) -> str:
    return "sm_?" if isinstance(gpu.capability, NotMeasured) else f"sm_{gpu.capability[0]}{gpu.capability[1]}"
