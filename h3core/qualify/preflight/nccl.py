"""Which NCCL this process has loaded: the version it says, and the file it came from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from h3core.qualify.preflight.finding import Finding, NotMeasured, Reading, not_measured, ok

NCCL: Final = "NCCL"

_LIBRARY: Final = re.compile(r"(/\S*/libnccl\.so[.\d]*)(?: \(deleted\))?$")


def read_libraries(root: Path) -> tuple[str, ...]:
    """Paths of libnccl mapped into this process; empty where torch holds NCCL inside, or has none."""
    return libraries_in((root / "proc/self/maps").read_text(errors="replace"))


def libraries_in(maps: str) -> tuple[str, ...]:
    """Paths of libnccl in the text of /proc/PID/maps, each once."""
    found = (_LIBRARY.search(line) for line in maps.splitlines())
    return tuple(dict.fromkeys(match[1] for match in found if match))


def judge_nccl(version: Reading[str], libraries: Reading[tuple[str, ...]]) -> Finding:
    """Version and file. Two files at once: what a version says is then that of one of them."""
    if isinstance(version, NotMeasured):
        return not_measured(NCCL, version)
    if isinstance(libraries, NotMeasured):
        return not_measured(NCCL, f"{version}; its file: {libraries.reason}")
    if len(libraries) > 1:
        return Finding(
            NCCL,
            "warning",
            f"{version}; {len(libraries)} libraries are loaded: {', '.join(libraries)}",
            "one libnccl.so",
            "look at LD_PRELOAD and LD_LIBRARY_PATH: ranks may use either",
            "stack",
        )
    return ok(NCCL, f"{version}, {libraries[0] if libraries else 'no file of its own: linked into torch'}")
