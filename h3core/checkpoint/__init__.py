"""Denoiser checkpoints: headers checked before use, layouts told from tensors, shards read by the ranks that hold them.

`errors` has the exception, `integrity` checks one file and `shards` a whole checkpoint; `layout` says what each layout
holds, `foreign` and `detect` which one it is; `slices` copies parts of tensors, `values` judges them, `reader` makes
the denoiser of them.
"""

from __future__ import annotations

from h3core.checkpoint.detect import Detected, detect, infer_config
from h3core.checkpoint.errors import CheckpointError
from h3core.checkpoint.integrity import Header, TensorInfo, read_header
from h3core.checkpoint.layout import TensorSpec, expected_tensors, file_order
from h3core.checkpoint.reader import DenoiserReader, load_denoiser
from h3core.checkpoint.shards import Checkpoint, open_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "DenoiserReader",
    "Detected",
    "Header",
    "TensorInfo",
    "TensorSpec",
    "detect",
    "expected_tensors",
    "file_order",
    "infer_config",
    "load_denoiser",
    "open_checkpoint",
    "read_header",
]
