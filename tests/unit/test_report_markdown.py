"""report.md: what it says, in which order, and that no string of a run is read as markup.

A pass means: the first line is the whole verdict; what failed comes next, once a problem; long lists are folded; a
Markdown parser finds in a hostile report the same structure as in a harmless one.
Run: pytest tests/unit/test_report_markdown.py
"""

from __future__ import annotations

import re

import pytest

from h3core.qualify.report.compare import compare_reports
from h3core.qualify.report.markdown import markdown, sections
from tests.unit.rendered import Page
from tests.unit.sample_hostile import hostile, tamed
from tests.unit.sample_reports import SAMPLES, gpu_box, in_progress, incomplete, not_qualified, qualified, unit_run


def headings(source: str) -> list[str]:
    return [line for line in source.splitlines() if re.match("#{1,6} ", line)]


@pytest.mark.parametrize("name", SAMPLES)
def test_the_first_line_is_the_whole_verdict_and_headings_start_at_three(name: str) -> None:
    report = SAMPLES[name]()
    source = markdown(report)
    first = source.partition("\n")[0]
    assert first.startswith("### ")
    coverage = report["coverage"]
    for part in (
        report["verdict"]["word"],
        f"{coverage['passed']} of {coverage['required']} required checks passed",
        "2026-11-30",
    ):
        assert part in first
    assert all(line.startswith("###") for line in headings(source))
    assert source.endswith("\n")
    assert not source.endswith("\n\n")


def test_the_first_line_says_what_narrowed_the_run() -> None:
    assert "narrowed by -k 'blocks' (command line)" in markdown(incomplete()).partition("\n")[0]


def test_the_order_is_that_in_which_it_is_needed() -> None:
    report = not_qualified()
    report["comparison"] = compare_reports(qualified(), report, where="old/report.json")
    names = [re.split("[ :]", line.lstrip("# ✗"))[0] for line in headings(markdown(report)) if line[3] == " "]
    assert names == [
        "NOT", "What", "Coverage", "Controls", "Checks", "Preflight", "Machine", "Tables", "Compared"
    ]  # fmt: skip


def test_a_failure_has_where_why_meaning_next_and_one_command() -> None:
    report = not_qualified()
    source = markdown(report)
    part = source[source.index("### What failed: 3 failures, 2 problems") : source.index("### Coverage")]
    assert part.count("#### ") == 2
    first = part[: part.index("#### ✗ rank 2 was killed")]
    failure = report["failures"][0]
    for said in (
        "- **Where:** worlds 4 and 8, mode tensor, ranks 3 and 7",
        "- **Why:** interconnect: links between ranks",
        f"- **Meaning:** {failure['meaning']}",
        f"- **Next:** {failure['action']}",
        f"```text\n{failure['reproduce']}\n```",
        f"\n\nChecks:\n\n- `{failure['check']}`\n- `{report['failures'][1]['check']}`\n\n",
    ):
        assert said in first
    assert first.count("Reproduce") == 1
    assert first.count(failure["problem"].replace("[", "\\[").replace("]", "\\]")) == 1
    assert part.count("<details><summary>Error in full") == 2


def test_many_checks_of_one_problem_are_folded() -> None:
    report = not_qualified()
    report["failures"] = [report["failures"][0] | {"check": f"a.py::test_{n}"} for n in range(30)]
    part = markdown(report).partition("### Coverage")[0]
    assert part.count("#### ") == 1
    before, _, after = part.partition("<details><summary>and 27 more</summary>")
    assert before.count("- `a.py::test_") == 3
    assert after.count("- `a.py::test_") == 27


def test_very_many_problems_are_cut_and_counted() -> None:
    report = not_qualified()
    report["failures"] = [report["failures"][0] | {"problem": f"problem {n}", "meaning": f"{n}"} for n in range(50)]
    source = markdown(report)
    assert source.count("#### ") == 20
    assert "... and 30 more problems, in report.json." in source


def test_required_checks_that_did_not_run_are_named_by_reason() -> None:
    source = markdown(incomplete())
    assert "152 required, 44 passed, 0 failed, 108 did not run." in source
    part = source[source.index("Did not run, deselected by -k 'blocks' (108 checks)") : source.index("### Controls")]
    assert part.count("- `test_") == 108
    assert "<details><summary>and 105 more</summary>" in part


