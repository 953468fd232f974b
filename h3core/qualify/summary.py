"""What the terminal says before the verdict: tables, failures with the next action, and what was compared."""

from __future__ import annotations

from typing import Final

from h3core.qualify.run import Run

SHOWN: Final = 10
"""Failures, missing checks and table lines that are printed; the report has all of them."""


def sections(run: Run) -> dict[str, list[str]]:
    """Titles and lines, in the order in which they are printed."""
    found = {title: _short(lines) for title, lines in run.journal.sections().items()}
    failed = [nodeid for nodeid in run.failures if run.plan.tier is not None or nodeid in run.keys]
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
    """One paragraph for each distinct problem: checks that say the same are counted, not repeated."""
    groups: dict[tuple[str, str], list[str]] = {}
    for nodeid in failed:
        groups.setdefault((run.diagnosis(nodeid).fault_class, run.failures[nodeid].problem), []).append(nodeid)
    lines: list[str] = []
    for (fault_class, problem), nodeids in list(groups.items())[:SHOWN]:
        diagnosis = run.diagnosis(nodeids[0])
        more = f" and {len(nodeids) - 1} more" if len(nodeids) > 1 else ""
        lines += [
            f"{fault_class}: {nodeids[0]}{more}",
            f"  problem:   {problem}",
            f"  means:     {diagnosis.meaning}",
            f"  next:      {diagnosis.action}",
            f"  reproduce: {run.reproduce(nodeids[0])}",
        ]
    if len(groups) > SHOWN:
        lines.append(f"{len(groups) - SHOWN} more problems are in the report")
    return lines


def _short(lines: list[str]) -> list[str]:
    if len(lines) <= SHOWN:
        return lines
    return [*lines[:SHOWN], f"... {len(lines) - SHOWN} more lines are in the report"]
