"""report.md: a run for GitHub's job summary, a comment or a terminal, in the order in which a reader needs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from h3core.qualify.report import markdown_parts as parts
from h3core.qualify.report.schema import Report
from h3core.qualify.report.text import cleaned


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the report. Where space is short, the highest `rank` goes first; 0 stays."""

    name: str
    text: str
    rank: int


RANKS: Final = (
    ("verdict", 0, parts.verdict),
    ("what failed", 2, parts.failed),
    ("errors in full", 7, parts.errors),
    ("coverage", 1, parts.coverage),
    ("required checks that did not run", 3, parts.missing),
    ("controls", 4, parts.controls),
    ("checks by name", 5, parts.checks),
    ("every check", 10, parts.every_check),
    ("preflight", 4, parts.preflight),
    ("machine", 6, parts.machine),
    ("tables", 9, parts.tables),
    ("comparison", 8, parts.comparison),
)
"""The sections in order: name, rank, and what writes them; an empty one is left out."""


def sections(report: Report) -> list[Section]:
    """The parts of the Markdown in order, each a whole by itself."""
    harmless = cleaned(report)
    found = (Section(name, write(harmless), rank) for name, rank, write in RANKS)
    return [section for section in found if section.text]


def markdown(report: Report) -> str:
    """A valid report as GitHub-flavoured Markdown; the first line is the verdict."""
    return "\n\n".join(section.text for section in sections(report)) + "\n"
