"""The determinism screen's judgement, with planted digests, and that it computes anew at each repeat.

A pass means that a rank which computes other bytes, once or always, is named, and one that computes nothing is no
pass. With ranks: tests/gloo/test_controls_are_live.py. Run it with: pytest tests/unit/test_determinism.py
"""

from __future__ import annotations

import pytest
import torch

from h3core.qualify.checks.compare import ComparisonError
from h3core.qualify.checks.determinism import (
    DEMAND,
    Corruption,
    Operation,
    Result,
    Work,
    judge,
    operations,
    repeated,
    screen,
)
from h3core.ranks import Rank

CPU = torch.device("cpu")
SMALL = Work(rows=40, inner=128, columns=128, heads=1, width=64)


def result(*digests: str, inputs: str = "in", **changes) -> Result:
    values = {"elements": 6, "bytes": 12, "spread": 2.0} | changes
    return Result(inputs, digests or ("a", "a", "a"), **values)


def ranks(*results: Result, operation: str = "GEMM") -> list[dict[str, Result]]:
    return [{operation: one} for one in results]


def corruption(*results: Result) -> Corruption:
    with pytest.raises(Corruption) as caught:
        judge(ranks(*results))
    return caught.value


def findings(*results: Result) -> list[tuple[str, tuple[int, ...]]]:
    return [(finding.kind, finding.ranks) for finding in corruption(*results).findings]


# What passes, and with what evidence.


def test_equal_results_give_evidence_per_rank_and_operation():
    evidence = judge([{"GEMM": result(), "attention": result("b", "b", "b")} for _ in range(2)])
    assert [(item.what, item.rank) for item in evidence] == [
        (f"{operation}, rank {rank} of 2", rank) for operation in ("GEMM", "attention") for rank in (0, 1)
    ]
    for item in evidence:
        assert (item.elements, item.bytes, item.spread, item.demand) == (18, 36, 2.0, DEMAND)


def test_one_rank_can_be_held_against_itself():
    assert [item.rank for item in judge(ranks(result()))] == [0]
    assert findings(result("a", "b", "a")) == [("self", (0,))]


def test_ranks_that_are_wrong_alike_are_not_seen():
    assert judge(ranks(result("wrong", "wrong"), result("wrong", "wrong")))  # that takes an oracle: diffusers, numpy


# Who is named.


def test_a_rank_that_disagrees_with_itself_is_named_with_the_repeat():
    error = corruption(result(), result(), result("a", "b", "a"), result())
    assert [(finding.kind, finding.ranks) for finding in error.findings] == [("self", (2,))]
    assert str(error) == "GEMM: rank 2 of 4 disagrees with itself: repeat 2 of 3"


def test_without_a_majority_of_repeats_the_number_of_results_is_told():
    assert "2 different results in 2 repeats" in str(corruption(result("a", "b"), result("a", "a")))


def test_a_rank_that_disagrees_with_itself_comes_first_and_has_no_vote():
    unsteady = result("b", "b", "c")
    assert findings(result(), result("b", "b", "b"), unsteady, result()) == [("self", (2,)), ("odd", (1,))]
    assert findings(result(), result("b", "b", "b"), unsteady) == [("self", (2,)), ("undecided", (0, 1))]
    assert findings(result(), unsteady) == [("self", (1,))]


def test_it_comes_first_over_all_operations():
    odd = {"GEMM": result("b", "b", "b"), "attention": result()}
    unsteady = {"GEMM": result(), "attention": result("a", "a", "b")}
    with pytest.raises(Corruption, match=r"^attention: rank 3 of 4 disagrees .*; GEMM: rank 0 of 4 steadily"):
        judge([odd, *[{"GEMM": result(), "attention": result()}] * 2, unsteady])


def test_the_majority_names_the_odd_rank():
    error = corruption(result(), result("b", "b", "b"), result(), result())
    assert [(finding.kind, finding.ranks) for finding in error.findings] == [("odd", (1,))]
    assert str(error) == "GEMM: rank 1 of 4 steadily computes other bytes than the rest"


def test_the_majority_names_several_odd_ranks():
    assert findings(*[result()] * 4, result("b", "b", "b"), result("c", "c", "c")) == [("odd", (4, 5))]


def test_two_against_two_names_both_groups():
    error = corruption(result(), result("b", "b", "b"), result("b", "b", "b"), result())
    assert [(finding.kind, finding.ranks) for finding in error.findings] == [("undecided", (0, 1, 2, 3))]
    assert "no majority: ranks 0, 3 and ranks 1, 2 differ" in str(error)


def test_a_largest_group_without_a_majority_accuses_nobody():
    error = corruption(result(), result(), result("b", "b", "b"), result("c", "c", "c"))
    assert [finding.kind for finding in error.findings] == ["undecided"]
    assert "ranks 0, 1 and rank 2 and rank 3" in str(error)


def test_two_ranks_cannot_tell_which_of_them_is_wrong():
    error = corruption(result(), result("b", "b", "b"))
    assert [(finding.kind, finding.ranks) for finding in error.findings] == [("undecided", (0, 1))]
    assert "rank 0 or 1" in str(error)


