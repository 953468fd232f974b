"""What the terminal says before the verdict: tables, failures with the next action, and what was compared."""

from __future__ import annotations

from typing import Final

from h3core.qualify.diagnosis import Diagnosis
from h3core.qualify.report.text import plural
from h3core.qualify.run import Run

SHOWN: Final = 10
"""Missing checks and table lines that are printed; the report has all of them."""


def sections(run: Run) -> dict[str, list[str]]:
    """Titles and lines, in the order in which they are printed."""
    found = {title: _short(lines) for title, lines in run.journal.sections().items()}
    failed = [nodeid for nodeid in run.failed() if run.plan.tier is not None or nodeid in run.keys]
    if failed:  # of the project's own tests pytest says enough
        found["what failed, and what to do next"] = _failures(run, failed)
    missing = [item for item in run.coverage() if item.state == "not run"]
    if missing:
        found["required, and did not run"] = _short([f"{item.required.key}: {item.why}" for item in missing])
    if run.caught:
        found["negative controls"] = [f"caught at world {c.world}: {c.name}: {c.how}" for c in run.caught.values()]
    seen = [sight for sight in run.seen.values() if sight.comparisons]
    if seen:
        found["evidence"] = [
            f"{sum(s.comparisons for s in seen):,} comparisons in {len(seen):,} checks, "
            f"{sum(s.elements for s in seen):,} elements",
            f"{sum(s.exact for s in seen):,} of them bit for bit, {sum(s.bytes for s in seen):,} bytes in all",
        ]
    return found


def _failures(run: Run, failed: list[str]) -> list[str]:
    """One paragraph for each diagnosis, with its first check: the others are counted, and stand in the report."""
    groups: dict[Diagnosis, list[str]] = {}
    for nodeid in failed:
        groups.setdefault(run.diagnosis(nodeid), []).append(nodeid)
    lines: list[str] = []
    for diagnosis, nodeids in groups.items():
        more = f" and {plural(len(nodeids) - 1, 'other check')}" if len(nodeids) > 1 else ""
        lines += [
            f"{diagnosis.fault_class}: {nodeids[0]}{more}",
            f"  problem:   {run.failures[nodeids[0]].problem}",
            f"  means:     {diagnosis.meaning}",
            f"  next:      {diagnosis.action}",
            f"  reproduce: {run.reproduce(nodeids[0])}",
        ]
    return lines


def _short(lines: list[str]) -> list[str]:
    if len(lines) <= SHOWN:
        return lines
    return [*lines[:SHOWN], f"... {len(lines) - SHOWN} more lines are in the report"]
