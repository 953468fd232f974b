"""Reports on disk: what is read, what is refused, and what is written.

A pass means: a report is read back as it was written; what is no report, or contradicts itself, is refused with its
path and the reason; nothing is written that is no report, nor beside the report of another run.
Run: pytest tests/unit/test_report_files.py
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from h3core.atomic import OutputError
from h3core.qualify.report import files
from h3core.qualify.report.files import FORMS, begin, read_report, write_all_forms, write_forms
from h3core.qualify.report.schema import ReportError
from tests.unit.folders import listing
from tests.unit.report_folders import EVERYTHING, contents, older
from tests.unit.sample_reports import SAMPLES, edited, in_progress, not_qualified, qualified

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
