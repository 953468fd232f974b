"""Every layout loads into the same weights, the normal form, in the dtypes that were asked for.

A pass means: fused tensors come out as hand-written files and diffusers have them, and what is fp32 stays so.
Run: pytest tests/unit/test_checkpoint_reader.py
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from h3core.checkpoint.errors import CheckpointError
from h3core.checkpoint.reader import DenoiserReader, load_denoiser
from h3core.nvfp4 import NVFP4Weight, quantize
from h3core.partition import Shard, Span
from h3core.weights import CurveAdaLN, DenoiserWeights, FullAdaLN, named_tensors
from tests.unit.layout_files import CONFIG, KINDS, Files, differing, logical, same_bytes


@pytest.fixture(scope="module")
def model() -> Files:
    return logical(CONFIG)


@pytest.fixture(scope="module")
def whole(layouts: dict[str, Path]) -> dict[str, DenoiserWeights]:
    return {kind: load_denoiser(layouts[kind])[1] for kind in KINDS}


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


def test_pruned_adaln_is_widened_exactly(whole: dict[str, DenoiserWeights], layouts: dict[str, Path]) -> None:
    stored = load_file(layouts["pruned"])
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


def test_packed_weights_at_odd_offsets_are_read(layouts: dict[str, Path]) -> None:
    starts = [
        info.start
        for name, info in DenoiserReader(layouts["nvfp4"]).checkpoint.tensors.items()
        if name.endswith(".weight") and info.dtype == "U8"
    ]
    assert any(start % 2 for start in starts), "the file must be one that needs copying before viewing"


def test_sharded_files_load_like_one(
    layouts: dict[str, Path], whole: dict[str, DenoiserWeights], tmp_path: Path
) -> None:
    tensors = load_file(layouts["diffusers"])
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
    layouts: dict[str, Path], kind: str, dtype: torch.dtype
) -> None:
    wide = torch.promote_types(dtype, torch.float32)
    weights = load_denoiser(layouts[kind], dtype=dtype)[1]
    islands = re.compile(r"(video_in|audio_in|video_out|audio_out|adaln\.time_(in|out)|adaln\.table)\b.*")
    for name, tensor in named_tensors(weights):
        if name.endswith((".codes", ".scales", ".scale_2")):
            assert kind == "nvfp4"
            continue
        widened = islands.fullmatch(name) or (name.startswith("adaln") and kind in ("pruned", "nvfp4"))
        assert tensor.dtype == (wide if widened else dtype), name
    packed = {name for name, _ in named_tensors(weights) if name.endswith(".codes")}
    assert len(packed) == (4 * CONFIG.num_layers if kind == "nvfp4" else 0)


def test_float32_checkpoint_is_rounded_to_the_activation_dtype(layouts: dict[str, Path], tmp_path: Path) -> None:
    tensors = {name: tensor.float() * 1.001 for name, tensor in load_file(layouts["diffusers"]).items()}
    save_file(tensors, tmp_path / "x.safetensors")
    weights = load_denoiser(tmp_path)[1]
    assert same_bytes(weights.text_in.weight, tensors["context_embedder.weight"].bfloat16())
    assert same_bytes(weights.video_in.weight, tensors["proj_in.weight"])
    exact = load_denoiser(tmp_path, dtype=torch.float32)[1]
    assert same_bytes(exact.text_in.weight, tensors["context_embedder.weight"])


def test_other_dtypes_and_shards_of_other_models_are_refused(layouts: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match=r"dtype: got torch\.float16, expected one of torch\.bfloat16"):
        load_denoiser(layouts["native"], dtype=torch.float16)
    for shard in (
        Shard(Span(0, 10), Span(0, 128)),
        Shard(Span(3, 3), Span(0, 128)),
        Shard(Span(0, 9), Span(1280, 1408)),
    ):
        with pytest.raises(CheckpointError, match="expected a non-empty range inside"):
            load_denoiser(layouts["native"], shard=shard)
    with pytest.raises(ValueError, match="NVFP4 cut of rows"):
        load_denoiser(layouts["nvfp4"], shard=Shard(Span(0, 1), Span(64, 128)))


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
