"""What stands in a folder when a run is killed, or the disk fills, while its report is written.

A pass means: at every point at which writing can end, the forms that are there are those of the report.json that is
there; after a run has begun nothing of an older run is left; a result that is not whole is taken back.
Run: pytest tests/unit/test_report_files_midway.py
"""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from h3core.atomic import OutputError
from h3core.qualify.report import files
from h3core.qualify.report.files import FORMS, begin, read_report, write_all_forms
from tests.unit.folders import listing
from tests.unit.report_folders import agrees, contents, ending, older, runs, whose
from tests.unit.sample_reports import in_progress, qualified


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forms that only say whose they are: these tests are about files."""
    monkeypatch.setattr(files, "FORMS", {name: whose for name in FORMS})


@pytest.mark.usefixtures("stubs")
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("lasting", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("step", ["begin", "end", "end without begin"])
def test_a_failure_at_any_file_leaves_a_folder_that_agrees_with_itself(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    lasting: bool,
    error: BaseException,
) -> None:
    every, real = runs(tmp_path_factory), files.write_text
    for number in range(4):
        folder = tmp_path_factory.mktemp("run")
        write_all_forms(older(), folder)
        (folder / "journal.jsonl").write_text("older\n")
        if step == "end":
            begin(folder, in_progress())
        calls: list[Path] = []

        def failing(path: Path, text: str, *, force: bool, calls: list[Path] = calls, number: int = number) -> None:
            calls.append(path)
            if len(calls) == number + 1 or (lasting and len(calls) > number):
                raise error
            real(path, text, force=force)

        monkeypatch.setattr(files, "write_text", failing)
        # Ctrl-C comes once; a second one may end the tidying, and that too must leave the folder in order.
        with pytest.raises(type(error)):
            begin(folder, in_progress()) if step == "begin" else write_all_forms(ending(), folder)
        monkeypatch.setattr(files, "write_text", real)
        assert agrees(folder, every)
        names = [name for name in listing(folder) if name != "journal.jsonl"]
        if step == "begin":
            assert listing(folder) == ([] if number == 0 else sorted(["report.json", *list(FORMS)[: number - 1]]))
        elif step == "end without begin" and number == 0:
            assert read_report(folder)["run"]["id"] == "a" * 32, "nothing had changed yet"
        elif step == "end without begin":
            assert names == [], "the older run's report does not come back"
        elif number == 0 or not lasting:
            assert names == ["report.json"]
            assert read_report(folder) == in_progress()
        else:
            assert names == []


def test_no_space_is_seen_before_anything_is_removed_from_a_run_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path, in_progress())
    before = contents(tmp_path)

    def full(path: Path, needed: int) -> None:
        assert needed > 100_000
        raise OutputError("not enough space")

    monkeypatch.setattr(files, "check_space", full)
    with pytest.raises(OutputError, match="not enough space"):
        write_all_forms(qualified(), tmp_path)
    assert contents(tmp_path) == before
    write_before = older()
    monkeypatch.undo()
    write_all_forms(write_before, tmp_path)
    monkeypatch.setattr(files, "check_space", full)
    with pytest.raises(OutputError, match="not enough space"):
        begin(tmp_path, in_progress())
    assert listing(tmp_path) == [], "no older verdict stands for the run that could not begin"


KILLED = """
import os, signal, sys
from pathlib import Path
from h3core.qualify.report import files
from tests.unit.sample_reports import in_progress
from tests.unit.report_folders import ending, older, whose

step, root = sys.argv[1], Path(sys.argv[2])
files.FORMS = {name: whose for name in files.FORMS}
first, last = in_progress(), ending()
for number in range(1, 100):
    folder = root / f"{number:03}"
    folder.mkdir()
    files.write_all_forms(older(), folder)
    (folder / "journal.jsonl").write_text("older")
    if step == "end":
        files.begin(folder, first)
    child = os.fork()
    if not child:
        seen = 0
        def count(event, args):
            global seen
            if event in ("open", "os.remove", "os.rename", "os.mkdir") and str(folder) in str(args[0]):
                seen += 1
                if seen == number:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(count)
        files.begin(folder, first) if step == "begin" else files.write_all_forms(last, folder)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status == 0:
        break
    if not os.WIFSIGNALED(status):
        sys.exit("the child failed")
print(number - 1)
"""
"""Kills a run at its first, second, third ... file operation, until one comes through."""


@pytest.mark.usefixtures("stubs")
@pytest.mark.parametrize("step", ["begin", "end"])
def test_a_run_killed_at_any_file_operation_leaves_a_folder_that_agrees_with_itself(
    tmp_path_factory: pytest.TempPathFactory, step: str
) -> None:
    every = runs(tmp_path_factory)
    root = tmp_path_factory.mktemp("killed")
    here = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, step, str(root)],
        cwd=here,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    points = int(done.stdout)
    assert points >= 15
    states = []
    for folder in sorted(root.iterdir()):
        assert agrees(folder, every), contents(folder).keys()
        report = read_report(folder)
        states.append(
            report["run"]["id"] == "a" * 32 if step == "begin" else report["verdict"]["outcome"] == "incomplete"
        )
        if not states[-1] and step == "begin":
            assert not (folder / "journal.jsonl").exists(), "an older run's journal beside the new report"
    assert states == sorted(states, reverse=True), "once the new report stands, the old one never comes back"
    assert states[0]
    assert not states[-1]


@pytest.mark.parametrize(
    "call", [lambda folder: begin(folder, in_progress()), lambda f: write_all_forms(qualified(), f)]
)
def test_a_form_that_cannot_be_made_touches_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[Path], object]
) -> None:
    write_all_forms(older(), tmp_path)
    before = contents(tmp_path)

    def broken(report: object) -> str:
        raise RuntimeError("template")

    monkeypatch.setattr(files, "FORMS", {**FORMS, "junit.xml": broken})
    with pytest.raises(RuntimeError, match="template"):
        call(tmp_path)
    assert contents(tmp_path) == before
