"""Checkpoint folders: tensors dealt over files, an index, and all of the folder or nothing.

A pass means: every tensor is in one file and the index says which, a failure keeps the older folder, and `force`
deletes nothing but a checkpoint. Run: pytest tests/unit/test_checkpoint_folder_writer.py
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from h3core.atomic import OutputError
from h3core.checkpoint.folder_writer import plan_shards, write_sharded
from h3core.checkpoint.layout import TensorSpec
from h3core.checkpoint.safetensors_format import data_bytes
from tests.unit.tensor_makers import disk_of, existing, failing, fifo, link, never, producer


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
    with pytest.raises(OutputError, match="m: exists; choose another name, or --force"):
        sharded(tmp_path / "m", never)
    sharded(tmp_path / "m", producer(numbered()[1]), max_shard_bytes=280, force=True)
    assert [p.name for p in (tmp_path / "m").iterdir()] == ["model.safetensors"]
    assert list(tmp_path.iterdir()) == [tmp_path / "m"]


def test_a_config_is_part_of_a_checkpoint_folder_that_force_replaces(tmp_path: Path) -> None:
    for content in (b"{}", b'{"newer": 1}'):
        sharded(tmp_path / "m", producer(numbered()[1]), extra={"config.json": content}, force=True)
    assert (tmp_path / "m" / "config.json").read_bytes() == b'{"newer": 1}'


def test_force_does_not_delete_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years")
    with pytest.raises(OutputError, match=r"holds thesis.txt, .* not replacing it"):
        sharded(tmp_path / "home", never, force=True)
    assert (tmp_path / "home" / "thesis.txt").read_text() == "years"


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda tmp: existing(tmp / "out"), "got a regular file, expected a folder"),
        (lambda tmp: fifo(tmp / "out"), "got a named pipe, expected a folder"),
        (lambda tmp: link(tmp / "out", "."), "got a symbolic link, expected a folder"),
        (lambda tmp: link(tmp / "out", "nowhere"), "got a symbolic link that leads nowhere; remove it first"),
        (lambda tmp: tmp / "no" / "out", "create it first"),
    ],
    ids=["file", "named pipe", "link to a folder", "dangling link", "missing parent"],
)
def test_an_output_that_is_no_place_for_a_folder_is_refused(
    tmp_path: Path, make: Callable[[Path], Path], message: str, force: bool
) -> None:
    out = make(tmp_path)
    with pytest.raises(OutputError, match=message):
        sharded(out, never, force=force)


def test_a_disk_too_full_for_all_shards_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded(tmp_path / "a", producer(numbered()[1]))
    needed = sum(path.stat().st_size for path in (tmp_path / "a").iterdir())
    disk_of(monkeypatch, needed - 1)
    with pytest.raises(OutputError, match=f"{needed - 1:,} bytes free, {needed:,} needed"):
        sharded(tmp_path / "b", never)
    disk_of(monkeypatch, needed)
    sharded(tmp_path / "b", producer(numbered()[1]))
