"""The safetensors format as it is written: dtype names, offsets, and the header to the byte.

A file is the header's length, the header (JSON, padded), and the tensors' data back to back in the header's order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod
from typing import Final

import torch

from h3core.checkpoint.errors import CheckpointError
from h3core.checkpoint.layout import TensorSpec

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
