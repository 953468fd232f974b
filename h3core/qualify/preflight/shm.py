"""/dev/shm: room for what NCCL shares between ranks of one host, and files that dead ranks left there.

Nothing is deleted here: another container may share this /dev/shm, and its processes cannot be seen from this one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from h3core.qualify.preflight.finding import Finding, NotMeasured, Reading, amount, not_measured, ok

SHM: Final = "/dev/shm"
STALE: Final = "stale NCCL files"

NEEDED_BYTES: Final = 1 << 30
"""Free bytes: NCCL's troubleshooting guide starts containers with --shm-size=1g; docker's default of 64 MiB is the
usual cause of "Error while creating shared memory segment"."""

_FILE: Final = re.compile(r"nccl-[^/\s]+")


@dataclass(frozen=True, slots=True)
class SharedFile:
    """A `nccl-*` file. `in_use` is None where some processes could not be looked at and none of the others has it."""

    name: str
    bytes: int
    in_use: bool | None


@dataclass(frozen=True, slots=True)
class Shm:
    """Bytes of the file system, and NCCL's files on it."""

    size: int
    free: int
    files: tuple[SharedFile, ...]
    unseen: int = 0
    """Processes whose files this user may not look at."""

    @property
    def stale(self) -> tuple[SharedFile, ...]:
        """Files that no living process has."""
        return tuple(file for file in self.files if file.in_use is False)


def held_by(process: Path) -> list[str]:
    """What a process of /proc has mapped and open, one path a line. Raises OSError where it may not be looked at.

    NCCL closes a file once it is mapped, so both are needed.
    """
    folder = process / "fd"
    mapped = (process / "maps").read_text(errors="replace").splitlines()
    return mapped + [os.readlink(folder / name) for name in os.listdir(folder)]


def read_shm(
    root: Path,
    statvfs: Callable[[Path], os.statvfs_result],
    look: Callable[[Path], Iterable[str]] = held_by,
) -> Shm:
    """Sizes of /dev/shm and its `nccl-*` files; /proc is looked through, with `look`, only where there are any."""
    folder = root / "dev/shm"
    space = statvfs(folder)
    sizes = {}
    for path in sorted(folder.glob("nccl-*")):
        try:
            sizes[path.name] = path.stat().st_size
        except FileNotFoundError:  # its owner has just ended
            continue
    held, unseen = names_held(root / "proc", look) if sizes else (frozenset[str](), 0)
    files = tuple(
        SharedFile(name, count, True if name in held else None if unseen else False) for name, count in sizes.items()
    )
    return Shm(space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize, files, unseen)


def names_held(proc: Path, look: Callable[[Path], Iterable[str]]) -> tuple[frozenset[str], int]:
    """Names of `nccl-*` files that living processes have open or mapped, and the number that could not be looked at."""
    held: set[str] = set()
    unseen = 0
    for process in proc.iterdir():
        if not process.name.isdigit():
            continue
        try:
            held |= names_in(look(process))
        except PermissionError:
            unseen += 1
        except OSError:
            continue  # ended meanwhile
    return frozenset(held), unseen


def names_in(lines: Iterable[str]) -> set[str]:
    """Names of NCCL's files in lines of /proc/PID/maps or in targets of /proc/PID/fd."""
    return {match[0] for line in lines for match in _FILE.finditer(line.rpartition("/")[2])}


def judge_shm(shm: Reading[Shm], *, gloo: bool) -> Finding:
    """Room for NCCL; the Gloo tier needs none."""
    if isinstance(shm, NotMeasured):
        return not_measured(SHM, shm)
    got = f"{amount(shm.free)} free of {amount(shm.size)}"
    if gloo:
        return ok(SHM, f"{got}; the Gloo tier needs none")
    if shm.free >= NEEDED_BYTES:
        return ok(SHM, got)
    action = "start the container with a larger one (docker run --shm-size=1g, or --ipc=host)"
    if shm.stale:
        action = f"remove the {len(shm.stale)} stale NCCL files that fill it (see below), or " + action
    return Finding(SHM, "problem", got, f"at least {amount(NEEDED_BYTES)} free for NCCL", action, "stack")


def judge_stale(shm: Reading[Shm]) -> Finding:
    """Files of ranks that were killed."""
    if isinstance(shm, NotMeasured):
        return not_measured(STALE, shm)
    if shm.stale:
        names = ", ".join(file.name for file in shm.stale[:3]) + (", ..." if len(shm.stale) > 3 else "")
        return Finding(
            STALE,
            "warning",
            f"{_sum(shm.stale)} in /dev/shm that no process has: {names}",
            "none",
            "remove /dev/shm/nccl-* while no NCCL job runs, here or in a container that shares this /dev/shm",
            "stack",
        )
    unsure = [file for file in shm.files if file.in_use is None]
    if unsure:
        return not_measured(
            STALE, f"{_sum(unsure)} in /dev/shm; {shm.unseen} processes do not show whether they use it"
        )
    return ok(STALE, f"none; {len(shm.files)} in use" if shm.files else "none")


def _sum(files: Iterable[SharedFile]) -> str:
    listed = list(files)
    return f"{len(listed)} nccl-* file{'s' * (len(listed) != 1)}, {amount(sum(file.bytes for file in listed))},"
