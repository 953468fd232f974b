"""Write safetensors files one tensor at a time: only one is in memory, and no partial output is ever left.

The bytes are those of the safetensors library for the same tensors in the same order (a test compares them), but
the library wants all of them at once, which a 66 GB model does not allow. A file appears under its name only when
it is whole: it is written to a temporary name beside it, flushed to the disk, then renamed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import BinaryIO, Final

import torch
from torch import Tensor

from h3core.checkpoint.errors import CheckpointError
from h3core.checkpoint.layout import TensorSpec

Produce = Callable[[str, TensorSpec], Tensor]
"""Makes the tensor of a name, with the dtype and shape of its spec. Called once a tensor, in file order."""

Progress = Callable[[int], None]
"""Told the number of bytes written since the last call."""

TORCH_DTYPE: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors' dtype names and torch's."""

ALIGNMENT: Final = 8
"""The header is padded with spaces, so that the data starts at a multiple of this."""

WRITE_BYTES: Final = 16 << 20
"""Bytes handed to the kernel at once: small enough that Ctrl-C and the progress bar keep up."""

OWN_SUFFIXES: Final = (".safetensors", ".safetensors.index.json")
"""What may stand in a checkpoint folder that `force` replaces, besides `config.json`."""


def nbytes(spec: TensorSpec) -> int:
    """Bytes of a tensor's data. Raises `CheckpointError` for a dtype this writer does not know."""
    return prod(spec.shape) * torch_dtype(spec).itemsize


def torch_dtype(spec: TensorSpec) -> torch.dtype:
    """The torch dtype of a spec. Raises `CheckpointError` for one this writer does not know."""
    dtype = TORCH_DTYPE.get(spec.dtype)
    if dtype is None:
        raise CheckpointError(f"tensor dtype: got {spec.dtype!r}, expected one of {sorted(TORCH_DTYPE)}")
    return dtype


def offsets(specs: Mapping[str, TensorSpec]) -> Iterator[tuple[str, TensorSpec, int, int]]:
    """Name, spec, and the half-open byte range in the data section of each tensor, in file order."""
    start = 0
    for name, spec in specs.items():
        stop = start + nbytes(spec)
        yield name, spec, start, stop
        start = stop


def data_bytes(specs: Mapping[str, TensorSpec]) -> int:
    """Bytes of all tensors' data, headers left out."""
    return sum(nbytes(spec) for spec in specs.values())


def encode_header(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None) -> bytes:
    """Everything before the data: the header's length (8 bytes, little endian), then the padded header.

    The header is compact JSON in the order of `specs`; `__metadata__` comes first, and only where it is given.
    """
    entries: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    for name, spec, start, stop in offsets(specs):
        entries[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [start, stop]}
    # serde_json leaves non-ASCII characters as they are; Python would escape them and move every later byte.
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % ALIGNMENT)
    return len(header).to_bytes(8, "little") + header


def file_bytes(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None) -> int:
    """Size of the whole file, to the byte."""
    return len(encode_header(specs, metadata)) + data_bytes(specs)


