"""A file that is not a whole, sound checkpoint is refused before anything is loaded, and the error says what to do.

Run: pytest tests/unit/test_checkpoint_integrity.py
"""

from __future__ import annotations

import json
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from h3core.checkpoint.errors import CheckpointError
from h3core.checkpoint.integrity import read_header
from h3core.checkpoint.shards import open_checkpoint


def raw(path: Path, header: object, payload: bytes = b"") -> Path:
    """A file with exactly this header (an object, or JSON text) and payload."""
    text = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + payload)
    return path


def entry(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    return str(caught.value)


def test_header_gives_the_bytes_that_safetensors_wrote(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).bfloat16(),
        "c": torch.randint(256, (4, 3), dtype=torch.uint8),
        "scalar": torch.tensor(2.5),
        "fp8": torch.randn(2, 2).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 4),
    }
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    data = path.read_bytes()
    assert header.metadata == {"format": "pt"}
    assert header.file_bytes == len(data)
    assert header.header_bytes == struct.unpack("<Q", data[:8])[0]
    assert set(header.tensors) == set(tensors)
    for name, tensor in tensors.items():
        info = header.tensors[name]
        expected = tensor.view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        assert info.shape == tuple(tensor.shape)
        assert data[info.start : info.stop] == expected == header.read(name)
    assert header.tensors["fp8"].dtype == "F8_E4M3"
    assert header.tensors["b"].dtype == "BF16"


def test_a_sound_header_of_640_bytes_is_not_taken_for_a_pickle(tmp_path: Path) -> None:
    # Its length starts with the bytes 0x80 0x02, which is also how a pickle starts.
    text = json.dumps({"a": entry("U8", [1], 0, 1)})
    path = raw(tmp_path / "x.safetensors", text + " " * (640 - len(text)), b"\x01")
    assert path.read_bytes()[:2] == b"\x80\x02"
    assert read_header(path).header_bytes == 640


FOREIGN = {
    "empty": (b"", ["empty file (0 bytes)", "download the file again"]),
    "lfs": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
        ["git-LFS pointer", "git lfs pull"],
    ),
    "html": (b"\n <!DOCTYPE html><html><body>404</body></html>", ["web page", "saved an error page"]),
    "xml": (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', ["web page"]),
    "json": (b'{"error":"Entry not found"}', ["text that starts", "Entry not found"]),
    "text": (b"Invalid username or password.", ["text that starts", "Invalid username"]),
    "gguf": (b"GGUF\x03\x00\x00\x00" + bytes(64), ["GGUF", "not supported", "bf16 or NVFP4"]),
    "zip": (b"PK\x03\x04" + bytes(64), ["pickle", "never opened"]),
    "pickle": (pickle.dumps({"a": list(range(99))}), ["pickle", "never opened"]),
    "short": (b"\x01\x02\x03", ["3 bytes", "at least 10"]),
    "longer-than-file": (
        struct.pack("<Q", 5000) + b'{"a":1}' + bytes(50),
        ["header length of 5000", "at most 57", "file of 65 bytes"],
    ),
    "no-brace": (struct.pack("<Q", 4) + b"\x01\x02\x03\x04" + bytes(50), ["not JSON", "opening brace"]),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_file_is_named_with_what_to_do(tmp_path: Path, kind: str) -> None:
    content, words = FOREIGN[kind]
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    message = refusal(path)
    assert str(path) in message
    for word in [*words, "expected"]:
        assert word in message


def test_missing_file_and_folder_are_named(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "x.safetensors")
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "gone")
    assert "link to one that is gone" in refusal(tmp_path / "link.safetensors")
    with pytest.raises(CheckpointError, match=r"got a folder, expected a \.safetensors file; name the file"):
        read_header(tmp_path)


