"""Virtual ranks and the collectives' own checks, in one process.

A pass means that the oracle of sharded runs exchanges what it should, counts what it sends, and cannot hang.
Run it with: pytest tests/unit/test_comm.py
"""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

from h3core.comm import alone, run_virtual
from h3core.comm import virtual as virtual_module
from h3core.config import TINY
from h3core.parallel import TensorParallel, build_mode
from h3core.partition import Partition, Span, split


def whole(rows: int, heads: int, width: int = 4) -> torch.Tensor:
    return torch.arange(rows * heads * width, dtype=torch.float32).view(rows, heads, width)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_rows_to_heads_and_back(world):
    x = whole(11, 7)
    plan = Partition(split(11, world), split(7, world))

    def task(comm):
        own = x[slice(*plan.rows[comm.rank])]
        heads = comm.rows_to_heads([own, own + 0.5], plan, "qkv")
        expected = x[:, slice(*plan.heads[comm.rank])]
        assert torch.equal(heads[:, 0], expected)
        assert torch.equal(heads[:, 1], expected + 0.5)
        return comm.heads_to_rows(heads[:, 0], plan, "out"), comm.report()

    results = run_virtual(world, task)
    assert torch.equal(torch.cat([rows for rows, _ in results]), x)
    for rank, (_, report) in enumerate(results):
        rows, heads = plan.rows[rank].size, plan.heads[rank].size
        assert report["qkv"]["bytes_sent"] == 2 * rows * (7 - heads) * 4 * 4
        assert report["out"]["bytes_sent"] == (11 - rows) * heads * 4 * 4


def test_reduce_scatter_of_one_thousandth_survives_bf16_only_in_an_fp32_sum():
    partials = [torch.full((4, 2), value, dtype=torch.bfloat16) for value in (256.0, 0.5, 0.5, 0.5, 0.5)]
    plan = Partition(split(4, 4), split(4, 4))

    def task(comm):
        return comm.reduce_scatter_rows(partials[comm.rank], plan, "reduce", torch.bfloat16)

    got = torch.cat(run_virtual(4, task))
    assert got.unique().tolist() == [258.0], "256 + 0.5 rounds back to 256 in bf16: three times, 256"


def test_gather_takes_empty_rows():
    spans = (Span(0, 2), Span(2, 2), Span(2, 5))
    rows = torch.arange(5.0)[:, None]
    for got in run_virtual(3, lambda comm: comm.gather_rows(rows[slice(*spans[comm.rank])], spans, "gather")):
        assert torch.equal(got, rows)


def test_gather_refuses_spans_that_leave_a_gap():
    with pytest.raises(ValueError, match="expected consecutive ones from 0"):
        alone().gather_rows(torch.zeros(3, 1), (Span(1, 4),), "gather")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c, p: c.rows_to_heads([torch.zeros(3, 9, 4)], p, "qkv"), r"rank 0: qkv: rows to heads: got shape"),
        (lambda c, p: c.heads_to_rows(torch.zeros(4, 9, 4), p, "out"), r"expected \(5, 9, 4\)"),
        (lambda c, p: c.reduce_scatter_rows(torch.zeros(4, 4), p, "r", torch.float32), r"expected \(5, 4\)"),
        (lambda c, p: c.gather_rows(torch.zeros(4, 4), p.rows, "g"), r"expected \(5, 4\)"),
    ],
)
def test_a_wrong_shape_is_refused_before_any_exchange(call, message):
    comm = alone()
    with pytest.raises(ValueError, match=message):
        call(comm, Partition.build(TINY, 5, 1))
    assert not comm.phases


def test_received_tensors_do_not_alias_the_senders():
    sent = [torch.zeros(2, 1), torch.zeros(2, 1)]
    spans = split(4, 2)

    def task(comm):
        got = comm.gather_rows(sent[comm.rank], spans, "gather")
        comm.gather_text("all have it")
        sent[comm.rank] += 1
        comm.gather_text("all have changed theirs")
        return got

    for got in run_virtual(2, task):
        assert not got.any()


def test_digest_sees_one_bit_and_is_left_out_unless_asked_for():
    def task(flip):
        def run(comm):
            data = torch.ones(2, 2)
            if flip and comm.rank == 1:
                data.view(torch.int32)[0, 0] ^= 1
            comm.gather_rows(data, split(4, 2), "gather")
            return comm.report()["gather"]["received_digest"]

        return run

    clean = run_virtual(2, task(False), digest=True)
    assert clean[0] == clean[1] is not None
    assert run_virtual(2, task(True), digest=True)[0] != clean[0]
    assert run_virtual(2, task(False)) == [None, None]


def test_the_first_ranks_own_error_is_raised_and_the_others_end():
    def task(comm):
        if comm.rank == 2:
            raise KeyError("the cause")
        comm.gather_text("waits for rank 2")

    before = threading.active_count()
    with pytest.raises(KeyError, match="the cause") as caught:
        run_virtual(4, task)
    assert "virtual rank 2 of 4" in caught.value.__notes__[0]
    assert threading.active_count() == before


def test_a_rank_that_returns_early_is_an_error_not_a_hang(monkeypatch):
    monkeypatch.setattr(virtual_module.ThreadGroup.__init__, "__defaults__", (0.3,))
    with pytest.raises(RuntimeError, match="waited for a rank that never came"):
        run_virtual(2, lambda comm: comm.rank or comm.gather_text("alone"))


def test_one_rank_computes_at_a_time():
    running, most = [0], [0]

    def task(comm):
        for _ in range(20):
            running[0] += 1
            most[0] = max(most[0], running[0])
            sum(range(2000))
            running[0] -= 1
            comm.gather_text("turn")

    run_virtual(4, task)
    assert most[0] == 1


def test_ranks_run_in_inference_mode_on_one_thread():
    assert run_virtual(2, lambda comm: (torch.is_inference_mode_enabled(), torch.get_num_threads())) == [(True, 1)] * 2


def test_disagreeing_plans_are_shown_with_their_holders():
    def task(comm):
        comm.check_plan(Partition(split(10 + (comm.rank == 1), 3), split(9, 3)))

    with pytest.raises(ValueError, match=r"(?s)ranks \[0, 2\].*rows.:\[4,3,3\].*ranks \[1\].*\[4,4,3\]"):
        run_virtual(3, task)


def test_a_plan_for_another_world_is_refused():
    with pytest.raises(ValueError, match="for 2 ranks, the group has 1"):
        alone().check_plan(Partition.build(TINY, 10, 2))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_row_parallel_bias_is_added_once(world):
    check_bias_added_once(world)


def check_bias_added_once(world: int) -> None:
    """Raise `ValueError` where a row-parallel linear with a bias is not x W^T + b."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((12, 9), (5, 9), (5,)))
    columns = split(9, world)

    def task(comm):
        mode = build_mode("tensor", TINY, 12, comm)
        if not isinstance(mode, TensorParallel):
            raise TypeError(type(mode))
        own = slice(*columns[comm.rank])
        return mode.row_parallel(x[:, own], weight[:, own], "reduce", bias)

    got = torch.cat(run_virtual(world, task))
    if not torch.allclose(got, F.linear(x, weight, bias), rtol=1e-12, atol=1e-12):
        raise ValueError(f"bias: off by {(got - F.linear(x, weight, bias)).abs().max()} at world {world}")
