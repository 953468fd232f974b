"""The checks of sample_reports.py: the Gloo tier's, with figures as they were seen."""

from __future__ import annotations

from typing import Any

Report = dict[str, Any]

WORLDS = (2, 4, 6, 8)
ONE = ("",)
DTYPES = ("torch.float32", "torch.bfloat16")
FILES = ("nvfp4", "bf16", "diffusers", "wide")

# file, function, modes, variants, comparisons a rank, elements of a check, seconds of a check
CHECKS: tuple[tuple[str, str, tuple[str | None, ...], tuple[str, ...], int, int, float], ...] = (
    (
        "transport",
        "rows_to_heads_and_back_is_the_identity",
        (None,),
        ("one a rank-9", "one a rank-56", "mixed-9", "mixed-56"),
        24,
        1703520,
        0.14,
    ),
    ("transport", "sharded_attention_equals_whole_attention", (None,), DTYPES, 2, 407808, 0.10),
    ("transport", "gather_takes_every_rank_its_exact_rows", (None,), ONE, 12, 35700, 0.10),
    ("transport", "reduce_scatter_sums_in_rank_order_and_rounds_once", (None,), ("one a rank", "mixed"), 6, 9024, 0.02),
    ("transport", "max_over_ranks_finds_the_one_that_holds_it", (None,), ONE, 1, 5, 0.01),
    (
        "blocks",
        "segments_are_clipped_inside_a_rank_and_at_its_edge",
        (None,),
        ("mixed", "audio-heavy", "text-heavy", "four-a-rank"),
        4,
        12992,
        1.07,
    ),
    ("blocks", "ulysses_attention_and_mlp_equal_one_rank", (None,), DTYPES, 2, 67968, 0.51),
    ("blocks", "tensor_parallel_attention_and_mlp_equal_one_rank_in_fp64", (None,), FILES[:3], 2, 75520, 0.88),
    ("blocks", "output_heads_equal_one_rank", (None,), DTYPES, 4, 78400, 0.20),
    ("denoise", "real_ranks_equal_virtual_ranks_bit_for_bit", ("ulysses", "tensor"), ONE, 40, 470389, 1.92),
    ("denoise", "row_invariance_holds_at_the_shapes_of_this_tier", (None,), ONE, 14, 144, 1.56),
    ("denoise", "ulysses_latents_equal_one_rank_bit_for_bit", ("ulysses",), ONE, 26, 444032, 1.02),
    ("denoise", "tensor_latents_equal_one_rank_in_fp64", ("tensor",), FILES, 2, 52160, 0.48),
    ("denoise", "tensor_velocities_stay_within_the_error_budget", ("tensor",), FILES, 1, 91200, 3.03),
    ("denoise", "counted_bytes_equal_the_formula", ("ulysses", "tensor"), ONE, 14, 277, 0.01),
    ("denoise", "tensor_shards_are_smaller_than_the_whole", ("tensor",), ONE, 1, 1, 0.03),
    (
        "nvfp4_shards",
        "shards_of_one_block_are_the_rows_and_columns_of_the_whole",
        (None,),
        ("released", "tiny"),
        6,
        21,
        0.4,
    ),
)


def instances() -> list[Report]:
    """All checks of the tier, passed."""
    return [check for row in CHECKS for check in _instances(*row)]


def node(file: str, name: str, world: int, mode: str | None, variant: str = "") -> str:
    """A node id as pytest writes it."""
    inside = "-".join(filter(None, (f"world={world}", mode, variant)))
    return f"tests/gloo/test_{file}.py::test_{name}[{inside}]"


def _instances(
    file: str,
    name: str,
    modes: tuple[str | None, ...],
    variants: tuple[str, ...],
    comparisons: int,
    elements: int,
    seconds: float,
) -> list[Report]:
    only = modes[0] if len(modes) == 1 else None
    return [
        {
            "check": node(file, name, world, mode if only is None else None, variant),
            "name": f"test_{name}",
            "world": world,
            "mode": mode,
            "required": True,
            "outcome": "passed",
            "duration_s": round(seconds * (0.7 + world / 10), 3),
            "comparisons": comparisons * world,
            "exact": 0 if "budget" in name or "fp64" in name else comparisons * world,
            "elements": elements,
            "bytes": elements * 4,
            "largest_difference": 0.0137 if "budget" in name else 0.0,
            "ranks": list(range(world)),
            "owed": {"comparisons": comparisons * world, "elements": elements // 2, "ranks": world},
            "reason": None,
        }
        for world in WORLDS
        for mode in modes
        for variant in variants
    ]