ONE = entry("U8", [4], 0, 4)
MALFORMED = {
    "not-json": ('{"a": nope}', 0, ["header is not JSON", "expected tensor names"]),
    "not-utf8": ('{"a": 1}\udcff', 0, ["header is not JSON"]),
    "nested": ('{"a":' * 50_000, 0, ["header is not JSON"]),
    "duplicate-tensor": (
        f'{{"a": {json.dumps(ONE)}, "a": {json.dumps(ONE)}}}',
        4,
        ["duplicate names: a"],
    ),
    "duplicate-key": (
        '{"a": {"dtype": "U8", "dtype": "I8", "shape": [4], "data_offsets": [0, 4]}}',
        4,
        ["duplicate names: dtype"],
    ),
    "unknown-dtype": ({"a": entry("U9", [4], 0, 4)}, 4, ["a: unknown dtype 'U9'", "expected one of BOOL"]),
    "extra-field": ({"a": {**ONE, "x": 1}}, 4, ["a: expected dtype, shape and data_offsets"]),
    "negative-shape": ({"a": entry("U8", [-4], 0, 4)}, 4, ["expected integers from 0 up"]),
    "boolean-shape": ({"a": entry("U8", [True], 0, 1)}, 1, ["expected integers from 0 up"]),
    "metadata-number": ({"__metadata__": {"a": 1}, "a": ONE}, 4, ["__metadata__: expected an object of strings"]),
    "size-of-shape": ({"a": entry("F32", [4], 0, 8)}, 8, ["hold 8 bytes, expected 16 for F32 (4,)"]),
    "half-byte": ({"a": entry("F4", [3], 0, 1)}, 1, ["hold 1 bytes, expected 1.5 for F4"]),
    "backwards": ({"a": entry("U8", [0], 4, 0)}, 4, ["hold -4 bytes, expected 0"]),
    "overlap": ({"a": ONE, "b": entry("U8", [4], 2, 6)}, 6, ["b: starts at byte", "overlaps a, which ends at"]),
    "gap": ({"a": ONE, "b": entry("U8", [4], 6, 10)}, 10, ["b: starts at byte", "leaves a gap after a"]),
    "gap-at-start": ({"a": entry("U8", [4], 2, 6)}, 6, ["leaves a gap after the header"]),
    "truncated": ({"a": ONE}, 3, ["truncated: the file has", "1 are missing"]),
    "trailing": ({"a": ONE}, 9, ["5 bytes after the payload"]),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_header_is_refused(tmp_path: Path, kind: str) -> None:
    header, payload, words = MALFORMED[kind]
    path = tmp_path / "x.safetensors"
    text = header if isinstance(header, str) else json.dumps(header)
    data = text.encode("utf-8", "surrogateescape")
    path.write_bytes(struct.pack("<Q", len(data)) + data + bytes(payload))
    message = refusal(path)
    for word in [*words, "download the file again"]:
        assert word in message


def test_truncated_file_names_both_byte_counts(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(1000), "b": torch.ones(10)}, path)
    whole = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-100])
    message = refusal(path)
    assert f"the file has {whole - 100} bytes, its header describes {whole}; 100 are missing" in message


def test_every_malformed_entry_is_listed(tmp_path: Path) -> None:
    path = raw(tmp_path / "x.safetensors", {f"t{i}": entry("U9", [4], 0, 4) for i in range(30)}, bytes(4))
    message = refusal(path)
    assert all(f"t{i}: unknown dtype" in message for i in range(30))


# ---- sharded checkpoints ----


def sharded(folder: Path, total: int = 2, stem: str = "model") -> dict[str, str]:
    """A sound sharded checkpoint with two tensors a shard; returns its weight_map."""
    folder.mkdir(exist_ok=True)
    weight_map: dict[str, str] = {}
    for number in range(1, total + 1):
        file = f"{stem}-{number:05d}-of-{total:05d}.safetensors"
        tensors = {f"w{number}.{part}": torch.full((8,), float(number)) for part in "ab"}
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    index(folder, weight_map, 64 * total, stem)
    return weight_map


def index(folder: Path, weight_map: object, total_size: object = None, stem: str = "model") -> None:
    metadata = {} if total_size is None else {"metadata": {"total_size": total_size}}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({**metadata, "weight_map": weight_map}))


def test_folder_index_and_file_open_alike(tmp_path: Path) -> None:
    weight_map = sharded(tmp_path)
    by_folder, by_index = open_checkpoint(tmp_path), open_checkpoint(tmp_path / "model.safetensors.index.json")
    assert set(by_folder.tensors) == set(weight_map) == set(by_index.tensors)
    assert by_folder.tensors == by_index.tensors
    assert by_folder.read("w2.b") == torch.full((8,), 2.0).numpy().tobytes()
    assert by_folder.config_json is None
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert open_checkpoint(tmp_path).config_json == {"a": 1}
    single = tmp_path / "single"
    single.mkdir()
    save_file({"x": torch.ones(1)}, single / "any.safetensors")
    assert open_checkpoint(single).tensors == open_checkpoint(single / "any.safetensors").tensors


