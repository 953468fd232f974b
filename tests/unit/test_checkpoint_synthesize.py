"""Synthetic checkpoints: one model in every layout, reproducible tensor by tensor, with values that test something.

A pass means: a seed names one model, whatever file it is in; no tensor is constant and no norm weight is 1, so that a
weight that was not applied shows; and the command line writes exactly what its dry run says.
Run: pytest tests/unit/test_checkpoint_synthesize.py
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from h3core.checkpoint import synthesize as module
from h3core.checkpoint.cli import FORMATS, add_parser
from h3core.checkpoint.errors import CheckpointError
from h3core.checkpoint.layout import TensorSpec, expected_tensors
from h3core.checkpoint.reader import load_denoiser
from h3core.checkpoint.synthesize import plan_files, synthesize, synthetic_tensor
from h3core.checkpoint.writer import TORCH_DTYPE, data_bytes, file_bytes, plan_shards
from h3core.config import H3, TINY, H3Config
from h3core.nvfp4 import NVFP4Weight
from h3core.weights import CurveAdaLN, FullAdaLN, named_tensors

KINDS = list(FORMATS.values())
FLOATS = [("native", "bf16"), ("diffusers", "bf16"), ("pruned", "bf16")]
SEED = 440420


@cache
def tensors(layout: str, quant: str, seed: int = SEED, config: H3Config = TINY) -> dict[str, Tensor]:
    specs = expected_tensors(config, layout, quant)
    return {name: synthetic_tensor(config, layout, quant, name, spec, seed) for name, spec in specs.items()}


def written(folder: Path, layout: str, quant: str, seed: int = SEED, name: str = "out") -> Path:
    out = folder / name
    synthesize(out, config=TINY, layout=layout, quant=quant, seed=seed)
    return out


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


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


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


# --- values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "quant"), KINDS)
def test_every_tensor_is_finite_and_varies(layout: str, quant: str) -> None:
    specs = expected_tensors(TINY, layout, quant)
    for name, tensor in tensors(layout, quant).items():
        assert TORCH_DTYPE[specs[name].dtype] == tensor.dtype
        assert specs[name].shape == tuple(tensor.shape)
        values = tensor.float()
        assert bool(values.isfinite().all()), name
        if tensor.dim() == 0:
            assert float(values) > 0, name
            continue
        some = values.flatten()[:1000]  # sorting all of them takes seconds
        assert len(some.unique()) > min(8, len(some) // 3), name
        if name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "norm_q.weight", "norm_k.weight")):
            assert bool((values != 1).all()), name
            assert float(values.min()) >= 0.5, name
        if name.endswith(".bias"):
            assert bool((values != 0).all()), name


@pytest.mark.parametrize(("layout", "quant"), FLOATS)
def test_linears_keep_activations_at_order_one(layout: str, quant: str) -> None:
    gains = {"out_proj": 2.0, "to_out": 2.0, "fc2": 1.6, "ff.net.2": 1.6}
    checked = 0
    for name, tensor in tensors(layout, quant).items():
        if tensor.dim() != 2 or "adaln" in name or "time_embedder" in name or "norm_out" in name:
            continue
        gain = next((value for part, value in gains.items() if part in name), 1.0)
        assert float(tensor.float().std()) * math.sqrt(tensor.shape[1]) == pytest.approx(gain, rel=0.03), name
        checked += 1
    assert checked == 5 + 4 * (6 if layout == "diffusers" else 4)


def test_nvfp4_weights_have_the_spread_of_the_float_ones() -> None:
    made = tensors("pruned", "nvfp4")
    names = [name.removesuffix(".weight_scale_2") for name in made if name.endswith("_scale_2")]
    assert len(names) == 8
    for name in names:
        scales = made[f"{name}.weight_scale"]
        assert bool((scales.float() > 0).all())
        assert float(scales.float().max() / scales.float().min()) > 2
        weight = NVFP4Weight(made[f"{name}.weight"], scales, made[f"{name}.weight_scale_2"]).dequantize(torch.float32)
        gain = {"out_proj": 2.0, "fc2": 1.6}.get(name.rpartition(".")[2], 1.0)
        assert float(weight.std()) * math.sqrt(weight.shape[1]) == pytest.approx(gain, rel=0.07), name
        assert abs(float(weight.mean())) < 0.02 * float(weight.std())
        assert bytes(made[f"{name}.comfy_quant"].tolist()) == b'{"format": "nvfp4"}'
    assert len({float(made[f"{name}.weight_scale_2"]) for name in names}) == 8


def test_block_scales_read_row_major_are_visibly_wrong() -> None:
    made = tensors("pruned", "nvfp4")
    name = "blocks.0.mlp.fc2"  # wide: few scales happen to stand where a row-major reader looks
    weight = NVFP4Weight(*(made[f"{name}.{part}"] for part in ("weight", "weight_scale", "weight_scale_2")))
    right = weight.dequantize(torch.float32)
    code = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = torch.stack([weight.codes >> 4, weight.codes & 15], dim=-1).flatten(1).long()
    naive = code[codes] * weight.scales.float().repeat_interleave(16, dim=1) * weight.scale_2
    correlation = float(torch.corrcoef(torch.stack([right.flatten(), naive.flatten()]))[0, 1])
    assert correlation == pytest.approx(0.866, abs=0.02)


@pytest.mark.parametrize(("layout", "quant"), KINDS)
def test_gates_are_never_near_zero_and_modalities_differ(layout: str, quant: str) -> None:
    made = tensors(layout, quant)
    prefix = "transformer_blocks" if layout == "diffusers" else "blocks"
    for index in range(TINY.num_layers):
        bias = made[f"{prefix}.{index}.adaln_proj.linear.bias"].float().view(3, 6, TINY.hidden_size)
        gate = 1 / math.sqrt(2 * TINY.num_layers)
        gates = bias[:, [2, 5]].abs() / gate
        assert float(gates.min()) > 0.74
        assert float(gates.max()) < 1.26
        assert bool((bias[:, [2, 5]] > 0).any())
        assert bool((bias[:, [2, 5]] < 0).any())
        assert float(bias[:, [0, 1, 3, 4]].std()) == pytest.approx(0.12, rel=0.1)
        assert float((bias[0] - bias[1]).abs().mean()) > 0.1
        assert float((bias[0] - bias[2]).abs().mean()) > 0.1


def modulation(layout: str, times: Tensor) -> Tensor:
    """Block 0's AdaLN output without its bias, (times, 18, hidden), by the formulas, in fp32."""
    made = {name: tensor.float() for name, tensor in tensors(layout, "bf16").items()}
    if layout == "pruned":
        at = times.clamp(0, 1) * 1024
        low = at.floor().clamp(max=1023).long()
        table = made["adaln_t_table"]
        fed = torch.lerp(table[low], table[low + 1], (at - low)[:, None])
    else:
        frequencies = torch.exp(-math.log(10000) * torch.arange(128) / 128)
        angles = times[:, None] * frequencies
        hidden = torch.cat([angles.cos(), angles.sin()], dim=1)
        for part in ("proj_in", "proj_out"):
            hidden = hidden @ made[f"time_embedder.{part}.weight"].T + made[f"time_embedder.{part}.bias"]
            hidden = torch.nn.functional.silu(hidden)
        fed = hidden
    return (fed @ made["blocks.0.adaln_proj.linear.weight"].T).view(len(times), 18, TINY.hidden_size)


