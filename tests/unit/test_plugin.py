"""The pytest plugin: worlds that cannot be run are usage errors, and a rank check without evidence is a failure.

Each case is a pytest of its own, in a folder of its own. Run it with: pytest tests/unit/test_plugin.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

CHECK = """
import pytest
import torch
from h3core.qualify.compare import Identical, compare

pytestmark = pytest.mark.gloo

def test_sound(world, record):
    x = torch.arange(6.0) + world
    record(compare("numbers", x, x.clone(), Identical()))
"""


@pytest.fixture
def run(pytester):
    """Run `source` in a pytest of its own, in this process: its result, and its report where one was asked for."""

    def inner(source: str, *options: str):
        pytester.makepyfile(test_it=source)
        return pytester.runpytest_inprocess("-p", "h3core.qualify.plugin", "-p", "no:cacheprovider", "-q", *options)

    return inner


def report_of(folder: Path) -> dict:
    return json.loads((folder / "report.json").read_text())


def test_a_check_runs_at_each_world_and_its_evidence_is_written(run, tmp_path):
    result = run(CHECK, "--world", "2,3", "--report-dir", str(tmp_path / "out"))
    assert result.ret == 0
    assert "2 comparisons in 2 checks, 12 elements" in result.stdout.str()
    report = report_of(tmp_path / "out")
    assert report["worlds"] == [2, 3]
    assert list(report["checks"]) == ["test_it.py::test_sound[world=2]", "test_it.py::test_sound[world=3]"]
    for check in report["checks"].values():
        assert check["outcome"] == "passed"
        assert check["evidence"][0]["elements"] == 6


@pytest.mark.parametrize("body", ["    pass", "    record([])"])
def test_a_check_that_records_no_evidence_fails(run, tmp_path, body):
    source = CHECK + f"\ndef test_empty(world, record):\n{body}\n"
    result = run(source, "--world", "2", "--report-dir", str(tmp_path / "out"))
    assert result.ret == 1
    assert "passed without recording evidence of what it compared" in result.stdout.str()
    report = report_of(tmp_path / "out")
    assert report["checks"]["test_it.py::test_empty[world=2]"]["outcome"] == "failed"
    assert report["pytest_exit_status"] == 1


def test_evidence_of_another_kind_is_refused(run, tmp_path):
    source = CHECK + "\ndef test_wrong(world, record):\n    record(5)\n"
    result = run(source, "--world", "2")
    assert result.ret == 1
    assert "got int, expected Evidence or a list of it" in result.stdout.str()


def test_a_broken_fixture_is_an_error_in_the_report(run, tmp_path):
    source = CHECK + "\n@pytest.fixture\ndef broken():\n    raise OSError('no disk')\n\ndef test_b(broken):\n    pass\n"
    result = run(source, "--world", "2", "--report-dir", str(tmp_path / "out"))
    assert result.ret == 1
    report = report_of(tmp_path / "out")
    assert report["checks"]["test_it.py::test_b"]["outcome"] == "error"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--world", "10"), "expected 2 to 9: the test model has 9 heads"),
        (("--world", "1"), "world 1 always runs"),
        (("--world", "0"), "expected 2 to 9"),
        (("--world", "two"), "got 'two', expected N or N,N"),
        (("--world", ""), "got '', expected N or N,N"),
        (("--rank-timeout", "0"), "expected a positive number of seconds"),
        (("--report-dir", "/dev/null"), "report-dir"),
    ],
)
def test_options_that_cannot_be_met_are_usage_errors(run, tmp_path, options, message):
    result = run(CHECK, *options)
    assert result.ret == 4, result.stderr.str()
    assert message in result.stderr.str()
    assert "Traceback" not in result.stderr.str()


def test_a_test_without_the_marker_keeps_its_own_world(run):
    source = "import pytest\n\n@pytest.mark.parametrize('world', [7])\ndef test_own(world):\n    assert world == 7\n"
    assert run(source).ret == 0


def test_an_older_report_is_not_taken_for_this_runs(run, tmp_path):
    (tmp_path / "report.json").write_text('{"pytest_exit_status": 0}')
    source = (
        "import json, pathlib\n"
        f"def test_now():\n    report = json.loads(pathlib.Path({str(tmp_path / 'report.json')!r}).read_text())\n"
        "    assert report['state'] == 'in progress' and report['pytest_exit_status'] is None\n"
    )
    assert run(source, "--report-dir", str(tmp_path)).ret == 0
    assert report_of(tmp_path)["state"] == "ended"


def test_xdist_is_refused_for_rank_checks(run, tmp_path):
    for options in (("-m", "gloo"), ("--report-dir", str(tmp_path))):
        result = run(CHECK, "-n", "2", *options)
        assert result.ret == 4
        assert "leave -n out" in result.stderr.str()
