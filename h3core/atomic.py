"""Files that are either whole or absent: written under a temporary name, synced, then renamed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def check_target(path: Path, *, force: bool) -> None:
    """Refuse a target that cannot be written as a plain file, before any work is done for it.

    Raises `ValueError`: its folder is missing, it is not a regular file (a device, a folder, a fifo), or it
    exists and `force` is false.
    """
    if not path.parent.is_dir():
        raise ValueError(f"{path}: got no folder {path.parent}, expected it to exist")
    if path.exists() or path.is_symlink():
        if not path.is_file():
            raise ValueError(f"{path}: exists and is no regular file; choose another name")
        if not force:
            raise ValueError(f"{path}: exists; choose another name, or --force to replace it")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise ValueError(f"{path}: got a folder {path.parent} that may not be written to; choose another one")


@contextmanager
def replacing(path: Path, *, force: bool) -> Iterator[Path]:
    """Give a temporary path in the same folder; on success it becomes `path`, on any failure it is removed.

    Raises as `check_target` does, and `OSError` where the file system refuses.
    """
    check_target(path, force=force)
    handle, name = tempfile.mkstemp(prefix=".h3core.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str, *, force: bool) -> None:
    """Write `text` as UTF-8. Raises as `replacing` does."""
    with replacing(path, force=force) as temporary:
        temporary.write_text(text, encoding="utf-8")


def free_name(path: Path) -> Path:
    """`path`, or where something stands there, the first of `name-1.ext`, `name-2.ext` ... that is free."""
    number, candidate = 0, path
    while candidate.exists() or candidate.is_symlink():
        number += 1
        candidate = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return candidate


def sync(path: Path) -> None:
    """Flush a file or a folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
