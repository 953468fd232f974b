"""The five controls of every tier, as a table, and how one of them is run."""

from __future__ import annotations

from typing import Final

from h3core.qualify.checks.parity import DIGESTS
from h3core.qualify.controls.base import GUILTY, Bench, Caught, Control
from h3core.qualify.controls.lost import LostRank, dies_inside, never_enters
from h3core.qualify.controls.payload import PayloadControl, flip_lowest_bit, leave_out, swap_two_rows

CONTROLS: Final[tuple[Control, ...]] = (
    PayloadControl(
        name="a flipped bit in one exchanged payload",
        slug="flipped-bit",
        mode="tensor",
        planted=f"rank {GUILTY} flips the lowest bit of one partial sum to its neighbour, in the last reduce-scatter",
        phase="mlp_reduce",
        spoil=flip_lowest_bit,
        seen_by=(DIGESTS,),
    ),
    PayloadControl(
        name="two rows swapped",
        slug="swapped-rows",
        mode="ulysses",
        planted=f"rank {GUILTY} sends its neighbour two rows in each other's place, in the last QKV exchange",
        phase="qkv",
        spoil=swap_two_rows,
    ),
    PayloadControl(
        name="a partial left out of the sum",
        slug="partial-left-out",
        mode="tensor",
        planted=f"rank {GUILTY} sends zeros for its partial sums, in the last reduce-scatter",
        phase="mlp_reduce",
        spoil=leave_out,
    ),
    LostRank(
        name="a rank that dies in a collective",
        slug="rank-dies",
        mode="collective",
        planted=f"rank {GUILTY} kills itself (SIGKILL) inside an all-to-all; the others go on exchanging",
        task=dies_inside,
        kind="died",
    ),
    LostRank(
        name="a rank that never enters a collective",
        slug="rank-never-comes",
        mode="collective",
        planted=f"rank {GUILTY} sleeps outside of an all-to-all in which the others wait for it",
        task=never_enters,
        kind="hung",
    ),
)
"""In the order in which they are reported."""


def run_control(control: str | Control, bench: Bench) -> Caught:
    """Plant `control`, by its name in CONTROLS or as given, and see it caught.

    Raises MissedControl where it is not; NotPlanted where the fault did not take place exactly once; ComparisonError or
    RankError where ranks are at fault in which nothing was planted; ValueError for an unknown name.
    """
    if isinstance(control, str):
        known = {entry.name: entry for entry in CONTROLS}
        if control not in known:
            raise ValueError(f"control: got {control!r}, expected one of {', '.join(known)}")
        control = known[control]
    return control.run(bench)
