"""What NVML says of the health of each GPU: clocks held down, memory errors, rows waiting to be replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from h3core.qualify.preflight.finding import (
    Finding,
    NotMeasured,
    Reading,
    State,
    gpu_names,
    not_measured,
)
from h3core.qualify.preflight.gpu import Ecc, Gpu, Remaps

CLOCKS: Final = "clock events"
ECC: Final = "ECC errors"
REMAPS: Final = "row remapping"
T = TypeVar("T")
Said = tuple[State, str]

CLOCK_EVENTS: Final[dict[int, Said]] = {
    0x001: ("ok", "idle"),
    0x002: ("ok", "clocks set by an application"),
    0x004: ("ok", "software power cap"),
    0x008: ("problem", "hardware slowdown"),
    0x010: ("ok", "sync boost"),
    0x020: ("warning", "software thermal slowdown"),
    0x040: ("problem", "hardware thermal slowdown"),
    0x080: ("problem", "power brake"),
    0x100: ("ok", "display clocks"),
    0x200: ("ok", "board limit"),
    0x400: ("ok", "reliability voltage"),
}
"""nvml.h, nvmlClocksEventReason*. A power cap is how a card under load should behave."""

_WORST_FIRST: Final[tuple[State, ...]] = ("problem", "warning", "not measured", "ok")


def judge_clocks(gpus: Reading[tuple[Gpu, ...]]) -> Finding:
    """What holds the clocks down at this moment, before any load of ours."""
    return _each(
        CLOCKS,
        gpus,
        lambda gpu: gpu.clock_events,
        clock_events,
        "no slowdown by hardware",
        "check cooling and power of this host, or choose another: a GPU below its clocks gives times that mean nothing",
    )


def clock_events(bits: int) -> Said:
    """The worst state among the bits of NVML's clock-event reasons, and all of them in words."""
    said: list[Said] = [
        CLOCK_EVENTS.get(1 << i, ("warning", f"unknown reason {1 << i:#x}")) for i in range(64) if bits >> i & 1
    ]
    worst: State = min((state for state, _ in said), key=_WORST_FIRST.index, default="ok")
    return worst, ", ".join(text for _, text in said) or "none"


def judge_ecc(gpus: Reading[tuple[Gpu, ...]]) -> Finding:
    """Memory errors that ECC could not correct."""

    def judge(ecc: Ecc) -> Said:
        text = f"{ecc.volatile} uncorrectable since the driver was loaded, {ecc.aggregate} in its life"
        return "problem" if ecc.volatile else "warning" if ecc.aggregate else "ok", text

    return _each(
        ECC,
        gpus,
        lambda gpu: gpu.ecc,
        judge,
        "no uncorrectable error",
        "reset the GPU or give this host back; where errors return, the GPU is to be replaced",
    )


def judge_remaps(gpus: Reading[tuple[Gpu, ...]]) -> Finding:
    """Rows that failed: replaced ones are history, pending ones are still in use."""

    def judge(rows: Remaps) -> Said:
        if rows.failed:
            return "problem", "a row could not be replaced"
        if rows.pending:
            return "problem", "a faulty row waits for a reset to be replaced"
        return "ok", f"none pending, {rows.corrected + rows.uncorrected} replaced before"

    return _each(
        REMAPS,
        gpus,
        lambda gpu: gpu.remaps,
        judge,
        "no row pending or failed",
        "reset the GPU (a reboot of the host does) or give this host back; a failed one is to be replaced",
    )


def _each(
    name: str,
    gpus: Reading[tuple[Gpu, ...]],
    read: Callable[[Gpu], Reading[T]],
    judge: Callable[[T], Said],
    expected: str,
    action: str,
) -> Finding:
    """One finding of all GPUs: the worst state, and the GPUs that are in it.

    A GPU that did not answer is worse than one that is well: the finding is then "not measured", not "ok".
    """
    if isinstance(gpus, NotMeasured):
        return not_measured(name, gpus)
    groups: dict[Said, list[int]] = {}
    for gpu in gpus:
        value = read(gpu)
        said: Said = ("not measured", value.reason) if isinstance(value, NotMeasured) else judge(value)
        groups.setdefault(said, []).append(gpu.index)
    if not groups:
        return not_measured(name, "no GPU is visible")
    worst = min((state for state, _ in groups), key=_WORST_FIRST.index)
    got = "; ".join(f"{gpu_names(indices)}: {text}" for (state, text), indices in groups.items() if state == worst)
    if worst in ("ok", "not measured"):
        return Finding(name, worst, got)
    return Finding(name, worst, got, expected, action, "hardware")
