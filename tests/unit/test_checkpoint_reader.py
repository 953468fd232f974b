"""Every layout loads into the same weights, and the shards of all ranks are these weights cut, to the byte.

The files are written here by hand from separate q, k, v, gate and up matrices, so that reading is checked against what
`checkpoints.md` says, not against the package's own tables. Run: pytest tests/unit/test_checkpoint_reader.py
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy_kitchen as ck
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from h3core.checkpoint.errors import CheckpointError
from h3core.checkpoint.layout import expected_tensors
from h3core.checkpoint.reader import DenoiserReader, load_denoiser
from h3core.config import TINY, H3Config
from h3core.nvfp4 import NVFP4Weight, quantize
from h3core.partition import Shard, Span, shards
from h3core.weights import CurveAdaLN, DenoiserWeights, FullAdaLN, held_bytes, named_tensors

KINDS = ["native", "diffusers", "pruned", "nvfp4"]
WORLDS = [2, 4, 6, 8]
RANK, GRID = 4, 9

# Sizes that differ from one another, so that a swapped cut cannot have the right shape.
CONFIG = dataclasses.replace(TINY, num_layers=2, num_refiner_layers=1, text_dim=64)
Files = dict[str, Tensor]


def logical(config: H3Config, seed: int = 0) -> Files:
    """The model in native names, but with q, k, v and gate, up apart; everything random, norms too."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    hidden, inner, ffn, dim = config.hidden_size, config.inner_dim, config.ffn_dim, config.attention_head_dim
    time_hidden, fp32 = config.time_embed_hidden_dim, torch.float32
    model: Files = {}

    def linear(name: str, rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> None:
        model[f"{name}.weight"], model[f"{name}.bias"] = make(rows, cols, dtype=dtype), make(rows, dtype=dtype)

    linear("video_patch_proj", hidden, config.video_row_dim, fp32)
    linear("audio_patch_proj", hidden, config.audio_in_channels, fp32)
    linear("condition_proj", hidden, config.text_dim)
    linear("time_embedder.proj_in", time_hidden, config.freq_dim, fp32)
    linear("time_embedder.proj_out", config.time_embed_dim, time_hidden, fp32)
    refiner = [f"token_refiner.blocks.{index}" for index in range(config.num_refiner_layers)]
    blocks = [f"blocks.{index}" for index in range(config.num_layers)]
    for block in [*refiner, *blocks]:
        for name in ("norm1", "norm2"):
            model[f"{block}.{name}.weight"] = make(hidden)
        for name in ("q", "k"):
            model[f"{block}.attn.{name}_norm.weight"] = make(dim)
        for name in "qkv":
            model[f"{block}.{name}"] = make(inner, hidden)
        for name in ("gate", "up"):
            model[f"{block}.{name}"] = make(ffn, hidden)
        model[f"{block}.attn.out_proj.weight"] = make(hidden, inner)
        model[f"{block}.mlp.fc2.weight"] = make(hidden, ffn)
    for block in blocks:
        linear(f"{block}.adaln_proj.linear", config.adaln_dim, config.time_embed_dim)
    model["token_refiner.final_norm.weight"] = make(hidden)
    model["final_layer.norm.weight"] = make(hidden)
    linear("final_layer.adaln_proj.linear", 2 * hidden, config.time_embed_dim)
    linear("final_layer.video_out", config.video_row_dim, hidden, fp32)
    linear("final_layer.audio_out", config.audio_in_channels, hidden, fp32)
    count = config.rope_freq_dim
    model["rope.inv_freq"] = config.rope_theta ** -(torch.arange(count) / count)
    return model


def parts(model: Files) -> tuple[list[str], Files]:
    """Blocks that have fused tensors, and the model without those."""
    blocks = [name.removesuffix(".q") for name in model if name.endswith(".q")]
    fused = {f"{block}.{part}" for block in blocks for part in ("q", "k", "v", "gate", "up")}
    return blocks, {name: tensor for name, tensor in model.items() if name not in fused}


def native(model: Files, config: H3Config) -> Files:
    blocks, files = parts(model)
    for block in blocks:
        heads = [model[f"{block}.{part}"].chunk(config.num_attention_heads) for part in "qkv"]
        rows = [heads[part][head] for head in range(config.num_attention_heads) for part in range(3)]
        files[f"{block}.attn.qkv_proj.weight"] = torch.cat(rows)
        files[f"{block}.mlp.fc1.weight"] = torch.cat([model[f"{block}.gate"], model[f"{block}.up"]])
    return files


RENAMES = [
    (r"^video_patch_proj", "proj_in"),
    (r"^audio_patch_proj", "audio_proj_in"),
    (r"^condition_proj", "context_embedder"),
    (r"^time_embedder\.proj_in", "time_embedder.linear_1"),
    (r"^time_embedder\.proj_out", "time_embedder.linear_2"),
    (r"^blocks", "transformer_blocks"),
    (r"^token_refiner\.blocks", "token_refiner.refiner_blocks"),
    (r"attn\.q_norm", "attn.norm_q"),
    (r"attn\.k_norm", "attn.norm_k"),
    (r"attn\.out_proj", "attn.to_out.0"),
    (r"mlp\.fc2", "ff.net.2"),
    (r"^final_layer\.norm", "norm_out.norm"),
    (r"^final_layer\.adaln_proj\.linear", "norm_out.linear"),
    (r"^final_layer\.video_out", "proj_out"),
    (r"^final_layer\.audio_out", "audio_proj_out"),
]


def diffusers(model: Files, config: H3Config) -> Files:
    blocks, files = parts(model)
    del files["rope.inv_freq"]
    for block in blocks:
        for part in "qkv":
            files[f"{block}.attn.to_{part}.weight"] = model[f"{block}.{part}"]
        files[f"{block}.ff.net.0.proj.weight"] = torch.cat([model[f"{block}.up"], model[f"{block}.gate"]])
    for pattern, replacement in RENAMES:
        files = {re.sub(pattern, replacement, name): tensor for name, tensor in files.items()}
    return files


def pruned(model: Files, config: H3Config) -> Files:
    blocks, files = parts(model)
    files = {name: tensor for name, tensor in files.items() if not name.startswith("time_embedder.")}
    generator = torch.Generator().manual_seed(1)
    files["adaln_t_table"] = torch.randn(GRID, RANK, generator=generator)
    for name in list(files):
        if "adaln_proj" in name:
            shape = (files[name].shape[0], RANK) if name.endswith("weight") else files[name].shape
            files[name] = torch.randn(shape, generator=generator).half()
    for block in blocks:
        files[f"{block}.attn.qkv_proj.weight"] = torch.cat([model[f"{block}.{part}"] for part in "qkv"])
        files[f"{block}.mlp.fc1.weight"] = torch.cat([model[f"{block}.gate"], model[f"{block}.up"]])
    return files


def nvfp4(model: Files, config: H3Config) -> Files:
    files = pruned(model, config)
    for name in [
        name for name in files if re.fullmatch(r"blocks\.\d+\.(attn\.(qkv|out)_proj|mlp\.fc[12])\.weight", name)
    ]:
        weight, base = quantize(files[name]), name.removesuffix(".weight")
        files[name] = weight.codes
        files[f"{base}.weight_scale"] = weight.scales
        files[f"{base}.weight_scale_2"] = weight.scale_2
        files[f"{base}.comfy_quant"] = torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8)
    return files


