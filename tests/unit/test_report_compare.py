"""What got worse between two runs.

A pass means: a worse verdict, a lost check, thinner evidence, a control that is no longer caught and a new preflight
problem are each named, from both sides; times never are; runs of different scope are compared only where they overlap.
Run: pytest tests/unit/test_report_compare.py
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from h3core.qualify.report.compare import compare_reports
from h3core.qualify.report.schema import schema
from h3core.qualify.report.validate import validate
from tests.unit.sample_reports import (
    SAMPLES,
    Report,
    edited,
    gpu_box,
    in_progress,
    incomplete,
    not_qualified,
    qualified,
)

CHECK = "tests/gloo/test_transport.py::test_gather_takes_every_rank_its_exact_rows[world=4]"


def check(report: Report) -> Report:
    return next(c for c in report["checks"] if c["check"] == CHECK)  # type: ignore[no-any-return]


@pytest.mark.parametrize("old", SAMPLES)
@pytest.mark.parametrize("new", SAMPLES)
def test_a_comparison_is_what_the_schema_says_and_changes_neither_report(old: str, new: str) -> None:
    before, after = SAMPLES[old](), SAMPLES[new]()
    kept = copy.deepcopy((before, after))
    found = compare_reports(before, after, where="old/report.json")
    assert (before, after) == kept
    after["comparison"] = found
    validate(after)
    jsonschema.Draft202012Validator(schema()).validate(after)
    assert found["with"] == "old/report.json"
    if old == new:
        assert (found["worse"], found["better"], found["changed"], found["comparable"]) == ([], [], [], True)


def test_times_ids_and_dates_are_never_judged() -> None:
    new = edited(qualified(), run__duration_s=9999.0, run__id="0" * 32, run__started_utc="2027-01-01T00:00:00Z")
    for item in new["checks"]:
        item["duration_s"] *= 100
    for rank in new["presence"]:
        rank["pid"] += 1
    found = compare_reports(qualified(), new)
    assert (found["worse"], found["better"], found["changed"]) == ([], [], [])


def _outcome(outcome: str) -> Callable[[Report], Any]:
    return lambda report: check(report).update(outcome=outcome, reason="why")


def _less(key: str) -> Callable[[Report], Any]:
    return lambda report: check(report).update({key: check(report)[key] - 1})


def _drop(report: Report) -> None:
    report["checks"] = [c for c in report["checks"] if c["check"] != CHECK]
    report["coverage"]["required"] -= 1


def _swap(report: Report) -> None:
    check(report)["check"] = CHECK.replace("gather", "scatter")


def _missing(report: Report) -> None:
    _drop(report)
    item = {"check": CHECK.removeprefix("tests/gloo/"), "world": 4, "mode": None, "why": "not collected"}
    report["coverage"]["missing"].append(item)
    report["coverage"]["required"] += 1


def _control(caught: bool | None) -> Callable[[Report], Any]:
    return lambda report: report["controls"]["list"][1].update(caught=caught)


def _finding(state: str) -> Callable[[Report], Any]:
    return lambda report: report["preflight"][1].update(state=state)


WORSE = {
    f"{CHECK}: passed -> failed (why)": _outcome("failed"),
    f"{CHECK}: passed -> error (why)": _outcome("error"),
    f"{CHECK}: passed -> skipped (why)": _outcome("skipped"),
    f"{CHECK}: passed -> not run (why)": _outcome("not run"),
    f"{CHECK.removeprefix('tests/gloo/')}: passed -> not run (not collected)": _missing,
    f"{CHECK}: comparisons 48 -> 47": _less("comparisons"),
    f"{CHECK}: comparisons bit for bit 48 -> 47": _less("exact"),
    f"{CHECK}: elements 35,700 -> 35,699": _less("elements"),
    f"{CHECK}: no evidence any more from ranks 3": lambda report: check(report)["ranks"].remove(3),
    f"no longer required: {CHECK} (152 -> 151 in all)": _drop,
    "control swapped rows at world 8: caught, now not caught": _control(False),
    "control swapped rows at world 8: caught, now did not run": _control(None),
    "control swapped rows at world 8: caught, now not in the run": lambda report: report["controls"]["list"].pop(1),
    "preflight open files: ok, now problem (1,048,576)": _finding("problem"),
    "preflight open files: ok, now warning (1,048,576)": _finding("warning"),
    "preflight open files: ok, now not measured (1,048,576)": _finding("not measured"),
    "preflight links: not looked at, now problem (down)": lambda report: report["preflight"].append(
        report["preflight"][1] | {"name": "links", "state": "problem", "got": "down"}
    ),
    "required checks: 152 -> 151 in all": lambda report: report["coverage"].update(required=151),
}


@pytest.mark.parametrize("said", WORSE)
def test_each_loss_is_named_and_nothing_else(said: str) -> None:
    new = qualified()
    WORSE[said](new)
    found = compare_reports(qualified(), new)
    assert found["worse"] == [said]
    assert found["better"] == []


BETTER = {
    f"{CHECK}: failed -> passed (why)": (_outcome("failed"), _outcome("passed")),
    f"{CHECK}: skipped -> passed (why)": (_outcome("skipped"), _outcome("passed")),
    f"{CHECK}: comparisons 47 -> 48": (_less("comparisons"), None),
    f"newly required: {CHECK} (151 -> 152 in all)": (_drop, None),
    "control swapped rows at world 8: not caught, now caught": (_control(False), None),
    "control swapped rows at world 8: did not run, now caught": (_control(None), None),
    "preflight open files: problem, now ok (1,048,576)": (_finding("problem"), None),
    "preflight open files: problem, now warning (1,048,576)": (_finding("problem"), _finding("warning")),
}


@pytest.mark.parametrize("said", BETTER)
def test_each_gain_is_named_and_nothing_else(said: str) -> None:
    old, new = qualified(), qualified()
    for change, report in zip(BETTER[said], (old, new), strict=True):
        if change is not None:
            change(report)
    found = compare_reports(old, new)
    assert found["better"] == [said]
    assert found["worse"] == []


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ("skipped", "failed", "worse"),
        ("not run", "failed", "worse"),
        ("error", "failed", "changed"),
        ("failed", "error", "changed"),
        ("failed", "not run", "changed"),
        ("not run", "skipped", "changed"),
    ],
)
def test_what_did_not_pass_before_is_worse_only_where_it_now_fails(before: str, after: str, kind: str) -> None:
    old, new = qualified(), qualified()
    check(old)["outcome"], check(new)["outcome"] = before, after
    found = compare_reports(old, new)
    said = {"worse": [], "better": [], "changed": []} | {kind: [f"{CHECK}: {before} -> {after}"]}
    assert {name: found[name] for name in said} == said


def test_a_missed_control_that_was_not_tried_again_is_no_better() -> None:
    old, new = qualified(), qualified()
    _control(False)(old)
    _control(None)(new)
    found = compare_reports(old, new)
    assert (found["worse"], found["better"]) == ([], [])
    assert found["changed"] == ["control swapped rows at world 8: not caught, now did not run"]
    assert compare_reports(new, old)["worse"] == ["control swapped rows at world 8: did not run, now not caught"]


def test_one_required_check_for_another_is_a_loss_and_a_gain() -> None:
    new = qualified()
    _swap(new)
    found = compare_reports(qualified(), new)
    assert found["worse"] == [f"no longer required: {CHECK} (152 -> 152 in all)"]
    assert found["better"] == [f"newly required: {CHECK.replace('gather', 'scatter')} (152 -> 152 in all)"]


ORDER = (not_qualified, incomplete, gpu_box, qualified)


@pytest.mark.parametrize("worse", range(4))
@pytest.mark.parametrize("better", range(4))
def test_verdicts_have_an_order(worse: int, better: int) -> None:
    old, new = ORDER[better](), qualified()
    new["verdict"] = ORDER[worse]()["verdict"]
    old["run"] = new["run"]
    said = f"verdict: {old['verdict']['word']} -> {new['verdict']['word']}"
    found = compare_reports(old, new)
    assert found["comparable"]
    assert (said in found["worse"]) == (worse < better)
    gone = (better, worse) == (0, 1)  # a fault that was not looked for again has not gone
    assert (said in found["better"]) == (worse > better and not gone)
    assert (said in found["changed"]) == gone


def test_a_check_that_nobody_required_may_go_away() -> None:
    old = qualified()
    old["checks"].append(check(old) | {"check": "tests/unit/test_a.py::test_b", "required": False})
    found = compare_reports(old, qualified())
    assert found["worse"] == []
    assert found["changed"] == ["tests/unit/test_a.py::test_b: passed, now not in the run"]
    new = copy.deepcopy(old)
    new["checks"][-1]["outcome"] = "skipped"
    assert compare_reports(old, new)["worse"] == []
    new["checks"][-1]["outcome"] = "failed"
    assert len(compare_reports(old, new)["worse"]) == 1


def test_a_new_check_that_fails_is_worse() -> None:
    new = qualified()
    new["checks"].append(check(new) | {"check": "tests/unit/test_a.py::test_b", "required": False, "outcome": "failed"})
    assert compare_reports(qualified(), new)["worse"] == [
        "tests/unit/test_a.py::test_b: failed, and was not in the earlier run"
    ]


def test_a_run_that_was_killed_is_worse_check_by_check() -> None:
    found = compare_reports(qualified(), in_progress())
    assert found["worse"][0] == "verdict: QUALIFIED (software, CPU) -> INCOMPLETE"
    assert sum("passed -> not run" in line for line in found["worse"]) == 152
    assert not [line for line in found["worse"] + found["better"] if "required:" in line], (
        "under another name, still there"
    )


def test_what_may_explain_it_is_listed_apart() -> None:
    new = edited(qualified(), machine__torch="2.11.0", machine__cores=8, run__host="other", h3core="0.2.0")
    new["environment"] = {"OMP_NUM_THREADS": "2", "NCCL_DEBUG": "INFO"}
    new["run"]["options"][1] |= {"value": "60", "source": "command line"}
    found = compare_reports(qualified(), new)
    assert found["worse"] == []
    assert found["changed"] == [
        "h3core: 0.1.0 -> 0.2.0",
        "run.host: cpu-box-17 -> other",
        "machine.torch: 2.13.0+cpu -> 2.11.0",
        "machine.cores: 2 -> 8",
        "options.--rank-timeout: 120 -> 60",
        "environment.OMP_NUM_THREADS: 1 -> 2",
        "environment.MKL_CBWR: AVX2,STRICT -> none",
        "environment.NCCL_DEBUG: none -> INFO",
    ]


def test_another_gpu_is_a_change() -> None:
    new = gpu_box()
    new["machine"]["gpus"][5]["uuid"] = "GPU-new"
    assert [line[:16] for line in compare_reports(gpu_box(), new)["changed"]] == ["machine.gpus.5: "]
    new["machine"]["gpus"].pop()
    assert "-> none" in compare_reports(gpu_box(), new)["changed"][-1]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"run__tier": "nccl"}, "tier: gloo -> nccl"),
        ({"run__worlds": [2, 4]}, "worlds: 2, 4, 6, 8 -> 2, 4"),
        ({"run__modes": ["tensor"]}, "modes: tensor, ulysses -> tensor"),
        ({"run__tier": None}, "tier: gloo -> none"),
    ],
)
def test_runs_of_different_scope_are_compared_only_where_they_overlap(change: dict[str, Any], why: str) -> None:
    new = edited(qualified(), verdict__outcome="not qualified", **change)
    new["checks"] = new["checks"][:40]
    new["controls"]["list"].pop()
    new["preflight"].append(new["preflight"][0] | {"name": "new", "state": "problem"})
    new["checks"].append(new["checks"][0] | {"check": "a::b", "outcome": "failed"})
    found = compare_reports(qualified(), new)
    assert found["comparable"] is False
    assert found["why_not"] == f"{why}. Only what both runs have is compared."
    assert (found["worse"], found["better"], found["changed"]) == ([], [], [])
    check(new)["outcome"] = "failed"
    new["controls"]["list"][0]["caught"] = False
    new["preflight"][0]["state"] = "problem"
    assert len(compare_reports(qualified(), new)["worse"]) == 3


def test_the_order_of_worlds_and_modes_is_no_difference() -> None:
    new = edited(qualified(), run__worlds=[8, 2, 4, 6], run__modes=["tensor", "ulysses"])
    assert compare_reports(qualified(), new)["comparable"]
