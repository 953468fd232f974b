"""The verdict: whatever is missing is INCOMPLETE, whatever failed is NOT QUALIFIED, and only the whole is QUALIFIED.

Run it with: pytest tests/unit/test_verdict.py
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from h3core.qualify.manifest import Key, Requirement, required
from h3core.qualify.tiers import TIERS
from h3core.qualify.verdict import EXIT_INCOMPLETE, Seen, absent_ranks, cover, judge
from h3core.ranks import RankFacts

TABLE = (
    Requirement("gloo", "test_a.py::test_bytes", "transport", comparisons=3, elements=10, variants=("x", "y")),
    Requirement("gloo", "test_a.py::test_loop", "parity", 1, 5, modes=("ulysses", "tensor")),
    Requirement("gloo", "test_c.py::test_control", "control", 1, 1, ("flip",), worlds="control", by_rank=False),
)
GLOO = TIERS["gloo"]


def owed(worlds=(2, 4), modes=("ulysses", "tensor"), control_world=4):
    return required("gloo", worlds, modes, control_world, TABLE)


def all_seen(items):
    """What a run sees in which every check brings exactly what it owes."""
    return {
        item.key: Seen(
            str(item.key),
            "passed",
            comparisons=item.comparisons,
            elements=item.elements,
            ranks=set(range(item.ranks)),
        )
        for item in items
    }


def verdict(items, seen, *, deselected=None, pytest_exit=0, failures=0, **more):
    coverage = cover(items, seen, deselected or {})
    return judge(GLOO, coverage, pytest_exit=pytest_exit, failures=failures, scope="worlds 2, 4", totals="", **more)


def test_everything_that_is_owed_is_qualified():
    found = verdict(owed(), all_seen(owed()))
    assert (found.outcome, found.exit_code) == ("qualified", 0)
    assert found.line.startswith("QUALIFIED (software, CPU); worlds 2, 4; 9 of 9 required checks, controls 1 of 1")


def test_the_manifest_is_expanded_over_worlds_modes_and_variants():
    keys = [str(item.key) for item in owed()]
    assert len(keys) == len(set(keys)) == 2 * 2 + 2 * 2 + 1
    assert "test_a.py::test_bytes[world=2-x]" in keys
    assert "test_a.py::test_loop[world=4-tensor]" in keys
    assert "test_c.py::test_control[world=4-flip]" in keys
    assert [item.comparisons for item in owed() if item.key.check.endswith("bytes")] == [6, 6, 12, 12]
    assert not [item for item in owed(modes=("ulysses",)) if item.key.mode == "tensor"]


@pytest.mark.parametrize("number", range(9))
@pytest.mark.parametrize("harm", ["gone", "skipped", "error", "never ended", "no rank 1", "few elements", "few"])
def test_any_check_that_is_missing_in_any_way_makes_it_incomplete_by_name(number, harm):
    items = owed()
    seen, victim = all_seen(items), items[number]
    sight = seen[victim.key]
    changed = {
        "gone": None,
        "skipped": replace(sight, outcome="skipped", reason="no time"),
        "error": replace(sight, outcome="error", reason="OSError: disk"),
        "never ended": replace(sight, outcome=None),
        "no rank 1": replace(sight, ranks={0}),
        "few elements": replace(sight, elements=victim.elements - 1),
        "few": replace(sight, comparisons=victim.comparisons - 1),
    }[harm]
    if harm == "no rank 1" and not victim.ranks:
        return  # a control's evidence is the parent's
    seen.pop(victim.key)
    if changed is not None:
        seen[victim.key] = changed
    found = verdict(items, seen)
    assert (found.outcome, found.exit_code) == ("incomplete", EXIT_INCOMPLETE)
    assert found.line.startswith("INCOMPLETE: 1 of 9 required checks did not run (first: " + str(victim.key))


def test_a_failure_beats_everything():
    items = owed()
    seen = all_seen(items)
    seen[items[0].key].outcome = "failed"
    seen.pop(items[1].key)
    found = verdict(items, seen, pytest_exit=1, failures=1, lacking=["x broke"], reductions=["mode ulysses"])
    assert (found.outcome, found.exit_code) == ("not qualified", 1)
    assert found.line.startswith("NOT QUALIFIED: 1 check failed; ")
    assert any("1 of 9 required checks did not run" in reason for reason in found.reasons)


def test_a_missed_control_is_not_qualified_and_named():
    items = owed()
    seen = all_seen(items)
    seen[items[-1].key].outcome = "failed"
    found = verdict(items, seen, pytest_exit=1, failures=1)
    assert found.outcome == "not qualified"
    assert "control not caught: test_c.py::test_control[world=4-flip]" in found.reasons
    assert "controls 0 of 1 caught" in found.line


def test_a_failure_that_no_check_knows_of_is_not_passed_over():
    assert verdict(owed(), all_seen(owed()), pytest_exit=1).outcome == "not qualified"


def test_a_broken_test_beside_the_required_ones_is_incomplete():
    found = verdict(owed(), all_seen(owed()), pytest_exit=1, lacking=["test_b.py could not be collected: ImportError"])
    assert (found.outcome, found.exit_code) == ("incomplete", 10)
    assert "could not be collected" in found.line


@pytest.mark.parametrize(("code", "word"), [(2, "interrupted"), (3, "itself failed"), (4, "command line")])
def test_pytests_own_ends_keep_their_code_and_are_incomplete(code, word):
    found = verdict(owed(), all_seen(owed()), pytest_exit=code)
    assert (found.outcome, found.exit_code) == ("incomplete", code)
    assert word in found.line


@pytest.mark.parametrize("code", [5, 6, 77])
def test_other_ends_without_success_are_incomplete_with_their_own_code(code):
    seen = {} if code == 5 else all_seen(owed())
    found = verdict(owed(), seen, pytest_exit=code)
    assert (found.outcome, found.exit_code) == ("incomplete", 10)


def test_in_progress_is_incomplete():
    found = verdict(owed(), {}, pytest_exit=None)
    assert (found.outcome, found.exit_code) == ("incomplete", 10)
    assert "in progress" in found.line


def test_nothing_required_is_incomplete():
    assert verdict([], {}).outcome == "incomplete"


def test_a_reduction_is_passed_and_says_so():
    found = verdict(owed(), all_seen(owed()), reductions=["mode ulysses"], narrowed=["--mode=ulysses (H3_MODE)"])
    assert (found.outcome, found.exit_code) == ("passed", 0)
    assert found.line.startswith("PASSED, REDUCED: mode ulysses; ")
    assert found.line.endswith("narrowed by --mode=ulysses (H3_MODE)")


def test_a_run_without_controls_is_no_full_qualification():
    items = owed(control_world=None)
    assert verdict(items, all_seen(items)).word == "PASSED, REDUCED: no negative controls"


def facts(count, **changes):
    whole = [RankFacts(rank, count, "gloo", 100 + rank, "cpu", None, None, (0, 1), True) for rank in range(count)]
    return [replace(fact, **changes) if fact.rank == 1 else fact for fact in whole]


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        ([], "no rank has proved its presence"),
        (facts(4)[:3], r"ranks \[0, 1, 2\]"),
        (facts(4, world=1), r"process groups of \[1\]"),
        (facts(4, backend="fake"), "backend fake, expected gloo"),
        (facts(4, pid=100), "ranks that share a process"),
        (facts(4, device="cuda:0"), "ranks on cuda, expected cpu"),
        (facts(4, cpus=()), "may run on no CPU"),
    ],
)
def test_ranks_that_were_not_all_there_are_named(seen, message):
    (problem,) = absent_ranks([4], {4: seen}, GLOO)
    assert re.search(message, problem), problem
    found = verdict(owed(), all_seen(owed()), absent=[problem])
    assert found.outcome == "incomplete"


def test_gpu_ranks_prove_distinct_gpus_unless_they_share_them():
    whole = [RankFacts(r, 2, "nccl", 9 + r, f"cuda:{r}", "RTX", "GPU-1", (0,), False) for r in range(2)]
    assert absent_ranks([2], {2: whole}, TIERS["nccl"]) == ["world 2: 1 distinct GPUs for 2 ranks"]
    assert absent_ranks([2], {2: whole}, TIERS["nccl"], share_gpus=True) == []
    apart = [replace(fact, device_uuid=f"GPU-{fact.rank}") for fact in whole]
    assert absent_ranks([2], {2: apart}, TIERS["nccl"]) == []
    unknown = [replace(fact, device_uuid=None) for fact in whole]
    assert absent_ranks([2], {2: unknown}, TIERS["nccl"]) == ["world 2: a GPU without a UUID"]


def test_ranks_that_were_there_are_no_problem():
    assert absent_ranks([1, 4], {4: facts(4), 1: facts(1)}, GLOO) == []


def test_a_deselected_check_says_by_what():
    items = owed()
    seen = all_seen(items)
    key = items[3].key
    seen.pop(key)
    found = verdict(items, seen, deselected={key: "deselected by -k 'x'"})
    assert f"(first: {key}: deselected by -k 'x')" in found.line


def test_keys_are_what_the_line_prints():
    assert str(Key("test_a.py::test_b", 2, "tensor", "wide-torch.float32")) == (
        "test_a.py::test_b[world=2-tensor-wide-torch.float32]"
    )


def test_checks_that_broke_explain_pytests_failure():
    items = owed()
    seen = all_seen(items)
    seen[items[0].key].outcome = "error"
    found = verdict(items, seen, pytest_exit=1, errors=1)
    assert (found.outcome, found.exit_code) == ("incomplete", 10)
