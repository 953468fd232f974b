"""CPUs that the ranks may use: how many this process is allowed, and how much time the container's quota gives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from h3core.qualify.preflight.cgroup import groups, number
from h3core.qualify.preflight.finding import Finding, NotMeasured, Reading, Unreadable, attempt, not_measured, ok

CPUS: Final = "CPUs"


@dataclass(frozen=True, slots=True)
class Cpus:
    """Logical CPUs of the affinity mask, and the quota in CPUs (None: no quota)."""

    allowed: tuple[int, ...]
    quota: Reading[float | None]

    @property
    def usable(self) -> float:
        """CPUs' worth of time; an upper bound where the quota was not measured."""
        quota = self.quota
        return len(self.allowed) if quota is None or isinstance(quota, NotMeasured) else min(len(self.allowed), quota)


def read_cpus(root: Path) -> Cpus:
    """From /proc/self/status and the control group's files."""
    return Cpus(parse_allowed((root / "proc/self/status").read_text()), attempt(lambda: _quota(root)))


def parse_allowed(text: str) -> tuple[int, ...]:
    """CPU numbers of the line "Cpus_allowed_list: 0-3,8" in /proc/PID/status. Raises `Unreadable` without it."""
    for line in text.splitlines():
        name, _, ranges = line.partition(":")
        if name == "Cpus_allowed_list":
            pairs = [part.strip().partition("-") for part in ranges.split(",")]
            return tuple(cpu for low, _, high in pairs for cpu in range(int(low), int(high or low) + 1))
    raise Unreadable("/proc/self/status has no Cpus_allowed_list")


def _quota(root: Path) -> float | None:
    """The smallest quota of the own group and those above, in CPUs; None for none."""
    version, folders = groups(root, "cpu")
    quotas = []
    for folder in folders:
        if version == 1:
            quota, period = number(folder, "cpu.cfs_quota_us"), number(folder, "cpu.cfs_period_us")
            if quota is not None and period and quota > 0:  # -1: no quota
                quotas.append(quota / period)
        elif (folder / "cpu.max").is_file():
            first, _, second = (folder / "cpu.max").read_text().partition(" ")
            if first != "max":
                quotas.append(int(first) / int(second))
    return min(quotas, default=None)


def judge_cpus(cpus: Reading[Cpus], world: int | None) -> Finding:
    """Too few CPUs make nothing wrong, only slow: ranks that take turns come late to every collective."""
    if isinstance(cpus, NotMeasured):
        return not_measured(CPUS, cpus)
    quota = cpus.quota
    got = f"{len(cpus.allowed)} allowed"
    if quota is not None and not isinstance(quota, NotMeasured):
        got += f", a quota of {quota:g}"
    if world is not None and cpus.usable < world:
        return Finding(
            CPUS,
            "warning",
            f"{got} for {world} ranks",
            f"at least {world}",
            "give the container more CPUs; until then ranks take turns, times mean little and timeouts come sooner",
            "stack",
        )
    if isinstance(quota, NotMeasured):
        return not_measured(CPUS, f"{got}; the container's quota: {quota.reason}")
    return ok(CPUS, got)
