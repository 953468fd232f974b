"""A qualification from end to end: exit code, last line and report of whole, failing and thinned-out runs.

A pass means that this suite cannot be green by accident.

Run it with: pytest tests/unit/test_qualification.py
"""

from __future__ import annotations

import re
import time

import pytest

from tests.unit.qualify_runs import GLOO, last_line, outcome


def test_a_whole_run_is_qualified(suite):
    result = suite.run_apart(*GLOO)
    assert result.returncode == 0, result.stdout
    line = last_line(result)
    assert line.startswith(
        "QUALIFIED (software, CPU); worlds 1, 2; both modes; 6 of 6 required checks, controls 1 of 1"
    )
    assert line.endswith("narrowed by --world=2 (command line); report: report/report.html")
    report = suite.report()
    assert outcome(suite) == ("qualified", 0)
    assert line.startswith(report["verdict"]["line"])
    assert report["coverage"] | {"missing": 0} == {"required": 6, "passed": 6, "failed": 0, "not_run": 0, "missing": 0}
    assert report["controls"]["list"][0]["how"] == "the digest differed"
    for name in ("report.md", "report.html", "junit.xml", "journal.jsonl"):
        assert (suite.folder / "report" / name).stat().st_size


def test_every_default_world_is_required(suite):
    result = suite.run("-m", "gloo")
    assert last_line(result).startswith(
        "QUALIFIED (software, CPU); worlds 1, 2, 4, 6, 8; both modes; 15 of 15 required"
    )


def test_a_failing_check_is_not_qualified_and_says_what_to_do(suite):
    suite.replace("test_a.py", 'compare(f"loop {mode}", X + world, X', 'compare(f"loop {mode}", X + world, X + 1')
    result = suite.run(*GLOO)
    assert result.returncode == 1
    assert last_line(result).startswith("NOT QUALIFIED: 2 checks failed; ")
    for words in ("problem:   ComparisonError: loop", "means:", "next:", "reproduce: python -m pytest"):
        assert words in result.stdout
    failure = suite.report()["failures"][0]
    assert failure["fault_class"] == "stack"
    assert failure["reproduce"] == "python -m pytest 'test_a.py::test_loop[world=2-ulysses]' --world=2"
    again = suite.run(*failure["reproduce"].replace("'", "").split()[3:])
    assert again.returncode == 1
    assert "1 failed" in again.stdout


@pytest.mark.parametrize(
    ("name", "old", "new", "why"),
    [
        ("test_a.py", "pytestmark = pytest.mark.gloo", "pytestmark = [pytest.mark.gloo, pytest.mark.skip('no time')]",
         "skipped: no time"),
        ("test_a.py", "def test_bytes(", "def test_other(", "not collected"),
        ("test_a.py", "for _ in range(2)]", "for _ in range(1)]", "1 comparisons, 2 owed"),
        ("test_a.py", "X = torch.arange(6.0)", "X = torch.arange(5.0)", "10 elements compared, 12 owed"),
        ("test_a.py", "    record(compare(f", "    str(compare(f", "0 comparisons, 1 owed"),
        ("test_a.py", "def test_bytes(world, record):", "def test_bytes(world, record, nothing):",
         "broke before it could decide"),
        ("test_a.py", "def test_bytes(", "@pytest.mark.xfail\ndef test_bytes(", "marked as expected to fail"),
        ("test_b.py", '["x", "y"]', '["x"]', "not collected"),
        ("test_b.py", "@pytest.mark.gloo\n", "", "not collected"),
        ("test_c.py", '["flip"]', '["flop"]', "not collected"),
    ],
)  # fmt: skip
def test_a_check_that_was_lost_in_any_way_is_incomplete_by_name(suite, name, old, new, why):
    suite.replace(name, old, new)
    result = suite.run(*GLOO)
    assert result.returncode == 10, result.stdout
    line = last_line(result)
    assert line.startswith("INCOMPLETE: ")
    assert why in line
    assert re.search(r"required checks did not run \(first: test_[abc].py::test_", line)
    assert outcome(suite) == ("incomplete", 10)
    assert suite.report()["coverage"]["missing"]


def test_two_checks_of_one_name_are_incomplete(suite):
    (suite.folder / "sub").mkdir()
    text = (suite.folder / "test_a.py").read_text()
    suite.write("sub/test_a.py", text)
    suite.write("sub/__init__.py", "")
    suite.write("test_a.py", text.replace("def test_bytes(world, record):", "def test_bytes(world, record, nothing):"))
    result = suite.run(*GLOO)
    assert result.returncode == 10, result.stdout
    assert last_line(result).startswith("INCOMPLETE: two checks answer to test_a.py::test_bytes[world=2], one of them ")


