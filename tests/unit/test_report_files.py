"""Reports on disk: what is refused, and what stands in a folder when a run is killed or the disk fills.

A pass means: at every point at which writing can end, the forms that are there are those of the report.json that is
there, and after a run has begun nothing of an older run is left.
Run: pytest tests/unit/test_report_files.py
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from h3core.atomic import OutputError
from h3core.qualify.report import files
from h3core.qualify.report.files import FORMS, begin, read_report, write_all_forms, write_forms
from h3core.qualify.report.schema import ReportError
from tests.unit.folders import listing
from tests.unit.sample_reports import SAMPLES, edited, in_progress, not_qualified, qualified

EVERYTHING = ["junit.xml", "report.html", "report.json", "report.md"]


def older() -> dict[str, Any]:
    return edited(qualified(), run__id="a" * 32)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """The files of an older run, of one in progress, and of the same at its end."""
    found = []
    for report in (older(), in_progress(), ending()):
        write_all_forms(report, folder := tmp_path_factory.mktemp("forms"))
        found.append(contents(folder))
    return found


@pytest.fixture
def stubs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forms that only say whose they are: these tests are about files."""
    monkeypatch.setattr(files, "FORMS", {name: whose for name in FORMS})


def whose(report: dict[str, Any]) -> str:
    return f"{report['run']['id']} {report['run']['state']} {report['verdict']['outcome']}"


# --- reading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLES)
def test_what_was_written_is_read_from_the_file_and_from_its_folder(tmp_path: Path, name: str) -> None:
    report = SAMPLES[name]()
    write_all_forms(report, tmp_path)
    assert read_report(tmp_path) == report
    assert read_report(tmp_path / "report.json") == report


WRONG: dict[str, tuple[bytes, str]] = {
    "empty": (b" \n", "got an empty file, expected a report.json"),
    "no JSON": (b"hello", "not JSON: Expecting value"),
    "truncated": (json.dumps(qualified()).encode()[:5000], "ends in the middle, after 5,000 bytes; copy it again"),
    "truncated string": (b'{"schema": "h3core-rep', "ends in the middle, after 22 bytes"),
    "another schema": (b'{"schema": "h3core-evidence-1"}', "got schema 'h3core-evidence-1' by h3core None, expected"),
    "no object": (b"[]", "got an array, expected an object"),
    "a key short": (b'{"schema": "h3core-report-1"}', "got no 'h3core', expected it"),
    "not UTF-8": (b'{"schema": "\xff"}', "not JSON: 'utf-8' codec can't decode"),
    "NaN": (b'{"schema": NaN}', "not JSON: got NaN, which JSON does not have"),
    "deep": (b"[" * 100_000, "not JSON: maximum recursion"),
    "a long number": (b"1" * 5000, "not JSON: Exceeds the limit"),
    "contradictory": (
        json.dumps(edited(qualified(), coverage__failed=1)).encode(),
        "qualified, and required checks that are missing; its verdict is not to be trusted",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_report_is_refused_with_its_path_and_why(tmp_path: Path, name: str) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(WRONG[name][0])
    with pytest.raises(ReportError) as caught:
        read_report(tmp_path)
    assert str(caught.value).startswith(f"{path}: ")
    assert WRONG[name][1] in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"report\.json: no such file; pass a report\.json, or the folder of a run"):
        read_report(tmp_path)
    (tmp_path / "a").write_text("x")
    with pytest.raises(ReportError, match="Not a directory"):
        read_report(tmp_path / "a" / "report.json")


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    with path.open("wb") as file:
        file.truncate(files.LARGEST + 1)
    with pytest.raises(ReportError, match=r"got 67,108,865 bytes, expected at most 67,108,864"):
        read_report(path)


def test_what_never_ends_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "report.json")
    for path in (tmp_path / "report.json", Path("/dev/zero")):
        with pytest.raises(ReportError, match="no regular file"):
            read_report(path)


# --- writing -----------------------------------------------------------------------------------------------------


def test_all_forms_are_written_and_are_the_reports_own(tmp_path: Path) -> None:
    assert [path.name for path in write_all_forms(not_qualified(), tmp_path)] == ["report.json", *FORMS]
    assert listing(tmp_path) == EVERYTHING
    for name, form in FORMS.items():
        assert (tmp_path / name).read_text() == form(not_qualified())


