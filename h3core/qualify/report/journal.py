"""What a run that was killed still knew: journal.jsonl, laid over the report that it began with.

The journal has one line for each check that ended, flushed as it ended; the last line may be half. The verdict stays
INCOMPLETE whatever the lines say.
"""

from __future__ import annotations

import copy
import json
import math
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from h3core.qualify.report.identity import Known, test_name, world_of
from h3core.qualify.report.schema import Report
from h3core.qualify.report.text import one_line, plural, shortened

JOURNAL: Final = "journal.jsonl"
LARGEST: Final = 256 * 2**20
"""Bytes that are read of a journal."""
OUTCOMES: Final = ("passed", "failed", "error", "skipped")

Entry = dict[str, Any]
"""What one line says, under the keys of a report's `checks`."""


def with_journal(report: Report, path: Path) -> Report:
    """A copy of an in-progress `report` with the checks of the journal at `path`; no journal changes nothing.

    Lines that cannot be read are counted among the verdict's reasons, but for a last one that was cut short. Raises
    `OSError` where the file cannot be read.
    """
    merged = copy.deepcopy(report)
    if not path.is_file():
        return merged
    unread, ended = 0, dict[str, Entry]()
    for entry in _entries(path):
        if entry is None:
            unread += 1
        elif ended.get(entry["check"], {}).get("outcome") not in ("failed", "error"):
            ended[entry["check"]] = entry  # a failure stays one, whatever its tear-down says
    _lay_over(merged, ended)
    if ended:
        outcomes = [entry["outcome"] for entry in ended.values()]
        words = ", ".join(f"{outcomes.count(name)} {name}" for name in OUTCOMES if name in outcomes)
        merged["verdict"]["reasons"].append(f"{plural(len(ended), 'check')} had ended: {words}")
    if unread:
        merged["verdict"]["reasons"].append(f"{path.name}: {plural(unread, 'line')} could not be read")
    return merged


def _entries(path: Path) -> Iterator[Entry | None]:
    """The journal's lines; None for one that is no check's."""
    with path.open("rb") as file:
        data = file.read(LARGEST + 1)
    *whole, rest = data[:LARGEST].split(b"\n")
    for line in whole:
        if line.strip():
            yield _entry(line)
    # Without its newline the last line is whole only if it reads as one.
    last = _entry(rest)
    if last is not None:
        yield last
    if len(data) > LARGEST:
        yield None


def _entry(line: bytes) -> Entry | None:
    try:
        said = json.loads(line)
        entry = {
            "check": said["check"],
            "outcome": said["outcome"],
            "duration_s": None if said.get("duration_s") is None else float(said["duration_s"]),
            "reason": said.get("reason"),
            **_evidence(said.get("evidence") or []),
        }
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None
    numbers = [entry[key] for key in ("duration_s", "elements", "bytes")] + entry["ranks"]
    sound = all(number is None or 0 <= number < math.inf for number in numbers)
    texts = isinstance(entry["check"], str) and isinstance(entry["reason"], str | None)
    return entry if sound and texts and entry["outcome"] in OUTCOMES else None


def _evidence(items: list[Mapping[str, Any]]) -> Entry:
    """The sums over a check's evidence."""
    differences = [float(item["max_abs"]) for item in items]
    return {
        "comparisons": len(items),
        "exact": sum(item["demand"] == "bit for bit" for item in items),
        "elements": sum(int(item["elements"]) for item in items),
        "bytes": sum(int(item["bytes"]) for item in items),
        # One that is not finite is the largest, and JSON has no number for it.
        "largest_difference": max(differences) if differences and all(map(math.isfinite, differences)) else None,
        "ranks": sorted({int(item["rank"]) for item in items if item.get("rank") is not None}),
    }


def _lay_over(report: Report, ended: Mapping[str, Entry]) -> None:
    """Put the checks that ended into the report: their rows, coverage, and failures."""
    coverage, rows = report["coverage"], {id(row): row for row in report["checks"]}
    known, missing = Known(report["checks"]), Known(coverage["missing"])
    taken: set[int] = set()
    for check, entry in ended.items():
        found, absent = known.find(check, world_of(check)), missing.find(check, world_of(check))
        if found is None or id(found) in taken:
            row: Entry = {"name": test_name(check), "world": world_of(check), "mode": None, "owed": None}
            row["required"] = True if absent is not None else None
            row |= {"world": absent["world"], "mode": absent["mode"]} if absent is not None else {}
            report["checks"].append(row)
        else:
            row = rows[id(found)]
        taken.add(id(row))
        row.update(entry)
        if row["outcome"] in ("failed", "error"):
            report["failures"].append(_failure(row))
        if _falls_short(row):
            row |= {"outcome": "not run", "reason": "passed with less evidence than it owes"}
        if row["required"] and row["outcome"] in ("passed", "failed"):
            coverage[row["outcome"]] = (coverage[row["outcome"]] or 0) + 1
            coverage["not_run"] = max(0, (coverage["not_run"] or 0) - 1)
            coverage["missing"] = [item for item in coverage["missing"] if item is not absent]


def _falls_short(row: Mapping[str, Any]) -> bool:
    """Whether a check that passed brought less evidence than it owes."""
    if row["owed"] is None or row["outcome"] != "passed":
        return False
    found = {"comparisons": row["comparisons"], "elements": row["elements"], "ranks": len(row["ranks"])}
    return any(number < (row["owed"][key] or 0) for key, number in found.items())


def _failure(row: Mapping[str, Any]) -> dict[str, Any]:
    reason = row["reason"] or f"the check ended as {row['outcome']}"
    world = f" --world={row['world']}" if (row["world"] or 1) > 1 else ""
    return {
        **{key: row[key] for key in ("check", "world", "mode")},
        "ranks": [],
        "fault_class": None,
        "problem": shortened(one_line(reason), 500),
        "meaning": "The run stopped before it could say what this failure is about.",
        "action": "Run the check alone.",
        "reproduce": f"python -m pytest {shlex.quote(row['check'])}{world}",
        "details": reason,
    }
