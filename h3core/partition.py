"""Who owns which heads, which token rows and which FFN units.

One rule, `split`: quotient and remainder, the first `total % parts` ranges one longer. Nothing is
padded, neither in the model nor on the wire: 56 heads over 6 ranks are 10, 10, 9, 9, 9, 9.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Final, NamedTuple

from h3core.config import H3Config

FFN_UNIT: Final = 128
"""FFN columns are dealt in units of 128: one NVFP4 tile row of gate and of up, two tile columns of fc2."""


class Span(NamedTuple):
    """A half-open range [start, stop)."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def scaled(self, factor: int) -> Span:
        """The same span in units `factor` times as fine."""
        return Span(self.start * factor, self.stop * factor)

    def clip(self, other: Span) -> Span:
        """The part of this span inside `other`; where they do not meet, an empty span at this one's nearer edge."""
        start = min(max(self.start, other.start), self.stop)
        return Span(start, max(start, min(self.stop, other.stop)))

    def shifted(self, by: int) -> Span:
        """The span moved by `by`."""
        return Span(self.start + by, self.stop + by)


def spans_of(sizes: list[int]) -> tuple[Span, ...]:
    """Consecutive spans of the given sizes, from 0."""
    spans, start = [], 0
    for size in sizes:
        spans.append(Span(start, start + size))
        start += size
    return tuple(spans)


def split(total: int, parts: int, what: str = "items") -> tuple[Span, ...]:
    """Deal `total` over `parts` ranges in order; the first `total % parts` are one longer.

    Raises `ValueError` that names total, parts and the first rank left without any.
    """
    if parts < 1:
        raise ValueError(f"split of {total} {what}: got {parts} parts, expected at least 1")
    if total < parts:
        raise ValueError(
            f"split of {total} {what} over {parts} ranks leaves rank {total} with none; use at most {total} ranks"
        )
    quotient, remainder = divmod(total, parts)
    return spans_of([quotient + (rank < remainder) for rank in range(parts)])


def split_ffn(ffn_dim: int, heads: tuple[Span, ...]) -> tuple[Span, ...]:
    """Deal FFN columns in units of 128, the extra units to the ranks with the fewest heads.

    At 6 ranks of the released model: heads 10, 10, 9, 9, 9, 9 get 18, 18, 19, 19, 19, 19 units, so that no
    rank is the largest twice (weight bytes 1.007 of the mean; 1.039 the other way round).
    Returns spans in columns. Raises `ValueError` where `ffn_dim` is no multiple of 128 or too small.
    """
    parts = len(heads)
    if ffn_dim % FFN_UNIT:
        raise ValueError(
            f"split of {ffn_dim} FFN columns: expected a multiple of {FFN_UNIT}, the height of an NVFP4 tile; "
            "use mode single or ulysses"
        )
    units = ffn_dim // FFN_UNIT
    if units < parts:
        raise ValueError(
            f"split of {units} FFN units of {FFN_UNIT} columns over {parts} ranks leaves rank {units} with none; "
            f"use at most {units} ranks"
        )
    quotient, remainder = divmod(units, parts)
    extra = set(sorted(range(parts), key=lambda rank: (heads[rank].size, rank))[:remainder])
    return spans_of([(quotient + (rank in extra)) * FFN_UNIT for rank in range(parts)])


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of each block's weights that a rank holds: heads, and FFN columns of gate, up and fc2."""

    heads: Span
    ffn: Span

    @classmethod
    def whole(cls, config: H3Config) -> Shard:
        """All of every weight."""
        return cls(Span(0, config.num_attention_heads), Span(0, config.ffn_dim))


@dataclass(frozen=True, slots=True)
class Partition:
    """The split plan of one request: token rows and heads of each rank. Computed once, equal on all ranks."""

    rows: tuple[Span, ...]
    heads: tuple[Span, ...]

    @classmethod
    def build(cls, config: H3Config, rows: int, world: int) -> Partition:
        """Deal `rows` token rows and the config's heads over `world` ranks.

        Raises `ValueError` where a rank would be left without rows or heads.
        """
        return cls(split(rows, world, "token rows"), split(config.num_attention_heads, world, "attention heads"))

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.rows)

    @property
    def total_rows(self) -> int:
        """Rows of the whole packed sequence."""
        return self.rows[-1].stop

    @property
    def total_heads(self) -> int:
        """Heads of the whole model."""
        return self.heads[-1].stop

    def describe(self) -> str:
        """The plan as one line of JSON, the text that is hashed and shown when ranks disagree."""
        return json.dumps(
            {
                "world": self.world,
                "rows": [span.size for span in self.rows],
                "heads": [span.size for span in self.heads],
            },
            separators=(",", ":"),
        )

    def digest(self) -> bytes:
        """SHA-256 of `describe()`, 32 bytes."""
        return hashlib.sha256(self.describe().encode()).digest()


def shards(config: H3Config, world: int) -> tuple[Shard, ...]:
    """Tensor parallelism: each rank's own heads and FFN columns.

    Raises `ValueError` where a rank would be left without heads or FFN units.
    """
    heads = split(config.num_attention_heads, world, "attention heads")
    return tuple(Shard(h, f) for h, f in zip(heads, split_ffn(config.ffn_dim, heads), strict=True))
