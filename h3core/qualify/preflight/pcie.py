"""What may stand between GPUs on PCIe: the IOMMU and ACS, which send peer traffic through the CPU's root complex.

On such boxes NCCL hangs or P2P copies return wrong bytes (NVIDIA/nccl #1999, #2079), though every query says that
peers can reach each other. A virtual machine or container may not see its host's settings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from h3core.qualify.preflight.finding import Finding, NotMeasured, Reading, Unreadable, attempt, not_measured, ok

IOMMU: Final = "IOMMU"
ACS: Final = "ACS"

_PARAMETER: Final = re.compile(r"(?:iommu|amd_iommu|intel_iommu|pcie_acs_override|pci)=")
_OFF: Final = frozenset({"iommu=off", "amd_iommu=off", "intel_iommu=off"})
_PASSTHROUGH: Final = frozenset({"iommu=pt", "iommu.passthrough=1"})
_ON: Final = frozenset({"iommu=force", "amd_iommu=on", "amd_iommu=force_enable", "intel_iommu=on"})
_DEVICE: Final = re.compile(r"((?:[0-9a-f]{4,}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]) (.*)")


@dataclass(frozen=True, slots=True)
class Iommu:
    """The kernel's parameters for it, and the units that it runs (ivhd0, dmar0, ...)."""

    parameters: tuple[str, ...]
    units: Reading[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Bridge:
    """A PCI bridge; `enabled` are the ACS controls that are on, None where it has no ACS."""

    address: str
    enabled: frozenset[str] | None


def read_iommu(root: Path) -> Iommu:
    """From /proc/cmdline and /sys/class/iommu."""
    units = attempt(lambda: tuple(sorted(path.name for path in (root / "sys/class/iommu").iterdir())))
    return Iommu(parse_cmdline((root / "proc/cmdline").read_text()), units)


def parse_cmdline(text: str) -> tuple[str, ...]:
    """Parameters of a kernel command line that concern IOMMU and ACS; the rest is nobody's business."""
    words = text.split()
    return tuple(word for word in words if _PARAMETER.match(word) or word.startswith("iommu."))


def judge_iommu(iommu: Reading[Iommu], *, gpus: int) -> Finding:
    """Running units count; the command line only where they cannot be seen."""
    if isinstance(iommu, NotMeasured):
        return not_measured(IOMMU, iommu)
    given = set(iommu.parameters)
    line = f"kernel command line: {' '.join(iommu.parameters) or 'nothing about it'}"
    if isinstance(iommu.units, NotMeasured):
        if not given & (_OFF | _PASSTHROUGH | _ON):
            return not_measured(IOMMU, f"{line}, and {iommu.units.reason}")
        on = not given & _OFF and bool(given & _ON)
        got = line
    else:
        on = bool(iommu.units)
        got = f"at work ({', '.join(iommu.units)}); {line}" if on else f"none at work, as this kernel sees it; {line}"
    if not on or given & _PASSTHROUGH or gpus < 2:
        return ok(IOMMU, got)
    return Finding(
        IOMMU,
        "warning",
        got,
        "off, or passing through (iommu=pt), where GPUs talk to each other",
        "if P2P checks hang or fail: boot with amd_iommu=off (Intel: intel_iommu=off), or set NCCL_P2P_DISABLE=1; on a "
        "rented host choose another",
        "interconnect",
    )


def parse_lspci(text: str) -> tuple[Bridge, ...]:
    """The bridges in the output of `lspci -vvv`.

    Raises `Unreadable` where it lists none (a virtual machine), or hides capabilities (only root sees them).
    """
    bridges: list[Bridge] = []
    hidden = bridge = False
    for line in text.splitlines():
        if match := _DEVICE.fullmatch(line):
            bridge = "PCI bridge" in match[2]
            if bridge:
                bridges.append(Bridge(match[1], None))
        elif bridge and "ACSCtl:" in line:
            words = line.partition("ACSCtl:")[2].split()
            bridges[-1] = Bridge(bridges[-1].address, frozenset(w[:-1] for w in words if w.endswith("+")))
        elif bridge and "<access denied>" in line:
            hidden = True
    if not bridges:
        raise Unreadable("lspci lists no PCI bridge: the host's are hidden from here")
    if hidden:
        raise Unreadable("lspci hides the capabilities of bridges: it needs root")
    return tuple(bridges)


def judge_acs(bridges: Reading[tuple[Bridge, ...]], *, gpus: int) -> Finding:
    """ACS on bridges: NVIDIA's NCCL guide takes SrcValid+ for its sign."""
    if isinstance(bridges, NotMeasured):
        return not_measured(ACS, bridges)
    on = [bridge for bridge in bridges if bridge.enabled is not None and "SrcValid" in bridge.enabled]
    if not on:
        return ok(ACS, f"off on all {len(bridges)} bridges")
    redirect = sum("ReqRedir" in (bridge.enabled or ()) for bridge in on)
    names = ", ".join(bridge.address for bridge in on[:4]) + (", ..." if len(on) > 4 else "")
    got = f"on at {len(on)} of {len(bridges)} bridges ({names}); {redirect} of them redirect requests"
    if gpus < 2:
        return ok(ACS, f"{got}; one GPU has no peers")
    return Finding(
        ACS,
        "warning",
        got,
        "SrcValid- on the bridges above the GPUs",
        "if P2P checks hang or fail: turn ACS off in the BIOS or with setpci (NCCL's guide, PCI Access Control "
        "Services), or set NCCL_P2P_DISABLE=1; on a rented host choose another",
        "interconnect",
    )
