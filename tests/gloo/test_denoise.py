"""The whole denoising loop over real ranks: every row of the comparison table that needs no GPU.

A pass means: real ranks equal virtual ranks bit for bit, in latents and in every payload received;
ulysses equals one rank bit for bit; tensor equals one rank to 1e-12 in fp64, and is as far from fp32 as one
rank is in bf16. Run it with: pytest -m gloo tests/gloo/test_denoise.py
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from h3core.checkpoint import DenoiserReader
from h3core.config import TINY
from h3core.packing import PackedSequence
from h3core.partition import split
from h3core.qualify.checks.compare import ErrorBudget, Identical, RelativeRows, compare, equal_facts
from h3core.qualify.checks.invariance import probe
from h3core.qualify.checks.loop import Case, Outcome, real_ranks, real_velocities, virtual_ranks
from h3core.qualify.checks.parity import equals_virtual
from h3core.qualify.checks.traffic import expected_bytes
from h3core.qualify.run import Plan
from h3core.ranks import RankPool
from h3core.weights import held_bytes
from tests.gloo.conftest import (
    AUDIO_HEAVY,
    BUDGET,
    MIXED,
    TEXT_HEAVY,
    WIDE,
    Checkpoints,
    Sequence,
    four_a_rank,
    smallest,
)

pytestmark = pytest.mark.gloo


def case(checkpoint: str, mode: str, sequence: Sequence, evaluations: int = 4, **options) -> Case:
    return Case(checkpoint, mode, sequence.latents, sequence.text, evaluations, **options)


def cases(checkpoints: Checkpoints, world: int, mode: str, plan: Plan) -> dict[str, Case]:
    """What is run at one world in one mode; each of them is also run on virtual ranks."""
    fp32 = torch.float32
    nvfp4, bf16 = checkpoints.nvfp4, checkpoints.bf16
    table = {
        "nvfp4 bf16": case(nvfp4, mode, MIXED),
        "nvfp4 fp32": case(nvfp4, mode, AUDIO_HEAVY, 1, dtype=fp32),
        "nvfp4 w4a4": case(nvfp4, mode, MIXED, 2, linear="w4a4"),
        "bf16 audio-heavy": case(bf16, mode, AUDIO_HEAVY),
        "bf16 text-heavy": case(bf16, mode, TEXT_HEAVY),
        "bf16 file in fp32, 12 evaluations": case(bf16, mode, MIXED, 12, dtype=fp32),
        "bf16 math attention": case(bf16, mode, MIXED, 1, attention="math"),
        "full AdaLN": case(checkpoints.diffusers, mode, MIXED),
        "full AdaLN fp32": case(checkpoints.diffusers, mode, AUDIO_HEAVY, dtype=fp32),
        "one row a rank": case(bf16, mode, smallest(world)),
        "one row a rank fp32": case(bf16, mode, smallest(world), dtype=fp32),
        "four rows a rank": case(nvfp4, mode, four_a_rank(world), 1),
        "56 heads": case(checkpoints.wide, mode, MIXED, 1),
    }
    if mode == "tensor":
        table["fp32 partials"] = case(bf16, mode, MIXED, reduce_dtype="fp32")
    return {name: chosen(wanted, plan) for name, wanted in table.items()}


def chosen(wanted: Case, plan: Plan) -> Case:
    """With the seed of this run, and its attention where the case has none of its own."""
    attention = plan.settings["attention"].value if wanted.attention == "sdpa" else wanted.attention
    return replace(wanted, seed=plan.settings["seed"].value, attention=attention)


@pytest.fixture(scope="module")
def run_real(pool, checkpoints, world, plan):
    """Outcomes of all cases over the pool, per mode, once a world."""
    return {
        mode: dict(zip(table, zip(*pool.run(real_ranks, list(table.values())), strict=True), strict=True))
        for mode in plan.modes
        for table in [cases(checkpoints, world, mode, plan)]
    }


@pytest.fixture(scope="module")
def run_virtual_ranks(checkpoints, world, plan):
    """The same over virtual ranks, in a fresh process per mode: no earlier run decides for it."""

    def run(mode: str) -> dict[str, list[Outcome]]:
        table = cases(checkpoints, world, mode, plan)
        with RankPool(1) as alone:
            (per_case,) = alone.run(virtual_ranks, world, list(table.values()))
        return dict(zip(table, per_case, strict=True))

    with ThreadPoolExecutor() as both:  # a baton keeps each of them on one core
        return dict(zip(plan.modes, both.map(run, plan.modes), strict=True))


@pytest.fixture(scope="session")
def one_rank(alone):
    """Outcomes of one rank in mode single, each distinct case once."""
    seen: dict[Case, Outcome] = {}

    def run(wanted: Case) -> Outcome:
        key = replace(wanted, mode="single")
        if key not in seen:
            ((seen[key],),) = alone.run(real_ranks, [key])
        return seen[key]

    return run


def test_real_ranks_equal_virtual_ranks_bit_for_bit(run_real, run_virtual_ranks, world, mode, record):
    for name, outcomes in run_real[mode].items():
        for real, virtual in zip(outcomes, run_virtual_ranks[mode][name], strict=True):
            record(equals_virtual(name, real, virtual))


def test_row_invariance_holds_at_the_shapes_of_this_tier(world, record, row_invariance):
    with RankPool(1) as alone:
        for name, sequence in (("mixed", MIXED), ("text-heavy", TEXT_HEAVY), ("four a rank", four_a_rank(world))):
            packed = PackedSequence.build(sequence.latents, sequence.text, TINY.patch_size)
            for dtype in (torch.float32, torch.bfloat16):
                (results,) = alone.run(probe_task, packed.rows, [split(packed.rows, world)], dtype)
                row_invariance(str(dtype)[6:], results)
                for found in results:
                    label = f"{found.operation}, {dtype}, {name}, world {world}"
                    record(equal_facts(label, (found.operation, found.broken), (found.operation, ())))


def probe_task(rank, rows, parts, dtype):
    return probe(TINY, rows, parts, dtype=dtype, device=rank.device)


def test_ulysses_latents_equal_one_rank_bit_for_bit(run_real, one_rank, checkpoints, world, plan, record):
    for name, wanted in cases(checkpoints, world, "ulysses", plan).items():
        single = one_rank(wanted)
        for outcome in run_real["ulysses"][name]:
            label = f"{name}, rank {outcome.rank} of {world}"
            record(compare(f"video latents, {label}", outcome.video, single.video, Identical(), rank=outcome.rank))
            record(compare(f"audio latents, {label}", outcome.audio, single.audio, Identical(), rank=outcome.rank))


@pytest.mark.parametrize("checkpoint", ["nvfp4", "bf16", "diffusers", "wide"])
def test_tensor_latents_equal_one_rank_in_fp64(pool, one_rank, checkpoints, world, plan, checkpoint, record):
    demand = RelativeRows(1e-12, "fp64 sums in another order; a logic error is orders of magnitude larger")
    wanted = chosen(case(getattr(checkpoints, checkpoint), "tensor", MIXED, 2, dtype=torch.float64), plan)
    single = one_rank(wanted)
    for (outcome,) in pool.run(real_ranks, [wanted]):
        label = f"{checkpoint}, rank {outcome.rank} of {world}"
        record(compare(f"video latents, {label}", outcome.video, single.video, demand, rank=outcome.rank))
        record(compare(f"audio latents, {label}", outcome.audio, single.audio, demand, rank=outcome.rank))


@pytest.fixture(scope="session")
def budgets(one_rank, checkpoints, plan):
    """Per checkpoint: the case, one rank's bf16 run of it, and fp32 velocities from that run's latents."""
    known = {}
    for name in ("nvfp4", "bf16"):
        wanted = chosen(case(getattr(checkpoints, name), "tensor", BUDGET, 4, keep=(0, 2, 3)), plan)
        single = one_rank(wanted)
        with RankPool(1) as alone:
            in_fp32 = replace(wanted, mode="single", dtype=torch.float32)
            (reference,) = alone.run(real_velocities, in_fp32, single.trajectory)
        known[name] = (wanted, single, reference)
    return known


@pytest.mark.parametrize("checkpoint", ["nvfp4", "bf16"])
@pytest.mark.parametrize("reduce_dtype", ["activation", "fp32"])
def test_tensor_velocities_stay_within_the_error_budget(pool, budgets, world, checkpoint, reduce_dtype, record, note):
    wanted, single, reference = budgets[checkpoint]
    sharded, *_ = pool.run(real_velocities, replace(wanted, reduce_dtype=reduce_dtype), single.trajectory)
    measured = []
    for index in wanted.keep:
        for modality, part, high in (("video", 0, 1.05), ("audio", 1, 1.10)):
            evidence = compare(
                f"{modality} velocity, evaluation {index}, {checkpoint}, {reduce_dtype} partials, world {world}",
                sharded[index][part],
                single.velocities[index][part],
                ErrorBudget(reference[index][part], 0.90, high, distinct=reduce_dtype == "activation"),
                rank=0,
            )
            record(evidence)
            measured.append(evidence.measured)
    spans = {key: f"{min(m[key] for m in measured):.3f}..{max(m[key] for m in measured):.3f}" for key in measured[0]}
    line = ", ".join(f"{key} {value}" for key, value in spans.items())
    note("error budget: tensor in bf16", [f"world {world}, {checkpoint}, {reduce_dtype} partials: {line}"])


def test_counted_bytes_equal_the_formula(run_real, checkpoints, world, mode, plan, record):
    for name, wanted in cases(checkpoints, world, mode, plan).items():
        config = WIDE if name == "56 heads" else TINY
        sequence = PackedSequence.build(wanted.latents, wanted.text_rows, config.patch_size)
        for outcome in run_real[mode][name]:
            expected = expected_bytes(
                mode,
                config,
                sequence,
                world,
                outcome.rank,
                wanted.evaluations,
                itemsize=wanted.dtype.itemsize,
                reduce_itemsize=4 if wanted.reduce_dtype == "fp32" else None,
            )
            counted = {phase: facts["bytes_sent"] for phase, facts in outcome.phases.items()}
            if wanted.linear == "w4a4":  # one scalar a linear whose input is dealt over ranks
                scalars = counted.pop("amax")
                linears = {"ulysses": 4, "tensor": 2}[mode] * config.num_layers * wanted.evaluations
                amax_bytes = linears * (world - 1) * wanted.dtype.itemsize
                record(equal_facts(f"amax bytes, {name}", scalars, amax_bytes, rank=outcome.rank))
            what = f"bytes sent, {name}, rank {outcome.rank} of {world}"
            record(equal_facts(what, counted, expected, rank=outcome.rank))


def test_tensor_shards_are_smaller_than_the_whole(run_real, one_rank, checkpoints, world, plan, record):
    wanted = cases(checkpoints, world, "tensor", plan)["nvfp4 bf16"]
    whole = one_rank(wanted).held_bytes
    outcomes = run_real["tensor"]["nvfp4 bf16"]
    held = [outcome.held_bytes for outcome in outcomes]
    blocks = block_bytes(checkpoints.nvfp4)
    replicated = whole - blocks
    record(equal_facts("block bytes over all ranks", sum(h - replicated for h in held), blocks + scalar_copies(world)))
    for outcome in outcomes:
        what = f"rank {outcome.rank} of {world} holds less than the whole"
        record(equal_facts(what, outcome.held_bytes < whole, True, rank=outcome.rank))


def block_bytes(path: str) -> int:
    blocks = DenoiserReader(path).load().blocks
    return sum(held_bytes(block.attn.qkv) + held_bytes(block.attn.out) + held_bytes(block.mlp) for block in blocks)


def scalar_copies(world: int) -> int:
    """scale_2, four bytes for each of four linears a block, is held by every rank."""
    return (world - 1) * 4 * 4 * TINY.num_layers
