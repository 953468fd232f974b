"""NVFP4: values against a table written by hand, cuts against comfy-kitchen, one rounding to bf16.

A pass means that nibble order, scale order, rounding and tile cuts are the format's. Run it with:
pytest tests/unit/test_nvfp4.py
"""

from __future__ import annotations

import comfy_kitchen as ck
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from h3core.nvfp4 import NVFP4Weight, concat_rows, quantize
from tests.unit.nvfp4_table import check_fp32_against_numpy, check_hand_table, hand_table, random_weight


def test_hand_written_bytes_give_hand_written_values():
    check_hand_table()


def test_dequantised_fp32_equals_an_independent_reading_of_the_bytes():
    check_fp32_against_numpy()


def test_every_code_and_every_finite_scale_has_its_value():
    weight, expected = hand_table()
    assert {0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -6.0} <= set((expected * 4).flatten().tolist())
    scales = [byte for byte in range(128) if byte != 0x7F]
    codes = torch.full((128, 1024), 0x77, dtype=torch.uint8)  # every code is 6
    bytes_ = torch.tensor((scales * 130)[: 128 * 128], dtype=torch.uint8).view(128, 128)
    weight = NVFP4Weight(codes, bytes_.view(torch.float8_e4m3fn), torch.tensor(0.5))
    got = weight.dequantize(torch.float32)
    tile = ck.from_blocked(bytes_, 128, 128).contiguous().view(torch.float8_e4m3fn).float()
    assert torch.equal(got, (tile * 3.0).repeat_interleave(16, dim=1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dequantising_rounds_once(dtype):
    weight = random_weight(256, 512, seed=3)
    once = weight.dequantize(torch.float32).to(dtype)
    assert torch.equal(weight.dequantize(dtype), once)
    twice = ck.dequantize_nvfp4(weight.codes, weight.scale_2, weight.scales, dtype)
    assert not torch.equal(twice, once), "comfy-kitchen's CPU path rounds once now: the detour can go"


def test_quantiser_is_comfy_kitchens_and_loses_what_four_bits_lose():
    source = torch.randn(256, 1024, generator=torch.Generator().manual_seed(5))
    weight = quantize(source)
    error = (weight.dequantize(torch.float32) - source).norm() / source.norm()
    assert 0.085 < error < 0.105, "published files measure 0.093 to 0.096 against bf16"
    assert weight.scale_2 == source.abs().max() / 2688


@given(rows=st.integers(1, 4), cols=st.integers(1, 6), data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_cut_dequantises_to_the_cut_of_the_whole(rows, cols, data):
    weight = random_weight(rows * 128, cols * 64, seed=rows * 10 + cols)
    whole = ck.dequantize_nvfp4(weight.codes, weight.scale_2, weight.scales, torch.float32)
    r0 = data.draw(st.integers(0, rows - 1))
    r1 = data.draw(st.integers(r0 + 1, rows))
    c0 = data.draw(st.integers(0, cols - 1))
    c1 = data.draw(st.integers(c0 + 1, cols))
    cut = weight.rows(r0 * 128, r1 * 128).columns(c0 * 64, c1 * 64)
    expected = whole[r0 * 128 : r1 * 128, c0 * 64 : c1 * 64]
    assert torch.equal(cut.dequantize(torch.float32), expected)
    other_way = weight.columns(c0 * 64, c1 * 64).rows(r0 * 128, r1 * 128)
    assert torch.equal(other_way.dequantize(torch.float32), expected)


def test_stacked_row_cuts_are_the_whole():
    weight = random_weight(512, 192, seed=8)
    stacked = concat_rows([weight.rows(0, 128), weight.rows(128, 384), weight.rows(384, 512)])
    assert torch.equal(stacked.codes, weight.codes)
    assert torch.equal(stacked.scales.view(torch.uint8), weight.scales.view(torch.uint8))


def test_parts_of_different_tensors_are_not_stacked():
    first, second = random_weight(128, 64, seed=1), random_weight(128, 64, seed=2)
    with pytest.raises(ValueError, match="expected one value"):
        concat_rows([first, second])


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (("rows", 0, 64), r"rows: got \[0, 64\), expected multiples of 128"),
        (("rows", 16, 128), "multiples of 128"),
        (("columns", 0, 32), r"columns: got \[0, 32\), expected multiples of 64: block scales are stored in swizzled"),
        (("columns", 16, 64), "multiples of 64"),
        (("rows", 128, 128), "non-empty range inside"),
        (("rows", 0, 384), r"inside \[0, 256\)"),
        (("columns", -64, 64), "inside"),
    ],
)
def test_a_cut_through_a_tile_is_refused_with_the_reason(cut, message):
    name, start, stop = cut
    with pytest.raises(ValueError, match=message):
        getattr(random_weight(256, 128, seed=0), name)(start, stop)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: (w.codes.view(torch.int8), w.scales, w.scale_2), "NVFP4 codes: got torch.int8"),
        (lambda w: (w.codes, w.scales.view(torch.uint8), w.scale_2), "NVFP4 scales: got torch.uint8"),
        (lambda w: (w.codes, w.scales[:, :4], w.scale_2), "NVFP4 scales: got .* expected .*8"),
        (lambda w: (w.codes, w.scales, w.scale_2[None]), "NVFP4 scale_2"),
        (lambda w: (w.codes[:100], w.scales, w.scale_2), "got 100 x 128, expected multiples"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        NVFP4Weight(*change(random_weight(256, 128, seed=0)))


def test_bytes_held_are_counted():
    weight = random_weight(256, 128, seed=0)
    assert weight.nbytes == 256 * 64 + 256 * 8 + 4
    assert np.prod(weight.shape) == 256 * 128
