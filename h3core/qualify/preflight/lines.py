"""Findings as lines for a terminal: what is wrong first, each with what to do."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from h3core.qualify.preflight.finding import Finding, State

ORDER: Final[tuple[State, ...]] = ("problem", "warning", "not measured", "ok")
WORDS: Final = {"problem": "PROBLEM"}
WIDTH: Final = 120


def lines(findings: Iterable[Finding]) -> list[str]:
    """A headline with the counts, then problems, warnings, what was not measured, and what is well; in columns."""
    every = list(findings)
    counts = Counter(finding.state for finding in every)
    listed = sorted(_merged(every), key=lambda finding: ORDER.index(finding.state))
    plural = {"problem": "problems", "warning": "warnings"}
    headline = ", ".join(
        f"{counts[state]} {plural.get(state, state) if counts[state] != 1 else state}" for state in ORDER
    )
    state_width = max(map(len, ORDER))
    name_width = max((len(finding.name) for finding in listed), default=0)
    out = [f"preflight: {headline}"]
    for finding in listed:
        head = f"{WORDS.get(finding.state, finding.state):{state_width}}  {finding.name:{name_width}}  "
        out += _wrapped(head, finding.got)
        blank = " " * len(head)
        if finding.expected is not None:
            out += _wrapped(f"{blank}expected: ", finding.expected)
        if finding.action is not None:
            out += _wrapped(f"{blank}do: ", finding.action)
    return out


def _merged(findings: Iterable[Finding]) -> list[Finding]:
    """One finding for all that could not be measured for the same reason: without NVML they would fill a screen."""
    out: dict[tuple[str, ...], Finding] = {}
    also: dict[tuple[str, ...], list[str]] = {}
    for finding in findings:
        key = (finding.state, finding.got) if finding.state == "not measured" else (finding.state, finding.name)
        if key in out:
            also.setdefault(key, []).append(finding.name)
        else:
            out[key] = finding
    return [
        replace(finding, got=f"{finding.got} (also: {', '.join(also[key])})") if key in also else finding
        for key, finding in out.items()
    ]


def _wrapped(head: str, text: str) -> list[str]:
    """`text` after `head`, further lines below its beginning; paths and addresses are never cut."""
    indent = " " * len(head)
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=head,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [head.rstrip()]
