"""Folders of runs, in tests of what stands in one and when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from h3core.qualify.report.files import write_all_forms
from tests.unit.sample_reports import edited, in_progress, qualified

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


def whose(report: dict[str, Any]) -> str:
    return f"{report['run']['id']} {report['run']['state']} {report['verdict']['outcome']}"


def ending() -> dict[str, Any]:
    """The end of the run that `in_progress` began."""
    return edited(qualified(), run__id=in_progress()["run"]["id"])


def agrees(folder: Path, every: list[dict[str, str]]) -> bool:
    """Whether all forms in the folder are of one run."""
    found = {name: text for name, text in contents(folder).items() if name in EVERYTHING}
    return any(found.items() <= run.items() for run in every)
