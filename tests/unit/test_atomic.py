"""Output files and folders are whole or absent.

A pass means: no failure leaves a half-written file or a temporary one, what exists survives unless it was to be
replaced, the disk has the data before the name, and permissions are those of any new file.
Run: pytest tests/unit/test_atomic.py
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from h3core.atomic import OutputError, flushed_file, new_file, new_folder, write_all, write_text
from tests.unit.folders import folder_of_mode, listing

# --- whole or absent ---------------------------------------------------------------------------------------------


def test_a_file_appears_whole_and_alone(tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    with new_file(out, force=False) as file:
        write_all(file, b"who")
        assert not out.exists(), "the name is taken only at the end"
        assert Path(str(file.name)).parent == tmp_path, "a rename works within one file system only"
        write_all(file, b"le")
    assert out.read_bytes() == b"whole"
    assert listing(tmp_path) == ["out.txt"]


@pytest.mark.parametrize("error", [RuntimeError, OSError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("force", [False, True])
def test_nothing_is_left_of_a_failure(tmp_path: Path, error: type[BaseException], force: bool) -> None:
    def fail() -> None:
        with new_file(tmp_path / "out.txt", force=force) as file:
            write_all(file, b"half")
            raise error

    with pytest.raises(error):
        fail()
    assert listing(tmp_path) == []


def test_a_failure_leaves_the_older_file_as_it_was(tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    out.write_text("older")

    def fail() -> None:
        with new_file(out, force=True) as file:
            write_all(file, b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert out.read_text() == "older"
    assert listing(tmp_path) == ["out.txt"]


def test_a_failure_of_the_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_text(tmp_path / "out.txt", "text", force=False)
    assert listing(tmp_path) == []


def test_a_writer_that_takes_its_file_away_fails_and_leaves_nothing(tmp_path: Path) -> None:
    def lose() -> None:
        with new_file(tmp_path / "out.txt", force=False) as file:
            Path(str(file.name)).unlink()

    with pytest.raises(FileNotFoundError):
        lose()
    assert listing(tmp_path) == []


def test_the_file_and_its_folder_are_synced_before_the_name_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    fsync = os.fsync

    def noted(handle: int) -> None:
        synced.append((stat.S_ISDIR(os.fstat(handle).st_mode), (tmp_path / "out.txt").exists()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    write_text(tmp_path / "out.txt", "text", force=False)
    assert synced == [(False, False), (True, True)], "(is a folder, has its name): the file, then the rename"


def test_text_is_utf8(tmp_path: Path) -> None:
    write_text(tmp_path / "out.txt", "3 µs ≤ 4 µs\n", force=False)
    assert (tmp_path / "out.txt").read_bytes() == "3 µs ≤ 4 µs\n".encode()


def test_a_name_as_long_as_file_systems_take_is_written(tmp_path: Path) -> None:
    out = tmp_path / ("n" * 255)
    out.touch()  # the file system takes it
    write_text(out, "text", force=True)
    assert out.read_text() == "text"
    assert len(listing(tmp_path)) == 1


def test_a_file_that_takes_little_at_once_is_written_whole() -> None:
    taken = bytearray()

    class Slow:
        def write(self, data: memoryview) -> int:
            taken.extend(data[:3])
            return min(3, len(data))

    slow: Any = Slow()
    write_all(slow, b"a longer text")
    assert taken == b"a longer text"


# --- while it is written -----------------------------------------------------------------------------------------


def test_a_file_that_came_into_being_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    with pytest.raises(OutputError, match="exists"), new_file(out, force=False):
        out.write_text("somebody else's")
    assert out.read_text() == "somebody else's"
    assert listing(tmp_path) == ["out.txt"]


def test_a_target_that_became_something_else_meanwhile_is_not_replaced_by_force(tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    out.touch()
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OutputError, match="got a named pipe"), new_file(out, force=True):
        (tmp_path / "fifo").rename(out)
    assert stat.S_ISFIFO(out.stat().st_mode)
    assert listing(tmp_path) == ["out.txt"]


# --- flushing folders --------------------------------------------------------------------------------------------


def failing_folders(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    fsync = os.fsync

    def fail(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", fail)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_flushes_no_folders_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    failing_folders(monkeypatch, number)
    write_text(tmp_path / "out.txt", "text", force=False)
    with new_folder(tmp_path / "folder", force=False, replaceable=any_name) as folder, flushed_file(folder / "a"):
        pass
    assert listing(tmp_path) == ["folder", "out.txt"]


def test_a_disk_that_fails_while_it_flushes_a_folder_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_folders(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        write_text(tmp_path / "out.txt", "text", force=False)
    assert (tmp_path / "out.txt").read_text() == "text", "it was renamed before"


@pytest.mark.skipif(not hasattr(os, "setresuid"), reason="needs a system on which root can become nobody")
def test_a_folder_that_may_be_written_but_not_read_is_no_failure() -> None:
    with folder_of_mode(0o333) as folder:
        write_text(folder / "out.txt", "text", force=False)
        assert (folder / "out.txt").read_text() == "text"


# --- folders -----------------------------------------------------------------------------------------------------


def any_name(name: str) -> bool:
    return True


def test_a_folder_appears_whole_and_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with umask(0o027), new_folder(out, force=False, replaceable=any_name) as folder:
        assert folder.parent == tmp_path, "a rename works within one file system only"
        for name in "ab":
            with flushed_file(folder / name) as file:
                write_all(file, name.encode())
        assert not out.exists(), "the name is taken only at the end"
    assert listing(tmp_path) == ["out"]
    assert [(out / name).read_text() for name in listing(out)] == ["a", "b"]
    assert stat.S_IMODE(out.stat().st_mode) == 0o750


@pytest.mark.parametrize("error", [RuntimeError, OSError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("older", [False, True])
def test_nothing_is_left_of_a_failed_folder_and_the_older_one_stays(
    tmp_path: Path, error: type[BaseException], older: bool
) -> None:
    if older:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "older").touch()

    def fail() -> None:
        with (
            new_folder(tmp_path / "out", force=older, replaceable=any_name) as folder,
            flushed_file(folder / "a") as file,
        ):
            write_all(file, b"half")
            raise error

    with pytest.raises(error):
        fail()
    assert listing(tmp_path) == (["out"] if older else [])
    assert not older or listing(tmp_path / "out") == ["older"]


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "older").touch()
    with new_folder(tmp_path / "out", force=True, replaceable=any_name) as folder:
        (folder / "newer").touch()
    assert listing(tmp_path) == ["out"]
    assert listing(tmp_path / "out") == ["newer"]


def test_a_folder_that_got_other_things_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with (
        pytest.raises(OutputError, match=r"holds b, .* not replacing it"),
        new_folder(out, force=True, replaceable="a".__eq__),
    ):
        (out / "b").touch()
    assert listing(tmp_path) == ["out"]
    assert listing(out) == ["b"]


def test_a_folder_and_all_in_it_are_flushed_before_the_name_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed = []
    fsync = os.fsync

    def noted(handle: int) -> None:
        flushed.append((stat.S_ISDIR(os.fstat(handle).st_mode), (tmp_path / "out").exists()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    with new_folder(tmp_path / "out", force=False, replaceable=any_name) as folder, flushed_file(folder / "a"):
        pass
    assert flushed == [(False, False), (True, False), (True, True)], "the file, its folder, then the rename"


# --- permissions -------------------------------------------------------------------------------------------------


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664), (0o027, 0o640)])
def test_permissions_are_those_of_any_new_file(tmp_path: Path, mask: int, mode: int) -> None:
    out = tmp_path / "out.txt"
    with umask(mask):
        write_text(out, "text", force=False)
        assert os.umask(mask) == mask, "the mask of the process is put back"
    assert stat.S_IMODE(out.stat().st_mode) == mode


def test_permissions_are_so_from_the_start_and_the_mask_of_other_threads_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with umask(0o027):
        monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("the umask belongs to the whole process"))
        with new_file(tmp_path / "out.txt", force=False) as file:
            assert stat.S_IMODE(os.fstat(file.fileno()).st_mode) == 0o640
        monkeypatch.undo()
