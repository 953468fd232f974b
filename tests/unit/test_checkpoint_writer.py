"""The checkpoint writer: the library's bytes, one tensor at a time, and all of a file or nothing.

A pass means: what this writer makes is what the safetensors library makes, down to the header's padding, and a run
that fails leaves the disk as it was. Run: pytest tests/unit/test_checkpoint_writer.py
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from h3core.atomic import OutputError
from h3core.checkpoint import writer
from h3core.checkpoint.errors import CheckpointError
from h3core.checkpoint.layout import TensorSpec
from h3core.checkpoint.safetensors_format import file_bytes
from h3core.checkpoint.writer import write_file
from tests.unit.tensor_makers import disk_of, existing, failing, fifo, folder, link, never, producer, small

# --- bytes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_file_equals_the_one_of_the_safetensors_library(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    specs, tensors = small()
    save_file(tensors, tmp_path / "theirs", metadata=metadata)
    size = write_file(tmp_path / "ours", specs, producer(tensors), metadata=metadata)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert size == file_bytes(specs, metadata) == (tmp_path / "ours").stat().st_size


def test_a_file_of_many_writes_equals_the_one_of_the_safetensors_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "WRITE_BYTES", 7)
    specs, tensors = small()
    save_file(tensors, tmp_path / "theirs")
    steps: list[int] = []
    write_file(tmp_path / "ours", specs, producer(tensors), progress=steps.append)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert sum(steps) == file_bytes(specs)
    assert len(steps) > len(specs)


def test_a_tensor_that_is_not_contiguous_is_written_in_the_order_of_its_indices(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).view(2, 3).t()
    write_file(tmp_path / "x", {"x": TensorSpec("F32", (3, 2))}, lambda name, spec: tensor)
    with safe_open(tmp_path / "x", "pt") as file:
        assert torch.equal(file.get_tensor("x"), tensor)


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    made: list[weakref.ref[np.ndarray]] = []

    def produce(name: str, spec: TensorSpec) -> Tensor:
        assert [ref for ref in made if ref() is not None] == []
        # A tensor object may be gone while its memory is not; the array under it lives as long as the memory.
        memory = np.ones(spec.shape, dtype=np.float32)
        made.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    write_file(tmp_path / "x", {name: TensorSpec("F32", (100,)) for name in "abc"}, produce)
    assert len(made) == 3


def test_the_file_is_readable_by_those_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        specs, tensors = small()
        write_file(tmp_path / "x", specs, producer(tensors))
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o644


# --- what the producer gives -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.bfloat16), torch.zeros(6)])
def test_a_tensor_of_another_dtype_or_shape_is_refused_and_nothing_stays(tmp_path: Path, wrong: Tensor) -> None:
    specs = {"w": TensorSpec("F32", (3, 2))}
    with pytest.raises(CheckpointError, match=r"tensor w: got .*, expected torch.float32 \(3, 2\)"):
        write_file(tmp_path / "x", specs, lambda name, spec: wrong)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="got 'Q5', expected one of"):
        write_file(tmp_path / "x", {"w": TensorSpec("Q5", (1,))}, never)


# --- all or nothing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt(), SystemExit(143)])
@pytest.mark.parametrize("existing", [False, True])
def test_a_failure_leaves_the_folder_as_it_was(tmp_path: Path, error: BaseException, existing: bool) -> None:
    out = tmp_path / "out.safetensors"
    if existing:
        out.write_bytes(b"what was there")
    specs, tensors = small()
    with pytest.raises(type(error)):
        write_file(out, specs, failing(tensors, error), force=True)
    assert [path.name for path in tmp_path.iterdir()] == (["out.safetensors"] if existing else [])
    assert not existing or out.read_bytes() == b"what was there"


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    specs, tensors = small()
    with pytest.raises(OSError, match="No space left"):
        write_file(tmp_path / "x", specs, producer(tensors))
    assert list(tmp_path.iterdir()) == []


def test_force_replaces_a_file_and_the_temporary_name_is_gone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_bytes(b"old")
    specs, tensors = small()
    write_file(out, specs, producer(tensors), force=True)
    assert out.stat().st_size == file_bytes(specs)
    assert list(tmp_path.iterdir()) == [out]


def test_force_replaces_a_link_and_keeps_the_file_it_pointed_to(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"shared")
    (tmp_path / "out").symlink_to("blob")
    specs, tensors = small()
    write_file(tmp_path / "out", specs, producer(tensors), force=True)
    assert not (tmp_path / "out").is_symlink()
    assert (tmp_path / "blob").read_bytes() == b"shared"


def test_a_file_that_came_into_being_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    specs, tensors = small()

    def produce(name: str, spec: TensorSpec) -> Tensor:
        out.write_bytes(b"somebody else's")
        return tensors[name]

    with pytest.raises(OutputError, match="out: exists; choose"):
        write_file(out, specs, produce)
    assert out.read_bytes() == b"somebody else's"
    assert list(tmp_path.iterdir()) == [out]


# --- refusals, before any tensor is made -----------------------------------------------------------------------


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "folder": (lambda tmp: folder(tmp / "out"), "got a folder, expected a regular file"),
    "named pipe": (lambda tmp: fifo(tmp / "out"), "got a named pipe, expected a regular file"),
    "device": (lambda tmp: Path("/dev/null"), "got a device, expected a regular file"),
    "link to a folder": (lambda tmp: link(tmp / "out", "."), "got a folder, expected a regular file"),
    "link to a device": (lambda tmp: link(tmp / "out", "/dev/null"), "got a device, expected a regular file"),
    "dangling link": (lambda tmp: link(tmp / "out", "nowhere"), "link that leads nowhere; remove it first"),
    "missing parent": (lambda tmp: tmp / "no" / "out", "got no folder .*no, expected it to exist; create it first"),
    "parent is a file": (lambda tmp: existing(tmp / "file") / "out", "got no folder .*file, expected it to exist"),
    "the folder itself": (lambda tmp: tmp, "got a folder"),
}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_an_output_that_is_no_place_for_a_file_is_refused(tmp_path: Path, case: str, force: bool) -> None:
    make, message = REFUSED[case]
    out = make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OutputError, match=message):
        write_file(out, small()[0], never, force=force)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_existing_file_is_refused_without_force(tmp_path: Path) -> None:
    out = existing(tmp_path / "out")
    with pytest.raises(OutputError, match=r"out: exists; .* --force"):
        write_file(out, small()[0], never)
    assert out.read_bytes() == b"x"


def test_a_folder_without_write_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(OutputError, match="that may not be written to"):
        write_file(tmp_path / "out", small()[0], never)


def test_a_disk_too_full_is_refused_with_got_and_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs, tensors = small()
    needed = file_bytes(specs)
    disk_of(monkeypatch, needed - 1)
    with pytest.raises(OutputError, match=f"{needed - 1:,} bytes free, {needed:,} needed"):
        write_file(tmp_path / "out", specs, never)
    disk_of(monkeypatch, needed)
    write_file(tmp_path / "out", specs, producer(tensors))
