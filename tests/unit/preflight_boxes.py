"""Boxes for the preflight's tests: a folder that stands for "/", an NVML that answers from a recording, a torch.

`read` reads such a box through the product's own `read_box`; what a test does not name is healthy. The recordings are
in tests/data/boxes, whose README says where their shapes come from.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from h3core.qualify.preflight import Box, Finding, judge, read_box
from h3core.qualify.preflight.finding import NotMeasured, Reading, Unreadable
from h3core.qualify.preflight.torch_build import TorchBuild

DATA = Path(__file__).parents[1] / "data" / "boxes"
GIB = 1 << 30
CU130_ARCHS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120")


def text(name: str) -> str:
    return (DATA / name).read_text()


class NVMLError(Exception):
    """As pynvml's: subclasses are named NVMLError_..., and str() is NVML's own sentence."""


ERRORS = {
    name: type(f"NVMLError_{name}", (NVMLError,), {"__str__": lambda self, said=said: said})
    for name, said in {
        "NotSupported": "Not Supported",
        "NotFound": "Not Found",
        "GpuIsLost": "GPU is lost",
        "NoPermission": "Insufficient Permissions",
        "LibraryNotFound": "NVML Shared Library Not Found",
        "Unknown": "Unknown Error",
    }.items()
}


def answer(value: Any) -> Any:
    """A recorded answer; {"error": NAME} is raised as pynvml would."""
    if isinstance(value, dict) and "error" in value:
        raise ERRORS[value["error"]]
    return value


class RecordedNvml:
    """Answers as the module `pynvml` of nvidia-ml-py does, from a recording; handles are the recorded GPUs."""

    NVMLError = NVMLError
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_AGGREGATE_ECC = 1

    def __init__(self, recording: Mapping[str, Any]) -> None:
        self.recording = recording
        self.open = 0

    def nvmlInit(self) -> None:
        answer(self.recording.get("init"))
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return str(answer(self.recording["driver"]))

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return int(answer(self.recording["cuda"]))

    def nvmlDeviceGetCount(self) -> int:
        return len(self.recording["gpus"])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return answer(self.recording["gpus"][index])

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return str(answer(handle["name"]))

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return str(answer(handle["uuid"]))

    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any:
        return SimpleNamespace(busId=answer(handle["bus"]))

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        return SimpleNamespace(total=answer(handle["memory"]))

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any) -> tuple[int, int]:
        major, minor = answer(handle["capability"])
        return major, minor

    def nvmlDeviceGetMigMode(self, handle: Any) -> Any:
        return answer(handle["mig"])

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int:
        return int(handle["places"])

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any:
        if index >= len(handle["slices"]):
            raise ERRORS["NotFound"]
        return handle["slices"][index]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any) -> int:
        return int(answer(handle["clock_events"]))

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: int, counter: int) -> int:
        if kind != self.NVML_MEMORY_ERROR_TYPE_UNCORRECTED:
            raise AssertionError(f"asked for errors of kind {kind}, expected uncorrected ones")
        return int(answer(handle["ecc"])[counter])

    def nvmlDeviceGetRemappedRows(self, handle: Any) -> tuple[int, ...]:
        return tuple(answer(handle["remapped"]))


def recording(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(text(name))
    return loaded


def no_nvml() -> Any:
    raise Unreadable("nvidia-ml-py is not installed: pip install nvidia-ml-py")


def torch_build(
    devices: Reading[int],
    *,
    version: str = "2.11.0+cu130",
    cuda: str | None = "13.0",
    archs: Sequence[str] = CU130_ARCHS,
    nccl: Reading[str] = "2.28.9",
) -> TorchBuild:
    return TorchBuild(version, cuda, tuple(archs), devices, nccl)


HEALTHY: dict[str, str] = {
    "proc/driver/nvidia/version": "driver_open.txt",
    "proc/meminfo": "meminfo.txt",
    "proc/self/status": "status.txt",
    "proc/self/limits": "limits.txt",
    "proc/self/maps": "maps.txt",
    "proc/cmdline": "cmdline_iommu_off.txt",
    "dev/kmsg": "kmsg_healthy.txt",
}
WRITTEN: dict[str, str] = {
    "proc/uptime": "9000.00 700000.00\n",
    "proc/self/cgroup": "0::/\n",
    "proc/cpuinfo": "processor\t: 0\nmodel name\t: AMD EPYC 9575F 64-Core Processor\n",
    "dev/shm/.keep": "",
    "sys/fs/cgroup/memory.max": "max\n",
    "sys/fs/cgroup/memory.current": "1000000\n",
    "sys/fs/cgroup/cpu.max": "max 100000\n",
    "sys/class/iommu/.keep": "",
    "etc/hostname": "box\n",
}


def write(root: Path, files: Mapping[str, str | None]) -> Path:
    """Write files below `root`, and remove those whose text is None."""
    for name, content in files.items():
        path = root / name
        if content is None:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def healthy_root(root: Path, **changed: str | None) -> Path:
    """The files of a healthy box, with `changed` ones (keys: "/" written as "__")."""
    write(root, {name: text(source) for name, source in HEALTHY.items()})
    write(root, WRITTEN)
    (root / "sys/class/iommu/.keep").unlink()
    return write(root, {name.replace("__", "/"): content for name, content in changed.items()})


def statvfs(size: int, free: int) -> Callable[[Path], os.statvfs_result]:
    def answer(path: Path) -> os.statvfs_result:
        return os.statvfs_result((4096, 4096, size // 4096, free // 4096, free // 4096, 0, 0, 0, 0, 255))

    return answer


def programs(outputs: Mapping[str, str]) -> Callable[[Sequence[str]], str]:
    def run(command: Sequence[str]) -> str:
        if command[0] not in outputs:
            raise Unreadable(f"{command[0]} is not installed")
        return outputs[command[0]]

    return run


def read(
    root: Path,
    *,
    nvml: str | Mapping[str, Any] | None = "nvml_pro6000_x8.json",
    devices: Reading[int] | None = None,
    build: TorchBuild | None = None,
    environ: Mapping[str, str] | None = None,
    shm: tuple[int, int] | Callable[[Path], os.statvfs_result] = (504 * GIB, 504 * GIB),
    outputs: Mapping[str, str] | None = None,
    home: Path = Path("/home/user"),
) -> Box:
    """The box below `root` (see `healthy_root`); torch counts what NVML lists, where `devices` does not say."""
    answers = recording(nvml) if isinstance(nvml, str) else nvml
    count = devices if devices is not None else len(answers["gpus"]) if answers else NotMeasured("no NVML")
    return read_box(
        environ=environ or {},
        root=root,
        nvml=no_nvml if answers is None else lambda: RecordedNvml(answers),
        torch_build=lambda: build or torch_build(count),
        run=programs({"lspci": text("lspci_acs_off.txt")} if outputs is None else outputs),
        statvfs=statvfs(*shm) if isinstance(shm, tuple) else shm,
        home=home,
    )


def finding(box: Box, name: str, **options: Any) -> Finding:
    """One finding of `judge`."""
    options = {"world": None, "device": "cuda"} | options
    (found,) = [finding for finding in judge(box, **options) if finding.name == name]
    return found