def test_other_inputs_are_told_apart_from_another_computation():
    given, alike = result("b", "b", "b", inputs="other"), result()
    error = corruption(alike, alike, given, alike)
    assert [(finding.kind, finding.ranks) for finding in error.findings] == [("inputs", (2,))]
    assert "rank 2 of 4 was given other inputs" in str(error)
    assert "computes" not in str(error)


def test_ranks_with_the_same_inputs_are_still_held_against_each_other():
    given = [result("b", "b", "b", inputs="other"), result("c", "c", "c", inputs="other")]
    assert findings(*[result()] * 3, *given) == [("inputs", (3, 4)), ("undecided", (3, 4))]


def test_two_ranks_with_different_inputs_cannot_tell_which_is_wrong():
    assert "rank 0 or 1 was given wrong bytes" in str(corruption(result(), result(inputs="other")))


# What proves nothing.


@pytest.mark.parametrize("per_rank", [[], [{}], [{}, {}]], ids=["no rank", "no operation", "two ranks, no operation"])
def test_nothing_is_no_pass(per_rank):
    with pytest.raises(ComparisonError, match="nothing to compare"):
        judge(per_rank)


@pytest.mark.parametrize(
    "results",
    [[result("a")], [result("a", elements=0), result("a", elements=0)]],
    ids=["one result", "no elements"],
)
def test_one_result_or_an_empty_one_is_no_pass(results):
    with pytest.raises(ComparisonError, match="GEMM: nothing to compare"):
        judge(ranks(*results))


def test_an_operation_that_a_rank_left_out_is_an_error_that_names_both():
    with pytest.raises(ComparisonError, match="rank 1 of 3 has no result of attention"):
        judge(
            [{"GEMM": result(), "attention": result()}, {"GEMM": result()}, {"GEMM": result(), "attention": result()}]
        )


@pytest.mark.parametrize("other", [result("a", "a"), result(elements=7), result(bytes=13)])
def test_ranks_that_did_other_work_are_refused(other):
    with pytest.raises(ComparisonError, match="GEMM: ranks differ in repeats, elements and bytes"):
        judge(ranks(result(), other))


# What a rank computes.


def test_the_screen_covers_products_attention_and_dequantisation_with_outputs_that_vary():
    results = screen(Rank(1, 2, CPU, "gloo", None), SMALL, 2)
    assert list(results) == ["bf16 GEMM", "fp32 GEMM", "bf16 attention", "NVFP4 dequantisation"]
    assert [one.elements for one in results.values()] == [40 * 128, 40 * 128, 40 * 64, 128 * 128]
    assert all(one.spread > 0.1 and len(one.digests) == 2 for one in results.values())
    assert judge([results, screen(Rank(0, 2, CPU, "gloo", None), SMALL, 2)])


def test_data_depend_on_the_works_own_seed_and_on_nothing_else():
    def drawn(seed: int, around: int) -> list[str]:
        torch.manual_seed(around)
        work = Work(rows=40, inner=128, columns=128, heads=1, width=64, seed=seed)
        return [one.inputs for one in screen(Rank(0, 1, CPU, "gloo", None), work, 1).values()]

    assert drawn(1, around=2) == drawn(1, around=3)
    assert not set(drawn(1, around=2)) & set(drawn(4, around=2))


def test_inputs_have_other_digests_per_operation():
    assert len({one.inputs for one in screen(Rank(0, 1, CPU, "gloo", None), SMALL, 1).values()}) == 4


def operation(*outputs: torch.Tensor) -> Operation:
    queue = list(outputs)
    return Operation((torch.ones(2),), lambda: queue.pop(0))


def test_a_result_that_is_handed_out_again_instead_of_computed_is_seen():
    kept = torch.arange(4.0)
    assert len(set(repeated("GEMM", operation(kept, kept, kept), 3).digests)) == 2
    assert len(set(repeated("GEMM", operation(*(torch.arange(4.0) for _ in range(3))), 3).digests)) == 1


def test_memory_that_was_not_written_does_not_pass_for_the_last_result():
    kept = torch.arange(4.0)

    def stale() -> torch.Tensor:
        return kept.view(-1)  # the same memory again, as an allocator hands it out

    assert len(set(repeated("GEMM", Operation((kept.clone(),), stale), 3).digests)) > 1


@pytest.mark.parametrize("value", [0.0, 3.0, torch.nan])
def test_a_constant_output_is_an_error(value):
    outputs = [torch.full((4,), value) for _ in range(2)]
    with pytest.raises(ComparisonError, match="constant or NaN, which proves nothing"):
        repeated("GEMM", operation(*outputs), 2)


def test_no_repeats_are_refused():
    with pytest.raises(ValueError, match="got 0 repeats, expected at least 1"):
        repeated("GEMM", operation(), 0)


def test_sizes_that_nvfp4_has_no_tiles_for_are_refused():
    with pytest.raises(ValueError, match="NVFP4 weight: got 100 x 128"):
        operations(Work(columns=100, inner=128), CPU)
