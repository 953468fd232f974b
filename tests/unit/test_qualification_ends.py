"""How a qualification ends, however it ends: its report says what was seen, and never more.

Run it with: pytest tests/unit/test_qualification_ends.py
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from h3core.qualify.report.stable import stable
from tests.unit.qualify_runs import GLOO, Suite, last_line, outcome


def started(suite: Suite, source: str) -> subprocess.Popen[str]:
    """A run that has come to the middle of `test_bytes`."""
    suite.replace(
        "test_a.py", "    record([compare(", f"    open('here', 'w').close()\n    {source}\n    record([compare("
    )
    process = subprocess.Popen(
        suite.command(*GLOO),
        cwd=suite.folder,
        env=suite.environment(),
        stdout=subprocess.PIPE,
        text=True,
        # A shell starts background jobs with SIGINT ignored, and so may the one that runs this.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while not (suite.folder / "here").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    return process


@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")])
def test_an_interrupted_run_is_incomplete_and_leaves_its_report(suite, number, name):
    process = started(suite, "import time; time.sleep(60)")
    time.sleep(0.3)
    process.send_signal(number)
    time.sleep(0.05 if number == signal.SIGINT else 0.0)
    process.send_signal(number)  # an impatient hand, or a whole group of processes that is told to end
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 2, output
    assert output.rstrip().splitlines()[-1].startswith(f"INCOMPLETE: interrupted by {name}; ")
    assert outcome(suite) == ("incomplete", 2)
    assert suite.report()["run"]["state"] == "ended"


def test_a_killed_run_leaves_incomplete_in_progress_and_what_had_ended(suite):
    suite.write("test_0.py", "import pytest\n@pytest.mark.gloo\ndef test_first():\n    pass\n")
    process = started(suite, "import time; time.sleep(60)")
    process.kill()
    process.communicate()
    report = suite.report()
    assert (report["run"]["state"], report["verdict"]["word"]) == ("in progress", "INCOMPLETE")
    journal = [json.loads(line) for line in (suite.folder / "report" / "journal.jsonl").read_text().splitlines()]
    assert [(line["check"], line["outcome"]) for line in journal] == [("test_0.py::test_first", "passed")]


def test_two_runs_do_not_share_a_folder(suite):
    process = started(suite, "import time; time.sleep(60)")
    try:
        first = suite.report()["run"]["id"]
        for words in ((), ("--wrold=2", "--report-dir=report")):
            assert suite.run(*GLOO, *words).returncode == 4
        assert "another run is writing its report there" in suite.run(*GLOO).stderr
        assert suite.report()["run"]["id"] == first
    finally:
        process.kill()
        process.communicate()
    suite.replace("test_a.py", "time.sleep(60)", "pass")
    assert suite.run(*GLOO).returncode == 0  # a killed run holds nothing


def test_an_older_report_is_replaced_before_the_first_check(suite):
    assert suite.run(*GLOO).returncode == 0
    process = started(suite, "import time; time.sleep(60)")
    try:
        assert outcome(suite) == ("incomplete", 10)
        for name in ("report.md", "report.html", "junit.xml"):
            assert "QUALIFIED (software" not in (suite.folder / "report" / name).read_text()
    finally:
        process.kill()
        process.communicate()


def test_a_report_that_cannot_be_written_at_the_end_is_no_success(suite):
    suite.replace(
        "test_c.py",
        "    record(",
        "    import shutil\n    shutil.rmtree('report'); open('report', 'x').close()\n    record(",
    )
    result = suite.run(*GLOO)
    assert result.returncode == 10
    assert last_line(result).startswith("INCOMPLETE: ")
    assert "no report: " in last_line(result)


def test_a_full_disk_at_the_end_is_said_and_is_no_success(suite):
    before = "    import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (999, 999))\n"
    suite.replace("test_c.py", "    record(", before + "    record(")
    result = suite.run_apart(*GLOO)
    assert result.returncode == 10, result.stdout
    assert "File too large" in last_line(result)
    assert "no report: " in last_line(result)
    assert suite.report()["verdict"]["outcome"] == "incomplete"


def test_github_gets_a_summary_and_annotations(suite, tmp_path):
    suite.replace("test_c.py", 'record(equal_facts("caught", 1, 1))', 'record(equal_facts("caught", 0, 1))')
    summary = tmp_path / "summary.md"
    result = suite.run(*GLOO, GITHUB_ACTIONS="true", GITHUB_STEP_SUMMARY=str(summary))
    assert "NOT QUALIFIED" in summary.read_text()
    assert "::error" in result.stdout
    assert last_line(result).startswith("NOT QUALIFIED")


def test_the_same_run_twice_gives_the_same_report_but_for_times_and_ids(suite):
    reports = []
    for _ in range(2):
        suite.run(*GLOO)
        reports.append(stable(suite.report()))
    assert reports[0] == reports[1]


def test_compare_says_what_got_worse(suite):
    assert suite.run(*GLOO, "--report-dir=first").returncode == 0
    suite.replace("test_a.py", "for _ in range(2)]", "for _ in range(1)]")
    suite.run(*GLOO, "--compare=first")
    comparison = suite.report()["comparison"]
    assert comparison["comparable"] is True
    assert any("test_bytes" in line for line in comparison["worse"])


def test_a_conftest_that_cannot_be_imported_is_incomplete(suite):
    assert suite.run(*GLOO).returncode == 0
    (suite.folder / "sub").mkdir()
    suite.write("sub/conftest.py", "import no_such_module\n")
    suite.write("sub/test_z.py", "def test_z():\n    pass\n")
    result = suite.run_apart(*GLOO)
    assert result.returncode in (2, 3, 4), result.stdout
    assert outcome(suite) == ("incomplete", result.returncode)
    assert last_line(result).startswith("INCOMPLETE: ")


def test_a_failure_of_pytest_itself_is_incomplete_and_keeps_its_code(suite):
    conftest = (suite.folder / "conftest.py").read_text()
    suite.write("conftest.py", conftest + "\ndef pytest_runtest_logreport(report):\n    raise OSError('broken')\n")
    result = suite.run(*GLOO)
    assert result.returncode == 3
    assert last_line(result).startswith("INCOMPLETE: pytest itself failed")
    assert outcome(suite) == ("incomplete", 3)


def test_a_check_that_ends_the_process_leaves_incomplete(suite):
    suite.replace("test_c.py", "    record(", "    import os\n    os._exit(0)\n    record(")
    result = suite.run_apart(*GLOO)
    assert result.returncode == 0  # nothing can be done about that: the report says what it is worth
    assert outcome(suite) == ("incomplete", 10)
    assert suite.report()["run"]["state"] == "in progress"
    assert "QUALIFIED" not in result.stdout


def test_a_run_ends_with_its_report_when_its_supervisor_is_killed(suite):
    code = "import os, subprocess, sys, time\n"
    code += "os.environ['H3CORE_SUPERVISOR'] = str(os.getpid())\nsubprocess.Popen(sys.argv[1:])\ntime.sleep(60)\n"
    before = "    open('here', 'w').close()\n    import time\n    time.sleep(60)\n"
    suite.replace("test_a.py", "    record([compare(", before + "    record([compare(")
    supervisor = subprocess.Popen(
        [sys.executable, "-c", code, *suite.command(*GLOO)],
        cwd=suite.folder,
        env=suite.environment(),
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not (suite.folder / "here").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    supervisor.kill()
    supervisor.wait()
    while suite.report()["run"]["state"] != "ended" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert outcome(suite) == ("incomplete", 2)
    assert suite.report()["verdict"]["reasons"][0] == "interrupted by SIGTERM"