@pytest.mark.parametrize("layout", ["native", "pruned"])
def test_modulation_moves_with_the_timestep(layout: str) -> None:
    made = modulation(layout, torch.linspace(0, 1, 201))
    shifts = made[:, [chunk for chunk in range(18) if chunk % 3 != 2]]
    gates = made[:, 2::3]
    assert 0.06 < float(shifts.std()) < 0.24
    assert float(shifts.std(dim=0).mean()) > 0.05
    assert float(gates.std()) == pytest.approx(0.3 * 0.5, rel=0.5)
    assert float((made[1:] - made[:-1]).abs().max()) < 0.05  # smooth: 1/200 of the way


def test_the_curve_has_no_steps() -> None:
    table = tensors("pruned", "bf16")["adaln_t_table"]
    assert float((table[1:] - table[:-1]).abs().max()) < 0.01
    assert float((table.max(0).values - table.min(0).values).min()) > 0.5


@pytest.mark.parametrize("layout", ["native", "pruned"])
def test_rotary_frequencies_have_the_bits_that_diffusers_computes(layout: str) -> None:
    from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3RotaryPosEmbed

    assert torch.equal(tensors(layout, "bf16")["rope.inv_freq"], MiniMaxH3RotaryPosEmbed(16, 10000.0).inv_freq)


# --- full size, without writing it -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "quant", "name", "shape"),
    [
        ("pruned", "nvfp4", "blocks.49.attn.out_proj.weight", (5376, 3584)),
        ("pruned", "nvfp4", "blocks.49.attn.out_proj.weight_scale", (5376, 448)),
        ("pruned", "bf16", "blocks.7.adaln_proj.linear.weight", (96768, 8)),
        ("diffusers", "bf16", "transformer_blocks.3.attn.to_k.weight", (7168, 5376)),
        ("native", "bf16", "token_refiner.blocks.1.attn.k_norm.weight", (128,)),
    ],
)
def test_one_tensor_of_the_released_model_is_made_without_the_rest(
    layout: str, quant: str, name: str, shape: tuple[int, ...]
) -> None:
    spec = expected_tensors(H3, layout, quant)[name]
    assert tuple(synthetic_tensor(H3, layout, quant, name, spec, SEED).shape) == shape == spec.shape


