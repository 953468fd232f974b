"""The one comparison that every tier uses: it returns evidence, or raises and says what, where and by how much.

A pass means: no demand can be met by comparing nothing, by NaN, or under `python -O`; every kind of difference raises
`ComparisonError` with text that leads to it; and the limits of the error budget stand where they are said to stand.
Run: pytest tests/unit/test_compare.py
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from h3core.qualify.checks.compare import (
    ComparisonError,
    Demand,
    ErrorBudget,
    Evidence,
    Identical,
    RelativeRows,
    compare,
    equal_facts,
)

NAN, INF = math.nan, math.inf


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def refused(got: Tensor, expected: Tensor, demand: Demand, what: str = "rows") -> str:
    """The message of the comparison, which must fail."""
    with pytest.raises(ComparisonError) as error:
        compare(what, got, expected, demand)
    assert str(error.value).startswith(f"{what}: ")
    return str(error.value)


def budget(reference: Tensor, low: float = 0.9, high: float = 1.05, **options: Any) -> ErrorBudget:
    return ErrorBudget(reference, low, high, **options)


REFERENCE = randn(64, 96, seed=1)
NOISE = randn(64, 96, seed=2) * 0.01
SINGLE = REFERENCE + NOISE
OTHER_NOISE = randn(64, 96, seed=3) * 0.01
DEMANDS: dict[str, Demand] = {
    "identical": Identical(),
    "relative": RelativeRows(1e9, "a limit that nothing finite exceeds"),
    "budget": budget(REFERENCE, 0.0, 1e9, worst_row=1e9),
}


# --- comparing nothing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("demand", DEMANDS)
@pytest.mark.parametrize("shape", [(0, 96), (64, 0), (0,)], ids=str)
def test_no_elements_are_nothing_to_compare(demand: str, shape: tuple[int, ...]) -> None:
    assert "nothing to compare" in refused(torch.zeros(shape), torch.zeros(shape), DEMANDS[demand])


@pytest.mark.parametrize("demand", DEMANDS)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.5])
def test_a_constant_expectation_proves_nothing(demand: str, value: float) -> None:
    text = refused(torch.full((64, 96), value), torch.full((64, 96), value), DEMANDS[demand])
    assert "constant" in text
    assert str(value) in text


@pytest.mark.parametrize("demand", DEMANDS)
@pytest.mark.parametrize(
    ("got", "shown"),
    [
        (SINGLE[:63], "torch.float32 (63, 96), expected torch.float32 (64, 96)"),
        (SINGLE.T, "torch.float32 (96, 64), expected torch.float32 (64, 96)"),
        (SINGLE[None], "torch.float32 (1, 64, 96), expected torch.float32 (64, 96)"),
        (SINGLE[:1], "torch.float32 (1, 96), expected torch.float32 (64, 96)"),
        (SINGLE.double(), "torch.float64 (64, 96), expected torch.float32 (64, 96)"),
        (SINGLE.bfloat16(), "torch.bfloat16 (64, 96), expected torch.float32 (64, 96)"),
    ],
    ids=["fewer rows", "transposed", "one more axis", "would broadcast", "wider dtype", "narrower dtype"],
)
def test_another_shape_or_dtype_is_a_failure(demand: str, got: Tensor, shown: str) -> None:
    assert f"got {shown}" in refused(got, SINGLE, DEMANDS[demand])


@pytest.mark.parametrize("demand", DEMANDS)
def test_an_expectation_with_nan_is_refused_as_such(demand: str) -> None:
    expected = SINGLE.clone()
    expected[3, 4] = NAN
    text = refused(expected.clone(), expected, DEMANDS[demand])
    assert "constant" not in text, f"the expectation holds a NaN, and is not constant: {text}"
    assert "nan" in text.lower()


# --- bit for bit -------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bytes_pass_and_the_evidence_says_what_was_seen(dtype: torch.dtype) -> None:
    x = (randn(5, 7) * 40).abs().to(dtype)
    evidence = compare("rows", x.clone(), x, Identical())
    assert evidence == Evidence(
        what="rows",
        demand="bit for bit",
        elements=35,
        bytes=35 * dtype.itemsize,
        spread=float(x.double().max() - x.double().min()),
        max_abs=0.0,
        measured={"differing": 0.0},
    )
    assert evidence.spread > 0
    assert json.loads(json.dumps(evidence.as_dict()))["elements"] == 35


def test_layout_in_memory_and_gradients_do_not_matter() -> None:
    x = randn(6, 8)
    strided = torch.stack([x, x], dim=-1)[..., 0]
    assert not strided.is_contiguous()
    compare("rows", strided.requires_grad_(), x, Identical())
    compare("rows", x, x.T.contiguous().T, Identical())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_flipped_bit_is_found_and_named(dtype: torch.dtype) -> None:
    x = (randn(12, 7) * 40).abs().to(dtype)
    got = x.clone()
    got.view(-1).view(torch.uint8)[(9 * 7 + 2) * dtype.itemsize] ^= 1
    text = refused(got, x, Identical())
    assert "1 of 84 elements differ in 1 rows (first rows [9]), first at (9, 2)" in text
    assert f"got {got[9, 2].double().item()!r}, expected {x[9, 2].double().item()!r}" in text
    assert "(demand: bit for bit)" in text


def test_several_differences_are_counted_by_element_and_by_row() -> None:
    x = randn(20, 4)
    got = x.clone()
    got[3:15, 1] += 1.0
    got[7, 2] = -9.0
    text = refused(got, x, Identical())
    assert "13 of 80 elements differ in 12 rows (first rows [3, 4, 5, 6, 7, 8, 9, 10]), first at (3, 1)" in text
    assert f"largest difference {max(1.0, abs(-9.0 - x[7, 2].item())):.3g}" in text


def test_swapped_rows_are_found() -> None:
    x = randn(20, 4)
    order = list(range(20))
    order[4], order[11] = 11, 4
    assert "8 of 80 elements differ in 2 rows (first rows [4, 11])" in refused(x[order], x, Identical())


def test_minus_zero_is_not_zero() -> None:
    x = torch.tensor([[1.0, 0.0, 2.0]])
    text = refused(torch.tensor([[1.0, -0.0, 2.0]]), x, Identical())
    assert "1 of 3 elements differ" in text
    assert "first at (0, 1): got -0.0, expected 0.0" in text
    assert "largest difference 0" in text


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_value_that_is_not_finite_is_found(value: float) -> None:
    x = randn(8, 3)
    got = x.clone()
    got[5, 1] = value
    text = refused(got, x, Identical())
    assert f"first at (5, 1): got {value!r}" in text
    assert "largest difference inf" in text


def test_any_number_of_axes_can_be_compared() -> None:
    for shape in ((6,), (2, 3, 4), (1, 24, 2, 4, 6)):
        x = randn(*shape)
        compare("latents", x.clone(), x, Identical())
        got = x.clone()
        got.view(-1)[-1] += 1
        assert f"first at {tuple(size - 1 for size in shape)}" in refused(got, x, Identical())


# --- relative, row by row ----------------------------------------------------------------------------------------


def test_the_worst_row_is_measured_against_its_own_norm() -> None:
    x = randn(10, 50, dtype=torch.float64)
    x[4] *= 1e-6
    got = x.clone()
    got[4] += x[4] * 1e-3
    evidence = compare("rows", got, x, RelativeRows(1.1e-3, "a test"))
    assert evidence.measured["worst_row_relative_error"] == pytest.approx(1e-3)
    assert evidence.demand == "relative error of each row at most 0.0011: a test"
    text = refused(got, x, RelativeRows(0.9e-3, "a test"))
    assert "row 4 has relative error 0.001" in text
    assert "at most 0.0009: a test" in text


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_no_limit_lets_a_value_that_is_not_finite_pass(value: float) -> None:
    got = SINGLE.clone()
    got[17, 3] = value
    assert "row 17 has relative error inf" in refused(got, SINGLE, RelativeRows(1e300, "all but infinity"))


def test_rows_of_more_than_two_axes_are_judged_whole() -> None:
    x = randn(4, 3, 5, dtype=torch.float64)
    got = x.clone()
    got[2] *= 1.5
    assert "row 2 has relative error 0.5" in refused(got, x, RelativeRows(0.4, "a test"))


def test_a_row_of_zeros_lets_nothing_pass() -> None:
    x = SINGLE.clone()
    x[8] = 0.0
    got = x.clone()
    got[8, 0] = 1e-30
    assert "row 8" in refused(got, x, RelativeRows(1e300, "all but infinity"))


# --- the error budget --------------------------------------------------------------------------------------------


def test_as_good_as_one_rank_passes_and_is_measured() -> None:
    evidence = compare("velocity", REFERENCE + OTHER_NOISE, SINGLE, budget(REFERENCE))
    measured = evidence.measured
    assert measured["rms_ratio"] == pytest.approx(float(OTHER_NOISE.norm() / NOISE.norm()), rel=1e-5)
    assert measured["single_relative_error"] == pytest.approx(0.01, rel=0.1)
    assert measured["distance_to_single"] == pytest.approx(math.sqrt(2), rel=0.05)
    worst = OTHER_NOISE.norm(dim=1).max() / NOISE.norm(dim=1).max()
    assert measured["worst_row_ratio"] == pytest.approx(float(worst), rel=1e-5)
    assert "in [0.9, 1.05]" in evidence.demand
    assert "not identical to one rank" in evidence.demand


@pytest.mark.parametrize(("factor", "good"), [(0.85, False), (0.91, True), (1.04, True), (1.06, False), (3.0, False)])
def test_the_ratio_of_errors_has_two_sides(factor: float, good: bool) -> None:
    got = REFERENCE.double() - NOISE.double() * factor
    expected = SINGLE.double()
    if good:
        ratio = compare("velocity", got, expected, budget(REFERENCE)).measured["rms_ratio"]
        assert ratio == pytest.approx(factor, rel=1e-4)
    else:
        assert f"rms ratio {factor:.4f}" in refused(got, expected, budget(REFERENCE))


@pytest.mark.parametrize(("factor", "good"), [(1.9, True), (2.1, False)])
def test_one_bad_row_fails_where_the_mean_hides_it(factor: float, good: bool) -> None:
    unit = NOISE.double() / NOISE.double().norm(dim=1, keepdim=True) * 0.01
    got, expected = REFERENCE.double() - unit, REFERENCE.double() + unit
    got[30] = REFERENCE[30].double() - unit[30] * factor
    demand = budget(REFERENCE.double())
    if good:
        assert compare("velocity", got, expected, demand).measured["worst_row_ratio"] == pytest.approx(factor)
    else:
        text = refused(got, expected, demand)
        assert f"worst-row ratio {factor:.3f}" in text
        assert "rms ratio" not in text


def test_a_result_identical_to_one_rank_fails() -> None:
    assert "identical to one rank: the mode was not taken" in refused(SINGLE.clone(), SINGLE, budget(REFERENCE))


def test_too_few_rows_fail() -> None:
    got = REFERENCE + OTHER_NOISE
    text = refused(got[:63], SINGLE[:63], budget(REFERENCE[:63]))
    assert "63 rows are too few for the statistic, expected at least 64" in text
    compare("velocity", got[:63], SINGLE[:63], budget(REFERENCE[:63], 0.5, 1.5, min_rows=63))


@pytest.mark.parametrize("where", ["got", "reference"])
@pytest.mark.parametrize("value", [NAN, INF])
def test_no_budget_lets_a_value_that_is_not_finite_pass(where: str, value: float) -> None:
    got, reference = REFERENCE + OTHER_NOISE, REFERENCE.clone()
    {"got": got, "reference": reference}[where][9, 9] = value
    refused(got, SINGLE, budget(reference, 0.0, 1e300, worst_row=1e300))


@pytest.mark.parametrize(
    "reference",
    [REFERENCE[:1], REFERENCE[:, :1], torch.tensor(0.5), REFERENCE[:63], REFERENCE[None]],
    ids=["one row", "one column", "scalar", "fewer rows", "one more axis"],
)
def test_a_reference_of_another_shape_is_a_failure(reference: Tensor) -> None:
    text = refused(REFERENCE + OTHER_NOISE, SINGLE, budget(reference, 0.0, 1e9, worst_row=1e9))
    assert str(tuple(reference.shape)) in text
    assert "(64, 96)" in text


# --- plain facts -------------------------------------------------------------------------------------------------


def test_equal_facts_are_evidence() -> None:
    evidence = equal_facts("bytes", {"qkv": 12, "out": 4}, {"qkv": 12, "out": 4})
    assert (evidence.what, evidence.demand, evidence.elements) == ("bytes", "equal", 2)
    assert equal_facts("bytes", 12, 12).elements == 1


@pytest.mark.parametrize("expected", [None, "", [], {}, b""], ids=repr)
def test_facts_of_nothing_are_refused(expected: Any) -> None:
    with pytest.raises(ComparisonError, match="digests: nothing to compare"):
        equal_facts("digests", expected, expected)


@pytest.mark.parametrize(
    ("got", "expected"), [(12, 13), ({"a": 1}, {"a": 2}), ({}, {"a": 1}), ("ab", "abc"), (None, 3)]
)
def test_facts_that_differ_are_both_shown(got: Any, expected: Any) -> None:
    with pytest.raises(ComparisonError) as error:
        equal_facts("bytes", got, expected)
    assert str(error.value) == f"bytes: got {got!r}, expected {expected!r}"


# --- python -O ---------------------------------------------------------------------------------------------------

OPTIMISED = """
import torch
from h3core.qualify.checks.compare import ComparisonError, ErrorBudget, Identical, RelativeRows, compare, equal_facts

try:
    assert False
except AssertionError:
    raise SystemExit("this Python does not drop assertions")

x = torch.randn(64, 8)
y = x.clone()
y[3, 3] += 1
z = torch.zeros(64, 8)
nothing = torch.zeros(0, 8)
cases = {
    "identical": lambda: compare("x", y, x, Identical()),
    "relative": lambda: compare("x", y, x, RelativeRows(1e-6, "a test")),
    "budget": lambda: compare("x", y, x, ErrorBudget(x, 0.9, 1.1)),
    "shape": lambda: compare("x", y[:3], x, Identical()),
    "constant": lambda: compare("x", z, z, Identical()),
    "empty": lambda: compare("x", nothing, nothing, Identical()),
    "facts": lambda: equal_facts("x", 1, 2),
}
for name, case in cases.items():
    try:
        case()
    except ComparisonError:
        print(name)
"""


def test_every_failure_still_raises_where_python_drops_assertions() -> None:
    done = subprocess.run([sys.executable, "-O", "-c", OPTIMISED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["identical", "relative", "budget", "shape", "constant", "empty", "facts"]
