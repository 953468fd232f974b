"""Checks by name and world: the table that shows at a glance what ran, what failed and what did not run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from h3core.qualify.report.identity import Known, test_name
from h3core.qualify.report.schema import Report
from h3core.qualify.report.text import plural

State = Literal["passed", "failed", "not run", "skipped"]
"""`not run` is about required checks, for whatever reason; `skipped` about others."""

MARKS: Final[Mapping[State, str]] = {"passed": "✓", "failed": "✗", "not run": "!", "skipped": "○"}


@dataclass(frozen=True, slots=True)
class Cell:
    """All checks of one name at one world."""

    states: tuple[State, ...]

    @property
    def state(self) -> State | None:
        """The worst of them; None where there is no such check."""
        for state in ("failed", "not run", "passed", "skipped"):
            if state in self.states:
                return state
        return None

    @property
    def mark(self) -> str:
        """The state as a sign, with how many it is about where that is not all."""
        if self.state is None:
            return ""
        number = self.states.count(self.state)
        return MARKS[self.state] + (f"\u00a0{number}/{len(self.states)}" if number < len(self.states) else "")

    @property
    def title(self) -> str:
        """The cell in words."""
        words = [f"{self.states.count(state)} {state}" for state in MARKS if state in self.states]
        return ", ".join(words) if words else "no such check"


@dataclass(frozen=True, slots=True)
class Line:
    """One check name over all worlds."""

    name: str
    cells: tuple[Cell, ...]
    comparisons: int
    elements: int
    seconds: float

    @property
    def sentence(self) -> str:
        """The name as people read it: `test_gather_takes_every_row` is "gather takes every row"."""
        return self.name.removeprefix("test_").replace("_", " ")

    @property
    def worst(self) -> State | None:
        """The worst state over all worlds."""
        return Cell(tuple(state for cell in self.cells for state in cell.states)).state


@dataclass(frozen=True, slots=True)
class Matrix:
    """Names down, worlds across; the world None is of checks that have none."""

    worlds: tuple[int | None, ...]
    lines: tuple[Line, ...]


def world_label(world: int | None) -> str:
    """A world as the head of a column."""
    return "-" if world is None else str(world)


def matrix(report: Report) -> Matrix:
    """The checks of a report, and what was required and is not among them, in the order of their names' first."""
    rows: list[Mapping[str, Any]] = [*report["checks"], *unlisted(report)]
    worlds = sorted({row["world"] for row in rows}, key=lambda world: world or 0)
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_name.setdefault(row["name"], []).append(row)
    lines = [
        Line(
            name,
            tuple(Cell(tuple(state(row) for row in found if row["world"] == world)) for world in worlds),
            _sum(found, "comparisons"),
            _sum(found, "elements"),
            sum(row["duration_s"] or 0.0 for row in found),
        )
        for name, found in by_name.items()
    ]
    order = {"failed": 0, "not run": 1}
    lines.sort(key=lambda line: order.get(line.worst or "", 2))  # stable: the run's order otherwise
    return Matrix(tuple(worlds), tuple(lines))


def unlisted(report: Report) -> list[dict[str, Any]]:
    """Rows for required checks that did not run and are not among the report's checks under any name."""
    known = Known(report["checks"])
    return [
        {
            **{key: item[key] for key in ("check", "world", "mode")},
            "name": test_name(item["check"]),
            "required": True,
            "outcome": "not run",
            "reason": item["why"],
            **dict.fromkeys(("comparisons", "elements", "duration_s")),
        }
        for item in report["coverage"]["missing"]
        if known.find(item["check"], item["world"], item["mode"]) is None
    ]


def state(row: Mapping[str, Any]) -> State:
    """What a check's outcome amounts to."""
    outcome = row["outcome"]
    if outcome in ("passed", "failed"):
        return "passed" if outcome == "passed" else "failed"
    if row["required"]:
        return "not run"  # an error too: it broke before it could decide, and coverage counts it so
    return "failed" if outcome == "error" else "skipped"


def summary(table: Matrix) -> str:
    """The matrix in a sentence, for those who cannot see it."""
    bad = [f"{line.sentence} {line.worst}" for line in table.lines if line.worst in ("failed", "not run")]
    return f"{plural(len(table.lines), 'check name')} at {plural(len(table.worlds), 'world')}; " + (
        f"not well: {', '.join(bad)}" if bad else "all passed"
    )


def _sum(rows: Sequence[Mapping[str, Any]], key: str) -> int:
    return sum(row[key] or 0 for row in rows)