def test_everything_skipped_is_incomplete(suite):
    for name in ("test_a.py", "test_b.py", "test_c.py"):
        suite.write(name, (suite.folder / name).read_text() + "\npytest.skip('no', allow_module_level=True)\n")
    result = suite.run(*GLOO)
    assert result.returncode == 10
    assert last_line(result).startswith("INCOMPLETE: 6 of 6 required checks did not run")


@pytest.mark.parametrize(
    ("words", "environment", "by"),
    [
        (("-k", "bytes"), {}, "-k bytes"),
        ((), {"PYTEST_ADDOPTS": "-k bytes"}, "PYTEST_ADDOPTS=-k bytes"),
        (("--deselect=test_a.py::test_loop",), {}, "--deselect"),
        (("test_a.py",), {}, "paths test_a.py"),
        (("-m", "gloo and world2"), {}, "-m 'gloo and world2'"),
    ],
)
def test_what_narrows_a_run_is_in_the_line(suite, words, environment, by):
    result = suite.run(*GLOO, *words, **environment)
    line = last_line(result)
    assert by in line
    if "world2" in by:  # world 1 is not asked for, and so not owed
        assert result.returncode == 0
        assert line.startswith("PASSED, REDUCED: no world 1; worlds 2; both modes; 4 of 4 required checks")
    else:
        assert result.returncode == 10
        assert line.startswith("INCOMPLETE: ")


def test_a_mode_alone_is_passed_reduced(suite):
    result = suite.run(*GLOO, "--mode=ulysses")
    assert result.returncode == 0
    assert last_line(result).startswith("PASSED, REDUCED: mode ulysses; worlds 1, 2; mode ulysses; 5 of 5 required")


def test_a_variable_reduces_as_an_option_does_and_is_named(suite):
    result = suite.run("-m", "gloo", H3_MODE="tensor", H3_WORLD_SIZE="2")
    assert last_line(result).startswith("PASSED, REDUCED: mode tensor")
    assert "narrowed by --world=2 (H3_WORLD_SIZE), --mode=tensor (H3_MODE)" in last_line(result)


def test_nothing_collected_is_incomplete(suite):
    result = suite.run(*GLOO, "-k", "nosuchcheck")
    assert result.returncode == 10
    assert last_line(result).startswith("INCOMPLETE: 6 of 6 required checks did not run")


def test_an_import_error_in_a_test_file_is_incomplete_and_keeps_pytests_code(suite):
    suite.write("test_d.py", "import no_such_module\n")
    result = suite.run(*GLOO)
    assert result.returncode == 2
    assert last_line(result).startswith("INCOMPLETE: test_d.py could not be collected: ModuleNotFoundError")
    assert outcome(suite) == ("incomplete", 2)


def test_a_missed_control_is_not_qualified(suite):
    suite.replace("test_c.py", 'record(equal_facts("caught", 1, 1))', 'record(equal_facts("caught", 0, 1))')
    result = suite.run(*GLOO)
    assert result.returncode == 1
    assert "controls 0 of 1 caught" in last_line(result)
    assert suite.report()["controls"]["list"][0]["caught"] is False


@pytest.mark.parametrize(
    ("task", "code", "problem", "fault_class"),
    [
        ("total", 0, None, None),
        ("killed", 1, "rank 1 died: killed by SIGKILL", "stack"),
        ("asleep", 1, "rank 1 hung: no answer within 3 s", "interconnect"),
    ],
)
def test_ranks_that_die_or_never_come_are_named_within_the_rank_timeout(suite, task, code, problem, fault_class):
    suite.pooled(task)
    started = time.monotonic()
    result = suite.run_apart(*GLOO, "--rank-timeout=3")
    assert time.monotonic() - started < 60
    assert result.returncode == code, result.stdout
    report = suite.report()
    if problem is None:
        assert report["verdict"]["word"] == "PASSED, REDUCED: no negative controls"
        assert [(p["rank"], p["world_seen"], p["backend"]) for p in report["presence"]] == [
            (0, 2, "gloo"),
            (1, 2, "gloo"),
        ]
        return
    (failure,) = report["failures"]
    assert problem in failure["problem"]
    assert (failure["fault_class"], failure["ranks"]) == (fault_class, [1])
    assert last_line(result).startswith("NOT QUALIFIED: 1 check failed")


def test_evidence_from_some_ranks_only_is_incomplete(suite):
    suite.pooled("total")
    suite.replace("test_a.py", "record(pool.run(total))", "record(pool.run(total)[:1])")
    assert last_line(suite.run_apart(*GLOO)).startswith(
        "INCOMPLETE: 1 of 1 required checks did not run (first: test_a.py::test_sum[world=2]: passed with too little "
        "evidence: no evidence from ranks [1] of 2)"
    )
