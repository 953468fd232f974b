"""The four published tensor lists are reproduced to the letter, and what is not one of them is refused by name.

The oracle are the lists of the real files in tests/data. Run: pytest tests/unit/test_checkpoint_layout.py
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from h3core.checkpoint.detect import Detected, detect, infer_config
from h3core.checkpoint.errors import CheckpointError
from h3core.checkpoint.layout import TensorSpec, expected_tensors, fc1_pieces, file_order, qkv_pieces
from h3core.checkpoint.shards import open_checkpoint
from h3core.config import H3, TINY, H3Config
from h3core.partition import Span

DATA = Path(__file__).parent.parent / "data"
KINDS = [("native", "bf16"), ("diffusers", "bf16"), ("pruned", "bf16"), ("pruned", "nvfp4")]
DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I8": torch.int8,
}
SMALL = H3Config(
    num_attention_heads=3,
    attention_head_dim=64,
    hidden_size=128,
    num_layers=3,
    num_refiner_layers=1,
    ffn_dim=192,
    in_channels=5,
    audio_in_channels=7,
    patch_size=(1, 2, 2),
    text_dim=48,
    freq_dim=32,
    time_embed_hidden_dim=80,
    time_embed_dim=56,
    rope_freq_dim=8,
)
"""No size equals another one that could be mistaken for it."""
NVFP4_SMALL = dataclasses.replace(SMALL, num_attention_heads=2, ffn_dim=256)


def published(layout: str, quant: str) -> dict[str, Any]:
    return json.loads((DATA / f"denoiser_{layout}_{quant}.json").read_text())


def inv_freq(config: H3Config) -> torch.Tensor:
    count = config.rope_freq_dim
    return 1.0 / config.rope_theta ** (torch.arange(0, 2 * count, 2, dtype=torch.float32) / (2 * count))


def tensors_for(config: H3Config, layout: str, quant: str, **options: Any) -> dict[str, torch.Tensor]:
    """Zeros for every expected tensor; only the frequencies and the quantisation texts are read by `detect`."""
    specs = expected_tensors(config, layout, quant, **options)
    tensors = {name: torch.zeros(spec.shape, dtype=DTYPES[spec.dtype]) for name, spec in specs.items()}
    for name in tensors:
        if name == "rope.inv_freq":
            tensors[name] = inv_freq(config)
        if name.endswith(".comfy_quant"):
            tensors[name] = text('{"format": "nvfp4"}')
    return tensors


def text(value: str) -> torch.Tensor:
    return torch.tensor(list(value.encode()), dtype=torch.uint8)


def detected(folder: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> Detected:
    save_file(tensors, folder / "x.safetensors", metadata=metadata)
    return detect(open_checkpoint(folder))


def refusal(folder: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        detected(folder, tensors, metadata)
    return str(caught.value)


# ---- the lists ----


@pytest.mark.parametrize(("layout", "quant"), KINDS)
def test_expected_tensors_are_those_of_the_published_file_in_its_order(layout: str, quant: str) -> None:
    oracle = published(layout, quant)
    specs = expected_tensors(H3, layout, quant)
    assert {name: [spec.dtype, list(spec.shape)] for name, spec in specs.items()} == oracle["tensors"]
    assert list(specs) == list(oracle["tensors"])
    assert len(specs) == oracle["tensor_count"]
    sizes = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "U8": 1}
    assert sum(prod(spec.shape) * sizes[spec.dtype] for spec in specs.values()) == oracle["data_bytes"]


@pytest.mark.parametrize(("layout", "quant"), KINDS)
def test_released_sizes_are_told_from_the_published_shapes(layout: str, quant: str) -> None:
    tensors = {
        name: TensorSpec(dtype, tuple(shape)) for name, (dtype, shape) in published(layout, quant)["tensors"].items()
    }
    assert infer_config(tensors, layout) == H3


def test_file_order_sorts_by_dtype_and_then_by_name() -> None:
    given = {"u": "U8", "b": "BF16", "f8": "F8_E4M3", "a2": "F16", "a10": "F16", "z": "F32", "i": "I8"}
    specs = file_order({name: TensorSpec(dtype, (1,)) for name, dtype in given.items()})
    assert list(specs) == ["z", "b", "a10", "a2", "f8", "i", "u"]
    with pytest.raises(CheckpointError, match="C64"):
        file_order({"x": TensorSpec("C64", ())})


def test_pieces_are_the_rows_of_each_layout() -> None:
    heads, dim, inner = Span(1, 3), SMALL.attention_head_dim, SMALL.inner_dim
    native = qkv_pieces(SMALL, "native", "blocks.0", heads)
    # Head 1 owns rows 192..383: q 192..255, k 256..319, v 320..383.
    assert [tuple(piece.rows) for piece in native] == [
        (192, 256),
        (384, 448),
        (256, 320),
        (448, 512),
        (320, 384),
        (512, 576),
    ]
    pruned = qkv_pieces(SMALL, "pruned", "blocks.0", heads)
    assert [tuple(piece.rows) for piece in pruned] == [
        (dim + part * inner, 3 * dim + part * inner) for part in range(3)
    ]
    diffusers = qkv_pieces(SMALL, "diffusers", "b", heads)
    assert [piece.name for piece in diffusers] == ["b.attn.to_q", "b.attn.to_k", "b.attn.to_v"]
    assert {tuple(piece.rows) for piece in diffusers} == {(dim, 3 * dim)}
    assert [tuple(p.rows) for p in fc1_pieces(SMALL, "native", "b", Span(64, 128))] == [(64, 128), (256, 320)]
    assert [tuple(p.rows) for p in fc1_pieces(SMALL, "diffusers", "b", Span(64, 128))] == [(256, 320), (64, 128)]


@pytest.mark.parametrize(
    ("layout", "quant", "word"),
    [("gguf", "bf16", "one of native"), ("native", "int8", "one of bf16"), ("native", "nvfp4", "only layout pruned")],
)
def test_unknown_layouts_and_quantisations_are_refused(layout: str, quant: str, word: str) -> None:
    with pytest.raises(CheckpointError, match=word):
        expected_tensors(TINY, layout, quant)


def test_nvfp4_of_sizes_that_tiles_do_not_divide_is_refused() -> None:
    with pytest.raises(CheckpointError, match="576 x 128, expected rows in multiples of 128"):
        expected_tensors(SMALL, "pruned", "nvfp4")


# ---- detection ----


@pytest.mark.parametrize(("layout", "quant"), KINDS)
def test_layout_quantisation_and_sizes_are_told_from_the_file(tmp_path: Path, layout: str, quant: str) -> None:
    config = SMALL if quant == "bf16" else NVFP4_SMALL
    if layout == "pruned":
        # The pruned file no longer has the time embedding.
        config = dataclasses.replace(config, freq_dim=256, time_embed_hidden_dim=128, time_embed_dim=64)
    options = {"adaln_rank": 5, "adaln_grid": 33} if layout == "pruned" else {}
    found = detected(tmp_path, tensors_for(config, layout, quant, **options))
    rank, grid = (5, 33) if layout == "pruned" else (0, 0)
    assert found == Detected(layout, quant, config, rank, grid)


@pytest.mark.parametrize("layout", ["native", "diffusers"])
def test_float32_checkpoint_is_read_and_a_mixture_is_not(tmp_path: Path, layout: str) -> None:
    tensors = {name: tensor.float() for name, tensor in tensors_for(SMALL, layout, "bf16").items()}
    assert detected(tmp_path, tensors) == Detected(layout, "bf16", SMALL, 0, 0, "F32")
    name = next(name for name in tensors if name.endswith("norm1.weight"))
    tensors[name] = tensors[name].bfloat16()
    message = refusal(tmp_path, tensors)
    assert "tensors with a wrong dtype" in message
    assert "got F32, expected BF16" in message


def config_json(config: H3Config, **changes: Any) -> str:
    return json.dumps({"_class_name": "MiniMaxH3Transformer3DModel", **dataclasses.asdict(config), **changes})


def test_config_json_of_diffusers_is_used_and_held_against_the_tensors(tmp_path: Path) -> None:
    tensors = tensors_for(SMALL, "diffusers", "bf16")
    config = dataclasses.replace(SMALL, rope_freq_dim=4, norm_eps=1e-6, in_channels=20, patch_size=(1, 1, 1))
    (tmp_path / "config.json").write_text(config_json(config))
    assert detected(tmp_path, tensors).config == config
    (tmp_path / "config.json").write_text(config_json(SMALL, ffn_dim=64))
    assert "net.2.weight: got (128, 192), expected (128, 64)" in refusal(tmp_path, tensors)
    (tmp_path / "config.json").write_text(config_json(SMALL, new_key=1))
    assert "unknown keys ['new_key']" in refusal(tmp_path, tensors)
    (tmp_path / "config.json").write_text('{"_class_name": "WanTransformer3DModel"}')
    assert "got class 'WanTransformer3DModel', expected MiniMaxH3Transformer3DModel" in refusal(tmp_path, tensors)


def test_config_json_of_a_stranger_beside_a_native_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Other"]}')
    assert detected(tmp_path, tensors_for(SMALL, "native", "bf16")).config == SMALL


def test_all_differences_are_listed_in_one_error_and_bounded(tmp_path: Path) -> None:
    tensors = tensors_for(dataclasses.replace(SMALL, num_layers=30), "native", "bf16")
    for index in range(1, 30):
        del tensors[f"blocks.{index}.norm1.weight"]
    tensors["surplus.weight"] = torch.zeros(1)
    tensors["final_layer.norm.weight"] = torch.zeros(127).bfloat16()
    tensors["blocks.0.mlp.fc2.weight"] = tensors["blocks.0.mlp.fc2.weight"].half()
    tensors["rope.inv_freq"][3] *= 1.001
    message = refusal(tmp_path, tensors)
    assert "29 tensors missing: blocks.1.norm1.weight" in message
    assert "and 9 more" in message
    assert "1 tensors surplus: surplus.weight" in message
    assert "final_layer.norm.weight: got (127,), expected (128,)" in message
    assert "blocks.0.mlp.fc2.weight: got F16, expected BF16" in message
    assert "rope.inv_freq: 1 of 8 differ from 10000^(-i/8): at i=3" in message
    assert "download it again" in message


def test_one_shard_given_as_the_whole_names_what_is_missing(tmp_path: Path) -> None:
    tensors = tensors_for(SMALL, "diffusers", "bf16")
    message = refusal(tmp_path, {n: t for n, t in tensors.items() if "blocks.2." not in n and "norm_out" not in n})
    assert "3 tensors missing: norm_out.linear.bias" in message
    assert "name the folder or index where it is sharded" in message
    message = refusal(tmp_path, {n: t for n, t in tensors.items() if n.startswith("transformer_blocks.2.")})
    assert "token_refiner.refiner_blocks.*: got no tensors" in message


def test_a_stray_block_number_does_not_make_an_endless_list(tmp_path: Path) -> None:
    tensors = tensors_for(SMALL, "native", "bf16") | {"blocks.99999999.norm1.weight": torch.zeros(1)}
    assert "blocks.*: got block 99999999, expected blocks from 0 to at most" in refusal(tmp_path, tensors)


def renamed(change: Callable[[str], str]) -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: {change(name): tensor for name, tensor in tensors_for(SMALL, "native", "bf16").items()}


def with_extra(layout: str, quant: str, extra: dict[str, torch.Tensor]) -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: tensors_for(NVFP4_SMALL, layout, quant) | extra


def fp8_scaled(scale: str) -> Callable[[], dict[str, torch.Tensor]]:
    name = "blocks.0.attn.out_proj"
    weight = torch.zeros(128, 128, dtype=torch.float8_e4m3fn)
    return with_extra("pruned", "bf16", {f"{name}.weight": weight, f"{name}.{scale}": torch.ones(())})


OUT = "blocks.0.attn.out_proj"
FOREIGN: dict[str, tuple[Callable[[], dict[str, torch.Tensor]], list[str]]] = {
    "lora": (lambda: {"blocks.0.attn.qkv_proj.lora_A.weight": torch.zeros(4, 4)}, ["got a LoRA", "merge it"]),
    "lora-kohya": (
        lambda: {"lora_unet_blocks_0.lora_down.weight": torch.zeros(4), "x.alpha": torch.zeros(())},
        ["LoRA"],
    ),
    "text-encoder": (lambda: {"model.layers.0.mlp.up_proj.weight": torch.zeros(4)}, ["text encoder", "model.layers.0"]),
    "text-encoder-visual": (lambda: {"visual.blocks.0.norm1.weight": torch.zeros(4)}, ["text encoder"]),
    "vae": (lambda: {"decoder.conv_in.weight": torch.zeros(4)}, ["got a VAE"]),
    "wrapped": (renamed(lambda name: f"model.diffusion_model.{name}"), ["'model.diffusion_model.'", "wraps"]),
    "unknown": (lambda: {"foo.weight": torch.zeros(4)}, ["unknown layout of 1 tensors, such as foo.weight"]),
    "fp8-weight-scale": (fp8_scaled("weight_scale"), ["fp8_scaled weights (1", "scaled weights of an unknown kind"]),
    "fp8-scale-weight": (fp8_scaled("scale_weight"), ["fp8_scaled weights (1", "fp8_scaled scales (1"]),
    "comfy-float8": (
        with_extra("pruned", "bf16", {f"{OUT}.comfy_quant": text('{"format": "float8_e4m3fn"}')}),
        ["comfy_quant format 'float8_e4m3fn'"],
    ),
    "comfy-int8": (
        with_extra("pruned", "bf16", {f"{OUT}.comfy_quant": text('{"format": "int8_tensorwise"}')}),
        ["comfy_quant format 'int8_tensorwise'"],
    ),
    "int8-convrot": (
        with_extra("pruned", "bf16", {f"{OUT}.weight": torch.zeros(128, 128, dtype=torch.int8)}),
        ["int8 (int8_tensorwise or int8_convrot) weights"],
    ),
    "comfy-one-of-many": (
        with_extra("pruned", "nvfp4", {"blocks.2.mlp.fc2.comfy_quant": text('{"format": "mxfp4"}')}),
        ["comfy_quant format 'mxfp4' (1, such as blocks.2.mlp.fc2.comfy_quant)"],
    ),
    "comfy-options": (
        with_extra(
            "pruned", "nvfp4", {f"{OUT}.comfy_quant": text('{"format": "nvfp4", "full_precision_matrix_mult": true}')}
        ),
        ["NVFP4 with options"],
    ),
    "comfy-not-json": (with_extra("pruned", "nvfp4", {f"{OUT}.comfy_quant": text("nvfp4")}), ["is not JSON"]),
    "comfy-float": (with_extra("pruned", "nvfp4", {f"{OUT}.comfy_quant": torch.zeros(19)}), ["comfy_quant as F32"]),
    "input-scale": (with_extra("pruned", "nvfp4", {f"{OUT}.input_scale": torch.ones(())}), ["NVFP4 with input_scale"]),
    "awq": (with_extra("pruned", "nvfp4", {f"{OUT}.pre_quant_scale": torch.ones(4)}), ["NVFP4 with pre_quant_scale"]),
    "nvfp4-unpruned": (
        with_extra("native", "bf16", {f"{OUT}.weight_scale_2": torch.ones(())}),
        ["NVFP4 tensors in layout native"],
    ),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_unsupported_file_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    make, words = FOREIGN[kind]
    message = refusal(tmp_path, make())
    for word in [*words, "supported are"]:
        assert word in message


def test_quantisation_in_the_header_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, tensors_for(SMALL, "pruned", "bf16"), {"_quantization_metadata": "{}"})
    assert "_quantization_metadata" in message


def test_nvfp4_in_more_linears_than_published_is_refused(tmp_path: Path) -> None:
    tensors = tensors_for(NVFP4_SMALL, "pruned", "nvfp4")
    name = "token_refiner.blocks.0.attn.out_proj"
    tensors |= {
        f"{name}.{part}": tensors[f"{OUT}.{part}"].clone() for part in ("weight", "weight_scale", "weight_scale_2")
    }
    message = refusal(tmp_path, tensors)
    surplus = message.split("2 tensors surplus: ")[1].splitlines()[0]
    assert set(surplus.split(", ")) == {f"{name}.weight_scale", f"{name}.weight_scale_2"}
    assert f"{name}.weight: got (128, 64), expected (128, 128)" in message


def test_spacing_of_the_quantisation_text_does_not_matter(tmp_path: Path) -> None:
    tensors = tensors_for(NVFP4_SMALL, "pruned", "nvfp4")
    tensors[f"{OUT}.comfy_quant"] = text('{"format":"nvfp4"}')
    assert detected(tmp_path, tensors).quant == "nvfp4"


@pytest.mark.parametrize(
    ("name", "shape", "word"),
    [
        ("blocks.0.attn.qkv_proj.weight", (100, 128), "got 100 rows, expected a multiple of 192"),
        ("blocks.0.attn.qkv_proj.weight", (), "at least 1 dimensions"),
        ("audio_patch_proj.weight", (128,), "at least 2 dimensions"),
        ("rope.inv_freq", (11,), "rope_freq_dim: got 11"),
    ],
)
def test_sizes_that_cannot_be_told_are_an_error_that_names_the_tensor(
    tmp_path: Path, name: str, shape: tuple[int, ...], word: str
) -> None:
    tensors = tensors_for(SMALL, "native", "bf16")
    tensors[name] = torch.zeros(shape, dtype=tensors[name].dtype)
    assert word in refusal(tmp_path, tensors)
