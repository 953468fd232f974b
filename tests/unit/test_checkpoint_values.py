"""Weights that no model can have are refused while they are read.

A pass means: NaN, infinity and impossible NVFP4 scales are told by tensor and with counts, all problems of a file in
one bounded error, and a file that shrinks meanwhile is an error too. Run: pytest tests/unit/test_checkpoint_values.py
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from h3core.checkpoint.errors import CheckpointError
from h3core.checkpoint.reader import DenoiserReader, load_denoiser
from tests.unit.layout_files import CONFIG, RANK, Files


def faulty(source: Path, folder: Path, change: Callable[[Files], None]) -> str:
    """The error of loading a copy of a file whose tensors were changed."""
    tensors = load_file(source)
    change(tensors)
    save_file(tensors, folder / "x.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_denoiser(folder)
    return str(caught.value)


def scale_bytes(tensors: Files, name: str) -> Tensor:
    return tensors[f"{name}.weight_scale"].view(torch.uint8).view(-1)


def test_nan_and_infinity_are_refused_by_tensor_with_counts(layouts: dict[str, Path], tmp_path: Path) -> None:
    def change(tensors: Files) -> None:
        tensors["blocks.1.mlp.fc2.weight"][3, 5:8] = float("nan")
        tensors["blocks.1.mlp.fc2.weight"][4, 5] = float("-inf")
        tensors["final_layer.video_out.bias"][1] = float("inf")
        tensors["blocks.0.norm2.weight"][0] = float("nan")

    message = faulty(layouts["native"], tmp_path, change)
    size = CONFIG.hidden_size * CONFIG.ffn_dim
    assert f"blocks.1.mlp.fc2.weight: got 3 NaN and 1 infinite of {size} values" in message
    assert "final_layer.video_out.bias: got 0 NaN and 1 infinite" in message
    assert "blocks.0.norm2.weight: got 1 NaN" in message
    assert "3 problems" in message
    assert "sha256" in message


def test_non_finite_curve_is_refused(layouts: dict[str, Path], tmp_path: Path) -> None:
    message = faulty(layouts["pruned"], tmp_path, lambda tensors: tensors["adaln_t_table"][2].fill_(float("nan")))
    assert f"adaln_t_table: got {RANK} NaN" in message


def test_bad_nvfp4_scales_are_refused_with_counts(layouts: dict[str, Path], tmp_path: Path) -> None:
    def change(tensors: Files) -> None:
        scale_bytes(tensors, "blocks.0.mlp.fc2")[torch.tensor([1, 700])] = torch.tensor([0x7F, 0xFF], dtype=torch.uint8)
        scale_bytes(tensors, "blocks.0.mlp.fc2")[50] |= 0x80
        tensors["blocks.1.attn.out_proj.weight_scale_2"].fill_(0.0)
        tensors["blocks.1.mlp.fc1.weight_scale_2"].fill_(float("nan"))
        tensors["blocks.1.mlp.fc2.weight_scale_2"].fill_(-1.0)
        tensors["blocks.1.attn.qkv_proj.weight_scale_2"].fill_(float("inf"))

    message = faulty(layouts["nvfp4"], tmp_path, change)
    assert "blocks.0.mlp.fc2: weight_scale: got 2 NaN and 1 negative of" in message
    for name, value in (("attn.out_proj", "0.0"), ("mlp.fc1", "nan"), ("mlp.fc2", "-1.0"), ("attn.qkv_proj", "inf")):
        assert f"blocks.1.{name}: weight_scale_2: got {value}, expected a finite positive number" in message
    assert "5 problems" in message


@pytest.mark.parametrize(("byte", "word"), [(0x7F, "1 NaN and 0"), (0xFF, "1 NaN and 0"), (0x81, "0 NaN and 1")])
def test_each_kind_of_bad_scale_byte_is_seen_alone(
    layouts: dict[str, Path], tmp_path: Path, byte: int, word: str
) -> None:
    def change(tensors: Files) -> None:
        scale_bytes(tensors, "blocks.1.attn.qkv_proj")[-1] = byte

    assert f"blocks.1.attn.qkv_proj: weight_scale: got {word} negative" in faulty(layouts["nvfp4"], tmp_path, change)


def test_zero_scale_over_ordinary_codes_is_refused_and_over_empty_or_saturated_ones_is_not(
    layouts: dict[str, Path], tmp_path: Path
) -> None:
    name, row, block = "blocks.1.mlp.fc2", 230, 13
    tile_cols = CONFIG.ffn_dim // 64
    offset = ((row // 128) * tile_cols + block // 4) * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + block % 4

    def lose(tensors: Files) -> None:
        scale_bytes(tensors, name)[offset] = 0

    message = faulty(layouts["nvfp4"], tmp_path, lose)
    assert f"{name}: weight_scale: 1 of 1 zero block scales stand over codes that a zero block cannot have" in message

    # What a quantiser leaves where a block is too small for its scale: nothing (CPU) or plus and minus 6 (CUDA).
    for codes in (bytes(8), b"\x80\x08\x88\x00" * 2, b"\x7f\xf7\x07\x70" * 2):
        tensors = load_file(layouts["nvfp4"])
        lose(tensors)
        tensors[f"{name}.weight"][row, 8 * block : 8 * block + 8] = torch.tensor(list(codes), dtype=torch.uint8)
        save_file(tensors, tmp_path / "x.safetensors")
        assert load_denoiser(tmp_path)[1].blocks
    for byte in (0x01, 0x06, 0x09, 0x0E, 0x10, 0x60, 0x90, 0xE0):
        tensors[f"{name}.weight"][row, 8 * block + 7] = byte
        save_file(tensors, tmp_path / "x.safetensors")
        with pytest.raises(CheckpointError, match="1 of 1 zero block scales"):
            load_denoiser(tmp_path)


def test_problems_are_bounded(layouts: dict[str, Path], tmp_path: Path) -> None:
    def change(tensors: Files) -> None:
        for tensor in tensors.values():
            if tensor.is_floating_point() and tensor.shape != (CONFIG.rope_freq_dim,):
                tensor.view(-1)[0] = float("nan")

    message = faulty(layouts["native"], tmp_path, change)
    assert 40 < len(message.splitlines()) < 44
    assert re.search(r"and \d+ more$", message)


def test_file_that_shrinks_while_it_is_read_is_an_error(layouts: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(layouts["native"].read_bytes())
    reader = DenoiserReader(path)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="become shorter"):
        reader.load()


def test_a_matrix_of_nothing_but_zeros_is_refused() -> None:
    from h3core.checkpoint.values import float_problems, nvfp4_problems
    from h3core.nvfp4 import NVFP4Weight

    (problem,) = float_problems(torch.zeros(4, 8))
    assert "got 32 zeros, expected a weight: the bytes are missing" in problem
    assert not list(float_problems(torch.zeros(8))), "a bias may be zero"
    scales = torch.zeros(128, 4, dtype=torch.uint8).view(torch.float8_e4m3fn)
    empty = NVFP4Weight(torch.zeros(128, 32, dtype=torch.uint8), scales, torch.tensor(1.0))
    assert any("got 512 zeros, expected block scales" in problem for problem in nvfp4_problems(empty))
