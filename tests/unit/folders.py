"""Folders in tests of what is written: what they hold, and ones that may not be written to."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def listing(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@contextmanager
def folder_of_mode(mode: int) -> Iterator[Path]:
    """A folder that this process may use as `mode` says; root, whom no mode stops, becomes nobody."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(mode)
        root = os.getuid() == 0
        try:
            if root:
                os.setresuid(65534, 65534, 0)
            yield folder
        finally:
            if root:
                os.setresuid(0, 0, 0)
            folder.chmod(0o755)
