"""Write safetensors files one tensor at a time: only one is in memory, and no partial output is ever left.

The bytes are those of the safetensors library for the same tensors in the same order (a test compares them), but
the library wants all of them at once, which a 66 GB model does not allow. `h3core.atomic` sees to it that a file
appears under its name only when it is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from h3core.atomic import new_file, write_all
from h3core.checkpoint.errors import CheckpointError
from h3core.checkpoint.layout import TensorSpec
from h3core.checkpoint.safetensors_format import encode_header, file_bytes, torch_dtype

Produce = Callable[[str, TensorSpec], Tensor]
"""Makes the tensor of a name, with the dtype and shape of its spec. Called once a tensor, in file order."""

Progress = Callable[[int], None]
"""Told the number of bytes written since the last call."""

WRITE_BYTES: Final = 16 << 20
"""Bytes handed to the kernel at once: small enough that Ctrl-C and the progress bar keep up."""


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

    An existing regular file is replaced only with `force`, and stays untouched until the new one is complete. Raises
    `OutputError`, before any tensor is made, where `out` may not be written or the disk is too full; `CheckpointError`
    where `produce` returns another dtype or shape than the spec's; `OSError` where the system refuses.
    """
    with new_file(out, force=force, needed=file_bytes(specs, metadata)) as file:
        return write_tensors(file, specs, produce, metadata, progress)


def write_tensors(
    file: FileIO,
    specs: Mapping[str, TensorSpec],
    produce: Produce,
    metadata: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> int:
    """Write the content of a safetensors file to an open one and return its size. Raises as `write_file` does."""
    size = 0
    for chunk in _chunks(specs, produce, metadata):
        write_all(file, chunk)
        size += len(chunk)
        if progress is not None:
            progress(len(chunk))
        del chunk  # even an empty view keeps its tensor alive while the next one is made
    return size


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
