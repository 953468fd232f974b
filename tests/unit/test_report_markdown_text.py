"""Strings of a run in Markdown: shown as they are, whatever they are.

A pass means: a Markdown parser finds the text that went in, and no element that the report itself did not write.
Run: pytest tests/unit/test_report_markdown_text.py
"""

from __future__ import annotations

import pytest

from h3core.qualify.report.markdown_text import code, fenced, inside_html, prose, table
from h3core.qualify.report.text import clean
from tests.unit.rendered import Page, shown
from tests.unit.sample_hostile import HOSTILE

STRINGS = [
    HOSTILE,
    "**bold** _it_ ~~gone~~ `code` [text](http://x.example) ![image](x.png) <b>x</b> &amp; &#42;",
    "a|b\\|c\\\\|d\\",
    "# heading",
    "- item",
    "+ item",
    "1. item",
    "1) item",
    "> quote",
    "=====",
    "---",
    "``` fence",
    "~~~ fence",
    "| a | b |",
    "[x]: http://x.example",
    "<details>",
    "<!-- comment",
    "`a` ``b`` `",
    "`",
    "test___x__init__[world=2-one a rank]",
    "$HOME costs $5$",
    "a  \nb\n\nc\n    d",
    "-1.5e-3",
    "    indented",
]


@pytest.mark.parametrize("raw", STRINGS)
@pytest.mark.parametrize("where", ["{}", "- {}", "- **Why:** {}", "### ✗ {}", "#### {} end"])
def test_prose_is_shown_as_it_is(raw: str, where: str) -> None:
    harmless = clean(raw)
    plain, page = Page(where.format("x")), Page(where.format(prose(harmless)))
    page.tags.pop("span", None)  # around $, which GitHub would take for mathematics
    assert page.tags == plain.tags
    assert shown(where.format(prose(harmless))) == plain.text.replace("x", " ".join(harmless.split())).strip()


@pytest.mark.parametrize("raw", STRINGS)
@pytest.mark.parametrize("writer", [prose, code])
def test_a_table_cell_stays_one_cell(raw: str, writer: object) -> None:
    assert callable(writer)
    harmless = clean(raw)
    page = Page(table(["a", "b"], [[writer(harmless), "end"], [writer(harmless), "end"]]))
    assert (page.tags["td"], page.tags["tr"], page.tags["table"]) == (4, 3, 1)
    assert not set(page.tags) - {"table", "thead", "tbody", "tr", "th", "td", "code", "span"}
    assert page.text.replace("\u200b", "").count(" ".join(harmless.split())) == 2


@pytest.mark.parametrize("raw", STRINGS)
def test_code_is_shown_as_it_is(raw: str) -> None:
    page = Page(f"- {code(clean(raw))}")
    assert page.tags == {"ul": 1, "li": 1, "code": 1}
    assert page.text.strip() == " ".join(clean(raw).split())


@pytest.mark.parametrize("raw", [*STRINGS, "`" * 9, "a\n```\nb\n````"])
def test_a_block_ends_only_where_it_ends(raw: str) -> None:
    page = Page(f"{fenced(clean(raw).splitlines())}\n\nend")
    assert page.tags == {"pre": 1, "code": 1, "p": 1}
    assert page.text == f"{chr(10).join(clean(raw).splitlines())}\n\nend\n"


@pytest.mark.parametrize("raw", STRINGS)
def test_a_summary_is_shown_as_it_is(raw: str) -> None:
    page = Page(f"<details><summary>{inside_html(clean(raw))}</summary>\n\nbody\n\n</details>")
    assert page.tags == {"details": 1, "summary": 1, "p": 1}
    assert page.text.startswith(" ".join(clean(raw).split()))


def test_nobody_is_called_and_nothing_is_mathematics() -> None:
    assert prose("@joe") == "@\u200bjoe"
    assert prose("$a$") == "<span>$</span>a<span>$</span>"


def test_usual_names_stay_readable_in_the_source() -> None:
    name = "tests/gloo/test_x.py::test_y[world=2-tensor]"
    assert code(name) == f"`{name}`"
    assert code("") == ""
