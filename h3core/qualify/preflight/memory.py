"""Host memory that loading can take: the least of what the host has left and what the container's limit leaves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from h3core.qualify.preflight.cgroup import UNLIMITED_V1, groups, number
from h3core.qualify.preflight.finding import (
    Finding,
    NotMeasured,
    Reading,
    Unreadable,
    amount,
    attempt,
    not_measured,
    ok,
)

MEMORY: Final = "host memory"

_FILES: Final = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes. `left_by_limit`: what the control group still allows; None where there is no limit."""

    total: int
    available: int
    left_by_limit: Reading[int | None]
    limit: int | None = None
    """The limit that leaves the least."""

    @property
    def usable(self) -> int:
        """What can be taken; an upper bound where the limit was not measured."""
        left = self.left_by_limit
        return self.available if left is None or isinstance(left, NotMeasured) else min(self.available, left)


def read_memory(root: Path) -> Memory:
    """From /proc/meminfo and the control group's files."""
    values = parse_meminfo((root / "proc/meminfo").read_text())
    found = attempt(lambda: _tightest(root))
    if isinstance(found, NotMeasured):
        return Memory(values["MemTotal"], values["MemAvailable"], found)
    left, limit = found if found is not None else (None, None)
    return Memory(values["MemTotal"], values["MemAvailable"], left, limit)


def parse_meminfo(text: str) -> dict[str, int]:
    """Bytes by name. Raises `Unreadable` where MemTotal or MemAvailable is missing."""
    values = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        fields = rest.split()
        if fields and fields[0].isdigit():
            values[name] = int(fields[0]) * (1024 if fields[1:] == ["kB"] else 1)
    if "MemTotal" not in values or "MemAvailable" not in values:
        raise Unreadable("/proc/meminfo has no MemTotal and MemAvailable")
    return values


def _tightest(root: Path) -> tuple[int, int] | None:
    """(bytes left, limit) of the group that leaves the least; None where no group has a limit."""
    version, folders = groups(root, "memory")
    limit_file, usage_file, cache = _FILES[version]
    found = []
    for folder in folders:
        limit = number(folder, limit_file)
        usage = number(folder, usage_file)
        if limit is None or usage is None or limit >= UNLIMITED_V1:
            continue
        stat = attempt(lambda folder=folder: (folder / "memory.stat").read_text())  # type: ignore[misc]
        counts = dict(line.split(maxsplit=1) for line in stat.splitlines()) if isinstance(stat, str) else {}
        # The kernel gives up cached pages of files before it refuses memory.
        found.append((max(0, limit - usage + int(counts.get(cache, 0))), limit))
    return min(found, default=None)


def judge_memory(memory: Reading[Memory], needed_bytes: int | None) -> Finding:
    """What is there against `needed_bytes`, what loading takes on this host in all ranks together (None: not known)."""
    if isinstance(memory, NotMeasured):
        return not_measured(MEMORY, memory)
    left = memory.left_by_limit
    got = f"{amount(memory.usable)} available of {amount(memory.total)}"
    if memory.limit is not None:
        got += f", limited to {amount(memory.limit)} by the control group"
    if needed_bytes is not None and memory.usable < needed_bytes:
        return Finding(
            MEMORY,
            "problem",
            got,
            f"at least {amount(needed_bytes)} for loading",
            "choose a host or container with more memory (RunPod: minRamPerGpu), or fewer ranks; the kernel would kill "
            "a rank, and its peers would wait",
            "stack",
        )
    if isinstance(left, NotMeasured):
        return not_measured(MEMORY, f"{got} on the host; the container's limit: {left.reason}")
    return ok(MEMORY, got + (f"; loading takes {amount(needed_bytes)}" if needed_bytes is not None else ""))