def test_the_released_sizes_make_as_many_shards_as_were_published() -> None:
    for layout, count, first in (
        ("native", 13, "model-00001-of-00013.safetensors"),
        ("diffusers", 14, "diffusion_pytorch_model-00001-of-00014.safetensors"),
    ):
        files = plan_files(Path("out"), expected_tensors(H3, layout, "bf16"), layout)
        assert len(files) == count
        assert next(iter(files)) == Path("out", first)


def test_a_name_the_layout_lacks_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"blocks.0.attn.to_q: no such part in layout native"):
        synthetic_tensor(TINY, "native", "bf16", "blocks.0.attn.to_q.weight", TensorSpec("BF16", (1, 1)), 1)


# --- diffusers -------------------------------------------------------------------------------------------------


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


# --- command line ----------------------------------------------------------------------------------------------


def command(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["checkpoint", "synthesize", *map(str, arguments)])
    return int(args.run(args))


@pytest.mark.parametrize("format_", FORMATS)
def test_the_dry_run_writes_nothing_and_ends_with_the_bytes_that_the_run_then_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], format_: str
) -> None:
    out = tmp_path / "out"
    assert command(out, "--size", "tiny", "--format", format_, "--dry-run") == 0
    assert list(tmp_path.iterdir()) == []
    lines = capsys.readouterr().out.splitlines()
    layout, quant = FORMATS[format_]
    specs = expected_tensors(TINY, layout, quant)
    assert len(lines) == 1 + len(specs) + 1
    assert [line.split()[:2] for line in lines[1:-1]] == [[name, spec.dtype] for name, spec in specs.items()]
    assert command(out, "--size", "tiny", "--format", format_) == 0
    files = [out] if out.is_file() else list(out.glob("*.safetensors"))
    assert int(lines[-1]) == sum(file.stat().st_size for file in files) == file_bytes(specs)
    captured = capsys.readouterr()
    assert captured.err == ""  # no progress bar where there is no terminal


@pytest.mark.parametrize("format_", FORMATS)
def test_the_dry_run_of_the_released_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str], format_: str) -> None:
    assert command(tmp_path / "out", "--size", "h3", "--format", format_, "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    layout, quant = FORMATS[format_]
    files = plan_files(tmp_path / "out", expected_tensors(H3, layout, quant), layout)
    assert sum(line.startswith(str(tmp_path)) for line in lines) == len(files)
    assert int(lines[-1]) == sum(map(file_bytes, files.values()))
    if format_ == "nvfp4-pruned":
        assert lines[-1] == "12528636800"
        assert lines[-2] == "blocks.9.mlp.fc2.weight U8 5376x7168 12489985624-12528520792"
        assert lines[0].endswith("12528636800 bytes, header 116000, 1132 tensors")


def test_a_mistake_is_one_line_and_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    arguments = (out, "--size", "tiny", "--format", "nvfp4-pruned")
    assert command(*arguments) == 0
    before = out.read_bytes()
    capsys.readouterr()
    assert command(*arguments, "--seed", 1) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"h3core: error: output {out} already exists")
    assert error.count("\n") == 1
    assert out.read_bytes() == before
    assert command(*arguments, "--seed", 1, "--force") == 0
    assert out.read_bytes() != before
    assert command(tmp_path / ("n" * 300), "--size", "tiny", "--format", "native") == 2
    assert "h3core: error: [Errno 36] File name too long" in capsys.readouterr().err


def test_native_is_one_file_where_the_name_says_so_and_a_folder_otherwise(tmp_path: Path) -> None:
    assert written(tmp_path, "native", "bf16", name="one.safetensors").is_file()
    assert [p.name for p in written(tmp_path, "native", "bf16", name="folder").iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_terminated_run_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    code = (
        "import argparse, sys\n"
        "from h3core.checkpoint.cli import add_parser\n"
        "parser = argparse.ArgumentParser()\n"
        "add_parser(parser.add_subparsers(required=True))\n"
        "args = parser.parse_args()\n"
        "sys.exit(args.run(args))\n"
    )
    arguments = ["checkpoint", "synthesize", str(tmp_path / "out"), "--size", "h3", "--format", "nvfp4-pruned"]
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not any(p.stat().st_size > 1 << 20 for p in tmp_path.iterdir()):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
        os.kill(process.pid, number)
        assert process.wait(30) != 0
    finally:
        process.kill()
        process.wait()
    assert list(tmp_path.iterdir()) == []


def test_the_seed_has_its_default(tmp_path: Path) -> None:
    assert command(tmp_path / "a", "--size", "tiny", "--format", "nvfp4-pruned") == 0
    written(tmp_path, "pruned", "nvfp4", seed=440420, name="b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_other_depths_scale_the_gates() -> None:
    deep = replace(TINY, num_layers=8)
    spec = expected_tensors(deep, "pruned", "bf16")["blocks.7.adaln_proj.linear.bias"]
    bias = synthetic_tensor(deep, "pruned", "bf16", "blocks.7.adaln_proj.linear.bias", spec, SEED).float()
    assert float(bias.view(3, 6, -1)[:, [2, 5]].abs().mean()) == pytest.approx(0.25, rel=0.05)
