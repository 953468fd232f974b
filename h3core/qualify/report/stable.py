"""A report without what differs between two equal runs: times, ids, and where temporary files were.

Two runs of the same software on the same machine with the same outcome have equal `stable` reports, so that a test or
`diff` can hold one against the other. Tables keep their lines: where what they measure differs, that is a difference.
"""

from __future__ import annotations

import re
from typing import Any, Final

from h3core.qualify.report.schema import Report

DROPPED: Final = (
    "run.id",
    "run.started_utc",
    "run.duration_s",
    "run.host",
    "run.command",
    "verdict.line",
    "failures[].details",
    "checks[].duration_s",
    "presence[].pid",
    "preflight[].got",
    "comparison",
)
"""The keys that `stable` takes out: times, ids, names that containers draw at random, free space as it was measured,
the command (it names the report's folder) and the long texts of errors (addresses, ports and line orders)."""

DROPPED_OPTIONS: Final = ("--report-dir", "--compare")
"""Entries of `run.options` that are taken out: they say where reports stand."""

REPLACED: Final = (
    (re.compile(r"(?:/private)?/(?:tmp|var/tmp|var/folders|dev/shm)/[^\s'\",;:)\]]*"), "<temporary>"),
    (re.compile(r"\b0x[0-9a-f]{6,16}\b"), "<address>"),
    (re.compile(r"\b(pid|process) [0-9]+"), r"\1 <pid>"),
    (re.compile(r"\b(127\.0\.0\.1|localhost):[0-9]+"), r"\1:<port>"),
)
"""What is replaced inside every string that stays."""


def stable(report: Report) -> Report:
    """A copy of a valid report without the keys of `DROPPED`, ranks in order. It is no report any more."""
    kept: Report = _replaced(report)
    for path in DROPPED:
        _drop(kept, path.split("."))
    kept["run"]["options"] = [option for option in kept["run"]["options"] if option["name"] not in DROPPED_OPTIONS]
    kept["presence"].sort(key=lambda rank: (rank["world"] or 0, rank["rank"]))
    return kept


def _drop(value: Any, path: list[str]) -> None:
    name = path[0].removesuffix("[]")
    if len(path) == 1:
        del value[name]
        return
    for item in value[name] if path[0].endswith("[]") else [value[name]]:
        _drop(item, path[1:])


def _replaced(value: Any) -> Any:
    if isinstance(value, str):
        for pattern, word in REPLACED:
            value = pattern.sub(word, value)
        return value
    if isinstance(value, dict):
        return {key: _replaced(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item) for item in value]
    return value
