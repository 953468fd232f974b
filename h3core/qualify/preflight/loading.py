"""How much host memory the ranks take to load a checkpoint, from file headers alone.

`h3core.checkpoint` would say more, but importing it imports comfy_kitchen, which touches CUDA.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Final, Literal

_MAX_HEADER: Final = 100_000_000
"""safetensors' own limit; a longer one is another kind of file."""


def host_bytes(checkpoint: Path, device: Literal["cpu", "cuda"], world: int) -> int:
    """Bytes in all ranks together.

    On GPUs a rank holds one tensor at a time in host memory (tests/unit/test_checkpoint_memory.py). On the CPU it holds
    its weights as well: all of them in mode ulysses, which is counted here, and a part in mode tensor.
    Raises `ValueError` for what is no safetensors checkpoint, OSError for what cannot be read.
    """
    sizes = [size for file in files_of(checkpoint) for size in tensor_bytes(file)]
    if not sizes:
        raise ValueError(f"{checkpoint}: got no tensor, expected a denoiser; download it again")
    return world * (max(sizes) + (sum(sizes) if device == "cpu" else 0))


def files_of(checkpoint: Path) -> list[Path]:
    """The files of a checkpoint: one file, or those that an index names. Raises `ValueError` for anything else."""
    if checkpoint.is_dir():
        found = sorted(checkpoint.glob("*.safetensors.index.json")) or sorted(checkpoint.glob("*.safetensors"))
        if len(found) != 1:
            raise ValueError(
                f"{checkpoint}: got a folder with {len(found)} checkpoints, expected one index or one .safetensors "
                "file; name the file that is meant"
            )
        checkpoint = found[0]
    if checkpoint.suffix != ".json":
        return [checkpoint]
    try:
        names = set(json.loads(checkpoint.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{checkpoint}: got no index of shards ({error!r}); download it again") from error
    return [checkpoint.parent / str(name) for name in sorted(names)]


def tensor_bytes(file: Path) -> list[int]:
    """The size of each tensor of a safetensors file. Raises `ValueError` where its header is not one."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _MAX_HEADER:
                raise ValueError(f"its header would take {length} bytes")
            header = json.loads(stream.read(length))
        return [
            entry["data_offsets"][1] - entry["data_offsets"][0]
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: got no safetensors file ({error}); download it again") from error
