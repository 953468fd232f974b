"""Synthetic tensors hold values that test something.

A pass means: no tensor is constant, no norm weight is 1 and no gate near 0, so that a weight that was not applied
shows; and activations stay of order one. Run: pytest tests/unit/test_checkpoint_synthetic_tensors.py
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from h3core.checkpoint.errors import CheckpointError
from h3core.checkpoint.layout import TensorSpec, expected_tensors
from h3core.checkpoint.safetensors_format import TORCH_DTYPE
from h3core.checkpoint.synthetic_tensors import synthetic_tensor
from h3core.config import H3, TINY
from h3core.nvfp4 import NVFP4Weight
from tests.unit.synthetic_checkpoints import FLOATS, KINDS, SEED, tensors


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


def test_other_depths_scale_the_gates() -> None:
    deep = replace(TINY, num_layers=8)
    spec = expected_tensors(deep, "pruned", "bf16")["blocks.7.adaln_proj.linear.bias"]
    bias = synthetic_tensor(deep, "pruned", "bf16", "blocks.7.adaln_proj.linear.bias", spec, SEED).float()
    assert float(bias.view(3, 6, -1)[:, [2, 5]].abs().mean()) == pytest.approx(0.25, rel=0.05)


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


def test_a_name_the_layout_lacks_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"blocks.0.attn.to_q: no such part in layout native"):
        synthetic_tensor(TINY, "native", "bf16", "blocks.0.attn.to_q.weight", TensorSpec("BF16", (1, 1)), 1)
