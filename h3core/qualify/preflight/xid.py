"""Xid events: what NVIDIA's driver wrote into the kernel's log about GPUs in trouble, and on which GPU.

Meanings are those of NVIDIA's "Xid Errors" catalog, in few words. A code that is not listed is shown, not guessed at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from h3core.qualify.preflight.finding import FaultClass, Finding, NotMeasured, Reading, not_measured, ok
from h3core.qualify.preflight.kernel_log import WRAPPED_AFTER_S, KernelLog, Xid

XID: Final = "Xid events"
OFF_THE_BUS: Final = 79
Kind = Literal["hardware", "interconnect", "noted", "program"]

MEANINGS: Final[Mapping[int, tuple[Kind, str]]] = {
    13: ("program", "exception in a kernel"),
    31: ("program", "access to memory that is not mapped"),
    32: ("program", "corrupted push buffer"),
    43: ("program", "a program's work was stopped"),
    44: ("program", "fault during a context switch"),
    45: ("program", "a program's channels were removed, after an earlier error or its end"),
    46: ("hardware", "GPU stopped processing"),
    48: ("hardware", "uncorrectable memory error (double-bit ECC)"),
    61: ("hardware", "internal microcontroller breakpoint"),
    62: ("hardware", "internal microcontroller halted"),
    63: ("noted", "a memory row or page was marked for replacement"),
    64: ("hardware", "a memory row or page could not be marked for replacement"),
    69: ("program", "illegal graphics class operation"),
    74: ("interconnect", "NVLink error"),
    79: ("hardware", "GPU has fallen off the bus"),
    92: ("hardware", "many correctable memory errors"),
    94: ("hardware", "uncorrectable memory error, contained: its program was ended"),
    95: ("hardware", "uncorrectable memory error, not contained"),
    109: ("program", "context switch timeout"),
    119: ("hardware", "GPU's firmware (GSP) did not answer"),
    120: ("hardware", "error in the GPU's firmware (GSP)"),
    136: ("interconnect", "link training failed"),
    140: ("hardware", "uncorrectable memory error, not recovered"),
    143: ("hardware", "GPU failed to initialise"),
    154: ("noted", "the action that recovers the GPU has changed"),
}
"""Code -> kind and meaning. "noted": no fault by itself; "program": most often a program's own error."""


def judge_xids(log: Reading[KernelLog], visible: Mapping[str, int], listed: frozenset[str]) -> Finding:
    """Events since boot, as far back as the log goes.

    `visible`: PCI address -> CUDA's index of the GPUs under test; `listed`: addresses of all GPUs that NVML lists.
    A hardware event on a GPU under test is a problem, on another one a warning (it may be another tenant's), except
    79: a GPU that fell off the bus is in no list any more.
    """
    if isinstance(log, NotMeasured):
        return not_measured(XID, log)
    if not log.xids:
        return _none(log)
    counts: dict[tuple[str, int], list[Xid]] = {}
    for xid in log.xids:
        counts.setdefault((xid.pci, xid.code), []).append(xid)
    bad: dict[FaultClass, list[str]] = {}
    rest: list[str] = []
    for (pci, code), events in counts.items():
        kind, meaning = MEANINGS.get(code, ("unknown", "not in our list; see NVIDIA's Xid catalog"))
        where = f"GPU {visible[pci]} ({pci})" if pci in visible else f"{pci}, no GPU under test"
        times = f"{len(events)} times, last " if len(events) > 1 else ""
        text = f"Xid {code} on {where}: {meaning}, {times}{_when(events[-1].seconds, log.uptime)}"
        ours = pci in visible or (code == OFF_THE_BUS and pci not in listed)
        if ours and kind in ("hardware", "interconnect"):
            bad.setdefault("hardware" if kind == "hardware" else "interconnect", []).append(text)
        else:
            rest.append(text)
    if bad:
        fault: FaultClass = "hardware" if "hardware" in bad else "interconnect"
        return Finding(
            XID,
            "problem",
            "; ".join([*bad.get("hardware", ()), *bad.get("interconnect", ()), *rest]),
            "no hardware event since boot",
            "give this host back, or have that GPU reset and tested: what it computes cannot be trusted",
            fault,
        )
    return Finding(
        XID,
        "warning",
        "; ".join(rest),
        "no event since boot",
        "events of programs are most often their own; if they come back during this run, they are ours or the GPU's",
    )


def _none(log: KernelLog) -> Finding:
    """No line is good news only in a log that the driver writes to: gVisor's, and some pods', is not the host's."""
    if not log.names_driver and log.first <= WRAPPED_AFTER_S:
        return not_measured(XID, "the kernel log never names NVIDIA's driver: it is not the log of the GPUs' host")
    if log.first <= WRAPPED_AFTER_S:
        return ok(XID, f"none since boot ({log.lines} lines)")
    return ok(XID, f"none in {log.lines} lines, which begin {_when(log.first, log.uptime)}")


def _when(seconds: float, uptime: float | None) -> str:
    if uptime is None or uptime < seconds:
        return f"{seconds:.0f} s after boot"
    age = uptime - seconds
    for length, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if age >= length:
            return f"{age / length:.1f} {unit} ago"
    return f"{age:.0f} seconds ago"