def test_an_incomplete_run_says_what_to_do_beside_its_command() -> None:
    verdict = sections(incomplete())[0].text
    assert "**Next:** Run it again without what narrowed it." in verdict
    assert "```text\npython -m pytest -m gloo -k blocks --report-dir=report\n```" in verdict
    assert "This is not a pass." in verdict


def test_many_reasons_are_cut_and_counted() -> None:
    report = incomplete()
    report["verdict"]["reasons"] = [f"reason {n}" for n in range(9)]
    assert "- reason 4\n- 4 more reasons\n" in sections(report)[0].text


def test_checks_are_one_row_a_name_with_a_mark_a_world() -> None:
    source = markdown(not_qualified())
    assert "| check | W=2 | W=4 | W=6 | W=8 | comparisons | elements | seconds |" in source
    row = next(line for line in source.splitlines() if line.startswith("| `test_real_ranks_equal_virtual"))
    assert row.split(" | ")[1:5] == ["✓", "✗\u00a01/2", "✓", "✗\u00a01/2"]
    part = source[source.index("### Checks") : source.index("<details><summary>Every check (152)")]
    assert part.count("\n| `") == 17


def test_the_full_table_is_folded_and_complete() -> None:
    report = incomplete()
    source = markdown(report)
    full = source[source.index("<details><summary>Every check (152)") : source.index("### Preflight")]
    for check in report["checks"]:
        assert f"| `{check['check']}` |" in full
    assert full.count("! not run") == 108


def test_missed_controls_are_open_and_caught_ones_folded() -> None:
    report = qualified()
    assert "### Controls: 5 of 5 planted faults caught\n\n<details>" in markdown(report)
    report["controls"]["list"][2] |= {"caught": False, "how": "nothing was seen"}
    report["controls"]["caught"] = 4
    source = markdown(report)
    assert "### Controls: 4 of 5 planted faults caught\n\n- ✗ **not caught**: a partial left out at world 8" in source


def test_preflight_shows_problems_and_folds_what_is_well() -> None:
    source = markdown(not_qualified())
    part = source[source.index("### Preflight: 1 problem, 1 to look at, 3 ok") : source.index("### Machine")]
    head, _, folded = part.partition("<details><summary>3 ok</summary>")
    assert head.index("| ✗ problem | memory |") < head.index("| ! warning | cores |")
    assert folded.count("✓ ok") == 3


def test_the_machine_has_its_gpus_and_ranks() -> None:
    source = markdown(gpu_box())
    assert "| 7 | NVIDIA H200 | 140.4 GiB | 9.0 | GPU-5f3c07aa" in source
    assert "| 8 | 0-7 | nccl | cuda:0 GPU-5f3c00aa" in source
    assert "| 8 | 0-7 | gloo | cpu, CPUs 0-1 |" in markdown(qualified())
    assert "No rank gave an account of itself." in markdown(in_progress())


def test_a_comparison_says_what_got_worse_and_the_verdict_points_to_it() -> None:
    report = not_qualified()
    report["comparison"] = compare_reports(qualified(), report, where="old/report.json")
    source = markdown(report)
    assert "### Compared with `old/report.json`" in source
    assert "**Worse:**" in source
    assert "**Better:** nothing" in source
    worse = len(report["comparison"]["worse"])
    assert f"**Worse than the earlier run** in {worse} points" in sections(report)[0].text


def test_a_run_without_verdict_has_no_empty_parts() -> None:
    source = markdown(unit_run())
    assert "NO VERDICT" in source
    assert "### Controls" not in source
    assert "### What failed" not in source


def test_unknown_numbers_are_said_to_be_unknown() -> None:
    report = in_progress()
    report["coverage"] |= dict.fromkeys(("required", "passed", "failed", "not_run"))
    report["run"]["duration_s"] = None
    source = markdown(report)
    assert "unknown of unknown required checks passed" in source
    assert "unknown time" in source
    assert "None" not in source


def test_a_hostile_run_changes_no_structure() -> None:
    source = markdown(hostile())
    page = Page(source)
    assert not set(page.tags) - {
        "h3", "h4", "p", "ul", "li", "strong", "pre", "code", "details", "summary", "table", "thead", "tbody", "tr",
        "th", "td", "span",
    }  # fmt: skip
    calm = Page(markdown(tamed(hostile())))
    page.tags.pop("span")
    assert page.tags == calm.tags
    assert "<script" not in re.sub(r"```.*?```|`[^`\n]*`", "", source, flags=re.S)
    assert all(sign not in source for sign in "\x1b\x00\u202e\r")
