"""`python -m h3core qualify`: the pytest call that it builds, and what it believes of that pytest's end.

Run it with: pytest tests/unit/test_qualify_cli.py
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from h3core.qualify import cli
from h3core.qualify.options import OPTIONS, PATHS
from h3core.qualify.report.files import begin, write_all_forms
from tests.unit.sample_reports import in_progress, incomplete, qualified, unit_run

ROOT = Path(__file__).parents[2]


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    return parser.parse_args(["qualify", *words], argparse.Namespace(rest=[]))


def test_the_tier_and_every_option_reach_pytest():
    args = parsed("gloo", "--world", "2,4", "--mode=tensor", "--share-gpus", "--seed", "7")
    args.rest = ["-k", "x"]
    command = cli.pytest_command(args, Path("/home/me"), ROOT)
    assert command[:4] == ["-m", "pytest", "-m", "gloo"]
    assert {"--world=2,4", "--mode=tensor", "--share-gpus", "--seed=7", "--report-dir=/home/me/report"} <= set(command)
    assert command[-3:] == ["-k", "x", "tests/gloo"]


@pytest.mark.parametrize("flag", PATHS)
@pytest.mark.parametrize("joined", [True, False])
def test_paths_are_the_callers_and_written_with_an_equals_sign(flag, joined):
    words = [f"{flag}=here/x"] if joined else [flag, "here/x"]
    assert f"{flag}=/home/me/here/x" in cli.pytest_command(parsed("gloo", *words), Path("/home/me"), ROOT)


def test_the_command_has_every_option_of_the_plugin():
    args = vars(parsed("gloo"))
    assert {option.name for option in OPTIONS} <= set(args)


def test_only_a_finished_report_of_this_run_has_a_say(tmp_path):
    said, problem = cli.ending(tmp_path, None, "gloo")
    assert said is None
    assert "no such file" in problem
    begin(tmp_path, in_progress())
    assert cli.ending(tmp_path, None, "gloo") == (None, "its report was never finished")
    report = qualified()
    write_all_forms(report, tmp_path)
    assert cli.ending(tmp_path, "another", "gloo") == (0, "its report says QUALIFIED (software, CPU)")
    assert cli.ending(tmp_path, report["run"]["id"], "gloo") == (None, "the report is an earlier run's")
    write_all_forms(incomplete(), tmp_path)
    assert cli.ending(tmp_path, None, "gloo") == (10, "its report says INCOMPLETE")


@pytest.mark.parametrize(
    ("code", "end", "line"),
    [
        (10, "os._exit(0)", "INCOMPLETE: pytest ended with exit code 0, and "),
        (10, "os.kill(os.getpid(), 9)", "INCOMPLETE: pytest was killed by SIGKILL, and "),
        (10, "os._exit(77)", "INCOMPLETE: pytest ended with exit code 77, and "),
        (10, "os._exit(1)", "INCOMPLETE: pytest ended with exit code 1, and "),
        (10, "os._exit(10)", "INCOMPLETE: pytest ended with exit code 10, and "),
        (4, "os._exit(4)", ""),
    ],
)
def test_an_end_without_a_report_is_incomplete(tmp_path, monkeypatch, capfd, code, end, line):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "pytest_command", lambda *_: ["-c", f"import os; {end}"])
    assert cli.run(parsed("gloo")) == code
    assert capfd.readouterr().out.startswith(line)


def test_a_report_of_something_else_is_no_success(tmp_path):
    write_all_forms(unit_run(), tmp_path)
    assert cli.ending(tmp_path, None, "gloo")[0] == 10
    write_all_forms(qualified(), tmp_path)
    assert cli.ending(tmp_path, None, "nccl")[0] == 10


@pytest.mark.parametrize("words", [["-m", "not nccl"], ["-k", "x", "-mgate"]])
def test_another_marker_expression_is_refused(words, capfd):
    args = parsed("gloo")
    args.rest = words
    assert cli.run(args) == 4
    assert "-m is the tier's" in capfd.readouterr().err


def test_a_closed_stdout_is_no_traceback(tmp_path):
    command = f"{sys.executable} -m h3core report {tmp_path} >&-"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("report", "end", "code"), [(qualified, 0, 0), (qualified, 1, 10), (incomplete, 10, 10), (incomplete, 0, 10)]
)
def test_the_code_and_the_report_must_say_the_same(tmp_path, monkeypatch, report, end, code):
    monkeypatch.chdir(tmp_path)
    write = (
        "from tests.unit.sample_reports import *; from h3core.qualify.report.files import *; from pathlib import *; "
    )
    write += f"import os; write_all_forms({report.__name__}(), Path({str(tmp_path)!r}, 'report')); os._exit({end})"
    (tmp_path / "report").mkdir()
    monkeypatch.setattr(cli, "pytest_command", lambda *_: ["-c", write])
    assert cli.run(parsed("gloo")) == code


CHILD = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))
open("up", "w").close()
time.sleep(60)
"""


@pytest.fixture
def child(tmp_path) -> Path:
    (tmp_path / "child.py").write_text(CHILD)
    return tmp_path


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 60
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(file)
        time.sleep(0.02)


def test_sigterm_is_handed_on(child):
    def terminate() -> None:
        wait_for(child / "up")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=terminate).start()
    assert cli.supervised([sys.executable, "child.py"], child, dict(os.environ)) == 42


def test_ctrl_c_is_for_pytest_and_its_code_is_kept(child):
    code = "from h3core.qualify.cli import supervised as s; import os, sys; from pathlib import Path; "
    code += "print(s([sys.executable, 'child.py'], Path('.'), dict(os.environ)))"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=child,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    ) as process:
        wait_for(child / "up")
        os.killpg(process.pid, signal.SIGINT)
        assert process.communicate(timeout=60)[0].strip() == str(-signal.SIGINT)
