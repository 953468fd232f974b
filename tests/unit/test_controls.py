"""Negative controls without ranks: what each fault changes, who is believed to be lost, and who can reach them.

A pass means that a fault is as small as it says, that another rank's loss is not taken for the planted one, and that
nothing below the suite knows of faults. With ranks: tests/gloo/test_controls_are_live.py. Run it with:
pytest tests/unit/test_controls.py
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import h3core
from h3core.partition import Span
from h3core.qualify import controls
from h3core.qualify.controls import CONTROLS, GUILTY, MissedControl, run_control
from h3core.qualify.controls.lost import LostRank, started
from h3core.qualify.controls.payload import flip_lowest_bit, leave_out, swap_two_rows
from h3core.ranks import RankError, RankFailure

ROOT = Path(h3core.__file__).parent
FAULT_WORDS = re.compile(r"(?<!de)fault(?!handler)|inject|spoil|corrupt|plant|sabotage", re.IGNORECASE)
DIES, ABSENT = (control for control in CONTROLS if isinstance(control, LostRank))
IN_COLLECTIVE = 'File "/x/torch/distributed/distributed_c10d.py", line 1 in all_to_all_single'
OUTSIDE = 'File "/x/h3core/qualify/controls/lost.py", line 1 in never_enters'


# What is planted.


def payload(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(24, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_flipped_bit_is_the_lowest_one_of_the_first_element_to_the_neighbour(dtype):
    sound, spoiled = payload(dtype), payload(dtype)
    flip_lowest_bit(spoiled, Span(8, 16), 2)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    changed = sound.view(integer) ^ spoiled.view(integer)
    assert changed.tolist() == [1 if index == 8 else 0 for index in range(24)]


def test_two_rows_to_the_neighbour_change_places_and_nothing_else_does():
    sound, spoiled = payload(torch.float32), payload(torch.float32)
    swap_two_rows(spoiled, Span(8, 20), 3)
    assert torch.equal(spoiled[8:12], sound[12:16])
    assert torch.equal(spoiled[12:16], sound[8:12])
    assert torch.equal(spoiled[16:], sound[16:])
    assert torch.equal(spoiled[:8], sound[:8])


def test_a_partial_that_is_left_out_is_zero_for_everyone():
    spoiled = payload(torch.float32)
    leave_out(spoiled, Span(8, 16), 2)
    assert not spoiled.any()


def test_the_five_controls_have_names_slugs_and_words_of_their_own():
    assert len(CONTROLS) == 5
    for part in ("name", "slug", "planted"):
        assert len({getattr(control, part) for control in CONTROLS}) == 5
    assert {control.mode for control in CONTROLS} == {"ulysses", "tensor", "collective"}


def test_an_unknown_control_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="two rows swapped"):
        run_control("three rows swapped", None)


# Who is believed to be lost.


def lost(rank: int, kind: str, where: str = OUTSIDE, exitcode: int | None = None) -> RankFailure:
    raised = kind == "raised"
    traceback, stacks = (where, None) if raised else (None, where)
    message = "RuntimeError: Connection closed by peer" if raised else kind
    return RankFailure(rank, kind, message, traceback, stacks, exitcode)  # type: ignore[arg-type]


def waiting(*ranks: int, kind: str = "hung") -> list[RankFailure]:
    return [lost(rank, kind, IN_COLLECTIVE) for rank in ranks]


def error(*failures: RankFailure) -> RankError:
    return RankError(failures, world=4, doing="a task")


def test_a_rank_that_died_is_believed_when_all_others_were_in_the_collective():
    how = DIES.judge(error(*waiting(0), *waiting(3, 2, kind="raised"), lost(GUILTY, "died", exitcode=-9)), 4)
    assert "rank 1 died" in how
    assert "rank 0 hung, ranks 2, 3 raised" in how


def test_a_rank_that_never_came_is_believed_when_all_others_were_in_the_collective():
    assert "rank 1 hung" in ABSENT.judge(error(*waiting(0, 2, 3), lost(GUILTY, "hung")), 4)


@pytest.mark.parametrize(
    ("control", "failures", "why"),
    [
        (DIES, [lost(2, "died", exitcode=-9), *waiting(0, 1, 3)], "rank 2 is named first, as died"),
        (DIES, [lost(GUILTY, "exited", exitcode=0), *waiting(0, 2, 3)], "as exited"),
        (DIES, [lost(GUILTY, "raised"), *waiting(0, 2, 3)], "as raised"),
        (DIES, [lost(GUILTY, "died", exitcode=-11), *waiting(0, 2, 3)], "code -11, planted: -9"),
        (DIES, [lost(GUILTY, "died", exitcode=-9), *waiting(0, 2)], "2 other ranks failed with it, expected 3"),
        (DIES, [lost(GUILTY, "died", exitcode=-9), *waiting(0, 2), lost(3, "raised")], "rank 3 not shown inside"),
        (DIES, [lost(GUILTY, "hung"), *waiting(0, 2, 3)], "as hung"),
        (ABSENT, [lost(0, "hung"), *waiting(1, 2, 3)], "rank 0 is named first"),
        (ABSENT, waiting(1, 0, 2, 3), "rank 1 is shown inside a collective"),
        (ABSENT, [lost(rank, "hung") for rank in (1, 0, 2, 3)], "ranks 0, 2, 3 not shown inside"),
        (ABSENT, [lost(GUILTY, "died", exitcode=-9), *waiting(0, 2, 3)], "as died"),
    ],
)
def test_another_end_is_not_taken_for_the_planted_one(control, failures, why):
    with pytest.raises(MissedControl, match=why):
        control.judge(error(*failures), 4)


def test_a_process_that_ended_or_was_never_reaped_is_not_alive():
    assert started(os.getpid()) == started(os.getpid()) is not None
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        assert started(child.pid) is not None
        child.kill()
        deadline = time.monotonic() + 10
        while started(child.pid) is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert started(child.pid) is None  # a zombie, until `with` reaps it
    assert started(child.pid) is None


# Who can reach them.


def below_qualify() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if "qualify" not in path.relative_to(ROOT).parts)


@pytest.mark.parametrize("module", ["h3core.generate", "h3core.__main__", "h3core.ranks"])
def test_what_users_run_does_not_load_the_suite(module):
    code = f"import sys, {module}; print([name for name in sys.modules if name.startswith('h3core.qualify')])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.strip() == "[]"


def test_no_name_that_the_runtime_reads_speaks_of_faults():
    """Environment names and options are text in the code: none of it, docstrings aside, is about planting any."""
    spoken = {}
    for path in below_qualify():
        tree = ast.parse(path.read_text())
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        names = [node.value for node in texts if id(node) not in prose and re.fullmatch(r"[\w-]+", node.value)]
        if found := [name for name in names if FAULT_WORDS.search(name)]:
            spoken[path.name] = found
    assert spoken == {}


def test_controls_read_neither_environment_nor_options():
    for path in Path(controls.__file__).parent.glob("*.py"):
        tree = ast.walk(ast.parse(path.read_text()))
        words = {getattr(node, "id", getattr(node, "attr", getattr(node, "name", None))) for node in tree}
        assert not words & {"environ", "environb", "getenv", "argv", "argparse", "getoption", "getini"}, path