def test_index_without_total_size_or_numbers_is_sound(tmp_path: Path) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "first.safetensors")
    save_file({"y": torch.ones(1)}, tmp_path / "second.safetensors")
    index(tmp_path, {"x": "first.safetensors", "y": "second.safetensors"})
    assert set(open_checkpoint(tmp_path).tensors) == {"x", "y"}


def test_folder_that_does_not_say_which_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    assert "download the denoiser's files" in refusal(tmp_path)
    save_file({"x": torch.ones(1)}, tmp_path / "transformer" / "a.safetensors")
    assert "name one of its folders: transformer" in refusal(tmp_path)
    for name in ("a", "b"):
        save_file({"x": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    assert "got 2 safetensors files (a.safetensors, b.safetensors), expected one" in refusal(tmp_path)
    index(tmp_path, {"x": "a.safetensors"}, stem="a")
    index(tmp_path, {"x": "a.safetensors"}, stem="b")
    assert "got 2 index files" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("[]", "got a JSON list, expected an object"),
        ("{", "expected an index of shards"),
        ('{"weight_map": {}}', "expected a weight_map"),
        ('{"weight_map": {"x": "a", "x": "b"}}', "duplicate names: x"),
        ('{"weight_map": {"x": "../a.safetensors"}}', "names of files in the index's own folder"),
        ('{"weight_map": {"x": 3}}', "3: no such file"),
    ],
)
def test_malformed_index_is_refused(tmp_path: Path, content: str, word: str) -> None:
    (tmp_path / "m.safetensors.index.json").write_text(content)
    assert word in refusal(tmp_path)


def test_malformed_config_json_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "config.json").write_text("<html>")
    assert "config.json" in refusal(tmp_path)


def test_all_faults_of_a_sharded_checkpoint_are_listed_at_once(tmp_path: Path) -> None:
    weight_map = sharded(tmp_path, 4)
    first, second, third, fourth = sorted(set(weight_map.values()))
    (tmp_path / first).unlink()
    (tmp_path / second).write_bytes((tmp_path / second).read_bytes()[:-8])
    # The third from another download: one tensor more, one less, and one that the index has in the fourth.
    save_file({"w3.a": torch.ones(8), "new": torch.ones(8), "w4.a": torch.ones(8)}, tmp_path / third)
    message = refusal(tmp_path)
    assert f"{first}: no such file" in message
    assert "8 are missing" in message
    assert f"{third}: 1 tensors missing: w3.b" in message
    assert f"{third}: 2 tensors surplus: new, w4.a (the index has it in {fourth})" in message


def test_sum_of_bytes_must_be_the_index_total(tmp_path: Path) -> None:
    weight_map = sharded(tmp_path)
    index(tmp_path, weight_map, 127)
    assert "the shards hold 128 bytes of tensors, the index says total_size 127" in refusal(tmp_path)


def test_shard_numbers_must_be_complete(tmp_path: Path) -> None:
    weight_map = sharded(tmp_path, 4)
    index(tmp_path, {name: file for name, file in weight_map.items() if "-00003-" not in file})
    assert "got 3 of 4 shards; numbers absent from the index: 3" in refusal(tmp_path)


def test_shards_of_two_sets_are_refused(tmp_path: Path) -> None:
    weight_map = {**sharded(tmp_path, 2), **sharded(tmp_path, 3)}
    (tmp_path / "other.safetensors").write_bytes(b"")
    index(tmp_path, {**weight_map, "w2.a": "model-00002-of-00002.safetensors"})
    assert "shards of different sets" in refusal(tmp_path)
    index(tmp_path, {"w1.a": "model-00001-of-00001.safetensors", "z": "other.safetensors"})
    assert "with and without a number" in refusal(tmp_path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(CheckpointError, match="got a device or a pipe"):
        read_header(tmp_path / "pipe.safetensors")
