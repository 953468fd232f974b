"""The structure of report.json, as JSON Schema."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any, Final, TypeAlias

SCHEMA: Final = "h3core-report-1"
"""What `report["schema"]` says; another structure gets another name."""

Report: TypeAlias = dict[str, Any]
"""A report as json.loads gives it, valid by `schema()`."""


class ReportError(ValueError):
    """A report that cannot be read or may not be written: what was found, what was expected, what to do."""


def package_text(name: str) -> str:
    """A file of this package's data."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of a report; a fresh copy."""
    loaded: dict[str, Any] = json.loads(package_text("report.schema.json"))
    return loaded
