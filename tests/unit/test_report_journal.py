"""What is still known of a run that was killed: its journal, laid over the report that it began with.

A pass means: every check that had ended is there with its outcome and evidence, under the manifest's name or pytest's;
the verdict stays INCOMPLETE; a line cut short is forgiven, and any other that cannot be read is counted.
Run: pytest tests/unit/test_report_journal.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from h3core.qualify.report.files import begin, read_report, write_all_forms
from h3core.qualify.report.html import html
from h3core.qualify.report.journal import with_journal
from h3core.qualify.report.junit import junit
from h3core.qualify.report.markdown import markdown
from h3core.qualify.report.schema import schema
from tests.unit.sample_checks import instances, node
from tests.unit.sample_reports import Report, in_progress, qualified

MODES = "real_ranks_equal_virtual_ranks_bit_for_bit"


def evidence(rank: int | None = 0, **changes: Any) -> dict[str, Any]:
    item = {"what": "x", "demand": "bit for bit", "elements": 600_000, "bytes": 70, "spread": 1.0, "max_abs": 0.0}
    return item | {"measured": {"differing": 0.0}, "rank": rank} | changes


def line(check: str, outcome: str = "passed", **changes: Any) -> str:
    entry = {"check": check, "outcome": outcome, "duration_s": 1.5, "reason": None, "evidence": []}
    return json.dumps(entry | changes) + "\n"


def ended(world: int = 4, mode: str = "tensor", outcome: str = "passed", **changes: Any) -> str:
    """The line of a check that brought what it owes."""
    return line(
        node("denoise", MODES, world, mode), outcome, evidence=[evidence(r) for r in range(world)] * 40, **changes
    )


def merged(tmp_path: Path, *lines: str) -> Report:
    begin(tmp_path, in_progress())
    (tmp_path / "journal.jsonl").write_text("".join(lines))
    report = read_report(tmp_path)
    jsonschema.Draft202012Validator(schema()).validate(report)
    assert report["verdict"]["outcome"] == "incomplete"
    assert report["verdict"]["exit_code"] == 10
    return report


def row(report: Report, check: str) -> dict[str, Any]:
    found = [item for item in report["checks"] if item["check"] == check]
    assert len(found) == 1
    return found[0]  # type: ignore[no-any-return]


def test_without_a_journal_the_report_is_as_it_began(tmp_path: Path) -> None:
    begin(tmp_path, in_progress())
    assert read_report(tmp_path) == in_progress()
    (tmp_path / "journal.jsonl").write_text("")
    assert read_report(tmp_path) == in_progress()


def test_a_check_that_had_ended_is_shown_and_counted(tmp_path: Path) -> None:
    report = merged(tmp_path, ended())
    check = row(report, node("denoise", MODES, 4, "tensor"))
    assert check["outcome"] == "passed"
    assert check["comparisons"] == check["exact"] == 160
    assert (check["elements"], check["bytes"]) == (160 * 600_000, 160 * 70)
    assert (check["ranks"], check["largest_difference"], check["duration_s"]) == ([0, 1, 2, 3], 0.0, 1.5)
    assert (check["mode"], check["world"], check["required"]) == ("tensor", 4, True)
    assert len(report["checks"]) == 152
    coverage = report["coverage"]
    assert (coverage["required"], coverage["passed"], coverage["failed"], coverage["not_run"]) == (152, 1, 0, 151)
    assert len(coverage["missing"]) == 151
    assert report["verdict"]["reasons"] == ["in progress, or killed before it ended", "1 check had ended: 1 passed"]


def test_modes_are_not_taken_for_one_another(tmp_path: Path) -> None:
    report = merged(tmp_path, ended(mode="tensor"), ended(mode="ulysses", outcome="failed", reason="bytes differ"))
    assert row(report, node("denoise", MODES, 4, "tensor"))["outcome"] == "passed"
    assert row(report, node("denoise", MODES, 4, "ulysses"))["outcome"] == "failed"
    assert len(report["checks"]) == 152


def test_a_whole_run_lacks_only_its_end(tmp_path: Path) -> None:
    # Pytest's names in pytest's order, laid over the manifest's names.
    lines = [
        line(c["check"], evidence=[evidence(rank) for rank in c["ranks"]] * (c["comparisons"] // c["world"]))
        for c in instances()
    ]
    report = merged(tmp_path, *lines)
    assert report["coverage"] == {"required": 152, "passed": 152, "failed": 0, "not_run": 0, "missing": []}
    assert {check["check"] for check in report["checks"]} == {check["check"] for check in qualified()["checks"]}
    assert "152 checks had ended: 152 passed" in markdown(report)
    assert "INCOMPLETE" in html(report)
    assert junit(report).count("<error") == 1


def test_a_failure_is_described_with_the_command_that_shows_it(tmp_path: Path) -> None:
    report = merged(tmp_path, ended(outcome="failed", reason="1 of 9 elements differ\nmore"))
    (failure,) = report["failures"]
    assert failure["problem"] == "1 of 9 elements differ more"
    assert failure["fault_class"] is None
    check = node("denoise", MODES, 4, "tensor")
    assert failure["reproduce"] == f"python -m pytest '{check}' --world=4"
    assert report["coverage"]["failed"] == 1
    assert report["verdict"]["outcome"] == "incomplete"


def test_a_failure_stays_one_whatever_its_tear_down_says(tmp_path: Path) -> None:
    report = merged(tmp_path, ended(outcome="failed", reason="bad"), ended())
    assert row(report, node("denoise", MODES, 4, "tensor"))["outcome"] == "failed"
    assert "1 check had ended: 1 failed" in report["verdict"]["reasons"]
    report = merged(tmp_path, ended(), ended(outcome="error", reason="tear-down"))
    assert row(report, node("denoise", MODES, 4, "tensor"))["outcome"] == "error"
    assert report["coverage"]["passed"] == 0


@pytest.mark.parametrize("less", ["comparisons", "elements", "ranks"])
def test_a_check_that_passed_with_less_than_it_owes_did_not_run(tmp_path: Path, less: str) -> None:
    items = {
        "comparisons": [evidence(r) for r in range(4)] * 39,
        "elements": [evidence(r, elements=1) for r in range(4)] * 40,
        "ranks": [evidence(r) for r in range(3)] * 60,
    }[less]
    report = merged(tmp_path, line(node("denoise", MODES, 4, "tensor"), evidence=items))
    check = row(report, node("denoise", MODES, 4, "tensor"))
    assert check["outcome"] == "not run"
    assert check["reason"] == "passed with less evidence than it owes"
    assert report["coverage"]["passed"] == 0
    assert len(report["coverage"]["missing"]) == 152


def test_a_check_that_the_report_did_not_know_is_added(tmp_path: Path) -> None:
    report = merged(tmp_path, line("tests/unit/test_a.py::test_b[world=2]"), line("tests/unit/test_a.py::test_c"))
    check = row(report, "tests/unit/test_a.py::test_b[world=2]")
    assert (check["name"], check["world"], check["required"], check["owed"]) == ("test_b", 2, None, None)
    assert row(report, "tests/unit/test_a.py::test_c")["world"] is None
    assert report["coverage"]["passed"] == 0


def test_a_required_check_that_only_the_list_of_missing_ones_knew_is_counted(tmp_path: Path) -> None:
    start = in_progress()
    start["checks"] = []
    begin(tmp_path, start)
    (tmp_path / "journal.jsonl").write_text(line(node("transport", "gather_takes_every_rank_its_exact_rows", 4, None)))
    report = read_report(tmp_path)
    assert (report["checks"][0]["required"], report["checks"][0]["world"]) == (True, 4)
    assert report["coverage"]["passed"] == 1


def test_two_names_that_could_be_one_row_stay_two(tmp_path: Path) -> None:
    check = node("transport", "gather_takes_every_rank_its_exact_rows", 4, None)
    report = merged(tmp_path, line(check), line(check.replace("tests/gloo", "other/place")))
    assert len(report["checks"]) == 153


def test_a_last_line_cut_short_is_forgiven_at_every_byte(tmp_path: Path) -> None:
    first, second = ended(), line(node("denoise", MODES, 4, "ulysses"), evidence=[evidence()])
    begin(tmp_path, in_progress())
    for length in range(0, len(second) - 1, 7):
        (tmp_path / "journal.jsonl").write_text(first + second[:length])
        report = read_report(tmp_path)
        assert report["verdict"]["reasons"][1:] == ["1 check had ended: 1 passed"], length
    (tmp_path / "journal.jsonl").write_text(first + second.rstrip("\n"))
    assert "2 checks had ended" in read_report(tmp_path)["verdict"]["reasons"][1], "whole but for its newline"


BAD = {
    "no JSON": "{half\n",
    "no object": "[1]\n",
    "null": "null\n",
    "no check": '{"outcome": "passed"}\n',
    "a number for a name": line("a").replace('"a"', "3"),
    "an unknown outcome": line("a", "xfailed"),
    "a list as outcome": line("a", duration_s=1).replace('"passed"', "[]"),
    "a negative time": line("a", duration_s=-1),
    "a time that is none": line("a", duration_s="soon"),
    "an endless time": line("a", duration_s=1).replace(": 1,", ": 1e999,"),
    "a number as reason": line("a", reason=3),
    "evidence that is none": line("a", evidence=[3]),
    "evidence without its keys": line("a", evidence=[{}]),
    "fewer than no elements": line("a", evidence=[evidence(elements=-1)]),
    "a rank below zero": line("a", evidence=[evidence(-1)]),
    "deep": "[" * 100_000 + "\n",
    "bytes": "\x00\x01\n",
}


@pytest.mark.parametrize("name", BAD)
def test_any_other_line_that_cannot_be_read_is_counted(tmp_path: Path, name: str) -> None:
    report = merged(tmp_path, BAD[name], "\n", ended(), BAD[name])
    assert report["verdict"]["reasons"][1:] == [
        "1 check had ended: 1 passed",
        "journal.jsonl: 2 lines could not be read",
    ]


def test_a_difference_that_is_no_number_is_not_made_zero(tmp_path: Path) -> None:
    text = line(node("denoise", MODES, 4, "tensor"), evidence=[evidence(max_abs=0.5), evidence(max_abs=float("nan"))])
    report = merged(tmp_path, text)
    assert row(report, node("denoise", MODES, 4, "tensor"))["largest_difference"] is None
    report = merged(tmp_path, text.replace("NaN", "0.25"))
    assert row(report, node("denoise", MODES, 4, "tensor"))["largest_difference"] == 0.5


def test_evidence_that_is_no_ranks_own_names_no_rank(tmp_path: Path) -> None:
    text = line(node("denoise", MODES, 4, "tensor"), evidence=[evidence(None), evidence(3, demand="within budget")])
    check = row(merged(tmp_path, text), node("denoise", MODES, 4, "tensor"))
    assert (check["ranks"], check["comparisons"], check["exact"]) == ([3], 2, 1)


def test_a_report_that_ended_or_was_renamed_takes_no_journal(tmp_path: Path) -> None:
    write_all_forms(qualified(), tmp_path)
    (tmp_path / "journal.jsonl").write_text(ended(outcome="failed"))
    assert read_report(tmp_path) == qualified()
    begin(tmp_path, in_progress())
    (tmp_path / "journal.jsonl").write_text(ended())
    (tmp_path / "report.json").rename(tmp_path / "old.json")
    assert read_report(tmp_path / "old.json") == in_progress()


def test_the_report_itself_stays_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_text(ended())
    report = in_progress()
    assert with_journal(report, tmp_path / "journal.jsonl") != report
    assert report == in_progress()
