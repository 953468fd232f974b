"""Everything that the preflight reads of a machine, in one value, and the one function that reads it.

Nothing here judges, writes or makes a CUDA context. Every reading stands alone: one that fails leaves its reason in
its place. Tests hand in another root folder, another NVML and another way to run programs.
"""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from h3core.qualify.preflight.cpus import Cpus, read_cpus
from h3core.qualify.preflight.driver import Driver, read_driver
from h3core.qualify.preflight.finding import NotMeasured, Reading, Unreadable, attempt
from h3core.qualify.preflight.gpu import Gpu
from h3core.qualify.preflight.host import Host, read_host
from h3core.qualify.preflight.kernel_log import KernelLog, read_kernel_log
from h3core.qualify.preflight.memlock import read_memlock
from h3core.qualify.preflight.memory import Memory, read_memory
from h3core.qualify.preflight.nccl import read_libraries
from h3core.qualify.preflight.nccl_settings import ConfFile, read_conf_files
from h3core.qualify.preflight.nvml import Nvml, import_nvml, read_nvml
from h3core.qualify.preflight.pcie import Bridge, Iommu, parse_lspci, read_iommu
from h3core.qualify.preflight.shm import Shm, read_shm
from h3core.qualify.preflight.torch_build import TorchBuild, read_torch
from h3core.qualify.preflight.visible import Visible, resolve

PROGRAM_TIMEOUT_S: Final = 10.0
"""For lspci and dmesg: on a sick bus lspci can hang."""


@dataclass(frozen=True, slots=True)
class Box:
    """What was read. `gpus` are those that CUDA shows, in its order; `nvml` holds all that the driver lists."""

    environ: Mapping[str, str]
    host: Host
    torch: TorchBuild
    nvml: Reading[Nvml]
    visible: Reading[Visible]
    gpus: Reading[tuple[Gpu, ...]]
    driver: Driver
    shm: Reading[Shm]
    memlock: Reading[int | None]
    nccl_libraries: Reading[tuple[str, ...]]
    nccl_files: tuple[ConfFile, ...]
    iommu: Reading[Iommu]
    bridges: Reading[tuple[Bridge, ...]]
    kernel_log: Reading[KernelLog]
    memory: Reading[Memory]
    cpus: Reading[Cpus]


def read_box(
    *,
    environ: Mapping[str, str] | None = None,
    root: Path = Path("/"),
    nvml: Callable[[], Any] = import_nvml,
    torch_build: Callable[[], TorchBuild] = read_torch,
    run: Callable[[Sequence[str]], str] | None = None,
    statvfs: Callable[[Path], os.statvfs_result] = os.statvfs,
    home: Path | None = None,
) -> Box:
    """Read this machine.

    `root` is the folder that holds proc, sys, dev and etc; `nvml` gives the module `pynvml`; `run` runs a program and
    returns its output; `home` is where NCCL looks for .nccl.conf (default: the password file's).
    """
    variables = dict(os.environ if environ is None else environ)
    program = run_program if run is None else run
    build = torch_build()
    answers = attempt(lambda: read_nvml(nvml()))
    visible = answers if isinstance(answers, NotMeasured) else attempt(lambda: resolve(answers.gpus, variables))
    return Box(
        environ=variables,
        host=read_host(root),
        torch=build,
        nvml=answers,
        visible=visible,
        gpus=identified(build.devices, visible),
        driver=read_driver(root, answers),
        shm=attempt(lambda: read_shm(root, statvfs)),
        memlock=attempt(lambda: read_memlock(root)),
        nccl_libraries=attempt(lambda: read_libraries(root)),
        nccl_files=read_conf_files(root, variables, home or _home()),
        iommu=attempt(lambda: read_iommu(root)),
        bridges=attempt(lambda: parse_lspci(program(["lspci", "-vvv"]))),
        kernel_log=attempt(lambda: read_kernel_log(root, program)),
        memory=attempt(lambda: read_memory(root)),
        cpus=attempt(lambda: read_cpus(root)),
    )


def identified(count: Reading[int], visible: Reading[Visible]) -> Reading[tuple[Gpu, ...]]:
    """The GPUs that torch counts, by NVML's description: only where both agree on how many there are.

    Where torch counts none, NVML's stay: they say why. A repeated entry makes CUDA show none, too.
    """
    if isinstance(visible, NotMeasured):
        return visible
    if not isinstance(count, NotMeasured) and count not in (0, len(visible.gpus)):
        setting = "is not set" if visible.text is None else f"is {visible.text!r}"
        return NotMeasured(
            f"torch counts {count} GPUs, NVML {len(visible.gpus)} where CUDA_VISIBLE_DEVICES {setting}: which is which "
            "is not known"
        )
    return visible.gpus


def run_program(command: Sequence[str]) -> str:
    """The standard output of a program. Raises `Unreadable` where it is missing, fails or takes too long."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROGRAM_TIMEOUT_S,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except FileNotFoundError as error:
        raise Unreadable(f"{command[0]} is not installed") from error
    except subprocess.TimeoutExpired as error:
        raise Unreadable(f"{command[0]} took longer than {PROGRAM_TIMEOUT_S:g} s") from error
    if done.returncode:
        said = " ".join(done.stderr.split())[:200]
        raise Unreadable(f"{command[0]} ended with code {done.returncode}: {said}")
    return done.stdout


def _home() -> Path | None:
    """The home folder of the password file, which NCCL asks; a container's user may have no entry."""
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return None
