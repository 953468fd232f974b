"""The checkpoint writer: the library's bytes, one tensor at a time, and all of a file or nothing.

A pass means: what this writer makes is what the safetensors library makes and what the published files are, down to
the header's padding, and a run that fails leaves the disk as it was.
Run: pytest tests/unit/test_checkpoint_writer.py
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from h3core.checkpoint import writer
from h3core.checkpoint.errors import CheckpointError
from h3core.checkpoint.layout import TensorSpec, expected_tensors
from h3core.checkpoint.writer import (
    data_bytes,
    encode_header,
    file_bytes,
    plan_shards,
    write_file,
    write_sharded,
)
from h3core.config import H3

DATA = Path(__file__).parents[1] / "data"
PUBLISHED = [("native", "bf16"), ("diffusers", "bf16"), ("pruned", "bf16"), ("pruned", "nvfp4")]


def small() -> tuple[dict[str, TensorSpec], dict[str, Tensor]]:
    """A state dict of every dtype in the published files, in the order in which the library stores it."""
    tensors = {
        "z.f32": torch.arange(6.0).view(2, 3),
        "z.scalar": torch.tensor(0.25),
        "a.bf16": torch.arange(5).bfloat16(),
        "a.f16": torch.arange(5).half() / 3,
        "a.f8": torch.arange(1, 8).to(torch.float8_e4m3fn),
        "a.i8": torch.arange(-3, 4, dtype=torch.int8),
        "a.ü8": torch.arange(11, dtype=torch.uint8),
        "b.empty": torch.empty(0, 4, dtype=torch.uint8),
    }
    names = {dtype: name for name, dtype in writer.TORCH_DTYPE.items()}
    return {name: TensorSpec(names[t.dtype], tuple(t.shape)) for name, t in tensors.items()}, tensors


def producer(tensors: dict[str, Tensor]) -> Callable[[str, TensorSpec], Tensor]:
    return lambda name, spec: tensors[name]


def failing(tensors: dict[str, Tensor], error: BaseException) -> Callable[[str, TensorSpec], Tensor]:
    """Raises at the third tensor."""
    calls: list[str] = []

    def produce(name: str, spec: TensorSpec) -> Tensor:
        calls.append(name)
        if len(calls) == 3:
            raise error
        return tensors[name]

    return produce


def never(name: str, spec: TensorSpec) -> Tensor:
    raise AssertionError("a tensor was made for an output that cannot be written")


# --- bytes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "quant"), PUBLISHED)
def test_released_layouts_have_the_published_tensors_and_bytes(layout: str, quant: str) -> None:
    published = json.loads((DATA / f"denoiser_{layout}_{quant}.json").read_text())
    specs = expected_tensors(H3, layout, quant)
    assert [(n, s.dtype, list(s.shape)) for n, s in specs.items()] == [(n, *v) for n, v in published["tensors"].items()]
    assert data_bytes(specs) == published["data_bytes"]


def test_the_nvfp4_file_has_its_published_size_and_header_length() -> None:
    specs = expected_tensors(H3, "pruned", "nvfp4")
    encoded = encode_header(specs)
    assert len(encoded) - 8 == int.from_bytes(encoded[:8], "little") == 116_000
    assert file_bytes(specs) == 12_528_636_800
    offsets = json.loads(encoded[8:])["blocks.0.attn.qkv_proj.weight"]["data_offsets"]
    assert offsets == [2_913_992_614, 2_971_795_366]


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

    with pytest.raises(CheckpointError, match="already exists"):
        write_file(out, specs, produce)
    assert out.read_bytes() == b"somebody else's"
    assert list(tmp_path.iterdir()) == [out]


# --- refusals, before any tensor is made -----------------------------------------------------------------------


def _existing(path: Path) -> Path:
    path.write_bytes(b"x")
    return path


def _link(path: Path, to: str) -> Path:
    path.symlink_to(to)
    return path


def _fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "folder": (lambda tmp: _folder(tmp / "out"), "is a folder, expected a regular file"),
    "named pipe": (lambda tmp: _fifo(tmp / "out"), "is a named pipe, expected a regular file"),
    "device": (lambda tmp: Path("/dev/null"), "is a device, expected a regular file"),
    "link to a folder": (lambda tmp: _link(tmp / "out", "."), "is a folder, expected a regular file"),
    "link to a device": (lambda tmp: _link(tmp / "out", "/dev/null"), "is a device, expected a regular file"),
    "dangling link": (lambda tmp: _link(tmp / "out", "nowhere"), "leads nowhere"),
    "missing parent": (lambda tmp: tmp / "no" / "out", "no is not an existing folder; create it first"),
    "parent is a file": (lambda tmp: _existing(tmp / "file") / "out", "file is not an existing folder"),
    "the folder itself": (lambda tmp: tmp, "is a folder"),
}


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_an_output_that_is_no_place_for_a_file_is_refused(tmp_path: Path, case: str, force: bool) -> None:
    make, message = REFUSED[case]
    out = make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=message):
        write_file(out, small()[0], never, force=force)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_existing_file_is_refused_without_force(tmp_path: Path) -> None:
    out = _existing(tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"already exists; .* --force"):
        write_file(out, small()[0], never)
    assert out.read_bytes() == b"x"


def test_a_folder_without_write_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(CheckpointError, match="is not writable"):
        write_file(tmp_path / "out", small()[0], never)


def _disk_of(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - free, free))


def test_a_disk_too_full_is_refused_with_got_and_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs, tensors = small()
    needed = file_bytes(specs)
    _disk_of(monkeypatch, needed - 1)
    with pytest.raises(CheckpointError, match=f"{needed - 1:,} bytes free, {needed:,} needed"):
        write_file(tmp_path / "out", specs, never)
    _disk_of(monkeypatch, needed)
    write_file(tmp_path / "out", specs, producer(tensors))


# --- folders of shards -----------------------------------------------------------------------------------------


def numbered() -> tuple[dict[str, TensorSpec], dict[str, Tensor]]:
    """Seven tensors of 40 bytes."""
    tensors = {f"t{i}": torch.full((10,), float(i)) for i in range(7)}
    return {name: TensorSpec("F32", (10,)) for name in tensors}, tensors


def sharded(folder: Path, produce: Callable[[str, TensorSpec], Tensor], **options: Any) -> int:
    settings: dict[str, Any] = {"max_shard_bytes": 120, "basename": "model"} | options
    return write_sharded(folder, numbered()[0], produce, **settings)


def test_shards_hold_every_tensor_once_and_the_index_says_where(tmp_path: Path) -> None:
    specs, tensors = numbered()
    steps: list[int] = []
    total = sharded(tmp_path / "m", producer(tensors), extra={"config.json": b"{}"}, progress=steps.append)
    files = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == sorted(
        [*files, "config.json", "model.safetensors.index.json"]
    )
    assert list(tmp_path.iterdir()) == [tmp_path / "m"]
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": data_bytes(specs)}
    found = {}
    for file in files:
        with safe_open(tmp_path / "m" / file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                assert index["weight_map"][name] == file
                found[name] = opened.get_tensor(name)
    assert sorted(found) == sorted(index["weight_map"]) == sorted(tensors)
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    assert total == sum(steps) == sum((tmp_path / "m" / file).stat().st_size for file in files)


def test_what_fits_one_file_is_one_file_without_an_index(tmp_path: Path) -> None:
    sharded(tmp_path / "m", producer(numbered()[1]), max_shard_bytes=280)
    assert [p.name for p in (tmp_path / "m").iterdir()] == ["model.safetensors"]


def test_shards_are_filled_up_to_the_limit_and_a_large_tensor_stands_alone() -> None:
    specs = {name: TensorSpec("U8", (size,)) for name, size in {"a": 5, "b": 5, "c": 1, "d": 30, "e": 10}.items()}
    assert [list(part) for part in plan_shards(specs, 10, "m").values()] == [["a", "b"], ["c"], ["d"], ["e"]]


@pytest.mark.parametrize("existing", [False, True])
def test_a_failure_leaves_no_folder_and_keeps_the_old_one(tmp_path: Path, existing: bool) -> None:
    if existing:
        sharded(tmp_path / "m", producer(numbered()[1]))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(RuntimeError, match="broken"):
        sharded(tmp_path / "m", failing(numbered()[1], RuntimeError("broken")), force=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert len(list(tmp_path.iterdir())) == existing


def test_the_old_folder_comes_back_when_the_new_one_cannot_be_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded(tmp_path / "m", producer(numbered()[1]))
    rename = Path.rename

    def broken(self: Path, target: Path) -> Path:
        if (self / "new.safetensors").exists():
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", broken)
    with pytest.raises(OSError, match="Input/output"):
        sharded(tmp_path / "m", producer(numbered()[1]), max_shard_bytes=280, basename="new", force=True)
    assert (tmp_path / "m" / "model.safetensors.index.json").exists()
    assert list(tmp_path.iterdir()) == [tmp_path / "m"]


def test_force_replaces_a_checkpoint_folder_as_a_whole(tmp_path: Path) -> None:
    sharded(tmp_path / "m", producer(numbered()[1]))
    with pytest.raises(CheckpointError, match="already exists"):
        sharded(tmp_path / "m", never)
    sharded(tmp_path / "m", producer(numbered()[1]), max_shard_bytes=280, force=True)
    assert [p.name for p in (tmp_path / "m").iterdir()] == ["model.safetensors"]
    assert list(tmp_path.iterdir()) == [tmp_path / "m"]


def test_force_does_not_delete_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years")
    with pytest.raises(CheckpointError, match=r"holds thesis.txt, .* not replacing it"):
        sharded(tmp_path / "home", never, force=True)
    assert (tmp_path / "home" / "thesis.txt").read_text() == "years"


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda tmp: _existing(tmp / "out"), "is a regular file, expected a folder"),
        (lambda tmp: _fifo(tmp / "out"), "is a named pipe, expected a folder"),
        (lambda tmp: _link(tmp / "out", "."), "is a symbolic link, expected a folder"),
        (lambda tmp: _link(tmp / "out", "nowhere"), "leads nowhere"),
        (lambda tmp: tmp / "no" / "out", "create it first"),
    ],
    ids=["file", "named pipe", "link to a folder", "dangling link", "missing parent"],
)
def test_an_output_that_is_no_place_for_a_folder_is_refused(
    tmp_path: Path, make: Callable[[Path], Path], message: str, force: bool
) -> None:
    out = make(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        sharded(out, never, force=force)


def test_a_disk_too_full_for_all_shards_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded(tmp_path / "a", producer(numbered()[1]))
    needed = sum(path.stat().st_size for path in (tmp_path / "a").iterdir())
    _disk_of(monkeypatch, needed - 1)
    with pytest.raises(CheckpointError, match=f"{needed - 1:,} bytes free, {needed:,} needed"):
        sharded(tmp_path / "b", never)
    _disk_of(monkeypatch, needed)
    sharded(tmp_path / "b", producer(numbered()[1]))
