"""One safetensors file's header, read without trusting it, before any memory or GPU is touched.

A mapped file that is shorter than its header says reads as zeros or kills the process, and a download may have
saved an error page: so every byte is accounted for here, and nothing later needs to look again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

from h3core.checkpoint.errors import CheckpointError, bullets, listed

DTYPE_BITS: Final = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits of one element of each dtype that a safetensors header can name."""

_MAX_HEADER: Final = 100_000_000
_PREFIX: Final = 8
_AGAIN: Final = "download the file again and compare its size with the publisher's"
_SAFETENSORS: Final = "expected a .safetensors file"


class TensorInfo(NamedTuple):
    """One tensor of a file: dtype as the header spells it, shape, and absolute file offsets [start, stop)."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a file holds, every byte of it accounted for. `header_bytes` excludes the 8 bytes of its length."""

    path: Path
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    header_bytes: int
    file_bytes: int

    def read(self, name: str) -> bytes:
        """All bytes of one tensor. Raises `CheckpointError` where the file has become shorter."""
        info = self.tensors[name]
        with self.path.open("rb") as file:
            file.seek(info.start)
            data = file.read(info.stop - info.start)
        if len(data) != info.stop - info.start:
            raise CheckpointError(f"{self.path}: {name}: got {len(data)} of {info.stop - info.start} bytes; {_AGAIN}")
        return data