def test_a_run_that_begins_makes_its_folder_and_clears_it(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "report"
    begin(folder, in_progress())
    write_all_forms(older(), folder)
    (folder / "journal.jsonl").write_text("{}\n")
    (folder / "keep.txt").write_text("mine")
    written = begin(folder, in_progress())
    assert [path.name for path in written] == ["report.json", *FORMS]
    assert listing(folder) == sorted([*EVERYTHING, "keep.txt"])
    assert all("QUALIFIED (software" not in text for text in contents(folder).values())
    assert read_report(folder)["verdict"]["outcome"] == "incomplete"


def test_the_journal_stays_when_the_run_ends(tmp_path: Path) -> None:
    begin(tmp_path, in_progress())
    (tmp_path / "journal.jsonl").write_text("line\n")
    write_all_forms(qualified(), tmp_path)
    assert (tmp_path / "journal.jsonl").read_text() == "line\n"


def test_a_run_begins_in_progress_and_with_no_good_verdict(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="got state 'ended', expected 'in progress'"):
        begin(tmp_path, qualified())
    with pytest.raises(ReportError, match="qualified, and in progress"):
        begin(tmp_path, edited(qualified(), run__state="in progress"))
    assert listing(tmp_path) == []


def test_what_is_no_report_is_not_written(tmp_path: Path) -> None:
    begin(tmp_path, in_progress())
    before = contents(tmp_path)
    for bad in (edited(qualified(), verdict__exit_code=1), edited(qualified(), run={}), {}):
        with pytest.raises(ReportError):
            write_all_forms(bad, tmp_path)
    assert contents(tmp_path) == before


def test_numbers_that_json_has_not_become_null_and_long_strings_are_cut(tmp_path: Path) -> None:
    report = not_qualified()
    for check, value in zip(report["checks"], (float("nan"), float("inf"), float("-inf")), strict=False):
        check["largest_difference"] = value
    report["failures"][0]["details"] = "x" * 200_000 + "\ud800"
    write_all_forms(report, tmp_path)
    read = read_report(tmp_path)
    assert [check["largest_difference"] for check in read["checks"][:3]] == [None] * 3
    assert len(read["failures"][0]["details"]) < 100_100
    assert report["failures"][0]["details"].endswith("\ud800"), "the caller's own stays as it was"


@pytest.mark.parametrize("name", ["report.json", "report.html", "junit.xml", "journal.jsonl"])
def test_what_is_no_file_is_not_replaced_and_nothing_else_is_touched(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / "report.md").write_text("old")
    with pytest.raises(OutputError, match=f"{name}: got a folder, expected a regular file"):
        begin(tmp_path, in_progress())
    assert listing(tmp_path) == sorted([name, "report.md"])
    assert (tmp_path / "report.md").read_text() == "old"


def test_forms_alone_are_written_where_nothing_contradicts_them(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_forms(qualified(), out, force=False)
    assert listing(out) == ["junit.xml", "report.html", "report.md"]
    with pytest.raises(OutputError, match="exists; choose another name, or --force"):
        write_forms(not_qualified(), out, force=False)
    write_forms(not_qualified(), out, force=True)
    assert (out / "report.md").read_text() == FORMS["report.md"](not_qualified())


def test_forms_are_never_put_beside_the_report_of_another_run(tmp_path: Path) -> None:
    write_all_forms(older(), tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ReportError, match=r"holds the report\.json of another run; choose another folder"):
        write_forms(qualified(), tmp_path, force=True)
    with pytest.raises(ReportError, match=r"another run"):
        write_forms(edited(not_qualified(), run__id="a" * 32), tmp_path, force=True)
    assert contents(tmp_path) == before
    write_forms(older(), tmp_path, force=True)
    assert contents(tmp_path) == before


# --- what is there when it ends in the middle --------------------------------------------------------------------


def agrees(folder: Path, every: list[dict[str, str]]) -> bool:
    """Whether all forms in the folder are of one run."""
    found = {name: text for name, text in contents(folder).items() if name in EVERYTHING}
    return any(found.items() <= run.items() for run in every)


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


def ending() -> dict[str, Any]:
    """The end of the run that `in_progress` began."""
    return edited(qualified(), run__id=in_progress()["run"]["id"])


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
from tests.unit.test_report_files import ending, older, whose

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
