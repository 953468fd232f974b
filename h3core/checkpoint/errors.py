"""The one exception for a checkpoint that cannot be used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

SHOWN: Final = 20
"""Items of one kind listed before the rest is only counted."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used. Its message says what was found, what was expected and what to do."""


def listed(items: Iterable[str], shown: int = SHOWN) -> str:
    """Up to `shown` items separated by commas, then how many more there are."""
    every = list(items)
    text = ", ".join(every[:shown])
    return f"{text}, and {len(every) - shown} more" if len(every) > shown else text


def bullets(head: str, problems: Iterable[str]) -> CheckpointError:
    """One error for several problems, each on a line of its own below `head`."""
    return CheckpointError("\n".join([head, *(f"  - {problem}" for problem in problems)]))
