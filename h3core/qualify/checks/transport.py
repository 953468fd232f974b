"""Rank tasks that exchange known data and compare what arrives with what an independent sum says.

Every rank draws the whole sequence's data from one seed, so that it knows what the others send; what it
holds itself is only its own part. Each task returns the evidence of this rank's comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from h3core.attention import attention_backend
from h3core.partition import Partition, Span, split
from h3core.qualify.checks.compare import Comparisons, Evidence, Identical, RelativeRows, equal_facts
from h3core.qualify.checks.loop import comm_of
from h3core.ranks import Rank


def draw(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    """The same data on every rank: normal values, or for one-byte types every bit pattern."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.itemsize == 1:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(dtype)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def as_bits(x: Tensor) -> Tensor:
    """Bytes, for types that hold NaN patterns: what travelled is compared, not what it means."""
    return x.contiguous().view(torch.uint8) if x.dtype.itemsize == 1 else x


def rows_heads_rows(rank: Rank, rows: int, heads: int, width: int, dtypes: Sequence[torch.dtype]) -> list[Evidence]:
    """Rows -> heads -> rows is the identity, and in between each rank holds its own heads of every row."""
    comm = comm_of(rank)
    plan = Partition(split(rows, rank.world, "token rows"), split(heads, rank.world, "attention heads"))
    own_rows, own_heads = plan.rows[rank.rank], plan.heads[rank.rank]
    checks = Comparisons(rank.rank)
    for seed, dtype in enumerate(dtypes):
        whole = [draw(100 * seed + part, rows, heads, width, dtype=dtype).to(rank.device) for part in range(3)]
        own = [part[own_rows.start : own_rows.stop] for part in whole]
        label = f"{dtype} {rows} rows, {heads} heads"
        got = comm.rows_to_heads(own, plan, "qkv")
        expected = torch.stack([part[:, own_heads.start : own_heads.stop].view(torch.uint8) for part in whole], dim=1)
        checks.compare(f"rows to heads, {label}", got.view(torch.uint8), expected, Identical())
        for index, part in enumerate(own):
            back = comm.heads_to_rows(got[:, index], plan, "out")
            checks.compare(f"and back, part {index}, {label}", as_bits(back), as_bits(part), Identical())
    return checks.finish()


def sharded_attention(
    rank: Rank, rows: int, heads: int, width: int, dtype: torch.dtype, attention: str = "sdpa"
) -> list[Evidence]:
    """Attention through the exchange equals attention of the whole sequence, and a softmax in fp64."""
    comm = comm_of(rank)
    plan = Partition(split(rows, rank.world, "token rows"), split(heads, rank.world, "attention heads"))
    q, k, v = (draw(seed, rows, heads, width, dtype=dtype).to(rank.device) for seed in (1, 2, 3))
    attend = attention_backend(attention)
    own = plan.rows[rank.rank]
    parts = comm.rows_to_heads([x[own.start : own.stop] for x in (q, k, v)], plan, "qkv").unbind(1)
    got = comm.heads_to_rows(attend(*parts), plan, "out")
    whole = attend(q, k, v)[own.start : own.stop]
    scores = torch.einsum("tnd,snd->nts", q.double(), k.double()) / width**0.5
    exact = torch.einsum("nts,snd->tnd", scores.softmax(-1), v.double())[own.start : own.stop]
    # One rounding of probabilities and one of the result, each half an ulp, with room for the sum's own.
    limit = 8 * torch.finfo(dtype).eps
    checks = Comparisons(rank.rank)
    checks.compare(f"sharded attention, {dtype}", got, whole, Identical())
    why = "8 ulp: rounded probabilities, rounded result"
    checks.compare(f"sharded attention against fp64, {dtype}", got.double(), exact, RelativeRows(limit, why))
    return checks.finish()


def ragged_gather(rank: Rank, spans: Sequence[Span], width: int, dtypes: Sequence[torch.dtype]) -> list[Evidence]:
    """Every rank gets every row; spans may be empty."""
    comm = comm_of(rank)
    own = spans[rank.rank]
    checks = Comparisons(rank.rank)
    for seed, dtype in enumerate(dtypes):
        whole = draw(seed, spans[-1].stop, width, dtype=dtype).to(rank.device)
        got = comm.gather_rows(whole[own.start : own.stop], tuple(spans), "gather")
        label = f"gather of {[span.size for span in spans]} rows, {dtype}"
        checks.compare(label, as_bits(got), as_bits(whole), Identical())
    return checks.finish()


def ragged_reduce_scatter(rank: Rank, rows: int, width: int, dtypes: Sequence[torch.dtype]) -> list[Evidence]:
    """The own rows of the sum: in fp32, in rank order, rounded once, computed here from every rank's partial."""
    comm = comm_of(rank)
    plan = Partition(split(rows, rank.world, "token rows"), split(rank.world, rank.world))
    own = plan.rows[rank.rank]
    checks = Comparisons(rank.rank)
    for dtype in dtypes:
        partials = [draw(1000 + peer, rows, width, dtype=dtype).to(rank.device) for peer in range(rank.world)]
        got = comm.reduce_scatter_rows(partials[rank.rank], plan, "reduce", dtype)
        total = partials[0].to(torch.promote_types(dtype, torch.float32))
        for partial in partials[1:]:
            total = total + partial.to(total.dtype)
        expected = total[own.start : own.stop].to(dtype)
        checks.compare(f"reduce-scatter of {rows} rows, {dtype}", got, expected, Identical())
        sent = comm.phases["reduce"].bytes_sent
        comm.reset()
        formula = (rows - own.size) * width * dtype.itemsize
        checks.equal_facts(f"reduce-scatter bytes, {dtype}", sent, formula)
    return checks.finish()


def disagreeing_plan(rank: Rank, rows: Sequence[int], heads: int) -> str:
    """Each rank plans for its own idea of the sequence; returns the error that every rank must get."""
    comm = comm_of(rank)
    plan = Partition(split(rows[rank.rank], rank.world), split(heads, rank.world))
    try:
        comm.check_plan(plan)
    except ValueError as error:
        return str(error)
    raise RuntimeError(f"rank {rank.rank}: plans for {list(rows)} rows passed as equal")


def largest(rank: Rank) -> Evidence:
    """The scalar MAX over ranks, where each rank but one holds less."""
    comm = comm_of(rank)
    values = [float((7 * peer) % rank.world) + 0.5 for peer in range(rank.world)]
    got = comm.max(torch.tensor(values[rank.rank], device=rank.device), "amax")
    return equal_facts("max over ranks", float(got), max(values), rank=rank.rank)
