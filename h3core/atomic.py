"""Files and folders that are whole or absent: made under a temporary name, flushed to the disk, then renamed.

This is the one place where h3core decides what may be written where. A target is looked at twice: before any work is
done for it, and again just before the rename, because minutes may have passed.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Final

KINDS: Final = {
    stat.S_IFREG: "a regular file",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
}
"""What may stand where output should go, in words; anything else is a device."""

UNABLE: Final = (errno.EINVAL, errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EBADF, errno.ENOSYS)
"""How a file system says that it cannot flush folders. A failing disk says EIO, which is an error."""


class OutputError(ValueError):
    """An output that may not be written. Its message says what was found, what was expected and what to do."""


def check_target(path: Path, *, force: bool) -> None:
    """Refuse a target that cannot be written as a plain file. Raises `OutputError`.

    Its folder must exist and be writable. Only a regular file may be replaced, and only with `force`: a rename over a
    device, a pipe or a link that leads nowhere would succeed and take away what never was an output. A link to a
    regular file counts as one; it is the link that is replaced, not what it points to.
    """
    _check_parent(path)
    mode = _mode(path)
    if mode is None:
        return
    if not stat.S_ISREG(mode):
        raise OutputError(
            f"output {path}: got {_kind(mode)}, expected a regular file or no file yet; choose another name"
        )
    if not force:
        raise OutputError(f"output {path}: exists; choose another name, or --force to replace it")


def check_folder_target(path: Path, *, force: bool, replaceable: Callable[[str], bool]) -> None:
    """Refuse a target that cannot be written as a folder. Raises `OutputError`.

    With `force` an existing folder may be replaced where it holds nothing but regular files with a `replaceable` name:
    `--force` with a mistyped path must not delete somebody's home. A link to a folder is never replaced.
    """
    _check_parent(path)
    mode = _mode(path)
    if mode is None:
        return
    if path.is_symlink() or not stat.S_ISDIR(mode):
        kind = "a symbolic link" if path.is_symlink() else _kind(mode)
        raise OutputError(f"output {path}: got {kind}, expected a folder or none yet; choose another name")
    if not force:
        raise OutputError(f"output {path}: exists; choose another name, or --force to replace it")
    for item in sorted(path.iterdir()):
        if not replaceable(item.name) or not stat.S_ISREG(item.lstat().st_mode):
            raise OutputError(
                f"output {path}: holds {item.name}, expected only files of such an output; not replacing it"
            )


def check_space(path: Path, needed: int) -> None:
    """Refuse to start what cannot be finished: `needed` bytes at `path`. Raises `OutputError`.

    What `force` would replace does not count as free: it stays until the new output is complete.
    """
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        raise OutputError(f"output {path}: not enough space in {path.parent}: {free:,} bytes free, {needed:,} needed")


@contextmanager
def new_file(path: Path, *, force: bool, needed: int = 0) -> Iterator[FileIO]:
    """Give an open file to fill with `write_all`; on success it becomes `path`, on any failure it is removed.

    `needed` are the bytes that will be written, where that is worth a look at the free space. The file has the
    permissions of any new file. Raises as `check_target` and `check_space` do, and `OSError` where the system refuses.
    """
    check_target(path, force=force)
    check_space(path, needed)
    temporary = _beside(path)
    try:
        with flushed_file(temporary) as file:
            yield file
        check_target(path, force=force)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _flush_folder(path.parent)


@contextmanager
def new_folder(path: Path, *, force: bool, replaceable: Callable[[str], bool], needed: int = 0) -> Iterator[Path]:
    """Give an empty folder to fill with `flushed_file`s; on success it becomes `path`, on any failure it is removed.

    An older folder is replaced as a whole. Raises as `check_folder_target` and `check_space` do, and `OSError`.
    """
    check_folder_target(path, force=force, replaceable=replaceable)
    check_space(path, needed)
    temporary = _beside(path)
    try:
        temporary.mkdir()
        yield temporary
        _flush_folder(temporary)
        check_folder_target(path, force=force, replaceable=replaceable)
        _replace_folder(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _flush_folder(path.parent)


@contextmanager
def flushed_file(path: Path) -> Iterator[FileIO]:
    """A new file that is on the disk, not only in memory, when the block ends. Removing a failed one is the caller's.

    Raises `FileExistsError` where something stands at `path`.
    """
    # Unbuffered: what is left in a buffer would be written once more while a failure, or Ctrl-C, cleans up.
    with path.open("xb", buffering=0) as file:
        yield file
        os.fsync(file.fileno())


def write_all(file: FileIO, data: bytes | memoryview) -> None:
    """Write all of `data`, of which an unbuffered file may take less at once."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def write_text(path: Path, text: str, *, force: bool) -> None:
    """Write `text` as UTF-8. Raises as `new_file` does."""
    with new_file(path, force=force) as file:
        write_all(file, text.encode())


def free_name(path: Path) -> Path:
    """`path`, or where something stands there, the first of `name-1.ext`, `name-2.ext` ... that is free."""
    number, candidate = 0, path
    while candidate.exists() or candidate.is_symlink():
        number += 1
        candidate = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return candidate


def _check_parent(path: Path) -> None:
    if not path.parent.is_dir():
        raise OutputError(f"output {path}: got no folder {path.parent}, expected it to exist; create it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OutputError(f"output {path}: got a folder {path.parent} that may not be written to; choose another one")


def _mode(path: Path) -> int | None:
    """The mode of what `path` leads to; None where there is nothing, not even a link."""
    try:
        return path.stat().st_mode
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP) and path.is_symlink():
            raise OutputError(f"output {path}: got a symbolic link that leads nowhere; remove it first") from None
        if error.errno == errno.ENOENT:
            return None
        raise


def _kind(mode: int) -> str:
    return KINDS.get(stat.S_IFMT(mode), "a device")


def _beside(path: Path) -> Path:
    # In the same folder, since a rename works within one file system only. Not derived from the target's name, which
    # may already be as long as a name can be. Not tempfile.mkstemp either: its files are readable by their owner
    # alone, a rename would keep that, and the umask cannot be read without changing it for all threads.
    return path.parent / f".h3core-{secrets.token_hex(8)}.partial"


def _replace_folder(temporary: Path, path: Path) -> None:
    """Rename `temporary` to `path`; an existing folder steps aside first and comes back if that fails."""
    if not path.exists():
        temporary.rename(path)
        return
    aside = _beside(path)
    path.rename(aside)
    try:
        temporary.rename(path)
    except BaseException:
        aside.rename(path)
        raise
    shutil.rmtree(aside)


def _flush_folder(folder: Path) -> None:
    """Flush the names in a folder: without it a power cut may lose a rename although the data is safe."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in UNABLE:
            raise
