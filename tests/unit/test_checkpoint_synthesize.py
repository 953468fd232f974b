"""Synthetic checkpoints: one model in every layout, reproducible tensor by tensor, which diffusers loads too.

A pass means: a seed names one model, whatever file it is in, in this version and the next.
Run: pytest tests/unit/test_checkpoint_synthesize.py
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from h3core.checkpoint import synthesize as module
from h3core.checkpoint.folder_writer import plan_shards
from h3core.checkpoint.layout import TensorSpec, expected_tensors
from h3core.checkpoint.reader import load_denoiser
from h3core.checkpoint.safetensors_format import TORCH_DTYPE, data_bytes
from h3core.checkpoint.synthesize import plan_files
from h3core.checkpoint.synthetic_tensors import synthetic_tensor
from h3core.config import H3, TINY, H3Config
from h3core.weights import CurveAdaLN, FullAdaLN, named_tensors
from tests.unit.synthetic_checkpoints import FLOATS, KINDS, SEED, bits, tensors, written

# --- the same model everywhere ---------------------------------------------------------------------------------


def test_the_float_layouts_load_to_the_same_weights(tmp_path: Path) -> None:
    loaded = {}
    for layout, quant in FLOATS:
        out = written(tmp_path, layout, quant, name=f"{layout}.safetensors" if layout != "diffusers" else layout)
        config, weights = load_denoiser(out)
        assert config == TINY
        loaded[layout] = dict(named_tensors(weights))
        assert isinstance(weights.adaln, CurveAdaLN if layout == "pruned" else FullAdaLN)
    native, diffusers, pruned = loaded["native"], loaded["diffusers"], loaded["pruned"]
    assert native.keys() == diffusers.keys()
    assert [name for name in native if not torch.equal(native[name], diffusers[name])] == []
    shared = {name for name in native if not name.startswith("adaln.")}
    assert shared == {name for name in pruned if not name.startswith("adaln.")}
    assert [name for name in sorted(shared) if not torch.equal(native[name], pruned[name])] == []


def test_rows_lie_where_each_layout_has_them() -> None:
    # Written out by hand: the reader and the writer share the layout's tables, and would share a mistake in them.
    native, pruned = tensors("native", "bf16"), tensors("pruned", "bf16")
    diffusers = tensors("diffusers", "bf16")
    for ours, theirs in (("blocks.1", "transformer_blocks.1"), ("token_refiner.blocks.0",) * 2):
        theirs = theirs.replace("token_refiner.blocks", "token_refiner.refiner_blocks")
        q, k, v = (diffusers[f"{theirs}.attn.to_{part}.weight"] for part in "qkv")
        heads = []
        for h in range(9):
            rows = slice(128 * h, 128 * (h + 1))
            heads += [q[rows], k[rows], v[rows]]
        assert torch.equal(native[f"{ours}.attn.qkv_proj.weight"], torch.cat(heads))
        assert torch.equal(pruned[f"{ours}.attn.qkv_proj.weight"], torch.cat([q, k, v]))
        up, gate = diffusers[f"{theirs}.ff.net.0.proj.weight"].chunk(2)
        assert not torch.equal(up, gate)
        assert torch.equal(native[f"{ours}.mlp.fc1.weight"], torch.cat([gate, up]))
        assert torch.equal(pruned[f"{ours}.mlp.fc1.weight"], torch.cat([gate, up]))


def test_a_float32_file_rounds_to_the_bf16_file() -> None:
    for name, spec in expected_tensors(TINY, "diffusers", "bf16").items():
        wide = synthetic_tensor(TINY, "diffusers", "bf16", name, TensorSpec("F32", spec.shape), SEED)
        assert wide.dtype == torch.float32
        assert torch.equal(wide.to(TORCH_DTYPE[spec.dtype]), tensors("diffusers", "bf16")[name]), name


@pytest.mark.parametrize(("layout", "quant"), KINDS)
def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path: Path, layout: str, quant: str) -> None:
    folders = [written(tmp_path, layout, quant, seed, name) for seed, name in ((7, "a"), (7, "b"), (8, "c"))]
    first, second, other = (
        {p.relative_to(out): p.read_bytes() for p in ([out] if out.is_file() else out.iterdir())} for out in folders
    )
    assert first == second
    weights = [path for path in first if path.suffix != ".json"]
    assert weights
    assert all(first[path] != other[path] for path in weights)


@pytest.mark.parametrize(("layout", "quant"), KINDS)
def test_another_seed_changes_every_tensor_and_no_two_are_equal(layout: str, quant: str) -> None:
    ours, other = tensors(layout, quant), tensors(layout, quant, SEED + 1)
    fixed = {name for name in ours if name == "rope.inv_freq" or name.endswith(".comfy_quant")}
    assert {name for name in ours if torch.equal(bits(ours[name]), bits(other[name]))} == fixed
    seen = [bits(tensor).numpy().tobytes() for name, tensor in ours.items() if name not in fixed]
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize(
    ("layout", "quant", "digest"),
    [
        ("diffusers", "bf16", "6b71fa65f7fd7073bbcd554e9e634fd418497f89192f34f5573801c23ff18b94"),
        ("pruned", "nvfp4", "79d25c5853149cd668703fc7e9db3cad56c7a77faf3769958f17cdf78e501252"),
    ],
    ids=["diffusers", "pruned nvfp4"],
)
def test_values_are_those_they_were(layout: str, quant: str, digest: str) -> None:
    # A seed in a report must mean the same model in the next version and on the next machine. Whoever changes values
    # on purpose also changes the version in the streams' names. The curve is left out: its cosines are libm's.
    found = hashlib.sha256()
    for name, tensor in tensors(layout, quant).items():
        if name != "adaln_t_table":
            found.update(bits(tensor).numpy())
    assert found.hexdigest() == digest


# --- files ----------------------------------------------------------------------------------------------------


def test_the_released_sizes_make_as_many_shards_as_were_published() -> None:
    for layout, count, first in (
        ("native", 13, "model-00001-of-00013.safetensors"),
        ("diffusers", 14, "diffusion_pytorch_model-00001-of-00014.safetensors"),
    ):
        files = plan_files(Path("out"), expected_tensors(H3, layout, "bf16"), layout)
        assert len(files) == count
        assert next(iter(files)) == Path("out", first)


def test_native_is_one_file_where_the_name_says_so_and_a_folder_otherwise(tmp_path: Path) -> None:
    assert written(tmp_path, "native", "bf16", name="one.safetensors").is_file()
    assert [p.name for p in written(tmp_path, "native", "bf16", name="folder").iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("shards", [1, 3])
def test_diffusers_loads_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int) -> None:
    from diffusers import MiniMaxH3Transformer3DModel

    specs = expected_tensors(TINY, "diffusers", "bf16")
    if shards > 1:
        limit = data_bytes(specs) // 2
        assert len(plan_shards(specs, limit, "m")) == shards
        monkeypatch.setattr(module, "SHARD_BYTES", {"diffusers": limit})
    out = written(tmp_path, "diffusers", "bf16")
    assert len(list(out.glob("*.safetensors"))) == shards
    assert H3Config.from_dict(json.loads((out / "config.json").read_text())) == TINY
    model, info = MiniMaxH3Transformer3DModel.from_pretrained(out, torch_dtype=torch.bfloat16, output_loading_info=True)
    assert info == {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": [], "error_msgs": []}
    state = model.state_dict()
    expected = tensors("diffusers", "bf16")
    assert state.keys() == expected.keys()
    assert [name for name in state if state[name].dtype != expected[name].dtype] == []
    assert [name for name in state if not torch.equal(state[name], expected[name])] == []


def test_the_config_holds_every_size(tmp_path: Path) -> None:
    config = json.loads((written(tmp_path, "diffusers", "bf16") / "config.json").read_text())
    assert config.pop("_class_name") == "MiniMaxH3Transformer3DModel"
    assert config == asdict(TINY) | {"patch_size": [1, 2, 2]}
