"""A checkpoint as one thing: a single safetensors file, or the shards that an index names.

Shards may come from different downloads: the index says which tensors each one holds, and every header is
held against it. All problems are listed, since each costs another download.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from h3core.checkpoint.errors import CheckpointError, bullets, listed
from h3core.checkpoint.integrity import Header, TensorInfo, parse_json, read_header

_INDEX: Final = ".safetensors.index.json"
_NUMBERED: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<total>\d+)\.safetensors")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Sound files and what they hold. `path` is what the user named; `config_json` a config.json beside the files."""

    path: Path
    headers: tuple[Header, ...]
    file_of: dict[str, Header]
    """Which file holds a tensor, by tensor name."""
    config_json: Mapping[str, Any] | None

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every tensor by name; offsets are those of its own file."""
        return {name: header.tensors[name] for name, header in self.file_of.items()}

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata of all files together."""
        return {key: value for header in self.headers for key, value in header.metadata.items()}

    def read(self, name: str) -> bytes:
        """All bytes of one tensor; meant for small ones."""
        return self.file_of[name].read(name)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Check every header of a checkpoint; no tensor is read.

    `path` is a .safetensors file, an index file, or a folder with exactly one index or exactly one .safetensors file.
    A config.json beside the files is read too. Raises `CheckpointError` for files that are not sound, for shards that
    do not fit their index (tensors missing or surplus, numbers missing, sum of bytes wrong) and for a folder that does
    not say which file is meant.
    """
    path = Path(path)
    file = _file_of_folder(path) if path.is_dir() else path
    config = _config_beside(file)
    if file.name.endswith(_INDEX):
        return _open_index(path, file, config)
    header = read_header(file)
    return Checkpoint(path, (header,), dict.fromkeys(header.tensors, header), config)


def _file_of_folder(folder: Path) -> Path:
    """The index, or else the one safetensors file, of a folder."""
    for pattern, what in ((f"*{_INDEX}", "index"), ("*.safetensors", "safetensors")):
        found = sorted(folder.glob(pattern))
        if len(found) == 1:
            return found[0]
        if found:
            names = listed(file.name for file in found)
            raise CheckpointError(
                f"{folder}: got {len(found)} {what} files ({names}), expected one; name the file that is meant"
            )
    below = sorted({file.parent.name for file in folder.glob("*/*.safetensors")})
    advice = f"name one of its folders: {listed(below)}" if below else "download the denoiser's files into it"
    raise CheckpointError(f"{folder}: got a folder without .safetensors files, expected one checkpoint; {advice}")


def _config_beside(file: Path) -> Mapping[str, Any] | None:
    """The config.json in the same folder, if there is one."""
    path = file.parent / "config.json"
    if not path.is_file():
        return None
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}; expected the model's sizes: download it again or remove it") from error


def _open_index(path: Path, index: Path, config: Mapping[str, Any] | None) -> Checkpoint:
    """Open every shard of an index and hold it against the index."""
    try:
        content = parse_json(index.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{index}: no such file, expected an index of shards") from error
    except ValueError as error:
        raise CheckpointError(f"{index}: {error}; expected an index of shards: download it again") from error
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index}: got keys {sorted(content)}, expected a weight_map that names tensors and shards"
        )
    shards = sorted({str(shard) for shard in weight_map.values()})
    # A name with a folder in it could read any file of the machine, and no publisher writes one.
    astray = [shard for shard in shards if Path(shard).name != shard]
    if astray:
        raise CheckpointError(f"{index}: shards {listed(astray)}: expected names of files in the index's own folder")
    problems = list(_numbering_problems(shards))
    headers: list[Header] = []
    for shard in shards:
        try:
            headers.append(read_header(index.parent / shard))
        except CheckpointError as error:
            problems.append(str(error))
    for header in headers:
        expected = {name for name, shard in weight_map.items() if shard == header.path.name}
        problems += _shard_problems(header, expected, weight_map)
    metadata = content.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    stored = sum(info.stop - info.start for header in headers for info in header.tensors.values())
    if total is not None and len(headers) == len(shards) and total != stored:
        problems.append(f"the shards hold {stored} bytes of tensors, the index says total_size {total}")
    if problems:
        raise bullets(f"{index}: its shards do not fit it; download again what is named below:", problems)
    by_name = {header.path.name: header for header in headers}
    return Checkpoint(path, tuple(headers), {name: by_name[shard] for name, shard in weight_map.items()}, config)


def _shard_problems(header: Header, expected: set[str], weight_map: Mapping[str, Any]) -> Iterator[str]:
    """Tensors of one shard that the index expects elsewhere or not at all, and those it lacks."""
    missing = sorted(expected - set(header.tensors))
    surplus = sorted(set(header.tensors) - expected)
    if missing:
        yield f"{header.path.name}: {len(missing)} tensors missing: {listed(missing)}"
    if surplus:
        where = (f"{name} (the index has it in {weight_map[name]})" if name in weight_map else name for name in surplus)
        yield f"{header.path.name}: {len(surplus)} tensors surplus: {listed(where)}"


def _numbering_problems(shards: list[str]) -> Iterator[str]:
    """Gaps in name-00001-of-00014.safetensors; names that are not numbered are left alone."""
    matches = [match for shard in shards if (match := _NUMBERED.fullmatch(shard))]
    totals = sorted({int(match["total"]) for match in matches})
    if len(totals) > 1 or len({match["stem"] for match in matches}) > 1:
        yield f"shards of different sets: {listed(shards)}; expected one name and one total"
    elif matches and len(matches) != len(shards):
        yield f"shards with and without a number: {listed(shards)}; expected one kind"
    elif totals:
        numbers = sorted(int(match["number"]) for match in matches)
        absent = sorted(set(range(1, min(totals[0], 100_000) + 1)) - set(numbers))
        if absent or len(numbers) != totals[0]:
            yield f"got {len(numbers)} of {totals[0]} shards; numbers absent from the index: {listed(map(str, absent))}"
