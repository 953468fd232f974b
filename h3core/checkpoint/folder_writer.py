"""Checkpoints that are folders: tensors dealt over several files, an index that says where each one is.

The folder is whole or absent, as single files are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from h3core.atomic import flushed_file, new_folder, write_all
from h3core.checkpoint.layout import TensorSpec
from h3core.checkpoint.safetensors_format import data_bytes, file_bytes, nbytes
from h3core.checkpoint.writer import Produce, Progress, write_tensors

OWN_SUFFIXES: Final = (".safetensors", ".safetensors.index.json")
"""What may stand in a checkpoint folder that `force` replaces, besides `config.json`."""


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
    needed = sum(map(file_bytes, shards.values())) + sum(map(len, small.values()))
    total = 0
    with new_folder(folder, force=force, replaceable=is_own, needed=needed) as unfinished:
        for name, part in shards.items():
            with flushed_file(unfinished / name) as file:
                total += write_tensors(file, part, produce, progress=progress)
        for name, content in small.items():
            with flushed_file(unfinished / name) as file:
                write_all(file, content)
    return total


def encode_index(shards: Mapping[str, Mapping[str, TensorSpec]]) -> bytes:
    """The `*.safetensors.index.json` of the shards: total data bytes, and the file of each tensor."""
    weight_map = {name: file for file, part in shards.items() for name in part}
    index = {
        "metadata": {"total_size": sum(map(data_bytes, shards.values()))},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return (json.dumps(index, indent=2) + "\n").encode()


def is_own(name: str) -> bool:
    """Whether a file of that name may be part of a checkpoint folder."""
    return name == "config.json" or name.endswith(OWN_SUFFIXES)
