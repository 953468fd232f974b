"""Limits of the control group that this process is in, versions 1 and 2. A container's limits stand here alone:
/proc/meminfo and the number of CPUs are those of the host.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from h3core.qualify.preflight.finding import Unreadable

UNLIMITED_V1: Final = 1 << 60
"""Version 1 writes "no limit" as the largest multiple of a page that fits."""


def groups(root: Path, controller: str) -> tuple[int, list[Path]]:
    """The version (1 or 2) that limits `controller`, and the folders whose limits hold: the own group and those above.

    Inside a container the path may be the host's, of which only the top is mounted; what is not there is left out.
    Raises `Unreadable` where no control group is mounted, OSError where /proc/self/cgroup cannot be read.
    """
    base = root / "sys/fs/cgroup"
    version, path = parse_membership((root / "proc/self/cgroup").read_text(), controller)
    if version == 1:
        base = base / controller
    if not base.is_dir():
        raise Unreadable(f"{base} is not mounted")
    own = Path(path.lstrip("/"))
    folders = [base / part for part in (own, *own.parents)]
    # The root group of version 2 has no limit files at all; the folder then simply has none to read.
    return version, [folder for folder in dict.fromkeys(folders) if folder.is_dir()]


def parse_membership(text: str, controller: str) -> tuple[int, str]:
    """Version and path for `controller` in /proc/self/cgroup: lines "ID:CONTROLLERS:PATH", version 2's "0::PATH".

    On a host with both, version 1 limits what it lists. Raises `Unreadable` where neither is there.
    """
    unified = None
    for line in text.splitlines():
        identifier, names, path = line.split(":", 2)
        if controller in names.split(","):
            return 1, path
        if identifier == "0" and not names:
            unified = path
    if unified is None:
        raise Unreadable(f"/proc/self/cgroup lists no group for {controller}")
    return 2, unified


def number(folder: Path, name: str) -> int | None:
    """A limit or count in a file; None where there is no such file or it says "max"."""
    try:
        text = (folder / name).read_text().strip()
    except FileNotFoundError:
        return None
    return None if text == "max" else int(text)