def read_header(path: str | Path) -> Header:
    """Read and check the header of one safetensors file; no tensor is read.

    Raises `CheckpointError` for whatever is not a complete safetensors file: a missing or empty file, a folder, a
    git-LFS pointer, a saved web page, GGUF, a pickle, a malformed header (every problem is listed), and a payload
    that is shorter or longer than the header says.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise CheckpointError(f"{path}: got a folder, {_SAFETENSORS}; name the file inside it")
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path}: got a device or a pipe, {_SAFETENSORS}")
        with path.open("rb") as file:
            file_bytes = path.stat().st_size
            start = file.read(512)
            header_bytes = int.from_bytes(start[:_PREFIX], "little")
            # Magic numbers come second: a sound header of 640 bytes begins with 0x80 0x02, as a pickle does.
            plausible = header_bytes <= min(file_bytes - _PREFIX, _MAX_HEADER) and start[_PREFIX : _PREFIX + 1] == b"{"
            if not plausible:
                raise CheckpointError(f"{path}: {_what_it_is(start, header_bytes, file_bytes)}")
            file.seek(_PREFIX)
            text = file.read(header_bytes)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file (or a link to one that is gone), {_SAFETENSORS}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}; check its permissions and disk") from error
    if len(text) != header_bytes:
        raise CheckpointError(f"{path}: got {len(text)} bytes of header, expected {header_bytes}; {_AGAIN}")
    try:
        entries = parse_json(text)
    except ValueError as error:
        raise CheckpointError(
            f"{path}: header is not JSON ({error}), expected tensor names and offsets; {_AGAIN}"
        ) from (error)
    metadata, tensors, problems = _parse(entries, _PREFIX + header_bytes)
    if not problems:
        problems = list(_payload_problems(tensors, _PREFIX + header_bytes, file_bytes))
    if problems:
        raise bullets(f"{path}: not a sound safetensors file; {_AGAIN}:", problems)
    return Header(path, tensors, metadata, header_bytes, file_bytes)


def parse_json(text: bytes) -> dict[str, Any]:
    """One JSON object. Raises `ValueError` for text that is none, and for a key that stands twice in any object.

    Python's parser keeps the last of two equal keys: a header with a duplicate name would lose a tensor silently.
    """
    duplicates: list[str] = []

    def build(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        built: dict[str, Any] = {}
        for key, value in pairs:
            if key in built:
                duplicates.append(key)
            built[key] = value
        return built

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=build)
    except RecursionError as error:
        raise ValueError("objects nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"got a JSON {type(value).__name__}, expected an object")
    if duplicates:
        raise ValueError(f"duplicate names: {listed(sorted(set(duplicates)))}")
    return value


def _what_it_is(start: bytes, header_bytes: int, file_bytes: int) -> str:
    """Name a file that does not start like a safetensors file, and say what to do."""
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if not start:
        return f"got an empty file (0 bytes), {_SAFETENSORS}; {_AGAIN}"
    if start.startswith(b"version https://git-lfs.github.com/spec"):
        return f"got a git-LFS pointer ({file_bytes} bytes of text), {_SAFETENSORS}; run: git lfs pull"
    if text.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return (
            f"got a web page, {_SAFETENSORS}; the download saved an error page: {_AGAIN}, logged in if it asks for it"
        )
    if start.startswith(b"GGUF"):
        return f"got a GGUF file, {_SAFETENSORS}; GGUF is not supported, use the bf16 or NVFP4 checkpoint"
    if start.startswith(b"PK\x03\x04") or (start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05"):
        return (
            f"got a pickle (.pt, .pth, .bin or .ckpt), {_SAFETENSORS}; a pickle can run code and is never opened here: "
            "use the publisher's safetensors files"
        )
    if text.startswith((b"{", b"[")) or (len(text) > 8 and text.isascii() and b"\x00" not in start):
        return f"got text that starts {start[:60]!r}, {_SAFETENSORS}; the download saved a message: {_AGAIN}"
    if file_bytes < _PREFIX + 2:
        return f"got {file_bytes} bytes, {_SAFETENSORS} of at least {_PREFIX + 2}; {_AGAIN}"
    if header_bytes > min(file_bytes - _PREFIX, _MAX_HEADER):
        return (
            f"got a header length of {header_bytes} bytes, expected at most {min(file_bytes - _PREFIX, _MAX_HEADER)} "
            f"in a file of {file_bytes} bytes; it is truncated or no safetensors file: {_AGAIN}"
        )
    return f"header is not JSON: it starts {start[_PREFIX : _PREFIX + 16]!r}, expected an opening brace; {_AGAIN}"


def _parse(entries: dict[str, Any], payload: int) -> tuple[dict[str, str], dict[str, TensorInfo], list[str]]:
    """Metadata and tensors of a header; every entry that is not well formed becomes a problem."""
    problems: list[str] = []
    tensors: dict[str, TensorInfo] = {}
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        problems.append("__metadata__: expected an object of strings")
        metadata = {}
    for name, entry in entries.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            problems.append(f"{name}: expected dtype, shape and data_offsets, got {str(entry)[:80]}")
            continue
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
            problems.append(f"{name}: unknown dtype {dtype!r}, expected one of {', '.join(DTYPE_BITS)}")
        elif not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
            problems.append(f"{name}: shape {shape!r} and data_offsets {offsets!r}, expected integers from 0 up")
        else:
            bits = prod(shape) * DTYPE_BITS[dtype]
            start, stop = offsets
            if bits % 8 or stop - start != bits // 8:
                problems.append(
                    f"{name}: data_offsets [{start}, {stop}) hold {stop - start} bytes, expected {bits / 8:g} for "
                    f"{dtype} {tuple(shape)}"
                )
            tensors[name] = TensorInfo(dtype, tuple(shape), payload + start, payload + stop)
    return metadata, tensors, problems


def _counts(values: object) -> bool:
    """Whether this is a list of integers from 0 up (bool is no integer here)."""
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _payload_problems(tensors: dict[str, TensorInfo], payload: int, file_bytes: int) -> Iterator[str]:
    """Gaps and overlaps between tensors, and a payload that does not end where the file does."""
    at, before = payload, "the header"
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if info.start != at:
            kind = "overlaps" if info.start < at else "leaves a gap after"
            yield f"{name}: starts at byte {info.start} and {kind} {before}, which ends at {at}; expected no gap"
        at, before = max(at, info.stop), name
    if at > file_bytes:
        yield f"truncated: the file has {file_bytes} bytes, its header describes {at}; {at - file_bytes} are missing"
    elif at < file_bytes:
        yield f"{file_bytes - at} bytes after the payload: the file has {file_bytes} bytes, its header describes {at}"
