"""The rules in their order, and which of their findings mean that no rank may start."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Literal

from h3core.qualify.preflight import (
    cpus,
    driver,
    gpus,
    health,
    memlock,
    memory,
    nccl,
    nccl_settings,
    pcie,
    shm,
    torch_build,
    xid,
)
from h3core.qualify.preflight.box import Box
from h3core.qualify.preflight.finding import Finding, NotMeasured, attempt, not_measured

REQUIRED: Final = frozenset(
    {gpus.COUNT, gpus.LIST, gpus.DUPLICATES, gpus.MODELS, torch_build.IMAGES, driver.DRIVER},
)
"""Without a reading of these a run on GPUs cannot be judged at all."""

BLOCKING: Final = frozenset({gpus.COUNT, gpus.DUPLICATES, gpus.MODELS, torch_build.IMAGES, driver.DRIVER})
"""A problem with one of these makes every rank fail, or makes its result mean nothing."""

Rules = dict[str, Callable[[], Finding]]


def judge(
    box: Box,
    *,
    world: int | None,
    device: Literal["cpu", "cuda"],
    needed_bytes: int | None = None,
    share_gpus: bool = False,
    allow_mixed: bool = False,
) -> list[Finding]:
    """Hold what was read against what a run needs.

    `world`: ranks, None where that is open; `needed_bytes`: host memory that loading takes in all ranks together;
    `share_gpus`: several ranks may share a GPU; `allow_mixed`: unlike GPUs are meant. For device "cpu" the rules for
    GPUs are left out, and one finding says so.
    """
    host: Rules = {
        shm.SHM: lambda: shm.judge_shm(box.shm, gloo=device == "cpu"),
        memory.MEMORY: lambda: memory.judge_memory(box.memory, needed_bytes),
        cpus.CPUS: lambda: cpus.judge_cpus(box.cpus, world),
    }
    if device == "cpu":
        return [not_measured(gpus.COUNT, "the Gloo tier uses no GPU"), *_run(host)]
    return _run(_gpu_rules(box, world, share_gpus, allow_mixed) | host | _nccl_rules(box))


def _gpu_rules(box: Box, world: int | None, share_gpus: bool, allow_mixed: bool) -> Rules:
    text = box.environ.get("CUDA_VISIBLE_DEVICES")
    return {
        gpus.COUNT: lambda: gpus.judge_count(box.torch.devices, box.nvml, text, world=world, share_gpus=share_gpus),
        gpus.LIST: lambda: gpus.judge_list(box.gpus, box.visible),
        gpus.DUPLICATES: lambda: gpus.judge_duplicates(box.gpus, share_gpus=share_gpus),
        gpus.MODELS: lambda: gpus.judge_models(box.gpus, allow_mixed=allow_mixed),
        gpus.LOST: lambda: gpus.judge_lost(box.nvml),
        gpus.MIG: lambda: gpus.judge_mig(box.gpus, world=world),
        driver.DRIVER: lambda: driver.judge_driver(box.driver, box.torch),
        torch_build.IMAGES: lambda: torch_build.judge_images(box.torch, box.gpus),
        driver.MODULE: lambda: driver.judge_module(box.driver),
        health.CLOCKS: lambda: health.judge_clocks(box.gpus),
        health.ECC: lambda: health.judge_ecc(box.gpus),
        health.REMAPS: lambda: health.judge_remaps(box.gpus),
        xid.XID: lambda: xid.judge_xids(box.kernel_log, *_addresses(box)),
    }


def _nccl_rules(box: Box) -> Rules:
    count = box.torch.devices
    peers = 2 if isinstance(count, NotMeasured) else count  # unknown: judged as if there were peers
    return {
        shm.STALE: lambda: shm.judge_stale(box.shm),
        memlock.MEMLOCK: lambda: memlock.judge_memlock(box.memlock),
        nccl.NCCL: lambda: nccl.judge_nccl(box.torch.nccl, box.nccl_libraries),
        nccl_settings.VARIABLES: lambda: nccl_settings.judge_variables(box.environ),
        nccl_settings.FILES: lambda: nccl_settings.judge_conf_files(box.nccl_files, box.environ),
        pcie.IOMMU: lambda: pcie.judge_iommu(box.iommu, gpus=peers),
        pcie.ACS: lambda: pcie.judge_acs(box.bridges, gpus=peers),
    }


def blocking(findings: Iterable[Finding]) -> list[Finding]:
    """Those that mean that ranks must not start."""
    return [finding for finding in findings if finding.name in BLOCKING and finding.state == "problem"]


def unread(findings: Iterable[Finding]) -> list[Finding]:
    """Readings that a run on GPUs cannot do without, and that could not be made; none for a run on the CPU."""
    listed = list(findings)
    # The Gloo tier has the GPU count alone, as "not measured": it needs none of them.
    if not {finding.name for finding in listed} >= REQUIRED:
        return []
    return [finding for finding in listed if finding.name in REQUIRED and finding.state == "not measured"]


def _run(rules: Rules) -> list[Finding]:
    """Each rule's finding; a rule that fails has measured nothing."""
    found = {name: attempt(rule) for name, rule in rules.items()}
    return [
        not_measured(name, f"this rule failed: {result.reason}") if isinstance(result, NotMeasured) else result
        for name, result in found.items()
    ]


def _addresses(box: Box) -> tuple[dict[str, int], frozenset[str]]:
    """PCI address -> index of the GPUs under test, and the addresses of all that NVML lists."""
    under_test = () if isinstance(box.gpus, NotMeasured) else box.gpus
    listed = () if isinstance(box.nvml, NotMeasured) else box.nvml.gpus
    visible = {gpu.pci: gpu.index for gpu in under_test if isinstance(gpu.pci, str)}
    return visible, frozenset(gpu.pci for gpu in listed if isinstance(gpu.pci, str))
