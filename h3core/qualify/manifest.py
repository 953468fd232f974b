"""The checks that a qualification requires, and how much evidence each of them owes: what QUALIFIED stands for.

A check is known by its file and function, its world, its mode and the rest of its parameters. One that was deleted,
renamed, deselected, skipped, emptied or broken is missed here by name; tests/unit/test_manifest.py holds the table
against what pytest collects.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from h3core.qualify.options import RANK_MODES
from h3core.qualify.tiers import world_marker

Area = Literal["transport", "computation", "parity", "numerics", "loading", "control"]
"""What a failure of the check is about first of all; diagnosis.py says more."""

FP32_BF16: Final = ("torch.float32", "torch.bfloat16")
BF16_FP32: Final = ("torch.bfloat16", "torch.float32")
MODES: Final = RANK_MODES


@dataclass(frozen=True, slots=True)
class Requirement:
    """One row of the table: a check function and what each of its instances owes.

    worlds: "each" of the run, "one" (it needs no pool of several), or "control" (the run's largest).
    modes: one instance for each; None where the check has none. comparisons: at least, from every rank where `by_rank`.
    elements: compared in all, at least. variants: ids of the other parameters.
    """

    tier: str
    check: str
    area: Area
    comparisons: int
    elements: int
    variants: tuple[str, ...] = ("",)
    modes: tuple[str | None, ...] = (None,)
    worlds: Literal["each", "one", "control"] = "each"
    by_rank: bool = True


@dataclass(frozen=True, slots=True)
class Key:
    """One check instance, as the manifest and pytest both know it."""

    check: str
    world: int
    mode: str | None
    variant: str

    def __str__(self) -> str:
        inside = [f"world={self.world}", *([self.mode] if self.mode else []), *([self.variant] if self.variant else [])]
        return f"{self.check}[{'-'.join(inside)}]"


@dataclass(frozen=True, slots=True)
class Required:
    """One instance that must run, pass, and bring its evidence."""

    key: Key
    requirement: Requirement
    comparisons: int
    elements: int
    ranks: int

    @property
    def markers(self) -> tuple[str, str]:
        """The markers that the check carries in pytest."""
        return self.requirement.tier, world_marker(self.key.world)

    def shortfall(self, comparisons: int, elements: int, ranks: Iterable[int]) -> str | None:
        """What is missing from the evidence, in words; None where it is all there."""
        absent = sorted(set(range(self.ranks)) - set(ranks))
        if absent:
            return f"no evidence from ranks {absent} of {self.ranks}"
        if comparisons < self.comparisons:
            return f"{comparisons} comparisons, {self.comparisons} owed"
        if elements < self.elements:
            return f"{elements} elements compared, {self.elements} owed"
        return None


def cross(*axes: Sequence[str]) -> tuple[str, ...]:
    """Ids of stacked parameters: every combination, joined as pytest joins them."""
    ids: tuple[str, ...] = ("",)
    for axis in axes:
        ids = tuple(f"{left}-{right}".removeprefix("-") for left in ids for right in axis)
    return ids


def gloo(check: str, area: Area, comparisons: int, elements: int, **more: object) -> Requirement:
    """A row of the Gloo tier."""
    return Requirement("gloo", check, area, comparisons, elements, **more)  # type: ignore[arg-type]


MANIFEST: Final[tuple[Requirement, ...]] = (
    gloo(
        "test_transport.py::test_rows_to_heads_and_back_is_the_identity",
        "transport",
        24,
        10_368,
        variants=cross(("one a rank", "mixed"), ("9", "56")),
    ),
    gloo(
        "test_transport.py::test_sharded_attention_equals_whole_attention", "transport", 2, 407_808, variants=FP32_BF16
    ),
    gloo("test_transport.py::test_gather_takes_every_rank_its_exact_rows", "transport", 12, 1_428),
    gloo(
        "test_transport.py::test_reduce_scatter_sums_in_rank_order_and_rounds_once",
        "transport",
        6,
        204,
        variants=("one a rank", "mixed"),
    ),
    gloo("test_transport.py::test_max_over_ranks_finds_the_one_that_holds_it", "transport", 1, 2),
    gloo("test_transport.py::test_ranks_that_plan_differently_all_get_both_plans", "transport", 1, 4),
    gloo("test_determinism.py::test_every_rank_computes_the_same_bytes_at_every_repeat", "computation", 4, 5_013_504),
    gloo(
        "test_blocks.py::test_segments_are_clipped_inside_a_rank_and_at_its_edge",
        "numerics",
        4,
        1_024,
        variants=("mixed", "audio-heavy", "text-heavy", "four-a-rank"),
    ),
    gloo(
        "test_blocks.py::test_ulysses_attention_and_mlp_equal_one_rank",
        "numerics",
        2,
        45_312,
        variants=cross(("nvfp4", "wide"), FP32_BF16),
        modes=("ulysses",),
    ),
    gloo(
        "test_blocks.py::test_tensor_parallel_attention_and_mlp_equal_one_rank_in_fp64",
        "numerics",
        2,
        45_312,
        variants=("nvfp4", "bf16", "wide"),
        modes=("tensor",),
    ),
    gloo("test_blocks.py::test_output_heads_equal_one_rank", "numerics", 4, 31_360, variants=FP32_BF16),
    gloo("test_denoise.py::test_real_ranks_equal_virtual_ranks_bit_for_bit", "parity", 39, 165_200, modes=MODES),
    gloo("test_denoise.py::test_row_invariance_holds_at_the_shapes_of_this_tier", "numerics", 72, 144, by_rank=False),
    gloo(
        "test_denoise.py::test_ulysses_latents_equal_one_rank_bit_for_bit", "numerics", 26, 165_120, modes=("ulysses",)
    ),
    gloo(
        "test_denoise.py::test_tensor_latents_equal_one_rank_in_fp64",
        "numerics",
        2,
        20_864,
        variants=("nvfp4", "bf16", "diffusers", "wide"),
        modes=("tensor",),
    ),
    gloo(
        "test_denoise.py::test_tensor_velocities_stay_within_the_error_budget",
        "numerics",
        6,
        91_200,
        by_rank=False,
        variants=cross(("activation", "fp32"), ("nvfp4", "bf16")),
        modes=("tensor",),
    ),
    gloo("test_denoise.py::test_counted_bytes_equal_the_formula", "loading", 14, 80, modes=MODES),
    gloo("test_denoise.py::test_tensor_shards_are_smaller_than_the_whole", "loading", 1, 3, modes=("tensor",)),
    gloo(
        "test_nvfp4_shards.py::test_shards_of_one_block_are_the_rows_and_columns_of_the_whole",
        "loading",
        1,
        9,
        variants=("released", "tiny"),
        modes=("tensor",),
    ),
    gloo(
        "test_world_one.py::test_ulysses_tensor_and_single_are_equal_at_world_one",
        "numerics",
        8,
        20_868,
        worlds="one",
        variants=cross(("nvfp4", "bf16", "diffusers"), BF16_FP32),
    ),
    gloo(
        "test_generate.py::test_ranks_under_torchrun_write_the_latents_of_one_process",
        "loading",
        4,
        6_405,
        worlds="one",
        by_rank=False,
    ),
    gloo(
        "test_controls.py::test_a_planted_fault_is_caught",
        "control",
        3,
        6_481,
        worlds="control",
        variants=("flipped-bit", "swapped-rows", "partial-left-out", "rank-dies", "rank-never-comes"),
    ),
)


def required(
    tier: str,
    worlds: Sequence[int],
    modes: Sequence[str],
    control_world: int | None,
    table: Sequence[Requirement] | None = None,
) -> list[Required]:
    """Every instance that a run of `tier` at `worlds` in `modes` owes; controls at `control_world`, if there is one."""
    found = []
    for row in MANIFEST if table is None else table:
        if row.tier != tier:
            continue
        controls = () if control_world is None else (control_world,)
        for world in {"each": tuple(worlds), "one": (1,), "control": controls}[row.worlds]:
            for mode in row.modes:
                if mode is not None and mode not in modes:
                    continue
                ranks = world if row.by_rank else 0
                comparisons = row.comparisons * max(ranks, 1)
                found += [
                    Required(Key(row.check, world, mode, variant), row, comparisons, row.elements, ranks)
                    for variant in row.variants
                ]
    return found


def row_of(check: str, tier: str) -> Requirement | None:
    """The row of a check function, "test_file.py::test_name"; None where it has none."""
    return next((row for row in MANIFEST if row.check == check and row.tier == tier), None)


def key_of(check: str, ident: str, world: int | None, mode: str | None, row: Requirement | None) -> Key:
    """The key of a collected test: `ident` is what pytest puts in brackets, `world` and `mode` its parameters."""
    rest = re.sub(r"(^|-)world=\d+(?=-|$)", "", ident)
    if mode is not None:
        rest = re.sub(rf"(^|-){mode}(?=-|$)", "", rest, count=1)
    elif row is not None and len(row.modes) == 1:
        mode = row.modes[0]
    return Key(check, world or 1, mode, rest.removeprefix("-"))
