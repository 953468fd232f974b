"""Output files are whole or absent, and a target that cannot be one is refused before any work is done for it.

A pass means: no failure leaves a half-written file or a temporary one, an existing file survives unless it was to be
replaced, and folders, devices, fifos and dangling links are never written to.
Run: pytest tests/unit/test_atomic.py
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from h3core.atomic import check_target, replacing, write_text


def listing(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


# --- whole or absent ---------------------------------------------------------------------------------------------


def test_a_file_appears_whole_and_alone(tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    with replacing(out, force=False) as temporary:
        temporary.write_bytes(b"half")
        assert not out.exists(), "the name is taken only at the end"
        assert temporary.parent == tmp_path, "a rename works within one file system only"
        temporary.write_bytes(b"whole")
    assert out.read_bytes() == b"whole"
    assert listing(tmp_path) == ["out.txt"]


@pytest.mark.parametrize("error", [RuntimeError, OSError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("force", [False, True])
def test_nothing_is_left_of_a_failure(tmp_path: Path, error: type[BaseException], force: bool) -> None:
    def fail() -> None:
        with replacing(tmp_path / "out.txt", force=force) as temporary:
            temporary.write_bytes(b"half")
            raise error

    with pytest.raises(error):
        fail()
    assert listing(tmp_path) == []


def test_a_failure_leaves_the_older_file_as_it_was(tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    out.write_text("older")

    def fail() -> None:
        with replacing(out, force=True) as temporary:
            temporary.write_text("half")
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
        with replacing(tmp_path / "out.txt", force=False) as temporary:
            temporary.unlink()

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


def test_nobody_else_reads_the_file_while_it_is_written(tmp_path: Path) -> None:
    with umask(0), replacing(tmp_path / "out.txt", force=False) as temporary:
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600


# --- targets -----------------------------------------------------------------------------------------------------


def refused(path: Path, *, force: bool) -> str:
    """The message of the refusal, which both doors must give, without touching the target's folder."""
    with pytest.raises(ValueError) as checked:
        check_target(path, force=force)
    with pytest.raises(ValueError) as written:
        write_text(path, "text", force=force)
    assert str(written.value) == str(checked.value)
    assert str(path) in str(checked.value)
    return str(checked.value)


def test_an_existing_file_is_refused_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out.txt"
    out.write_text("older")
    assert "exists" in refused(out, force=False)
    assert "--force" in refused(out, force=False)
    assert out.read_text() == "older"
    check_target(out, force=True)
    write_text(out, "newer", force=True)
    assert out.read_text() == "newer"
    assert listing(tmp_path) == ["out.txt"]


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_is_refused(tmp_path: Path, force: bool) -> None:
    (tmp_path / "out").mkdir()
    assert "no regular file" in refused(tmp_path / "out", force=force)
    assert listing(tmp_path) == ["out"]


@pytest.mark.parametrize("force", [False, True])
def test_a_fifo_is_refused_without_waiting_for_a_reader(tmp_path: Path, force: bool) -> None:
    os.mkfifo(tmp_path / "out")
    assert "no regular file" in refused(tmp_path / "out", force=force)
    assert stat.S_ISFIFO((tmp_path / "out").stat().st_mode)
    assert listing(tmp_path) == ["out"]


@pytest.mark.parametrize("force", [False, True])
def test_a_device_is_refused(force: bool) -> None:
    before = os.stat(os.devnull)
    assert "no regular file" in refused(Path(os.devnull), force=force)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    assert os.stat(os.devnull).st_ino == before.st_ino


@pytest.mark.parametrize("force", [False, True])
def test_a_link_to_a_device_is_refused(tmp_path: Path, force: bool) -> None:
    (tmp_path / "out").symlink_to(os.devnull)
    assert "no regular file" in refused(tmp_path / "out", force=force)


@pytest.mark.parametrize("force", [False, True])
def test_a_link_to_nothing_is_refused(tmp_path: Path, force: bool) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "gone")
    assert "no regular file" in refused(tmp_path / "out", force=force)
    assert listing(tmp_path) == ["out"]


@pytest.mark.parametrize("force", [False, True])
def test_a_missing_folder_is_refused_and_not_made(tmp_path: Path, force: bool) -> None:
    out = tmp_path / "absent" / "out.txt"
    assert f"got no folder {out.parent}, expected it to exist" in refused(out, force=force)
    assert listing(tmp_path) == []


def test_a_file_where_the_folder_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "got no folder" in refused(tmp_path / "file" / "out.txt", force=False)


@contextmanager
def read_only_folder() -> Iterator[Path]:
    """A folder that this process may list and enter, but not write to; root, whom no mode stops, becomes nobody."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o555)
        root = os.getuid() == 0
        try:
            if root:
                os.setresuid(65534, 65534, 0)
            yield folder
        finally:
            if root:
                os.setresuid(0, 0, 0)
            folder.chmod(0o755)


@pytest.mark.skipif(not hasattr(os, "setresuid"), reason="needs a system on which root can become nobody")
def test_a_folder_that_cannot_be_written_is_refused_before_any_work() -> None:
    with read_only_folder() as folder:
        with pytest.raises((ValueError, OSError)) as refusal:
            check_target(folder / "out.txt", force=False)
        assert str(folder) in str(refusal.value)
