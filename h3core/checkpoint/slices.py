"""Copies of parts of tensors, straight from the file into memory of their own.

Rows are consecutive bytes and are read; columns are not, and are copied out of a read-only map of the tensor. Only
bytes are moved, and viewed as the tensor's dtype afterwards: in the published NVFP4 file packed weights lie at odd
offsets, where no wider load is allowed. Nothing that is returned refers to the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from h3core.checkpoint.errors import CheckpointError
from h3core.checkpoint.integrity import TensorInfo
from h3core.checkpoint.layout import Piece
from h3core.checkpoint.shards import Checkpoint
from h3core.nvfp4 import TILE_BYTES, TILE_COLS, TILE_ROWS
from h3core.partition import Span

TORCH_DTYPES: Final = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}
"""The dtypes that a denoiser's files hold."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class SliceReader:
    """Reads parts of a checkpoint's tensors. A context manager: it keeps the files open, no map outlives a call."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Nothing is opened yet."""
        self._checkpoint = checkpoint
        self._files: dict[Path, FileIO] = {}
        self.bytes_read = 0
        """Bytes of tensors copied so far."""

    def __enter__(self) -> SliceReader:
        """The reader itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and place of a tensor in its file."""
        return self._checkpoint.file_of[name].tensors[name]

    def whole(self, name: str) -> Tensor:
        """All of a tensor."""
        info = self.info(name)
        buffer = torch.empty(info.stop - info.start, dtype=torch.uint8)
        self._read(name, info.start, buffer.numpy())
        return buffer.view(TORCH_DTYPES[info.dtype]).view(info.shape)

    def rows(self, pieces: Sequence[Piece], suffix: str) -> Tensor:
        """The rows of each piece's `name + suffix`, stacked in the order given.

        All pieces must be of one dtype and width. Raises `CheckpointError` where a file has become shorter.
        """
        info = self.info(pieces[0].name + suffix)
        rest = info.shape[1:]
        count = sum(piece.rows.size for piece in pieces)
        row_bytes = (info.stop - info.start) // info.shape[0]
        buffer = torch.empty(count * row_bytes, dtype=torch.uint8)
        at = 0
        for piece in _joined(pieces):
            size = piece.rows.size * row_bytes
            start = self.info(piece.name + suffix).start + piece.rows.start * row_bytes
            self._read(piece.name + suffix, start, buffer[at : at + size].numpy())
            at += size
        return buffer.view(TORCH_DTYPES[info.dtype]).view(count, *rest)

    def columns(self, name: str, columns: Span) -> Tensor:
        """Columns of a matrix (rows, columns), counted in stored elements."""
        info = self.info(name)
        rows, width = info.shape
        itemsize = (info.stop - info.start) // (rows * width)
        table = self._map(name, (rows, width * itemsize))
        part = table[:, columns.start * itemsize : columns.stop * itemsize]
        return self._copied(part, info.dtype, (rows, columns.size))

    def scale_columns(self, name: str, columns: Span) -> Tensor:
        """NVFP4 block scales (N, K/16) of weight columns `columns`, multiples of 64.

        Their bytes are tiles of 128 rows x 64 columns: a cut is a rectangle of tiles, not of the tensor's shape.
        """
        info = self.info(name)
        rows = info.shape[0]
        tile_cols = (info.stop - info.start) // TILE_BYTES // (rows // TILE_ROWS)
        table = self._map(name, (rows // TILE_ROWS, tile_cols, TILE_BYTES))
        part = table[:, columns.start // TILE_COLS : columns.stop // TILE_COLS]
        return self._copied(part, info.dtype, (rows, part.shape[1] * TILE_BYTES // TILE_ROWS))

    def _map(self, name: str, shape: tuple[int, ...]) -> Bytes:
        """A tensor's bytes, mapped read-only, in a shape of bytes."""
        path = self._checkpoint.file_of[name].path
        return np.memmap(path, mode="r", dtype=np.uint8, offset=self.info(name).start, shape=shape)

    def _copied(self, part: Bytes, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """A part of a map as a tensor of its own memory."""
        self.bytes_read += part.size
        buffer = torch.empty(part.size, dtype=torch.uint8)
        np.copyto(buffer.numpy().reshape(part.shape), part)
        return buffer.view(TORCH_DTYPES[dtype]).view(shape)

    def _read(self, name: str, start: int, buffer: Bytes) -> None:
        """Fill a buffer from the file of `name`, from byte `start`."""
        path = self._checkpoint.file_of[name].path
        file = self._files.get(path)
        if file is None:
            file = self._files[path] = path.open("rb", buffering=0)
        file.seek(start)
        left = buffer.data
        while left:
            # One call moves at most 2 GiB.
            count = file.readinto(left)
            if not count:
                raise CheckpointError(f"{path}: {name}: the file has become shorter while it was read; load it again")
            left = left[count:]
        self.bytes_read += buffer.size


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The same rows with neighbours joined, so that an uncut tensor is one read."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and joined[-1].name == piece.name and joined[-1].rows.stop == piece.rows.start:
            joined[-1] = Piece(piece.name, Span(joined[-1].rows.start, piece.rows.stop))
        else:
            joined.append(piece)
    return joined
