"""What checks bring while a run goes on: evidence, tables for the summary, and one line a check on the disk.

The line is written when the check ends, so that a run that was killed has still said what it knew.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from h3core.qualify.checks.compare import Evidence
from h3core.qualify.checks.invariance import Invariance
from h3core.qualify.verdict import Seen

NAME: Final = "journal.jsonl"


class Journal:
    """Evidence and tables of one run. `folder` None: nothing is written."""

    def __init__(self, folder: Path | None) -> None:
        self.notes: dict[str, list[str]] = {}
        self._evidence: dict[str, list[Evidence]] = {}
        self._invariance: dict[tuple[str, str], Invariance] = {}
        self._path = None if folder is None else folder / NAME

    def add(self, check: str, evidence: Any) -> None:
        """Keep `evidence`: an `Evidence`, or lists of them at any depth.

        Raises `TypeError` for anything else, `ValueError` for one that is already kept.
        """
        if isinstance(evidence, Evidence):
            if any(evidence is known for known in self._evidence.get(check, ())):
                raise ValueError(f"evidence of {check}: {evidence.what!r} was recorded twice, and counts once")
            self._evidence.setdefault(check, []).append(evidence)
        elif isinstance(evidence, Iterable) and not isinstance(evidence, str):
            for item in evidence:
                self.add(check, item)
        else:
            raise TypeError(f"evidence of {check}: got {type(evidence).__name__}, expected Evidence or a list of it")

    def note(self, title: str, lines: Iterable[str]) -> None:
        """Lines for the section `title` of the summary."""
        self.notes.setdefault(title, []).extend(lines)

    def row_invariance(self, dtype: str, results: Iterable[Invariance]) -> None:
        """Add one probe's results to the table of operations."""
        for result in results:
            key = (dtype, result.operation)
            known = self._invariance.get(key)
            self._invariance[key] = result if known is None else known.merged(result)

    def sections(self) -> dict[str, list[str]]:
        """Titles and lines of what checks noted, the row-invariance table first."""
        sound = [key for key, result in self._invariance.items() if not result.broken]
        table = [f"{len(sound)} of {len(self._invariance)} operations give a row the same bits at every number of rows"]
        table += [f"{key[0]:9} {result.describe()}" for key, result in self._invariance.items() if result.broken]
        return ({"row-invariance": table} if self._invariance else {}) | self.notes

    def weigh(self, seen: Seen) -> None:
        """Put the sums over the evidence of one check into `seen`."""
        found = self._evidence.get(seen.nodeid, [])
        seen.comparisons = len(found)
        seen.exact = sum(item.demand == "bit for bit" for item in found)
        seen.elements = sum(item.elements for item in found)
        seen.bytes = sum(item.bytes for item in found)
        seen.largest = max((item.max_abs for item in found), default=None)
        seen.ranks = {item.rank for item in found if item.rank is not None}

    def start(self) -> None:
        """Begin an empty file. Raises `OSError` where it cannot be written."""
        if self._path is not None:
            self._path.write_text("")

    def end(self, seen: Seen) -> None:
        """Write the line of one check that has ended. Raises `OSError` where it cannot be written."""
        if self._path is None:
            return
        line = {
            "check": seen.nodeid,
            "outcome": seen.outcome,
            "duration_s": round(seen.seconds, 3),
            "reason": seen.reason,
            "evidence": [item.as_dict() for item in self._evidence.get(seen.nodeid, ())],
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
