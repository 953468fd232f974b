"""The tiers, and which of them a marker expression selects.

A run is a qualification when its `-m` expression, evaluated as pytest evaluates it, is false for a test without
markers and true for some check of a tier: `-m gloo` and `-m "gloo and world8"` are, `-m "not nccl"` is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

import pytest
from _pytest.mark.expression import Expression


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier: where its checks stand, what its ranks run on, and the words of a full pass."""

    name: str
    folder: str
    backend: str
    device: Literal["cpu", "cuda"]
    help: str
    qualified: str


TIERS: Final = {
    tier.name: tier
    for tier in (
        Tier(
            "gloo",
            "tests/gloo",
            "gloo",
            "cpu",
            "real ranks on this machine's CPU, over Gloo",
            "QUALIFIED (software, CPU)",
        ),
        Tier("nccl", "tests/nccl", "nccl", "cuda", "real ranks on this machine's GPUs, over NCCL", "QUALIFIED"),
        Tier(
            "gate", "tests/gates", "nccl", "cuda", "speed of this machine's GPUs and links, against gates", "QUALIFIED"
        ),
    )
}
DEFAULT_WORLDS: Final = (2, 4, 6, 8)


def world_marker(world: int) -> str:
    """The marker that every check at `world` carries, for `-m "gate and world8"`."""
    return f"world{world}"


def worlds_named(expression: str) -> tuple[int, ...]:
    """Worlds that a marker expression names; they are registered, so that --strict-markers knows them."""
    return tuple(sorted({int(number) for number in re.findall(r"\bworld([1-9]\d{0,3})\b", expression)}))


def selects(expression: str, names: Iterable[str]) -> bool:
    """Whether pytest would keep a test with the markers `names`. Raises `pytest.UsageError` for bad syntax."""
    known = frozenset(names)
    try:
        # pytest's own evaluator, because another reading of "and not" could call a run what it is not.
        compiled = Expression.compile(expression)
    except SyntaxError as error:
        raise pytest.UsageError(f"-m {expression!r}: {error.msg}") from None
    return compiled.evaluate(lambda name, /, **kwargs: name in known and not kwargs)


def selected_tier(expression: str, worlds: Iterable[int]) -> Tier | None:
    """The tier that a run with this `-m` expression qualifies; None where it is no qualification.

    Raises `pytest.UsageError` for an expression that selects several tiers: each has its own verdict.
    """
    if not expression or selects(expression, ()):
        return None
    candidates = {1, *worlds, *worlds_named(expression)}
    found = [
        tier
        for tier in TIERS.values()
        if any(selects(expression, (tier.name, world_marker(world))) for world in candidates)
    ]
    if len(found) > 1:
        names = " and ".join(tier.name for tier in found)
        raise pytest.UsageError(f"-m {expression!r} selects the tiers {names}: each has its own verdict, run one")
    return found[0] if found else None
