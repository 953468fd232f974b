"""Who owns what: heads, token rows and FFN units over any number of ranks, without padding.

A pass means: every head, row and FFN column belongs to exactly one rank, in order; the shares are those that the
design names for the released model; and a share of nothing is refused by total, number of ranks and rank.
Run: pytest tests/unit/test_partition.py
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h3core.config import H3, TINY, H3Config
from h3core.partition import FFN_UNIT, Partition, Shard, Span, shards, spans_of, split, split_ffn

HEADS = {
    1: [56],
    2: [28, 28],
    3: [19, 19, 18],
    4: [14] * 4,
    5: [12, 11, 11, 11, 11],
    6: [10, 10, 9, 9, 9, 9],
    7: [8] * 7,
    8: [7] * 8,
}
FFN_UNITS = {
    1: [112],
    2: [56, 56],
    3: [37, 37, 38],
    4: [28] * 4,
    5: [22, 23, 23, 22, 22],
    6: [18, 18, 19, 19, 19, 19],
    7: [16] * 7,
    8: [14] * 8,
}
ROWS_17680 = {2: [8840] * 2, 4: [4420] * 4, 6: [2947] * 4 + [2946] * 2, 8: [2210] * 8}


def sizes(spans: tuple[Span, ...]) -> list[int]:
    return [span.size for span in spans]


def covers(spans: tuple[Span, ...], total: int) -> None:
    """Every number from 0 to total is in exactly one span, and the spans come in order."""
    assert [i for span in spans for i in range(span.start, span.stop)] == list(range(total))


# --- the rule ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", HEADS)
def test_heads_of_the_released_model(ranks: int) -> None:
    assert sizes(split(H3.num_attention_heads, ranks)) == HEADS[ranks]


@pytest.mark.parametrize("ranks", ROWS_17680)
def test_token_rows_of_the_default_clip(ranks: int) -> None:
    assert sizes(Partition.build(H3, 17_680, ranks).rows) == ROWS_17680[ranks]


@pytest.mark.parametrize("ranks", FFN_UNITS)
def test_ffn_units_of_the_released_model(ranks: int) -> None:
    columns = split_ffn(H3.ffn_dim, split(H3.num_attention_heads, ranks))
    assert sizes(columns) == [units * 128 for units in FFN_UNITS[ranks]]
    covers(tuple(Span(a // 128, b // 128) for a, b in columns), 112)


@given(parts=st.integers(1, 64), data=st.data())
def test_any_split_covers_everything_once_and_is_even_to_one(parts: int, data: st.DataObject) -> None:
    total = data.draw(st.integers(parts, 5000))
    spans = split(total, parts)
    assert len(spans) == parts
    covers(spans, total)
    assert max(sizes(spans)) - min(sizes(spans)) <= 1
    assert sizes(spans) == sorted(sizes(spans), reverse=True), "the longer ranges come first"
    assert sizes(spans).count(min(sizes(spans))) == parts - total % parts


@given(parts=st.integers(1, 16), data=st.data())
def test_any_ffn_split_covers_every_column_once_in_whole_units(parts: int, data: st.DataObject) -> None:
    heads = split(data.draw(st.integers(parts, 64)), parts)
    units = data.draw(st.integers(parts, 200))
    spans = split_ffn(units * FFN_UNIT, heads)
    covers(spans, units * FFN_UNIT)
    assert all(span.start % FFN_UNIT == span.stop % FFN_UNIT == 0 for span in spans)
    assert max(sizes(spans)) - min(sizes(spans)) in (0, FFN_UNIT)
    # No rank with more heads than another has more units too, where an even deal would not give it them.
    for a in range(parts):
        for b in range(parts):
            if heads[a].size > heads[b].size:
                assert spans[a].size <= spans[b].size


# --- balance at six ranks ----------------------------------------------------------------------------------------

HEAD_WEIGHTS = 4 * 128 * 5376
"""Parameters of one head in one block: 128 rows each of q, k and v, 128 columns of the output projection."""
UNIT_WEIGHTS = 3 * 128 * 5376
"""Parameters of one FFN unit: 128 rows each of gate and up, 128 columns of fc2."""


def worst_over_mean(loads: list[float]) -> float:
    return max(loads) * len(loads) / sum(loads)


def test_weight_bytes_at_six_ranks_are_within_a_hundredth_of_the_mean() -> None:
    held = shards(H3, 6)
    loads = [shard.heads.size * HEAD_WEIGHTS + shard.ffn.size // 128 * UNIT_WEIGHTS for shard in held]
    assert sum(loads) == 56 * HEAD_WEIGHTS + 112 * UNIT_WEIGHTS
    assert worst_over_mean(loads) == pytest.approx(1.007, abs=5e-4)
    other_way_round = zip(HEADS[6], [19] * 4 + [18] * 2, strict=True)
    unkind = [heads * HEAD_WEIGHTS + units * UNIT_WEIGHTS for heads, units in other_way_round]
    assert worst_over_mean(unkind) == pytest.approx(1.039, abs=5e-4)


def test_operations_at_six_ranks_and_the_default_clip() -> None:
    rows = 17_680
    attention = 2 * 2 * rows * rows * 128
    loads = []
    for shard in shards(H3, 6):
        weights = shard.heads.size * HEAD_WEIGHTS + shard.ffn.size // 128 * UNIT_WEIGHTS
        loads.append(2 * rows * weights + shard.heads.size * attention)
    assert worst_over_mean(loads) == pytest.approx(1.033, abs=5e-4)


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("total", "parts"), [(0, 1), (1, 2), (5, 6), (7, 8), (56, 57)])
def test_a_rank_left_with_nothing_is_refused_by_total_parts_and_rank(total: int, parts: int) -> None:
    with pytest.raises(ValueError, match=rf"split of {total} heads over {parts} ranks leaves rank {total} with none"):
        split(total, parts, "heads")


@pytest.mark.parametrize("parts", [0, -1])
def test_a_split_over_no_ranks_is_refused(parts: int) -> None:
    with pytest.raises(ValueError, match=rf"split of 56 heads: got {parts} parts, expected at least 1"):
        split(56, parts, "heads")


def test_a_plan_names_what_would_be_empty() -> None:
    with pytest.raises(ValueError, match=r"5 token rows over 6 ranks leaves rank 5 .*use at most 5 ranks"):
        Partition.build(H3, 5, 6)
    with pytest.raises(ValueError, match=r"9 attention heads over 10 ranks leaves rank 9 .*use at most 9 ranks"):
        Partition.build(TINY, 1000, 10)
    with pytest.raises(ValueError, match=r"9 attention heads over 10 ranks leaves rank 9"):
        shards(TINY, 10)


def test_ffn_columns_that_cannot_be_dealt_are_refused() -> None:
    with pytest.raises(ValueError, match=r"14300 FFN columns: expected a multiple of 128.*single or ulysses"):
        split_ffn(14_300, split(56, 2))
    with pytest.raises(ValueError, match=r"4 FFN units of 128 columns over 6 ranks leaves rank 4 .*at most 4 ranks"):
        split_ffn(512, split(56, 6))


# --- spans -------------------------------------------------------------------------------------------------------

SPANS = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda pair: Span(pair[0], pair[0] + pair[1]))


@pytest.mark.parametrize(
    ("span", "other", "clipped"),
    [
        (Span(10, 20), Span(0, 100), Span(10, 20)),
        (Span(10, 20), Span(12, 15), Span(12, 15)),
        (Span(10, 20), Span(0, 15), Span(10, 15)),
        (Span(10, 20), Span(15, 30), Span(15, 20)),
        (Span(10, 20), Span(0, 5), Span(10, 10)),
        (Span(10, 20), Span(0, 10), Span(10, 10)),
        (Span(10, 20), Span(20, 30), Span(20, 20)),
        (Span(10, 20), Span(25, 30), Span(20, 20)),
        (Span(10, 20), Span(15, 15), Span(15, 15)),
        (Span(10, 10), Span(0, 30), Span(10, 10)),
    ],
)
def test_clip_by_hand(span: Span, other: Span, clipped: Span) -> None:
    assert span.clip(other) == clipped


@given(span=SPANS, other=SPANS)
def test_clip_is_the_intersection_and_stays_inside_the_clipped_span(span: Span, other: Span) -> None:
    clipped = span.clip(other)
    assert set(range(*clipped)) == set(range(*span)) & set(range(*other))
    assert span.start <= clipped.start <= clipped.stop <= span.stop


@given(total=st.integers(1, 200), parts=st.integers(1, 12), span=SPANS)
def test_clipping_by_every_rank_cuts_a_span_into_consecutive_parts(total: int, parts: int, span: Span) -> None:
    span = span.clip(Span(0, total))
    parts = min(parts, total)
    cut = [span.clip(rows) for rows in split(total, parts)]
    assert [i for part in cut for i in range(*part)] == list(range(*span))
    # As spans inside the whole, empty ones too, they continue each other: what a ragged gather needs.
    shifted = tuple(part.shifted(-span.start) for part in cut)
    assert shifted == spans_of(sizes(shifted))


def test_spans_scale_shift_and_count() -> None:
    assert Span(3, 7).size == 4
    assert Span(3, 7).scaled(128) == Span(384, 896)
    assert Span(3, 7).shifted(-3) == Span(0, 4)
    assert spans_of([2, 0, 3]) == (Span(0, 2), Span(2, 2), Span(2, 5))
    assert spans_of([]) == ()


# --- plans and shards --------------------------------------------------------------------------------------------


def test_a_plan_describes_itself_in_one_line_and_hashes_that() -> None:
    plan = Partition.build(H3, 17_680, 6)
    assert (plan.world, plan.total_rows, plan.total_heads) == (6, 17_680, 56)
    assert json.loads(plan.describe()) == {"world": 6, "rows": ROWS_17680[6], "heads": HEADS[6]}
    assert "\n" not in plan.describe()
    assert plan.digest() == hashlib.sha256(plan.describe().encode()).digest()
    assert len(plan.digest()) == 32


def test_plans_that_differ_anywhere_have_other_digests() -> None:
    plans = [
        Partition.build(H3, 17_680, 6),
        Partition.build(H3, 17_681, 6),
        Partition.build(H3, 17_680, 8),
        Partition.build(replace(H3, num_attention_heads=55), 17_680, 6),
    ]
    assert len({plan.digest() for plan in plans}) == len(plans)
    assert Partition.build(H3, 17_680, 6).digest() == plans[0].digest()


@pytest.mark.parametrize("config", [H3, TINY], ids=["h3", "tiny"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 8])
def test_shards_cover_the_model_once(config: H3Config, ranks: int) -> None:
    held = shards(config, ranks)
    assert len(held) == ranks
    covers(tuple(shard.heads for shard in held), config.num_attention_heads)
    covers(tuple(shard.ffn for shard in held), config.ffn_dim)
    assert held[0] == Shard.whole(config) or ranks > 1


def test_the_whole_shard_is_everything() -> None:
    assert Shard.whole(H3) == Shard(Span(0, 56), Span(0, 14_336))
