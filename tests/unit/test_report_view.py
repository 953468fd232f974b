"""What all forms of a report share: words, harmless strings, identities of checks, groups and the matrix.

A pass means: nothing in a string can act, one check is known under both its names, one problem is said once, and a
check that did not run shows in the matrix at its world.
Run: pytest tests/unit/test_report_view.py
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from h3core.qualify.report import text, view
from h3core.qualify.report.charts import CELL, strip, tiles
from h3core.qualify.report.identity import Known, test_name, world_of
from h3core.qualify.report.matrix import Cell, matrix, summary, unlisted
from tests.unit.sample_hostile import HOSTILE
from tests.unit.sample_reports import gpu_box, in_progress, incomplete, not_qualified, qualified, unit_run

test_name.__test__ = False  # type: ignore[attr-defined]

# --- text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x9b1mbold", "bold"),
        ("\x1b]0;title\x07after", "after"),
        ("\x1b]0;title\x1b\\after", "after"),
        ("\x1b]never ended\nnext", "]never ended\nnext"),
        ("a\x00b\x08c\x7fd\ufffee", "abcde"),
        ("a\r\nb\rc\u2028d\te", "a\nb\nc\nd\te"),
        ("\u202egnp.exe", "gnp.exe"),
        ("\ud800lone", "lone"),
        ("ümlaut \U0001f600", "ümlaut \U0001f600"),
    ],
)
def test_strings_lose_what_is_no_text(raw: str, clean: str) -> None:
    assert text.clean(raw) == clean
    assert text.cleaned({raw: [raw, 1, None]}) == {clean: [clean, 1, None]}


def test_times_sizes_and_lists_read_as_people_say_them() -> None:
    assert [text.seconds(s) for s in (None, 0.004, 9.99, 9.996, 59.96, 271.4, 3599.7, 7260)] == [
        "unknown time", "0.00 s", "9.99 s", "10.0 s", "1 min 00 s", "4 min 31 s", "1 h 00 min", "2 h 01 min"
    ]  # fmt: skip
    assert [text.size(n) for n in (None, 2**20, 2**30 * 3 // 2)] == ["unknown", "1.0 MiB", "1.5 GiB"]
    assert [text.listed(n) for n in ([], [1], [1, 2], [1, 2, 3])] == ["", "1", "1 and 2", "1, 2 and 3"]
    assert text.listed(range(12), 3) == "0, 1, 2 and 9 more"
    assert text.plural(1, "check") == "1 check"
    assert text.plural(1200, "check") == "1,200 checks"
    assert text.shortened("abcdef", 3) == "abc ... (3 more characters)"
    assert text.count(None) == "unknown"


# --- identity ----------------------------------------------------------------------------------------------------

ROWS = [
    {"check": "tests/gloo/test_a.py::test_x[world=2-ulysses]", "world": 2, "mode": "ulysses"},
    {"check": "tests/gloo/test_a.py::test_x[world=2-tensor]", "world": 2, "mode": "tensor"},
    {"check": "tests/gloo/test_a.py::test_y[released-world=2]", "world": 2, "mode": None},
    {"check": "tests/gloo/test_a.py::test_z[world=4]", "world": 4, "mode": "ulysses"},
    {"check": "tests/gloo/test_b.py::test_z", "world": 1, "mode": None},
    {"check": "tests/gloo/test_a.py::test_w[world=2-nvfp4-tensor]", "world": 2, "mode": "tensor"},
    {"check": "tests/gloo/test_c.py::test_v[world=2]", "world": 2, "mode": None},
    {"check": "tests/gloo/test_c.py::test_v[world=2-tensor]", "world": 2, "mode": "tensor"},
]


@pytest.mark.parametrize(
    ("check", "world", "mode", "row"),
    [
        ("tests/gloo/test_a.py::test_x[world=2-tensor]", 2, "tensor", 1),
        ("test_a.py::test_x[world=2-tensor]", 2, "tensor", 1),
        ("test_a.py::test_x[world=2-ulysses]", None, None, 0),
        ("test_a.py::test_y[world=2-released]", 2, None, 2),
        ("test_a.py::test_z[world=4-ulysses]", 4, "ulysses", 3),
        ("test_b.py::test_z[world=1]", 1, None, 4),
        ("tests/gloo/test_b.py::test_z", None, None, 4),
        ("test_b.py::test_z", None, None, 4),
        ("test_a.py::test_w[world=2-tensor-nvfp4]", 2, "tensor", 5),
        ("test_c.py::test_v[world=2]", 2, None, 6),
        ("test_c.py::test_v[world=2-tensor]", 2, "tensor", 7),
        ("test_a.py::test_x[world=4-tensor]", 4, "tensor", None),
        ("test_a.py::test_x[world=2-ring]", 2, "ring", None),
        ("test_a.py::test_y[world=2-tiny]", 2, None, None),
        ("test_a.py::test_z", None, None, None),
        ("test_b.py::test_y[world=2-released]", 2, None, None),
    ],
)
def test_a_check_is_found_under_pytests_name_and_the_manifests(
    check: str, world: int | None, mode: str | None, row: int | None
) -> None:
    assert Known(ROWS).find(check, world, mode) is (None if row is None else ROWS[row])


def test_a_name_without_mode_finds_the_row_that_has_only_one() -> None:
    rows = [{"check": "test_a.py::test_z[world=4-ulysses]", "world": 4, "mode": "ulysses"}]
    assert Known(rows).find("tests/gloo/test_a.py::test_z[world=4]") is rows[0]


def test_names_and_worlds_are_read_from_node_ids() -> None:
    assert test_name("tests/a.py::TestA::test_x[b::c]") == "test_x"
    assert [world_of(f"a::b[{inside}]") for inside in ("world=2", "x-world=12-y", "myworld=3", "world=0")] == [
        2, 12, None, None
    ]  # fmt: skip
    assert world_of("a::b") is None


# --- view --------------------------------------------------------------------------------------------------------


def test_one_diagnosis_is_one_group() -> None:
    report = not_qualified()
    first, second = view.groups(report)
    assert [len(group.failures) for group in (first, second)] == [2, 1]
    assert first.where == "worlds 4 and 8, mode tensor, ranks 3 and 7"
    assert first.first is report["failures"][0]
    report["failures"][1]["problem"] = "8 of 9 elements differ"
    (first, _), other = view.groups(report), report["failures"][1]
    assert first.checks == [report["failures"][0]["check"], f"{other['check']}: 8 of 9 elements differ"]
    other["fault_class"] = "hardware"
    assert len(view.groups(report)) == 3
    other["fault_class"], other["action"] = report["failures"][0]["fault_class"], "something else"
    assert len(view.groups(report)) == 3
    for failure in report["failures"]:
        failure["meaning"] = failure["action"] = ""
    assert len(view.groups(report)) == 3


def test_the_headline_stands_alone() -> None:
    assert view.headline(incomplete()) == (
        "INCOMPLETE: tier gloo, worlds 2, 4, 6, 8, modes ulysses and tensor; 44 of 152 required checks passed, 0 of 5 "
        "controls caught; 4 min 31 s, 2026-11-30 23:59:01 UTC; narrowed by -k 'blocks' (command line)"
    )


def test_the_meaning_never_calls_less_than_a_pass_a_pass() -> None:
    for make in (incomplete, in_progress):
        assert "not a pass" in view.meaning(make())
    assert "it was killed" in view.meaning(in_progress())
    assert "Do not trust" in view.meaning(not_qualified())
    assert "less was asked for" in view.meaning(gpu_box())
    assert "no GPU and no link is tested" in view.meaning(qualified())
    assert "no verdict" in view.meaning(unit_run())


def test_an_incomplete_run_says_what_to_do_next() -> None:
    assert view.next_step(qualified()) is None
    assert view.next_step(not_qualified()) is None
    assert view.next_step(incomplete()) == "Run it again without what narrowed it."
    assert "killed" in (view.next_step(in_progress()) or "")
    report = incomplete()
    report["verdict"]["narrowed"] = []
    assert "Mend" in (view.next_step(report) or "")
    report["preflight"] = not_qualified()["preflight"]
    assert view.next_step(report) == "Free memory, or raise the container's limit to 4 GiB."


def test_ranks_and_gpus_are_said_as_the_ranks_saw_them() -> None:
    assert view.presence(qualified())[-1] == ("8", "0-7", "gloo", "cpu, CPUs 0-1")
    report = gpu_box()
    assert view.presence(report)[0][3] == " and ".join(
        f"cuda:{rank} {report['machine']['gpus'][rank]['uuid']}" for rank in (0, 1)
    )
    report["presence"][0]["world_seen"] = 1
    assert view.presence(report)[0][1] == "0-1; they saw 1 ranks"
    assert view.gpus(report)[7][:4] == ("7", "NVIDIA H200", "140.4 GiB", "9.0")


def test_findings_and_controls_start_with_what_is_wrong() -> None:
    bad, well = view.preflight(not_qualified())
    assert [finding["name"] for finding in bad] == ["memory", "cores"]
    assert len(well) == 3
    report = qualified()
    report["controls"]["list"][3]["caught"] = False
    report["controls"]["list"][1]["caught"] = None
    assert [control["caught"] for control in view.unmet(report)] == [False, None]


def test_spans_join_neighbours() -> None:
    assert view.spans([8, 0, 1, 2, 3, 3]) == "0-3, 8"
    assert view.spans([]) == ""


# --- matrix ------------------------------------------------------------------------------------------------------


def test_the_matrix_has_a_line_a_name_and_a_cell_a_world() -> None:
    table = matrix(qualified())
    assert table.worlds == (2, 4, 6, 8)
    assert len(table.lines) == 17
    assert {cell.mark for line in table.lines for cell in line.cells} == {"✓"}
    assert sum(line.comparisons for line in table.lines) == sum(c["comparisons"] for c in qualified()["checks"])
    assert summary(table).endswith("all passed")


def test_a_failure_moves_its_line_up_and_is_counted_in_its_cell() -> None:
    line = matrix(not_qualified()).lines[0]
    assert line.name == "test_real_ranks_equal_virtual_ranks_bit_for_bit"
    assert [cell.mark for cell in line.cells] == ["✓", "✗\u00a01/2", "✓", "✗\u00a01/2"]
    assert line.cells[1].title == "1 passed, 1 failed"
    assert "real ranks equal virtual ranks bit for bit failed" in summary(matrix(not_qualified()))


def test_a_required_check_that_is_nowhere_but_in_the_list_of_missing_ones_has_its_cell() -> None:
    report = qualified()
    missing = {"check": "test_new.py::test_new[world=6]", "world": 6, "mode": None, "why": "not collected"}
    report["coverage"]["missing"] = [missing]
    line = next(line for line in matrix(report).lines if line.name == "test_new")
    assert [cell.state for cell in line.cells] == [None, None, "not run", None]
    assert len(unlisted(report)) == 1


def test_a_missing_check_that_is_also_among_the_checks_counts_once() -> None:
    report = incomplete()
    assert unlisted(report) == []
    for check in report["checks"]:
        if check["outcome"] == "not run":
            check["check"] = f"tests/gloo/{check['check']}"  # collected, and skipped: pytest's name there
    assert unlisted(report) == []
    assert sum(len(cell.states) for line in matrix(report).lines for cell in line.cells) == 152


@pytest.mark.parametrize(
    ("outcome", "required", "state"),
    [
        ("error", True, "not run"),
        ("error", False, "failed"),
        ("skipped", True, "not run"),
        ("skipped", False, "skipped"),
        ("not run", None, "skipped"),
        ("failed", False, "failed"),
    ],
)
def test_outcomes_amount_to_states(outcome: str, required: bool | None, state: str) -> None:
    report = qualified()
    report["checks"] = [report["checks"][0] | {"outcome": outcome, "required": required}]
    assert matrix(report).lines[0].worst == state


def test_a_cell_shows_the_worst_of_its_checks() -> None:
    assert Cell(("passed", "not run", "failed")).mark == "✗\u00a01/3"
    assert Cell(("passed", "not run")).state == "not run"
    assert Cell(()).mark == ""


def test_tiles_do_not_overlap_and_stay_inside() -> None:
    drawn = tiles(matrix(not_qualified()))
    assert len({(tile.x, tile.y) for tile in drawn.tiles}) == len(drawn.tiles) == 4 * 17
    assert max(tile.x for tile in drawn.tiles) + CELL <= drawn.left < drawn.width
    assert max(tile.y for tile in drawn.tiles) < drawn.height
    assert drawn.left_out == 0


def test_the_strip_is_full_and_longest_first() -> None:
    parts = strip(matrix(qualified()))
    assert abs(sum(part.share for part in parts) - 100) < 0.1
    assert parts[0].label == "tensor velocities stay within the error budget"
    assert all(abs(a.start + a.share - b.start) < 0.01 for a, b in pairwise(parts))
    assert parts[-1].label == "9 more"
    report = qualified()
    for check in report["checks"]:
        check["duration_s"] = None
    assert strip(matrix(report)) == ()


def test_many_names_are_cut_and_counted() -> None:
    report = qualified()
    report["checks"] = [report["checks"][0] | {"name": f"test_{n}", "check": f"a.py::test_{n}"} for n in range(100)]
    assert tiles(matrix(report)).left_out == 20


def test_the_hostile_string_is_hostile() -> None:
    assert all(part in HOSTILE for part in ("<script>", "|", "`", "\x1b", "\x00", "\r\n", "]]>", "::error::"))
