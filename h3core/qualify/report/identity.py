"""Which check of a report another one is, where both write its name differently.

pytest says `tests/gloo/test_x.py::test_y[world=2-tensor]`; the manifest of required checks, which must name what was
never collected, says `test_x.py::test_y[world=2-tensor]`, may put the parameters in another order, and adds the mode of
a check that has only one. The journal of a run that was killed has pytest's names alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]
"""Anything of a report with a `check`, a `world` and a `mode`."""

Identity = tuple[str, int, tuple[str, ...]]


def test_name(check: str) -> str:
    """The test function: what stands between `::` and the parameters."""
    return check.partition("[")[0].rpartition("::")[2]


def world_of(check: str) -> int | None:
    """The world among the parameters; None where there is none."""
    found = re.search(r"[\[-]world=([0-9]{1,6})(?=[-\]])", check)
    return int(found[1]) or None if found else None


class Known:
    """Rows by what they are. Where two could be meant, the first is."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._exact: dict[str, Row] = {}
        self._full: dict[Identity, Row] = {}
        self._modeless: dict[Identity, Row] = {}
        for row in rows:
            self._exact.setdefault(row["check"], row)
            self._full.setdefault(_identity(row["check"], row["world"]), row)
            self._modeless.setdefault(_identity(row["check"], row["world"], row["mode"]), row)

    def find(self, check: str, world: int | None = None, mode: str | None = None) -> Row | None:
        """The row of a check; None where there is none."""
        # Without its mode a name is looked up last: [world=2-tensor] must not be taken for [world=2-ulysses].
        full, modeless = _identity(check, world), _identity(check, world, mode)
        places = ((self._exact, check), (self._full, full), (self._full, modeless), (self._modeless, full))
        return next((place[key] for place, key in places if key in place), None)  # type: ignore[index]


def _identity(check: str, world: int | None, mode: str | None = None) -> Identity:
    """File and function, world (1 where no other is named), and the other parameters in no order."""
    function, _, inside = check.partition("[")
    file, _, name = function.rpartition("::")
    world = world or world_of(check) or 1
    words = [word for word in inside.removesuffix("]").split("-") if word and word != f"world={world}"]
    if mode in words:
        words.remove(mode)
    return f"{file.rpartition('/')[2]}::{name}", world, tuple(sorted(words))
