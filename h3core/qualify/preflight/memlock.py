"""The limit on locked memory: NCCL locks what network cards and the GPUs read directly."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from h3core.qualify.preflight.finding import Finding, NotMeasured, Reading, Unreadable, amount, not_measured, ok

MEMLOCK: Final = "locked memory"


def read_memlock(root: Path) -> int | None:
    """Bytes of the soft limit in /proc/self/limits; None for no limit."""
    return parse_limits((root / "proc/self/limits").read_text())


def parse_limits(text: str) -> int | None:
    """The soft limit of "Max locked memory" in /proc/PID/limits, bytes; None for no limit. Raises `Unreadable`."""
    for line in text.splitlines():
        if line.startswith("Max locked memory"):
            soft = line.removeprefix("Max locked memory").split()[0]
            return None if soft == "unlimited" else int(soft)
    raise Unreadable("/proc/self/limits has no line for locked memory")


def judge_memlock(limit: Reading[int | None]) -> Finding:
    """NCCL's guide asks for no limit; one that is too low shows as a failed registration, at worst late in a run."""
    if isinstance(limit, NotMeasured):
        return not_measured(MEMLOCK, limit)
    if limit is None:
        return ok(MEMLOCK, "no limit")
    return Finding(
        MEMLOCK,
        "warning",
        f"limited to {amount(limit)}",
        "no limit, as NCCL's guide asks",
        "start the container with --ulimit memlock=-1, or raise it with ulimit -l",
        "stack",
    )
