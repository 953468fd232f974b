"""Geometry of the two drawings in report.html; the template only writes it down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from h3core.qualify.report.matrix import Cell, Line, Matrix, world_label

ROW: Final = 26
"""Height of a line of the matrix, in CSS pixels; the other sizes are such pixels too."""
CELL: Final = 54
LETTER: Final = 6.9
"""Width of an average letter at 13 px: SVG text does not wrap, so the column is as wide as its longest name."""
LINES: Final = 80
"""Names that are drawn; those with a failure come first."""
PARTS: Final = 8
"""Names that the strip of time tells apart."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One cell: where it is, and what it says."""

    x: float
    y: float
    cell: Cell
    title: str


@dataclass(frozen=True, slots=True)
class Tiles:
    """The coverage matrix: names down, worlds across. Names stand on the right: on a phone the marks are what shows."""

    width: float
    height: float
    left: float
    """Where names begin."""
    names: tuple[tuple[float, Line], ...]
    heads: tuple[tuple[float, str], ...]
    tiles: tuple[Tile, ...]
    left_out: int


@dataclass(frozen=True, slots=True)
class Part:
    """One check name's share of the time."""

    label: str
    seconds: float
    start: float
    """Percent of the strip's width, as `share`."""
    share: float


def tiles(matrix: Matrix) -> Tiles:
    """Lay out the matrix."""
    lines = matrix.lines[:LINES]
    left = CELL * len(matrix.worlds) + 10
    heads = tuple((CELL * column + CELL / 2, world_label(world)) for column, world in enumerate(matrix.worlds))
    drawn = [
        Tile(
            CELL * column,
            ROW * (row + 1),
            cell,
            f"{line.sentence}, {'no world' if world is None else f'world {world}'}: {cell.title}",
        )
        for row, line in enumerate(lines)
        for column, (world, cell) in enumerate(zip(matrix.worlds, line.cells, strict=True))
        if cell.state is not None
    ]
    names = tuple((ROW * (row + 1), line) for row, line in enumerate(lines))
    width = left + LETTER * max((len(line.sentence) for line in lines), default=0)
    return Tiles(
        round(width, 1), ROW * (len(lines) + 1), left, names, heads, tuple(drawn), len(matrix.lines) - len(lines)
    )


def strip(matrix: Matrix) -> tuple[Part, ...]:
    """Shares of the time by check name, the longest first, the short ones together."""
    lines = sorted((line for line in matrix.lines if line.seconds > 0), key=lambda line: -line.seconds)
    named = [(line.sentence, line.seconds) for line in lines[:PARTS]]
    rest = lines[PARTS:]
    if rest:
        named.append((f"{len(rest)} more", sum(line.seconds for line in rest)))
    total = sum(seconds for _, seconds in named)
    parts, start = [], 0.0
    for label, seconds in named:
        share = 100.0 * seconds / total
        parts.append(Part(label, seconds, round(start, 3), round(share, 3)))
        start += share
    return tuple(parts)
