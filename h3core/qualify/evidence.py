"""The evidence of a run: what each check compared, kept as it comes and written once at the end."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from h3core import __version__
from h3core.atomic import write_text
from h3core.qualify.compare import Evidence
from h3core.qualify.invariance import Invariance


class Journal:
    """Evidence, outcomes and notes of one pytest run. `folder` None: nothing is written."""

    def __init__(self, folder: str | None, worlds: tuple[int, ...]) -> None:
        self.evidence: dict[str, list[Evidence]] = {}
        self.notes: dict[str, list[str]] = {}
        self._invariance: dict[tuple[str, str], Invariance] = {}
        self._outcomes: dict[str, dict[str, Any]] = {}
        self._folder = folder
        self._worlds = worlds
        self._started = time.time()

    def add(self, check: str, evidence: Any) -> None:
        """Keep `evidence`: an `Evidence`, or lists of them at any depth."""
        if isinstance(evidence, Evidence):
            self.evidence.setdefault(check, []).append(evidence)
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
        table = table if self._invariance else []
        return ({"row-invariance": table} if table else {}) | self.notes

    def outcome(self, check: str, outcome: str, seconds: float) -> None:
        """How a check ended; an error in its set-up or tear-down is not overwritten by its call."""
        if self._outcomes.get(check, {}).get("outcome") not in ("error", "failed"):
            self._outcomes[check] = {"outcome": outcome, "seconds": round(seconds, 3)}

    def count(self, check: str) -> int:
        """Comparisons that `check` recorded."""
        return len(self.evidence.get(check, ()))

    def summary(self) -> list[str]:
        """What was compared, in words and numbers."""
        every = [item for items in self.evidence.values() for item in items]
        exact = [item for item in every if item.demand == "bit for bit"]
        return [
            f"{len(every):,} comparisons in {len(self.evidence):,} checks, {sum(e.elements for e in every):,} elements",
            f"{len(exact):,} of them bit for bit, {sum(e.bytes for e in exact):,} bytes",
            *([f"report: {Path(self._folder) / 'report.json'}"] if self._folder is not None else []),
        ]

    def write(self, exit_status: int | None) -> None:
        """Write `report.json` to the folder, atomically; `exit_status` None says that the run is in progress.

        Raises `OSError` or `ValueError` where it cannot be written.
        """
        if self._folder is None:
            return
        report = {
            "schema": "h3core-evidence-1",
            "h3core": __version__,
            "started_unix_s": round(self._started, 3),
            "duration_s": round(time.time() - self._started, 3),
            "state": "in progress" if exit_status is None else "ended",
            "pytest_exit_status": exit_status,
            "worlds": list(self._worlds),
            "machine": {
                "python": sys.version.split()[0],
                "torch": torch.__version__,
                "platform": platform.platform(),
                "cpu_capability": torch.backends.cpu.get_cpu_capability(),
                "cores": os.cpu_count(),
            },
            "row_invariance": [f"{dtype} {result.describe()}" for (dtype, _), result in self._invariance.items()],
            "notes": self.notes,
            "checks": {
                check: {**outcome, "evidence": [item.as_dict() for item in self.evidence.get(check, ())]}
                for check, outcome in self._outcomes.items()
            },
        }
        folder = Path(self._folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "report.json", json.dumps(report, indent=1) + "\n", force=True)
