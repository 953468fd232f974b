"""What NVML says of driver and GPUs. Read only; no CUDA context, no setting is touched.

`nvidia-ml-py` is optional, and NVML needs the host's driver: without either, nothing here is measured. Each question
may be unsupported on a model (no ECC on a GeForce), so each answer stands alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from h3core.qualify.preflight.finding import NotMeasured, Unreadable
from h3core.qualify.preflight.gpu import Ecc, Gpu, Remaps, pci_address

T = TypeVar("T")

_NO_ACCESS: Final = "NVMLError_NoPermission"
"""A GPU of the host that this container was not given; it is no concern of ours."""
_GONE: Final = ("NVMLError_GpuIsLost", "NVMLError_ResetRequired")


@dataclass(frozen=True, slots=True)
class Nvml:
    """The answers. `lost`: GPUs that NVML counts and cannot reach, one line each."""

    driver: str | NotMeasured
    cuda: tuple[int, int] | NotMeasured
    """The CUDA version that the driver offers, (major, minor)."""
    gpus: tuple[Gpu, ...]
    lost: tuple[str, ...]


def import_nvml() -> Any:
    """The module `pynvml` of nvidia-ml-py. Raises `Unreadable` where it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError as error:
        raise Unreadable("nvidia-ml-py is not installed: pip install nvidia-ml-py") from error


def read_nvml(nvml: Any) -> Nvml:
    """Ask `nvml` (the module, or what answers like it). Raises `Unreadable` where NVML cannot start."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise Unreadable(f"NVML does not start: {error}") from error
    try:
        driver = _ask(nvml, nvml.nvmlSystemGetDriverVersion)
        number = _ask(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2)
        cuda = number if isinstance(number, NotMeasured) else (number // 1000, number % 1000 // 10)
        gpus: list[Gpu] = []
        lost: list[str] = []
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                gpus.append(_read_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index), index))
            except nvml.NVMLError as error:
                if type(error).__name__ != _NO_ACCESS:
                    lost.append(f"NVML device {index}: {error}")
        return Nvml(driver, cuda, tuple(gpus), tuple(lost))
    finally:
        nvml.nvmlShutdown()


def _read_gpu(nvml: Any, handle: Any, index: int) -> Gpu:
    """One GPU and its slices. Raises NVML's own error where the GPU does not even say its name."""
    mig = _ask(nvml, lambda: nvml.nvmlDeviceGetMigMode(handle)[0] == 1)

    def ecc() -> Ecc:
        wrong = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
        return Ecc(
            nvml.nvmlDeviceGetTotalEccErrors(handle, wrong, nvml.NVML_VOLATILE_ECC),
            nvml.nvmlDeviceGetTotalEccErrors(handle, wrong, nvml.NVML_AGGREGATE_ECC),
        )

    def remaps() -> Remaps:
        corrected, uncorrected, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
        return Remaps(corrected, uncorrected, bool(pending), bool(failed))

    whole = Gpu(
        index=index,
        name=nvml.nvmlDeviceGetName(handle),
        pci=_ask(nvml, lambda: pci_address(nvml.nvmlDeviceGetPciInfo(handle).busId)),
        capability=_ask(nvml, lambda: _pair(nvml.nvmlDeviceGetCudaComputeCapability(handle))),
        clock_events=_ask(nvml, lambda: _clock_events(nvml, handle)),
        ecc=_ask(nvml, ecc),
        remaps=_ask(nvml, remaps),
        **_identity(nvml, handle),
    )
    places = _ask(nvml, lambda: int(nvml.nvmlDeviceGetMaxMigDeviceCount(handle))) if mig is True else 0
    slices = [
        replace(whole, index=position, name=nvml.nvmlDeviceGetName(piece), mig=True, **_identity(nvml, piece))
        for position in range(places if isinstance(places, int) else 0)
        # Most places hold no slice, and NVML says "Not Found".
        if not isinstance(piece := _slice(nvml, handle, position), NotMeasured)
    ]
    return replace(whole, slices=tuple(slices), mig_enabled=mig is True)


def _identity(nvml: Any, handle: Any) -> dict[str, Any]:
    """What a slice has of its own."""
    return {
        "uuid": _ask(nvml, lambda: str(nvml.nvmlDeviceGetUUID(handle))),
        "memory_bytes": _ask(nvml, lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total)),
    }


def _slice(nvml: Any, handle: Any, position: int) -> Any:
    return _ask(nvml, lambda: nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, position))


def _clock_events(nvml: Any, handle: Any) -> int:
    """CUDA 13 deprecates the name with "Throttle", and older bindings have no other."""
    new = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    ask = nvml.nvmlDeviceGetCurrentClocksThrottleReasons if new is None else new
    return int(ask(handle))


def _pair(values: Any) -> tuple[int, int]:
    major, minor = values
    return int(major), int(minor)


def _ask(nvml: Any, question: Callable[[], T]) -> T | NotMeasured:
    """The answer, or the reason for none. NVML's word that the GPU is gone is raised: it answers nothing any more."""
    try:
        return question()
    except nvml.NVMLError as error:
        if type(error).__name__ in _GONE:
            raise
        return NotMeasured(f"NVML: {error}")
    except Exception as error:
        return NotMeasured(f"NVML: {type(error).__name__}: {error}")
