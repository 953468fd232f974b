"""The NVIDIA driver: its version against torch's CUDA, and whether its kernel module is the open one.

Minimum drivers are those of NVIDIA's "CUDA Compatibility", minor version compatibility: within a major version an older
driver runs newer code, with gaps; across major versions it does not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from h3core.qualify.preflight.finding import Finding, NotMeasured, Reading, Unreadable, attempt, not_measured, ok
from h3core.qualify.preflight.nvml import Nvml
from h3core.qualify.preflight.torch_build import TorchBuild

DRIVER: Final = "driver"
MODULE: Final = "kernel module"
Flavour = Literal["open", "proprietary"]

MINIMUM: Final = {11: 450, 12: 525, 13: 580}
"""CUDA's major version -> the oldest driver branch that runs it."""

_VERSION_LINE: Final = re.compile(r"NVRM version:\s*NVIDIA UNIX (.*?)\s+(\d+(?:\.\d+)+)")


@dataclass(frozen=True, slots=True)
class Driver:
    """`cuda` is what libcuda offers (with NVIDIA's cuda-compat package more than the driver's own)."""

    version: Reading[str]
    cuda: Reading[tuple[int, int]]
    flavour: Reading[Flavour]


def read_driver(root: Path, nvml: Reading[Nvml]) -> Driver:
    """NVML's answers; the version from /proc/driver/nvidia/version where NVML has none."""
    module = attempt(lambda: parse_module((root / "proc/driver/nvidia/version").read_text()))
    flavour: Reading[Flavour] = module if isinstance(module, NotMeasured) else module[0]
    if isinstance(nvml, NotMeasured):
        return Driver(nvml if isinstance(module, NotMeasured) else module[1], nvml, flavour)
    return Driver(nvml.driver, nvml.cuda, flavour)


def parse_module(text: str) -> tuple[Flavour, str]:
    """Flavour and version, from /proc/driver/nvidia/version. Raises `Unreadable` for any other text."""
    match = _VERSION_LINE.search(text)
    if match is None:
        raise Unreadable(f"/proc/driver/nvidia/version has an unknown form: {text.splitlines()[:1]}")
    return "open" if "Open Kernel Module" in match[1] else "proprietary", match[2]


def judge_driver(driver: Driver, build: TorchBuild) -> Finding:
    """Whether the driver can run what torch was compiled with."""
    version, cuda = driver.version, driver.cuda
    if build.cuda is None:
        return not_measured(DRIVER, f"{_named(driver)}; torch {build.version} has no CUDA to hold it against")
    if isinstance(version, NotMeasured) and isinstance(cuda, NotMeasured):
        return not_measured(DRIVER, version)
    major, minor = (int(part) for part in build.cuda.split(".")[:2])
    minimum = MINIMUM.get(major)
    branch = None if isinstance(version, NotMeasured) else int(version.split(".")[0])
    old_branch = branch is not None and minimum is not None and branch < minimum
    needed = f"driver {minimum} or newer" if minimum else "a driver"
    needed += f" (CUDA {major}) for torch {build.version}, built with CUDA {build.cuda}"
    if isinstance(cuda, NotMeasured):
        if branch is None or minimum is None:
            return not_measured(DRIVER, f"{_named(driver)}; CUDA {major}'s oldest driver is not known here")
        runs = not old_branch
    else:
        runs = cuda[0] >= major
    if not runs:
        return Finding(
            DRIVER,
            "problem",
            _named(driver),
            needed,
            "a pod cannot upgrade its host's driver: choose another host (RunPod: filter with minCudaVersion or "
            f"allowedCudaVersions {build.cuda}), or install a torch that was built for this driver's CUDA",
            "stack",
        )
    if old_branch:
        return Finding(
            DRIVER,
            "warning",
            f"{_named(driver)}: forward compatibility, through NVIDIA's cuda-compat",
            needed,
            "it works on data-center GPUs only; if CUDA says error 804, choose a host with a newer driver",
            "stack",
        )
    if not isinstance(cuda, NotMeasured) and cuda < (major, minor):
        return Finding(
            DRIVER,
            "warning",
            f"{_named(driver)} is older than torch's CUDA {build.cuda}",
            f"CUDA {build.cuda}",
            "most things run (minor version compatibility), kernels compiled at run time may not; a pod cannot upgrade "
            f"its host's driver: for RunPod ask for minCudaVersion {build.cuda}",
            "stack",
        )
    return ok(DRIVER, f"{_named(driver)}, torch {build.version} is built with CUDA {build.cuda}")


def judge_module(driver: Driver) -> Finding:
    """Which kernel module is loaded; both are sound, but faults are reported against one of them."""
    if isinstance(driver.flavour, NotMeasured):
        return not_measured(MODULE, driver.flavour)
    return ok(MODULE, driver.flavour)


def _named(driver: Driver) -> str:
    version = "version not measured" if isinstance(driver.version, NotMeasured) else driver.version
    offers = "" if isinstance(driver.cuda, NotMeasured) else f" (CUDA {driver.cuda[0]}.{driver.cuda[1]})"
    return f"{version}{offers}"
