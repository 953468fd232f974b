"""Strings of a run inside GitHub-flavoured Markdown: shown as they are, never read as markup.

Four places with rules of their own: prose (`prose`), code in a line (`code`), the inside of an HTML tag such as
<summary>, where Markdown is not read (`inside_html`), and blocks of text (`fenced`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from h3core.qualify.report.text import one_line, shortened

ENTITIES = {ord(sign): f"&#{ord(sign)};" for sign in "\\|<>&*_`[]~#!@:{}()"}
"""What could be markup, as numbers: those stand for the sign and never for its meaning, in every GFM context."""

LONGEST = 1000
"""Characters of a string that a line of Markdown takes."""


def prose(text: str, limit: int = LONGEST) -> str:
    """Text within a line, a list item or a table cell."""
    text = shortened(one_line(text), limit)
    # "|" and "\" as numbers, since "\|" ends a table cell or does not, depending on what stands before it. A
    # zero-width space after @, or a report in a comment would call people.
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = re.sub(r"[\\|]", lambda found: f"&#{ord(found[0])};", text)
    text = re.sub(r"[`*_~\[\]]", r"\\\g<0>", text)
    # What would begin a list, a heading or a rule.
    text = re.sub(r"^([0-9]+)(?=[.)](?: |$))|^(?=[-+=#])", r"\1\\", text)
    # GitHub reads $...$ as mathematics; <span> is its own advice.
    return text.replace("$", "<span>$</span>").replace("@", "@\u200b")


def code(text: str, limit: int = LONGEST) -> str:
    """Code within a line or a table cell. Where backticks cannot hold it, <code> does."""
    text = shortened(one_line(text), limit)
    if not text:
        return ""
    if not re.search(r"[`|\\]", text):
        return f"`{text}`"
    return f"<code>{text.translate(ENTITIES)}</code>"


def inside_html(text: str, limit: int = LONGEST) -> str:
    """Text between HTML tags on one line, where Markdown is not read."""
    return escape(shortened(one_line(text), limit))


def fenced(lines: Iterable[str], limit: int = 20_000) -> str:
    """A block of text as it is. The fence is longer than any run of backticks inside."""
    text = shortened("\n".join(lines), limit)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"


def folded(summary: str, body: str) -> str:
    """Something to unfold; `summary` is ready HTML, `body` Markdown."""
    return f"<details><summary>{summary}</summary>\n\n{body}\n\n</details>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> str:
    """A table of ready cells; the columns `right` are aligned to the right."""
    numbers = set(right)
    rule = ["---:" if index in numbers else "---" for index in range(len(head))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def bullets(items: Iterable[str]) -> str:
    """A list of ready items."""
    return "\n".join(f"- {item}" for item in items)
