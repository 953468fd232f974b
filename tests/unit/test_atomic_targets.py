"""Targets: what may be written where, refused before any work is done for it.

A pass means: folders, devices, fifos and links that lead nowhere are never written to, `force` replaces regular files
and folders of known content alone, and a refusal says what was got. Run: pytest tests/unit/test_atomic_targets.py
"""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from h3core.atomic import (
    OutputError,
    check_folder_target,
    check_space,
    check_target,
    free_name,
    new_file,
    new_folder,
    write_all,
    write_text,
)
from tests.unit.folders import folder_of_mode, listing

# --- files -------------------------------------------------------------------------------------------------------


def refused(path: Path, *, force: bool) -> str:
    """The message of the refusal, which both doors must give, without touching the target's folder."""
    with pytest.raises(OutputError) as checked:
        check_target(path, force=force)
    with pytest.raises(OutputError) as written:
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
    assert "got a folder, expected a regular file" in refused(tmp_path / "out", force=force)
    assert listing(tmp_path) == ["out"]


@pytest.mark.parametrize("force", [False, True])
def test_a_fifo_is_refused_without_waiting_for_a_reader(tmp_path: Path, force: bool) -> None:
    os.mkfifo(tmp_path / "out")
    assert "got a named pipe, expected a regular file" in refused(tmp_path / "out", force=force)
    assert stat.S_ISFIFO((tmp_path / "out").stat().st_mode)
    assert listing(tmp_path) == ["out"]


@pytest.mark.parametrize("force", [False, True])
def test_a_device_is_refused(force: bool) -> None:
    before = os.stat(os.devnull)
    assert "got a device, expected a regular file" in refused(Path(os.devnull), force=force)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    assert os.stat(os.devnull).st_ino == before.st_ino


@pytest.mark.parametrize("force", [False, True])
def test_a_link_to_a_device_is_refused(tmp_path: Path, force: bool) -> None:
    (tmp_path / "out").symlink_to(os.devnull)
    assert "got a device, expected a regular file" in refused(tmp_path / "out", force=force)


@pytest.mark.parametrize("force", [False, True])
def test_a_link_to_nothing_is_refused(tmp_path: Path, force: bool) -> None:
    (tmp_path / "out").symlink_to(tmp_path / "gone")
    assert "got a symbolic link that leads nowhere" in refused(tmp_path / "out", force=force)
    assert listing(tmp_path) == ["out"]


@pytest.mark.parametrize("force", [False, True])
def test_a_missing_folder_is_refused_and_not_made(tmp_path: Path, force: bool) -> None:
    out = tmp_path / "absent" / "out.txt"
    assert f"got no folder {out.parent}, expected it to exist" in refused(out, force=force)
    assert listing(tmp_path) == []


def test_a_file_where_the_folder_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "got no folder" in refused(tmp_path / "file" / "out.txt", force=False)


@pytest.mark.skipif(not hasattr(os, "setresuid"), reason="needs a system on which root can become nobody")
def test_a_folder_that_cannot_be_written_is_refused_before_any_work() -> None:
    with folder_of_mode(0o555) as folder:
        with pytest.raises(OutputError) as refusal:
            check_target(folder / "out.txt", force=False)
        assert str(folder) in str(refusal.value)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("to", ["out", "file/below"])
def test_a_link_in_a_circle_or_through_a_file_is_refused(tmp_path: Path, to: str, force: bool) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "out").symlink_to(tmp_path / to)
    assert "got a symbolic link that leads nowhere" in refused(tmp_path / "out", force=force)
    assert listing(tmp_path) == ["file", "out"]


def test_a_link_to_a_file_is_replaced_and_the_file_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("older")
    (tmp_path / "out").symlink_to("file")
    assert "exists" in refused(tmp_path / "out", force=False)
    write_text(tmp_path / "out", "newer", force=True)
    assert not (tmp_path / "out").is_symlink()
    assert [(tmp_path / name).read_text() for name in ("file", "out")] == ["older", "newer"]


def test_a_disk_too_full_is_refused_with_got_and_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9000, 6000, 3000))
    check_space(tmp_path / "out", 3000)
    with new_file(tmp_path / "out", force=False, needed=3000) as file:
        write_all(file, b"x")
    with (
        pytest.raises(OutputError, match="3,000 bytes free, 3,001 needed"),
        new_file(tmp_path / "more", force=False, needed=3001),
    ):
        raise AssertionError("work was done for it")
    with (
        pytest.raises(OutputError, match="3,000 bytes free, 3,001 needed"),
        new_folder(tmp_path / "more", force=False, replaceable=text_file, needed=3001),
    ):
        raise AssertionError("work was done for it")
    assert listing(tmp_path) == ["out"]


# --- folders -----------------------------------------------------------------------------------------------------


def text_file(name: str) -> bool:
    return name.endswith(".txt")


def refused_folder(path: Path, *, force: bool) -> str:
    """The message of the refusal, which both doors must give, without touching the target's folder."""
    with pytest.raises(OutputError) as checked:
        check_folder_target(path, force=force, replaceable=text_file)
    with pytest.raises(OutputError) as written, new_folder(path, force=force, replaceable=text_file):
        raise AssertionError("work was done for it")
    assert str(written.value) == str(checked.value)
    assert str(path) in str(checked.value)
    return str(checked.value)


def test_an_existing_folder_is_refused_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a.txt").touch()
    assert "exists; choose another name, or --force" in refused_folder(tmp_path / "out", force=False)
    check_folder_target(tmp_path / "out", force=True, replaceable=text_file)


@pytest.mark.parametrize("kind", ["another name", "a folder", "a link"])
def test_a_folder_of_other_things_is_never_replaced(tmp_path: Path, kind: str) -> None:
    inside = tmp_path / "out" / ("a.jpg" if kind == "another name" else "a.txt")
    inside.parent.mkdir()
    if kind == "another name":
        inside.touch()
    elif kind == "a folder":
        inside.mkdir()
    else:
        (tmp_path / "b.txt").touch()
        inside.symlink_to(tmp_path / "b.txt")
    assert f"holds {inside.name}, expected only files of such" in refused_folder(tmp_path / "out", force=True)
    assert listing(tmp_path / "out") == [inside.name]


@pytest.mark.parametrize("force", [False, True])
def test_a_link_to_a_folder_is_never_replaced(tmp_path: Path, force: bool) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "out").symlink_to("folder")
    assert "got a symbolic link, expected a folder" in refused_folder(tmp_path / "out", force=force)


# --- free names --------------------------------------------------------------------------------------------------


def test_a_name_at_which_nothing_stands_is_free(tmp_path: Path) -> None:
    assert free_name(tmp_path / "out.txt") == tmp_path / "out.txt"


def test_the_first_free_number_is_taken_whatever_stands_before_it(tmp_path: Path) -> None:
    (tmp_path / "out.txt").touch()
    assert free_name(tmp_path / "out.txt") == tmp_path / "out-1.txt"
    (tmp_path / "out-1.txt").mkdir()
    (tmp_path / "out-2.txt").symlink_to("nowhere")
    (tmp_path / "out-4.txt").touch()
    assert free_name(tmp_path / "out.txt") == tmp_path / "out-3.txt"
    (tmp_path / "bare").touch()
    assert free_name(tmp_path / "bare") == tmp_path / "bare-1"
