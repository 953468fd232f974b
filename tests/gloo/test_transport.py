"""Exchanges carry the right bytes: what arrives is compared with data that every rank draws for itself.

A pass means that rows and heads, ragged at every world, reach their owners unchanged in every dtype that
travels. Run it with: pytest -m gloo tests/gloo/test_transport.py
"""

from __future__ import annotations

import re

import pytest
import torch

from h3core.partition import Partition, spans_of, split
from h3core.qualify.checks import transport
from h3core.qualify.checks.compare import equal_facts
from tests.gloo.conftest import MIXED, Sequence

pytestmark = pytest.mark.gloo

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn)
FLOATS = (torch.float64, torch.float32, torch.bfloat16)


def rows_of(sequence: Sequence) -> int:
    return (
        sequence.text
        + 2 * sequence.latents.audio
        + sequence.latents.frames * (sequence.latents.height * sequence.latents.width // 4)
    )


@pytest.mark.parametrize("heads", [9, 56])
@pytest.mark.parametrize("rows", ["one a rank", "mixed"])
def test_rows_to_heads_and_back_is_the_identity(pool, world, heads, rows, record):
    count = world if rows == "one a rank" else rows_of(MIXED)
    record(pool.run(transport.rows_heads_rows, count, heads, 8, DTYPES))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sharded_attention_equals_whole_attention(pool, world, dtype, record):
    record(pool.run(transport.sharded_attention, rows_of(MIXED), 9, 128, dtype))


def test_gather_takes_every_rank_its_exact_rows(pool, world, record):
    ragged = spans_of([3 * rank + 1 for rank in range(world)])
    with_empty = spans_of([0 if rank % 2 else rank + 2 for rank in range(world)])
    for spans in (ragged, with_empty):
        record(pool.run(transport.ragged_gather, spans, 17, DTYPES))


@pytest.mark.parametrize("rows", ["one a rank", "mixed"])
def test_reduce_scatter_sums_in_rank_order_and_rounds_once(pool, world, rows, record):
    record(pool.run(transport.ragged_reduce_scatter, world if rows == "one a rank" else rows_of(MIXED), 33, FLOATS))


def test_max_over_ranks_finds_the_one_that_holds_it(pool, world, record):
    record(pool.run(transport.largest))


def test_ranks_that_plan_differently_all_get_both_plans(pool, world, record):
    rows = [100] * (world - 1) + [101]
    plans = [Partition(split(count, world), split(9, world)).describe() for count in (rows[0], rows[-1])]
    expected = [(str(list(range(world - 1))), plans[0]), (str([world - 1]), plans[1])]
    for rank, message in enumerate(pool.run(transport.disagreeing_plan, rows, 9)):
        told = re.findall(r"^  ranks (\[.*?\]): (.*)$", message, re.MULTILINE)
        record(equal_facts(f"plans and their holders, as rank {rank} of {world} is told", told, expected, rank=rank))
