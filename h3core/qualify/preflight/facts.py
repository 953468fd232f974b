"""The report's block "machine": what ran where. Null where it is not known."""

from __future__ import annotations

from typing import Any

from h3core.qualify.preflight.box import Box
from h3core.qualify.preflight.finding import NotMeasured, Reading, T


def machine_facts(box: Box) -> dict[str, Any]:
    """Plain values for a report. `gpus` are those that CUDA shows, in its order; empty where they are not known."""
    gpus = _known(box.gpus) or ()
    memory = _known(box.memory)
    return {
        "python": box.host.python,
        "torch": box.torch.version,
        "torch_cuda": box.torch.cuda,
        "platform": box.host.platform,
        "cpu": _known(box.host.cpu),
        "cpu_capability": _known(box.host.cpu_capability),
        "cores": box.host.cores,
        "memory_bytes": None if memory is None else memory.total,
        "gpus": [
            {
                "index": gpu.index,
                "name": gpu.name,
                "uuid": _known(gpu.uuid),
                "memory_bytes": _known(gpu.memory_bytes),
                "compute_capability": None
                if isinstance(gpu.capability, NotMeasured)
                else f"{gpu.capability[0]}.{gpu.capability[1]}",
            }
            for gpu in gpus
        ],
        "driver": _known(box.driver.version),
        "nccl": _known(box.torch.nccl),
    }


def _known(reading: Reading[T]) -> T | None:
    return None if isinstance(reading, NotMeasured) else reading