def plan_shards(
    specs: Mapping[str, TensorSpec], max_shard_bytes: int, basename: str
) -> dict[str, dict[str, TensorSpec]]:
    """Deal tensors over files in order; a new file starts where the next tensor would pass `max_shard_bytes` of data.

    Returns file name -> specs: `basename.safetensors` where one file is enough, `basename-00001-of-00013.safetensors`
    and so on otherwise. A single tensor above the limit gets a file of its own.
    """
    groups: list[dict[str, TensorSpec]] = [{}]
    used = 0
    for name, spec in specs.items():
        size = nbytes(spec)
        if groups[-1] and used + size > max_shard_bytes:
            groups.append({})
            used = 0
        groups[-1][name] = spec
        used += size
    if len(groups) == 1:
        return {f"{basename}.safetensors": groups[0]}
    return {f"{basename}-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def write_file(
    out: Path,
    specs: Mapping[str, TensorSpec],
    produce: Produce,
    *,
    metadata: Mapping[str, str] | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write one safetensors file and return its size in bytes.

    An existing regular file is replaced only with `force`, and stays untouched until the new one is complete; where
    `out` is a symbolic link to a file, the link is replaced, not what it points to. Raises `CheckpointError`, before
    any tensor is made, where `out` may not be written or the disk is too full, and later where `produce` returns
    another dtype or shape than the spec's; `OSError` where the system refuses.
    """
    check_file_target(out, force)
    check_space(out, file_bytes(specs, metadata))
    temporary = _temporary_beside(out)
    try:
        size = _write_plain(temporary, specs, produce, metadata, progress)
        # Minutes have passed: what came into being meanwhile is no more ours to replace than what was there before.
        check_file_target(out, force)
        temporary.replace(out)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(out.parent)
    return size


def write_sharded(
    folder: Path,
    specs: Mapping[str, TensorSpec],
    produce: Produce,
    *,
    max_shard_bytes: int,
    basename: str,
    extra: Mapping[str, bytes] | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write a checkpoint folder, all of it or nothing, and return the bytes of its safetensors files.

    The folder holds the files of `plan_shards`, `basename.safetensors.index.json` where they are several, and the
    small files `extra` (name -> content). With `force` an existing folder is replaced as a whole, if it holds nothing
    but a checkpoint. Raises as `write_file` does.
    """
    shards = plan_shards(specs, max_shard_bytes, basename)
    small = dict(extra or {})
    if len(shards) > 1:
        small[f"{basename}.safetensors.index.json"] = encode_index(shards)
    check_folder_target(folder, force)
    check_space(folder, sum(map(file_bytes, shards.values())) + sum(map(len, small.values())))
    temporary = _temporary_beside(folder)
    try:
        temporary.mkdir()
        total = sum(_write_plain(temporary / name, part, produce, None, progress) for name, part in shards.items())
        for name, content in small.items():
            with (temporary / name).open("xb") as file:
                file.write(content)
                _sync(file)
        _sync_folder(temporary)
        check_folder_target(folder, force)
        _replace_folder(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync_folder(folder.parent)
    return total


def encode_index(shards: Mapping[str, Mapping[str, TensorSpec]]) -> bytes:
    """The `*.safetensors.index.json` of the shards: total data bytes, and the file of each tensor."""
    weight_map = {name: file for file, part in shards.items() for name in part}
    index = {
        "metadata": {"total_size": sum(map(data_bytes, shards.values()))},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return (json.dumps(index, indent=2) + "\n").encode()


def check_file_target(out: Path, force: bool) -> None:
    """Refuse an `out` that is no place for a file. Raises `CheckpointError`.

    Only a regular file may be replaced: a rename over a device, a pipe or a link that leads nowhere would succeed
    and take away something that was never a checkpoint.
    """
    _check_parent(out)
    mode = _mode(out)
    if mode is None:
        return
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"output {out} exists and is {_kind(mode)}, expected a regular file or no file")
    if not force:
        raise CheckpointError(f"output {out} already exists; choose another name, or replace it with --force")


def check_folder_target(folder: Path, force: bool) -> None:
    """Refuse a `folder` that may not be written, or not replaced. Raises `CheckpointError`."""
    _check_parent(folder)
    mode = _mode(folder)
    if mode is None:
        return
    if folder.is_symlink() or not stat.S_ISDIR(mode):
        what = "a symbolic link" if folder.is_symlink() else _kind(mode)
        raise CheckpointError(f"output {folder} exists and is {what}, expected a folder or nothing: this format is one")
    if not force:
        raise CheckpointError(f"output folder {folder} already exists; choose another name, or replace it with --force")
    # --force on a mistyped name must not delete somebody's home.
    for item in sorted(folder.iterdir()):
        ours = item.name == "config.json" or item.name.endswith(OWN_SUFFIXES)
        if not ours or not stat.S_ISREG(item.lstat().st_mode):
            raise CheckpointError(
                f"output folder {folder} holds {item.name}, which is no part of a checkpoint; not replacing it"
            )


def check_space(out: Path, needed: int) -> None:
    """Refuse to start what cannot be finished. Raises `CheckpointError` (got, needed; bytes).

    A file that `force` replaces does not count as free: it stays until the new one is complete.
    """
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise CheckpointError(f"not enough space in {out.parent}: {free:,} bytes free, {needed:,} needed")


def _check_parent(out: Path) -> None:
    if not out.parent.is_dir():
        raise CheckpointError(f"output {out}: {out.parent} is not an existing folder; create it first")
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise CheckpointError(f"output {out}: folder {out.parent} is not writable; choose another")


def _mode(path: Path) -> int | None:
    """The mode of what `path` leads to; None where there is nothing, not even a link."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise CheckpointError(f"output {path} is a symbolic link that leads nowhere; remove it first") from None
        return None


def _kind(mode: int) -> str:
    names = {
        stat.S_IFREG: "a regular file",
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a named pipe",
        stat.S_IFSOCK: "a socket",
    }
    return names.get(stat.S_IFMT(mode), "a device")


def _temporary_beside(out: Path) -> Path:
    # Not derived from out's name, which may already be as long as a name can be. Not tempfile.mkstemp either: its
    # files are readable by their owner alone, and a rename would keep that.
    return out.parent / f".h3core-{secrets.token_hex(8)}.partial"


def _write_plain(
    path: Path,
    specs: Mapping[str, TensorSpec],
    produce: Produce,
    metadata: Mapping[str, str] | None,
    progress: Progress | None,
) -> int:
    """Write a new file in place, flush it to the disk, and return its size. Cleaning up is the caller's."""
    written = 0
    with path.open("xb", buffering=0) as raw:
        for chunk in _chunks(specs, produce, metadata):
            while chunk:
                count = raw.write(chunk)  # may take less than it is given
                chunk = chunk[count:]
                written += count
                if progress is not None:
                    progress(count)
            del chunk  # even an empty view keeps its tensor alive while the next one is made
        _sync(raw)
    return written


def _chunks(
    specs: Mapping[str, TensorSpec], produce: Produce, metadata: Mapping[str, str] | None
) -> Iterator[memoryview]:
    yield memoryview(encode_header(specs, metadata))
    for name, spec in specs.items():
        data = _raw(name, spec, produce(name, spec))
        for start in range(0, len(data), WRITE_BYTES):
            yield data[start : start + WRITE_BYTES]
        del data


def _raw(name: str, spec: TensorSpec, tensor: Tensor) -> memoryview:
    dtype, shape = torch_dtype(spec), tuple(spec.shape)
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise CheckpointError(f"tensor {name}: got {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {shape}")
    # NumPy knows neither bfloat16 nor float8; bytes it knows.
    flat = tensor.detach().cpu().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def _replace_folder(temporary: Path, folder: Path) -> None:
    """Rename `temporary` to `folder`; an existing one steps aside first and comes back if that fails."""
    if not folder.exists():
        temporary.rename(folder)
        return
    aside = _temporary_beside(folder)
    folder.rename(aside)
    try:
        temporary.rename(folder)
    except BaseException:
        aside.rename(folder)
        raise
    shutil.rmtree(aside)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    # Without it a power cut may lose the rename although the data is safe. Some network file systems refuse.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
