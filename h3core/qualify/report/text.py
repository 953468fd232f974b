"""Words, numbers and times as the forms of a report write them, and strings of the run made harmless.

Names, errors and paths of a run come from anywhere: from a test's parameters, a driver's message, a file somebody sent.
`cleaned` takes out what a terminal, an XML parser or a reader's eye would take for a command.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

ESCAPES: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x9b[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)")
"""ANSI control sequences, and operating system commands that end; one that does not must not swallow the rest."""

ILLEGAL: Final = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f"  # controls; XML 1.0 has no way to write most of them
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # they turn the direction of text, and so what a name seems to be
    "\ud800-\udfff\ufffe\uffff]"  # not characters: UTF-8 or XML refuses them
)


def clean(text: str) -> str:
    """`text` without control sequences and characters that are not text; line ends become newlines."""
    text = ESCAPES.sub("", text)
    text = re.sub("\r\n|[\r\u2028\u2029]", "\n", text)
    return ILLEGAL.sub("", text)


def cleaned(value: Any) -> Any:
    """`value` (of JSON) with every string in it clean, keys too."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean(key): cleaned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [cleaned(item) for item in value]
    return value


def one_line(text: str) -> str:
    """`text` with every run of white space as one space."""
    return " ".join(text.split())


def shortened(text: str, limit: int) -> str:
    """At most `limit` characters of `text`, and how many are left out."""
    return text if len(text) <= limit else f"{text[:limit]} ... ({len(text) - limit:,} more characters)"


def plural(number: int, noun: str) -> str:
    """`1 check`, `2 checks`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def count(number: int | None) -> str:
    """A number of things; unknown stays unknown."""
    return "unknown" if number is None else f"{number:,}"


def seconds(value: float | None) -> str:
    """A time with its unit, about three digits."""
    if value is None:
        return "unknown time"
    if value < 59.95:
        return f"{value:.2f} s" if value < 9.995 else f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def size(number: int | None) -> str:
    """Bytes in GiB, or in MiB below one."""
    if number is None:
        return "unknown"
    return f"{number / 2**30:,.1f} GiB" if number >= 2**30 else f"{number / 2**20:,.1f} MiB"


def listed(words: Sequence[object], limit: int = 8) -> str:
    """`a, b and c`; past `limit` the rest is counted."""
    texts = [str(word) for word in words]
    if len(texts) > limit:
        return f"{', '.join(texts[:limit])} and {len(texts) - limit:,} more"
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
