"""Which of NVML's GPUs CUDA will show, and in which order: CUDA_VISIBLE_DEVICES, read as CUDA reads it.

NVML knows nothing of that variable. Rules of the CUDA Programming Guide ("CUDA Environment Variables"): entries are
indices, UUIDs or unique beginnings of UUIDs; the first entry that fits no GPU ends the list; an empty list shows none.
A repeated entry shows none either (seen in torch.cuda's own parser).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from h3core.qualify.preflight.gpu import Gpu


@dataclass(frozen=True, slots=True)
class Visible:
    """GPUs in CUDA's order. A repeated entry stays repeated here, so that it can be named."""

    gpus: tuple[Gpu, ...]
    text: str | None
    """CUDA_VISIBLE_DEVICES as set; None where it is not."""
    problem: str | None = None
    """Why the list may not be what its author meant."""

    @property
    def hides_all(self) -> bool:
        """Whether no GPU is what the variable asks for, as an empty one does; a mistyped entry does not."""
        return self.text is not None and not self.gpus and self.problem is None


def resolve(devices: Sequence[Gpu], environ: Mapping[str, str]) -> Visible:
    """The GPUs of `devices` (all that NVML lists, in its order) that CUDA shows under `environ`."""
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return Visible(_numbered(_without_mig(devices)), None)
    picks: list[Gpu] = []
    problem = None
    by_index = False
    for entry in (part.strip() for part in text.split(",")):
        found = _find(entry, devices)
        if found is None:
            if entry not in ("", "-1", "none", "None", "NoDevFiles"):
                problem = f"entry {entry!r} fits no GPU: CUDA shows only what stands before it"
            break
        picks.append(found)
        by_index = by_index or not entry.startswith(("GPU-", "MIG-"))
    models = {gpu.name for gpu in devices}
    if by_index and len(models) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        # CUDA counts its fastest GPU first, NVML counts in PCI order: with one model they agree.
        problem = problem or (
            "indices of unlike GPUs: CUDA numbers the fastest first, so these may be others; set "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID, or use UUIDs"
        )
    return Visible(_numbered(picks), text, problem)


def _find(entry: str, devices: Sequence[Gpu]) -> Gpu | None:
    """The GPU or slice that an entry names; None for none, or for more than one."""
    if entry.startswith("GPU-"):
        candidates = list(devices)
    elif entry.startswith("MIG-"):
        candidates = [piece for gpu in devices for piece in gpu.slices]
    else:
        # CUDA takes the digits that an entry begins with, as C's strtoul does.
        digits = re.match(r"\+?(\d+)", entry)
        return devices[int(digits[1])] if digits and int(digits[1]) < len(devices) else None
    found = {gpu.uuid: gpu for gpu in candidates if isinstance(gpu.uuid, str) and gpu.uuid.startswith(entry)}
    return next(iter(found.values())) if len(found) == 1 else None


def _without_mig(devices: Sequence[Gpu]) -> list[Gpu]:
    """What CUDA shows where nothing was asked for: whole GPUs, or else the first slice (a process gets one)."""
    whole = [gpu for gpu in devices if not gpu.mig_enabled]
    return whole or [piece for gpu in devices for piece in gpu.slices][:1]


def _numbered(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    return tuple(replace(gpu, index=index) for index, gpu in enumerate(gpus))