WRITERS: dict[str, Callable[[Files, H3Config], Files]] = {
    "native": native,
    "diffusers": diffusers,
    "pruned": pruned,
    "nvfp4": nvfp4,
}


@pytest.fixture(scope="module")
def model() -> Files:
    return logical(CONFIG)


@pytest.fixture(scope="module")
def files(model: Files, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One file of each kind, all of the same logical model."""
    folder = tmp_path_factory.mktemp("layouts")
    paths = {kind: folder / kind / "model.safetensors" for kind in KINDS}
    for kind, path in paths.items():
        path.parent.mkdir()
        save_file({name: t.contiguous() for name, t in WRITERS[kind](model, CONFIG).items()}, path)
    return paths


@pytest.fixture(scope="module")
def whole(files: dict[str, Path]) -> dict[str, DenoiserWeights]:
    return {kind: load_denoiser(files[kind])[1] for kind in KINDS}


def same_bytes(left: Tensor, right: Tensor) -> bool:
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
    )


def differing(left: Any, right: Any) -> list[str]:
    """Paths of tensors that differ between two structures; all of them where the paths themselves differ."""
    ours, theirs = dict(named_tensors(left)), dict(named_tensors(right))
    if not ours or set(ours) != set(theirs):
        return sorted(set(ours) ^ set(theirs)) or ["nothing"]
    return [name for name, tensor in ours.items() if not same_bytes(tensor, theirs[name])]


# ---- the normal form ----


@pytest.mark.parametrize("kind", ["native", "diffusers", "pruned"])
def test_fused_tensors_come_into_the_normal_form(whole: dict[str, DenoiserWeights], model: Files, kind: str) -> None:
    for prefix, blocks in (("blocks", whole[kind].blocks), ("token_refiner.blocks", whole[kind].refiner)):
        for index, block in enumerate(blocks):
            name = f"{prefix}.{index}"
            assert same_bytes(block.attn.qkv, torch.cat([model[f"{name}.{part}"] for part in "qkv"]))
            assert same_bytes(block.mlp.fc1, torch.cat([model[f"{name}.gate"], model[f"{name}.up"]]))
            assert same_bytes(block.attn.out, model[f"{name}.attn.out_proj.weight"])
            assert same_bytes(block.mlp.fc2, model[f"{name}.mlp.fc2.weight"])
            assert same_bytes(block.attn.q_norm, model[f"{name}.attn.q_norm.weight"])
            assert same_bytes(block.attn.k_norm, model[f"{name}.attn.k_norm.weight"])
            assert same_bytes(block.norm1, model[f"{name}.norm1.weight"])
            assert same_bytes(block.norm2, model[f"{name}.norm2.weight"])


def test_other_tensors_go_where_they_belong(whole: dict[str, DenoiserWeights], model: Files) -> None:
    ours = whole["native"]
    assert isinstance(ours.adaln, FullAdaLN)
    affines = {
        "video_patch_proj": ours.video_in,
        "audio_patch_proj": ours.audio_in,
        "condition_proj": ours.text_in,
        "time_embedder.proj_in": ours.adaln.time_in,
        "time_embedder.proj_out": ours.adaln.time_out,
        "blocks.0.adaln_proj.linear": ours.adaln.blocks[0],
        "blocks.1.adaln_proj.linear": ours.adaln.blocks[1],
        "final_layer.adaln_proj.linear": ours.adaln.final,
        "final_layer.video_out": ours.video_out,
        "final_layer.audio_out": ours.audio_out,
    }
    for name, affine in affines.items():
        assert same_bytes(affine.weight, model[f"{name}.weight"])
        assert same_bytes(affine.bias, model[f"{name}.bias"])
    assert same_bytes(ours.refiner_norm, model["token_refiner.final_norm.weight"])
    assert same_bytes(ours.final_norm, model["final_layer.norm.weight"])


def test_all_layouts_of_one_model_load_to_equal_bytes(whole: dict[str, DenoiserWeights]) -> None:
    assert differing(whole["native"], whole["diffusers"]) == []
    ours, theirs = whole["native"], whole["pruned"]
    for field in dataclasses.fields(DenoiserWeights):
        if field.name != "adaln":
            left, right = getattr(ours, field.name), getattr(theirs, field.name)
            assert differing([left], [right]) == [], field.name


def test_pruned_adaln_is_widened_exactly(whole: dict[str, DenoiserWeights], files: dict[str, Path]) -> None:
    stored = load_file(files["pruned"])
    for kind in ("pruned", "nvfp4"):
        adaln = whole[kind].adaln
        assert isinstance(adaln, CurveAdaLN)
        assert same_bytes(adaln.table, stored["adaln_t_table"])
        assert same_bytes(adaln.blocks[1].weight, stored["blocks.1.adaln_proj.linear.weight"].float())
        assert same_bytes(adaln.final.bias, stored["final_layer.adaln_proj.linear.bias"].float())


def test_nvfp4_is_the_quantised_normal_form(whole: dict[str, DenoiserWeights], model: Files) -> None:
    for index, block in enumerate(whole["nvfp4"].blocks):
        name = f"blocks.{index}"
        expected = {
            "qkv": (block.attn.qkv, torch.cat([model[f"{name}.{part}"] for part in "qkv"])),
            "fc1": (block.mlp.fc1, torch.cat([model[f"{name}.gate"], model[f"{name}.up"]])),
            "out": (block.attn.out, model[f"{name}.attn.out_proj.weight"]),
            "fc2": (block.mlp.fc2, model[f"{name}.mlp.fc2.weight"]),
        }
        for loaded, dense in expected.values():
            assert isinstance(loaded, NVFP4Weight)
            assert differing(loaded, quantize(dense)) == []


# ---- shards ----


def joined(ranks: list[DenoiserWeights], config: H3Config) -> DenoiserWeights:
    """The whole weights out of all ranks' shards; what is replicated must be equal everywhere."""
    first = ranks[0]
    for rank in ranks[1:]:
        for field in dataclasses.fields(DenoiserWeights):
            if field.name != "blocks":
                assert differing([getattr(rank, field.name)], [getattr(first, field.name)]) == []

    def rows(pieces: list[Any], segments: int) -> Any:
        if isinstance(pieces[0], NVFP4Weight):
            codes = rows([piece.codes for piece in pieces], segments)
            scales = rows([piece.scales.view(torch.uint8) for piece in pieces], segments)
            return NVFP4Weight(codes, scales.view(torch.float8_e4m3fn), pieces[0].scale_2)
        return torch.cat([piece.chunk(segments)[segment] for segment in range(segments) for piece in pieces])

    def columns(pieces: list[Any]) -> Any:
        if isinstance(pieces[0], NVFP4Weight):
            count = pieces[0].shape[0]
            tiles = [piece.scales.view(torch.uint8).view(count // 128, -1, 512) for piece in pieces]
            scales = torch.cat(tiles, dim=1).reshape(count, -1).view(torch.float8_e4m3fn)
            return NVFP4Weight(columns([piece.codes for piece in pieces]), scales, pieces[0].scale_2)
        return torch.cat(pieces, dim=1)

    blocks = []
    for index in range(config.num_layers):
        held = [rank.blocks[index] for rank in ranks]
        attn = dataclasses.replace(
            held[0].attn,
            qkv=rows([block.attn.qkv for block in held], 3),
            out=columns([block.attn.out for block in held]),
        )
        mlp = dataclasses.replace(
            held[0].mlp, fc1=rows([block.mlp.fc1 for block in held], 2), fc2=columns([block.mlp.fc2 for block in held])
        )
        blocks.append(dataclasses.replace(held[0], attn=attn, mlp=mlp))
    return dataclasses.replace(first, blocks=blocks)


@pytest.mark.parametrize("n_ranks", WORLDS)
@pytest.mark.parametrize("kind", KINDS)
def test_shards_of_all_ranks_are_the_whole_and_each_byte_is_read_by_its_holder(
    files: dict[str, Path], whole: dict[str, DenoiserWeights], kind: str, n_ranks: int
) -> None:
    readers = [DenoiserReader(files[kind]) for _ in range(n_ranks)]
    ranks = [reader.load(shard) for reader, shard in zip(readers, shards(CONFIG, n_ranks), strict=True)]
    assert differing(joined(ranks, CONFIG), whole[kind]) == []
    stored = {name: info.stop - info.start for name, info in readers[0].checkpoint.tensors.items()}
    cut = re.compile(
        r"(transformer_)?blocks\.\d+\.(attn\.(qkv_proj|out_proj|to_.*)|mlp\.fc.|ff\.net.*)\.weight(_scale)?"
    )
    unread = re.compile(r"rope\.inv_freq|.*\.comfy_quant")
    sharded = sum(size for name, size in stored.items() if cut.fullmatch(name))
    replicated = sum(size for name, size in stored.items() if not cut.fullmatch(name) and not unread.fullmatch(name))
    assert sharded > 0.4 * replicated
    assert sum(reader.bytes_read for reader in readers) == sharded + n_ranks * replicated


def dense(weight: Any) -> Tensor:
    """comfy-kitchen's own dequantisation."""
    return ck.dequantize_nvfp4(weight.codes, weight.scale_2, weight.scales, torch.float32)


@pytest.fixture(scope="module")
def dense_whole(model: Files) -> list[Tensor]:
    """qkv, out, fc1 and fc2 of block 1: quantised from the model, not read from a file."""
    qkv = torch.cat([model[f"blocks.1.{part}"] for part in "qkv"])
    fc1 = torch.cat([model["blocks.1.gate"], model["blocks.1.up"]])
    matrices = [qkv, model["blocks.1.attn.out_proj.weight"], fc1, model["blocks.1.mlp.fc2.weight"]]
    return [dense(quantize(matrix)) for matrix in matrices]


@pytest.mark.parametrize("n_ranks", WORLDS)
def test_nvfp4_cut_dequantises_to_the_cut_of_the_dequantised_whole(
    files: dict[str, Path], dense_whole: list[Tensor], n_ranks: int
) -> None:
    qkv, out, fc1, fc2 = dense_whole
    inner, ffn = CONFIG.inner_dim, CONFIG.ffn_dim
    for shard in shards(CONFIG, n_ranks):
        block = load_denoiser(files["nvfp4"], shard=shard)[1].blocks[1]
        heads, columns = slice(*shard.heads.scaled(128)), slice(*shard.ffn)
        assert torch.equal(
            dense(block.attn.qkv), torch.cat([qkv[i * inner : (i + 1) * inner][heads] for i in range(3)])
        )
        assert torch.equal(dense(block.attn.out), out[:, heads])
        assert torch.equal(dense(block.mlp.fc1), torch.cat([fc1[:ffn][columns], fc1[ffn:][columns]]))
        assert torch.equal(dense(block.mlp.fc2), fc2[:, columns])


def test_packed_weights_at_odd_offsets_are_read(files: dict[str, Path]) -> None:
    starts = [
        info.start
        for name, info in DenoiserReader(files["nvfp4"]).checkpoint.tensors.items()
        if name.endswith(".weight") and info.dtype == "U8"
    ]
    assert any(start % 2 for start in starts), "the file must be one that needs copying before viewing"


def test_sharded_files_load_like_one(files: dict[str, Path], whole: dict[str, DenoiserWeights], tmp_path: Path) -> None:
    tensors = load_file(files["diffusers"])
    names = list(tensors)
    weight_map = {name: f"m-{1 + index % 3:05d}-of-00003.safetensors" for index, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, tmp_path / file)
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert differing(load_denoiser(tmp_path)[1], whole["diffusers"]) == []


# ---- dtypes ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_activation_dtype_decides_and_fp32_islands_are_never_narrowed(
    files: dict[str, Path], kind: str, dtype: torch.dtype
) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    weights = load_denoiser(files[kind], dtype=dtype)[1]
    islands = re.compile(r"(video_in|audio_in|video_out|audio_out|adaln\.time_(in|out)|adaln\.table)\b.*")
    for name, tensor in named_tensors(weights):
        if name.endswith((".codes", ".scales", ".scale_2")):
            assert kind == "nvfp4"
            continue
        widened = islands.fullmatch(name) or (name.startswith("adaln") and kind in ("pruned", "nvfp4"))
        assert tensor.dtype == (wide if widened else dtype), name
    packed = {name for name, _ in named_tensors(weights) if name.endswith(".codes")}
    assert len(packed) == (4 * CONFIG.num_layers if kind == "nvfp4" else 0)


def test_float32_checkpoint_is_rounded_to_the_activation_dtype(files: dict[str, Path], tmp_path: Path) -> None:
    tensors = {name: tensor.float() * 1.001 for name, tensor in load_file(files["diffusers"]).items()}
    save_file(tensors, tmp_path / "x.safetensors")
    weights = load_denoiser(tmp_path)[1]
    assert same_bytes(weights.text_in.weight, tensors["context_embedder.weight"].bfloat16())
    assert same_bytes(weights.video_in.weight, tensors["proj_in.weight"])
    exact = load_denoiser(tmp_path, dtype=torch.float32)[1]
    assert same_bytes(exact.text_in.weight, tensors["context_embedder.weight"])


def test_other_dtypes_and_shards_of_other_models_are_refused(files: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match=r"dtype: got torch\.float16, expected one of torch\.bfloat16"):
        load_denoiser(files["native"], dtype=torch.float16)
    for shard in (
        Shard(Span(0, 10), Span(0, 128)),
        Shard(Span(3, 3), Span(0, 128)),
        Shard(Span(0, 9), Span(1280, 1408)),
    ):
        with pytest.raises(CheckpointError, match="expected a non-empty range inside"):
            load_denoiser(files["native"], shard=shard)
    with pytest.raises(ValueError, match="NVFP4 cut of rows"):
        load_denoiser(files["nvfp4"], shard=Shard(Span(0, 1), Span(64, 128)))


# ---- values ----


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


def test_nan_and_infinity_are_refused_by_tensor_with_counts(files: dict[str, Path], tmp_path: Path) -> None:
    def change(tensors: Files) -> None:
        tensors["blocks.1.mlp.fc2.weight"][3, 5:8] = float("nan")
        tensors["blocks.1.mlp.fc2.weight"][4, 5] = float("-inf")
        tensors["final_layer.video_out.bias"][1] = float("inf")
        tensors["blocks.0.norm2.weight"][0] = float("nan")

    message = faulty(files["native"], tmp_path, change)
    size = CONFIG.hidden_size * CONFIG.ffn_dim
    assert f"blocks.1.mlp.fc2.weight: got 3 NaN and 1 infinite of {size} values" in message
    assert "final_layer.video_out.bias: got 0 NaN and 1 infinite" in message
    assert "blocks.0.norm2.weight: got 1 NaN" in message
    assert "3 problems" in message
    assert "sha256" in message


def test_non_finite_curve_is_refused(files: dict[str, Path], tmp_path: Path) -> None:
    message = faulty(files["pruned"], tmp_path, lambda tensors: tensors["adaln_t_table"][2].fill_(float("nan")))
    assert f"adaln_t_table: got {RANK} NaN" in message


def test_bad_nvfp4_scales_are_refused_with_counts(files: dict[str, Path], tmp_path: Path) -> None:
    def change(tensors: Files) -> None:
        scale_bytes(tensors, "blocks.0.mlp.fc2")[torch.tensor([1, 700])] = torch.tensor([0x7F, 0xFF], dtype=torch.uint8)
        scale_bytes(tensors, "blocks.0.mlp.fc2")[50] |= 0x80
        tensors["blocks.1.attn.out_proj.weight_scale_2"].fill_(0.0)
        tensors["blocks.1.mlp.fc1.weight_scale_2"].fill_(float("nan"))
        tensors["blocks.1.mlp.fc2.weight_scale_2"].fill_(-1.0)
        tensors["blocks.1.attn.qkv_proj.weight_scale_2"].fill_(float("inf"))

    message = faulty(files["nvfp4"], tmp_path, change)
    assert "blocks.0.mlp.fc2: weight_scale: got 2 NaN and 1 negative of" in message
    for name, value in (("attn.out_proj", "0.0"), ("mlp.fc1", "nan"), ("mlp.fc2", "-1.0"), ("attn.qkv_proj", "inf")):
        assert f"blocks.1.{name}: weight_scale_2: got {value}, expected a finite positive number" in message
    assert "5 problems" in message


@pytest.mark.parametrize(("byte", "word"), [(0x7F, "1 NaN and 0"), (0xFF, "1 NaN and 0"), (0x81, "0 NaN and 1")])
def test_each_kind_of_bad_scale_byte_is_seen_alone(
    files: dict[str, Path], tmp_path: Path, byte: int, word: str
) -> None:
    def change(tensors: Files) -> None:
        scale_bytes(tensors, "blocks.1.attn.qkv_proj")[-1] = byte

    assert f"blocks.1.attn.qkv_proj: weight_scale: got {word} negative" in faulty(files["nvfp4"], tmp_path, change)


def test_zero_scale_over_ordinary_codes_is_refused_and_over_empty_or_saturated_ones_is_not(
    files: dict[str, Path], tmp_path: Path
) -> None:
    name, row, block = "blocks.1.mlp.fc2", 230, 13
    tile_cols = CONFIG.ffn_dim // 64
    offset = ((row // 128) * tile_cols + block // 4) * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + block % 4

    def lose(tensors: Files) -> None:
        scale_bytes(tensors, name)[offset] = 0

    message = faulty(files["nvfp4"], tmp_path, lose)
    assert f"{name}: weight_scale: 1 of 1 zero block scales stand over codes that a zero block cannot have" in message

    # What a quantiser leaves where a block is too small for its scale: nothing (CPU) or plus and minus 6 (CUDA).
    for codes in (bytes(8), b"\x80\x08\x88\x00" * 2, b"\x7f\xf7\x07\x70" * 2):
        tensors = load_file(files["nvfp4"])
        lose(tensors)
        tensors[f"{name}.weight"][row, 8 * block : 8 * block + 8] = torch.tensor(list(codes), dtype=torch.uint8)
        save_file(tensors, tmp_path / "x.safetensors")
        assert load_denoiser(tmp_path)[1].blocks
    for byte in (0x01, 0x06, 0x09, 0x0E, 0x10, 0x60, 0x90, 0xE0):
        tensors[f"{name}.weight"][row, 8 * block + 7] = byte
        save_file(tensors, tmp_path / "x.safetensors")
        with pytest.raises(CheckpointError, match="1 of 1 zero block scales"):
            load_denoiser(tmp_path)


def test_problems_are_bounded(files: dict[str, Path], tmp_path: Path) -> None:
    def change(tensors: Files) -> None:
        for tensor in tensors.values():
            if tensor.is_floating_point() and tensor.shape != (CONFIG.rope_freq_dim,):
                tensor.view(-1)[0] = float("nan")

    message = faulty(files["native"], tmp_path, change)
    assert 40 < len(message.splitlines()) < 44
    assert re.search(r"and \d+ more$", message)


def test_file_that_shrinks_while_it_is_read_is_an_error(files: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(files["native"].read_bytes())
    reader = DenoiserReader(path)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="become shorter"):
        reader.load()


# ---- memory ----


def test_weights_do_not_refer_to_the_file(files: dict[str, Path], tmp_path: Path) -> None:
    for kind in KINDS:
        path = tmp_path / f"{kind}.safetensors"
        path.write_bytes(files[kind].read_bytes())
        shard = shards(CONFIG, 4)[1]
        loaded = load_denoiser(path, shard=shard)[1]
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
        # The second one is of a file that was left alone: two views of the same file would be equal, both zero.
        assert differing(loaded, load_denoiser(files[kind], shard=shard)[1]) == []
        path.unlink()


MEMORY = """
import json, resource, sys
import torch
torch.set_num_threads(1)
from h3core.checkpoint.reader import DenoiserReader
from h3core.partition import shards
from h3core.weights import held_bytes
def data_bytes():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmData"))
    return int(line.split()[1]) << 10
path, warm_up, held, largest = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
DenoiserReader(warm_up).load()
reader = DenoiserReader(path)
shard = shards(reader.config, 4)[1]
free = data_bytes()
def load(allowed):
    resource.setrlimit(resource.RLIMIT_DATA, (free + allowed, resource.RLIM_INFINITY))
    return held_bytes(reader.load(shard))
try:
    load(held // 2)
    starved = False
except (MemoryError, RuntimeError) as error:
    starved = "memory" in str(error)
print(json.dumps({"starved": starved, "held": load(held + largest + (8 << 20))}))
"""


def constant_file(path: Path, config: H3Config, layout: str, quant: str) -> None:
    """A file of constants: this is about its size, not its values."""
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8}
    tensors = {}
    for name, spec in expected_tensors(config, layout, quant).items():
        if spec.dtype == "F8_E4M3":
            tensors[name] = torch.full(spec.shape, 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
        else:
            tensors[name] = torch.ones(spec.shape, dtype=dtypes[spec.dtype])
        if name.endswith(".comfy_quant"):
            tensors[name] = torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8)
    tensors["rope.inv_freq"] = config.rope_theta ** -(torch.arange(config.rope_freq_dim) / config.rope_freq_dim)
    save_file(tensors, path)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA counts anonymous memory on Linux only")
@pytest.mark.parametrize(("layout", "quant", "layers"), [("native", "bf16", 4), ("pruned", "nvfp4", 10)])
def test_loading_a_shard_needs_its_own_memory_and_one_tensor(
    files: dict[str, Path], tmp_path: Path, layout: str, quant: str, layers: int
) -> None:
    """Under a limit on anonymous memory the shard, its largest tensor and 8 MiB suffice; half the shard does not."""
    config = dataclasses.replace(
        TINY, hidden_size=1024, num_attention_heads=16, ffn_dim=4096, num_layers=layers, num_refiner_layers=1
    )
    path = tmp_path / "x.safetensors"
    constant_file(path, config, layout, quant)
    weights = load_denoiser(path, shard=shards(config, 4)[1])[1]
    held, size = held_bytes(weights), path.stat().st_size
    largest = max(tensor.nbytes for _, tensor in named_tensors(weights))
    del weights
    assert 90 << 20 < size < 300 << 20
    assert held + largest + (8 << 20) < 0.95 * size, "the limit must exclude loading the whole file"
    arguments = [str(path), str(files["native"]), str(held), str(largest)]
    done = subprocess.run([sys.executable, "-c", MEMORY, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"starved": True, "held": held}


# ---- the other implementation ----


def test_a_checkpoint_that_diffusers_saved_loads_whole_and_sharded(tmp_path: Path) -> None:
    library = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    theirs = library.MiniMaxH3Transformer3DModel(**dataclasses.asdict(CONFIG))
    state = theirs.state_dict()
    theirs.save_pretrained(tmp_path / "one")
    theirs.save_pretrained(tmp_path / "many", max_shard_size="5MB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    config, ours = load_denoiser(tmp_path / "one", dtype=torch.float32)
    assert config == CONFIG
    assert differing(ours, load_denoiser(tmp_path / "many", dtype=torch.float32)[1]) == []
    block = ours.blocks[1]
    attention = "transformer_blocks.1.attn"
    assert same_bytes(block.attn.qkv, torch.cat([state[f"{attention}.to_{part}.weight"] for part in "qkv"]))
    # gate and up as diffusers uses them: value * silu(gate), value first on disk.
    up, gate = state["transformer_blocks.1.ff.net.0.proj.weight"].chunk(2)
    assert same_bytes(block.mlp.fc1, torch.cat([gate, up]))
