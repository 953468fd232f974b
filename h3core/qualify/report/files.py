"""Reports on disk: read, begun, and written in all forms.

What stands in a folder never contradicts itself, at whatever point a run is killed or the disk fills. The forms for
people and CI (`FORMS`) only repeat report.json, so they go before it changes and come after it has: at every moment
the folder holds report.json and some of its own forms. A form that is absent misleads nobody; an older one would.

1. `begin`, before the first check: an older run's forms and journal go, report.json becomes INCOMPLETE, forms come.
2. `write_all_forms`, at the end: the INCOMPLETE forms go, report.json becomes the result, forms come. Where one cannot
   be written, the result is taken back: a run whose report is not whole ends as INCOMPLETE, and its folder says so.
"""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Callable, Iterable, Mapping
from json import JSONDecodeError
from pathlib import Path
from typing import Any, Final

from h3core.atomic import check_space, check_target, write_text
from h3core.qualify.report.html import html
from h3core.qualify.report.journal import JOURNAL, with_journal
from h3core.qualify.report.junit import junit
from h3core.qualify.report.markdown import markdown
from h3core.qualify.report.schema import Report, ReportError
from h3core.qualify.report.text import shortened
from h3core.qualify.report.validate import validate

REPORT: Final = "report.json"
FORMS: Final[Mapping[str, Callable[[Report], str]]] = {
    "report.md": markdown,
    "report.html": html,
    "junit.xml": junit,
}
"""The forms of a report, and what writes each."""

LARGEST: Final = 64 * 2**20
"""Bytes of a report.json that are read; a real one has well under one MiB."""
LONGEST: Final = 100_000
"""Characters that a string of a report keeps when it is written."""


def read_report(path: Path) -> Report:
    """The valid report at `path`: a file, or a folder with a report.json.

    One in progress comes with what its journal knows, where it still has its name and the journal stands beside it.
    Raises `ReportError` for what is no report, with what to do, and for what the system refuses.
    """
    path = path / REPORT if path.is_dir() else path
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ReportError(f"{path}: got something that is no regular file, expected a {REPORT}")
        if status.st_size > LARGEST:
            raise ReportError(f"{path}: got {status.st_size:,} bytes, expected at most {LARGEST:,} in a {REPORT}")
        report = _parsed(path, path.read_bytes())
        try:
            validate(report)
            if report["run"]["state"] == "in progress" and path.name == REPORT:
                report = validate(with_journal(report, path.parent / JOURNAL))
        except ReportError as error:
            raise ReportError(f"{path}: {error}") from None
    except FileNotFoundError:
        raise ReportError(f"{path}: no such file; pass a {REPORT}, or the folder of a run (--report-dir)") from None
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror or error}") from None
    return report


def begin(folder: Path, report: Report) -> list[Path]:
    """Make `folder` (with its parents) that of a run that begins: `report` is in progress, all older output goes.

    Returns the files written. Raises `ReportError` for a report that is not in progress, and `OutputError` for what may
    not be replaced; then nothing is touched. Where the disk refuses, `OSError` or `OutputError`; then no older report
    is left to be taken for this run's.
    """
    if report["run"]["state"] != "in progress":
        raise ReportError(f"a run that begins: got state {report['run']['state']!r}, expected 'in progress'")
    folder.mkdir(parents=True, exist_ok=True)
    return _replace(report, folder, fresh=True)


def write_all_forms(report: Report, folder: Path) -> list[Path]:
    """Write report.json, report.md, report.html and junit.xml to `folder`, each whole; returns them in that order.

    Numbers that JSON cannot hold (NaN, infinities) become null, very long strings are cut. Nothing is touched before
    all forms exist in memory. Raises `ReportError` for a dictionary that is no report, and `OSError` or `OutputError`
    where a file cannot be written: then report.json says INCOMPLETE as it did before, or is gone.
    """
    return _replace(report, folder, fresh=False)


def write_forms(report: Report, folder: Path, *, force: bool) -> list[Path]:
    """Write only the forms of a valid report, into a folder that may be new.

    Raises `ReportError` where the folder holds the report.json of another run, which would then stand beside forms with
    another verdict; `OutputError` where a form exists and `force` is not given; `OSError` where the system refuses.
    """
    texts = {folder / name: render(report) for name, render in FORMS.items()}
    if (folder / REPORT).exists() and _mark(read_report(folder)) != _mark(report):
        raise ReportError(f"{folder}: holds the {REPORT} of another run; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for path in texts:
        check_target(path, force=force)
    for path in texts:
        path.unlink(missing_ok=True)
    for path, text in texts.items():
        write_text(path, text, force=force)
    return list(texts)


def _mark(report: Report) -> tuple[str, str, str | None]:
    """Which run, and how far it had come."""
    return report["run"]["id"], report["run"]["state"], report["verdict"]["outcome"]


def _replace(report: Report, folder: Path, *, fresh: bool) -> list[Path]:
    """The one order in which a folder changes; `fresh`: a new run begins, and nothing of an older one may stay."""
    report = validate(_writable(report))
    forms = {folder / name: render(report) for name, render in FORMS.items()}
    main, text = folder / REPORT, json.dumps(report, indent=1, allow_nan=False) + "\n"
    gone = [*forms, *([folder / JOURNAL] if fresh else [])]
    for path in (main, *gone):
        check_target(path, force=True)
    before = _in_progress(main, report["run"]["id"])
    try:
        check_space(main, len(text) + sum(len(form.encode()) for form in forms.values()))
        for path in gone:
            path.unlink(missing_ok=True)
        write_text(main, text, force=True)
    except BaseException:
        if fresh:
            for path in (*gone, main):
                path.unlink(missing_ok=True)
        raise
    try:
        for path, form in forms.items():
            write_text(path, form, force=True)
    except BaseException:
        if not fresh:
            _take_back(main, before, forms)
        raise
    return [main, *forms]


def _in_progress(main: Path, run: str) -> str | None:
    """The text of the report.json that the run began with; None where something else stands there, or nothing."""
    try:
        text = main.read_text(encoding="utf-8")
        begun = json.loads(text)["run"]
        return text if (begun["id"], begun["state"]) == (run, "in progress") else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _take_back(main: Path, before: str | None, forms: Iterable[Path]) -> None:
    """Put report.json back to `before`; remove it where there was none, or where not even that can be written."""
    for path in forms:
        path.unlink(missing_ok=True)
    back = False
    try:
        if before is not None:
            write_text(main, before, force=True)
            back = True
    except (OSError, ValueError):
        pass  # the caller has the first error, which is the cause
    finally:
        if not back:
            main.unlink(missing_ok=True)


def _writable(value: Any) -> Any:
    """A copy that JSON can hold and a reader can bear."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        return shortened(value, LONGEST)
    if isinstance(value, dict):
        return {key: _writable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(item) for item in value]
    return value


def _parsed(path: Path, data: bytes) -> Report:
    """The JSON in `data`. Raises `ReportError`."""
    if not data.strip():
        raise ReportError(f"{path}: got an empty file, expected a {REPORT}")
    try:
        text = data.decode("utf-8")
        report: Report = json.loads(text, parse_constant=_no_constant)
    except JSONDecodeError as error:
        if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
            raise ReportError(f"{path}: ends in the middle, after {len(data):,} bytes; copy it again") from None
        raise ReportError(f"{path}: not JSON: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{path}: not JSON: {shortened(str(error), 200)}") from None
    return report


def _no_constant(name: str) -> float:
    raise ValueError(f"got {name}, which JSON does not have")
