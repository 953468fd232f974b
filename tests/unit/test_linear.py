"""Linears: the same bits for a row however many rows come with it, and W4A4 by the format's own rules.

A pass means that ranks with few rows compute what one rank computes, and that the emulated W4A4 product
is codes x scales summed in fp32. Run it with: pytest tests/unit/test_linear.py
"""

from __future__ import annotations

import comfy_kitchen as ck
import pytest
import torch
import torch.nn.functional as F

from h3core.comm import run_virtual
from h3core.linear import BLOCK_ROWS, Linear, activation_scale, blocked, dense, w4a4
from h3core.nvfp4 import quantize
from h3core.partition import split
from h3core.weights import Affine
from tests.unit.nvfp4_table import random_weight, read_by_numpy


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("inner", [96, 1152, 7168])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 8, 33, 44])
def test_a_row_has_the_same_bits_however_many_rows_there_are(rows, inner, dtype):
    x, weight = draw(100, inner, dtype=dtype), draw(128, inner, seed=1, dtype=dtype)
    whole = dense(x, weight)
    for start in (0, 31, 100 - rows):
        assert torch.equal(dense(x[start : start + rows], weight), whole[start : start + rows])


def test_without_blocks_few_rows_would_have_other_bits():
    """The trap that the blocks are for; where this host has no such kernel, they cost little."""
    x, weight = draw(100, 1152), draw(256, 1152, seed=1)
    whole = F.linear(x, weight)
    broken = [rows for rows in (1, 2, 3) if not torch.equal(F.linear(x[:rows], weight), whole[:rows])]
    if not broken:
        pytest.skip("needs a BLAS that picks its kernel by rows; this host's gives 1, 2 and 3 rows the same bits")
    ours = dense(x, weight)
    assert all(torch.equal(dense(x[:rows], weight), ours[:rows]) for rows in broken)


def test_no_rows_give_no_rows():
    assert dense(draw(0, 8), draw(5, 8)).shape == (0, 5)
    assert blocked(draw(0, 8), Affine(draw(5, 8), draw(5))).shape == (0, 5)


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 71])
def test_blocked_rows_equal_the_plain_product(rows):
    x, affine = draw(rows, 96, dtype=torch.float64), Affine(draw(32, 96, dtype=torch.float64), draw(32).double())
    torch.testing.assert_close(blocked(x, affine), x @ affine.weight.T + affine.bias, rtol=1e-13, atol=1e-13)


def test_rows_run_in_blocks_of_one_size(monkeypatch):
    seen = []
    monkeypatch.setattr("h3core.linear.F.linear", lambda x, w, b: (seen.append(x.shape[0]), x @ w.T + b)[1])
    blocked(draw(80, 8), Affine(draw(5, 8), draw(5)))
    assert seen == [BLOCK_ROWS["cpu"]] * 3


def test_fp32_output_of_a_bf16_product_is_not_rounded():
    x, weight = draw(16, 128, dtype=torch.bfloat16), draw(8, 128, seed=2, dtype=torch.bfloat16)
    wide = dense(x, weight, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-4)
    assert not torch.equal(wide, wide.bfloat16().float())


def test_w4a16_multiplies_by_the_dequantised_weight():
    x, weight = draw(9, 256, dtype=torch.bfloat16), random_weight(128, 256, seed=1)
    assert torch.equal(Linear()(x, weight, sharded=False), F.linear(x, read_by_numpy(weight).bfloat16()))


@pytest.mark.parametrize("rows", [1, 5, 16, 37])
def test_w4a4_is_the_product_of_the_quantised_activation(rows):
    """Against fp64: codes and scales by comfy-kitchen's quantiser, read by numpy, one rounding at the end."""
    x, weight = draw(rows, 256, seed=3, dtype=torch.bfloat16), random_weight(128, 256, seed=2)
    scale = activation_scale(x.abs().amax())
    filled = F.pad(x, (0, 0, 0, 128 - rows))
    codes, scales = ck.quantize_nvfp4(filled, scale)
    from h3core.nvfp4 import NVFP4Weight

    one = torch.ones((), dtype=torch.float32)
    exact = read_by_numpy(NVFP4Weight(codes, scales, one)).double()[:rows]
    unscaled = read_by_numpy(NVFP4Weight(weight.codes, weight.scales, one)).double()
    expected = (exact @ unscaled.T * (scale * weight.scale_2).double()).to(torch.bfloat16)
    got = w4a4(x, weight, scale, torch.bfloat16)
    # One bf16 ulp where the fp32 sum falls on the other side of a tie than the fp64 sum does.
    torch.testing.assert_close(got, expected, rtol=2**-8, atol=0)
    assert (got == expected).float().mean() > 0.99


def test_activation_scale_is_computed_in_the_activation_dtype():
    amax = torch.tensor(5.3125, dtype=torch.bfloat16)
    assert activation_scale(amax).item() == (amax / 2688).float().item() != 5.3125 / 2688


@pytest.mark.parametrize("cut", ["rows", "columns"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_w4a4_codes_and_scales_of_a_shard_are_the_shard_of_the_whole(cut, world):
    """With the scale of the whole sequence, quantising a part gives the bytes that quantising all gives."""
    x = draw(48, 768, seed=9, dtype=torch.bfloat16)
    scale = activation_scale(x.abs().amax())
    codes, scales = ck.quantize_nvfp4(F.pad(x, (0, 0, 0, 80)), scale)
    plain = ck.from_blocked(scales.view(torch.uint8), 128, 48)
    for span in split(48 if cut == "rows" else 12, world):
        rows, cols = (slice(*span), slice(0, 768)) if cut == "rows" else (slice(0, 48), slice(*span.scaled(64)))
        part = x[rows, cols]
        got_codes, got_scales = ck.quantize_nvfp4(F.pad(part, (0, 0, 0, 128 - part.shape[0])), scale)
        blocks = slice(cols.start // 16, cols.stop // 16)
        assert torch.equal(got_codes[: part.shape[0]], codes[rows, cols.start // 2 : cols.stop // 2])
        got = ck.from_blocked(got_scales.view(torch.uint8), 128, part.shape[1] // 16)[: part.shape[0]]
        assert torch.equal(got, plain[rows, blocks])


@pytest.mark.parametrize("world", [2, 4])
def test_w4a4_over_ranks_takes_the_activation_scale_of_the_whole_sequence(world):
    x, weight = draw(40, 256, seed=4, dtype=torch.bfloat16), random_weight(128, 256, seed=5)
    x[-1] *= 50  # the largest value sits on the last rank
    whole = Linear("w4a4")(x, weight, sharded=False)
    spans = split(40, world)

    def task(comm):
        linear = Linear("w4a4", lambda amax: comm.max(amax, "amax"))
        return linear(x[slice(*spans[comm.rank])], weight, sharded=True)

    assert torch.equal(torch.cat(run_virtual(world, task)), whole)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="got 'fp3', expected one of w4a16, w4a4"):
        Linear("fp3")


def test_quantised_weights_of_a_linear_lose_what_nvfp4_loses():
    x, source = draw(64, 512, seed=6), draw(128, 512, seed=7)
    for kind, most in (("w4a16", 0.11), ("w4a4", 0.16)):  # weights alone about 0.095; activations as much again
        got = Linear(kind)(x, quantize(source), sharded=False)
        error = (got - x @ source.T).norm() / (x @ source.T).norm()
        assert 0.05 < error < most
