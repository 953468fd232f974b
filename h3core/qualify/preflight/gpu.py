"""One GPU as NVML describes it, and PCI addresses in one spelling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from h3core.qualify.preflight.finding import NotMeasured, Reading

UNASKED: Final = NotMeasured("not asked")


@dataclass(frozen=True, slots=True)
class Ecc:
    """Uncorrectable memory errors: since the driver was loaded, and in the GPU's life."""

    volatile: int
    aggregate: int


@dataclass(frozen=True, slots=True)
class Remaps:
    """Rows of memory that were replaced after errors; `pending` ones wait for a reset, `failed`: no spare row left."""

    corrected: int
    uncorrected: int
    pending: bool
    failed: bool


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, or a MIG slice of one. `index` is its place in its list: NVML's, or CUDA's once visibility is resolved."""

    index: int
    name: str
    uuid: Reading[str]
    pci: Reading[str]
    """As `pci_address` spells it."""
    memory_bytes: Reading[int]
    capability: Reading[tuple[int, int]]
    mig: bool = False
    """A slice, not a whole GPU."""
    slices: tuple[Gpu, ...] = field(default=(), repr=False)
    """The slices of a GPU in MIG mode."""
    mig_enabled: bool = False
    clock_events: Reading[int] = UNASKED
    """NVML's bits of what holds the clocks down now."""
    ecc: Reading[Ecc] = UNASKED
    remaps: Reading[Remaps] = UNASKED


def pci_address(text: str) -> str:
    """Domain, bus and device in the kernel log's spelling: "00000000:C1:00.0" of NVML becomes "0000:c1:00"."""
    domain, bus, device = text.strip().lower().split(":")
    return f"{int(domain, 16):04x}:{int(bus, 16):02x}:{int(device.split('.')[0], 16):02x}"
