"""report.html: one page that needs nothing outside itself, and whose strings are only ever text.

A pass means: the verdict, what failed and what to do stand before anything else, in words; both drawings say in text
what they show in colour; a hostile report yields the same elements as a harmless one.
Run: pytest tests/unit/test_report_html.py
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from h3core.qualify.report.compare import compare_reports
from h3core.qualify.report.html import _template, html
from h3core.qualify.report.schema import ReportError, package_text
from h3core.qualify.report.text import clean
from tests.unit.sample_hostile import HOSTILE, hostile, tamed
from tests.unit.sample_reports import SAMPLES, Report, in_progress, incomplete, not_qualified, qualified

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """The elements of a page in order, with attributes, and its text; tags must nest."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", " ".join(data.split())))

    @property
    def tags(self) -> Counter[str]:
        return Counter(tag for tag, _ in self.elements)

    def of(self, tag: str) -> list[str]:
        return [text for inside, text in self.texts if inside == tag]


def svgs(source: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", source, re.S)]


@pytest.mark.parametrize("name", SAMPLES)
def test_a_page_is_well_formed_and_needs_nothing_outside_itself(name: str) -> None:
    source = html(SAMPLES[name]())
    page = Page(source)
    assert source.startswith("<!doctype html>\n")
    assert (page.tags["html"], page.tags["head"], page.tags["h1"], page.tags["main"]) == (1, 1, 1, 1)
    assert not set(page.tags) & {"script", "link", "img", "iframe", "object", "embed", "form", "base", "video", "audio"}
    for tag, attrs in page.elements:
        assert not set(attrs) & {"src", "srcset", "action", "style", "data", "xlink:href"}, tag
        assert not [name for name in attrs if name.startswith("on")], tag
        assert attrs.get("href", "#").startswith("#"), tag  # type: ignore[union-attr]
    assert not re.search(r"https?:|url\(|@import|javascript:", source)


def test_a_policy_forbids_scripts_and_addresses_even_if_one_got_in() -> None:
    policy = next(a["content"] for t, a in Page(html(qualified())).elements if "http-equiv" in a)
    assert policy is not None
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline';")


@pytest.mark.parametrize("name", SAMPLES)
def test_the_verdict_comes_first_in_words_with_a_sign_and_a_meaning(name: str) -> None:
    report = SAMPLES[name]()
    page = Page(html(report))
    body = page.texts[next(i for i, (inside, _) in enumerate(page.texts) if inside == "h1") :]
    sign = {"qualified": "✓", "passed": "✓", "not qualified": "✗", "incomplete": "!", None: "-"}
    assert body[0] == ("h1", f"{sign[report['verdict']['outcome']]} {report['verdict']['word']}")
    assert len(body[1][1]) > 40
    assert page.of("title")[0].startswith(report["verdict"]["word"])
    banner = next(a["class"] for t, a in page.elements if t == "header")
    assert banner == f"verdict {str(report['verdict']['outcome'] or 'none').replace(' ', '-')}"
    assert f".{str(banner).split()[1]}" in package_text("report.css"), "its colour"


def test_what_failed_stands_before_everything_else_with_all_that_is_needed_to_act() -> None:
    report = not_qualified()
    texts = [text for _, text in Page(html(report)).texts]
    where = texts.index("What failed: 3 failures, 2 problems")
    assert where < texts.index("Checks by name and number of ranks")
    failure = report["failures"][0]
    wanted = [failure["problem"], "Where", "worlds 4 and 8, mode tensor, ranks 3 and 7; 2 checks", failure["check"]]
    wanted += [
        report["failures"][1]["check"],
        "Why",
        "interconnect: links between ranks",
        "Meaning",
        failure["meaning"],
    ]
    wanted += ["Next", failure["action"], "Reproduce", failure["reproduce"], "Error in full (of the first)"]
    assert texts[where + 1 : where + 1 + len(wanted)] == wanted
    assert texts.count(failure["reproduce"]) == 1


def test_several_problems_are_listed_in_the_verdict_with_links_that_lead_somewhere() -> None:
    report = not_qualified()
    page = Page(html(report))
    links = [str(a["href"])[1:] for t, a in page.elements if t == "a"]
    assert links == ["fault-1", "fault-2"]
    ids = [a["id"] for _, a in page.elements if "id" in a]
    assert set(links) <= set(ids)
    assert len(ids) == len(set(ids))


def test_coverage_and_controls_are_numbers_on_the_first_screen() -> None:
    texts = [text for _, text in Page(html(incomplete())).texts]
    start = texts.index("152")
    assert texts[start : start + 10] == [
        "152", "required", "44", "passed", "0", "failed", "108", "did not run", "0 of 5", "controls caught"
    ]  # fmt: skip
    assert start < texts.index("What to do next")


def test_an_incomplete_run_says_why_what_next_and_names_what_did_not_run() -> None:
    report = incomplete()
    texts = [text for _, text in Page(html(report)).texts]
    assert report["verdict"]["reasons"][0] in texts
    assert "Run it again without what narrowed it." in texts
    assert report["run"]["command"] in texts
    assert "and 107 more" in texts
    named = Counter(Page(html(report)).of("code"))
    assert {named[item["check"]] for item in report["coverage"]["missing"]} == {2}, "here, and among all checks"


def test_the_matrix_says_in_text_what_it_shows_in_colour() -> None:
    matrix = svgs(html(not_qualified()))[0]
    assert "not well: real ranks equal virtual ranks bit for bit failed" in matrix.attrib["aria-label"]
    tiles = [group for group in matrix.iter("g") if "tile" in group.attrib["class"]]
    assert len(tiles) == 4 * 17
    for tile in tiles:
        state = tile.attrib["class"].removeprefix("tile ")
        title, mark = tile.findtext("title"), tile.findtext("text")
        assert title is not None
        assert state.replace("-", " ") in title
        assert mark is not None
        assert mark[0] == {"passed": "✓", "failed": "✗", "not-run": "!", "skipped": "○"}[state]
    bad = [tile.findtext("title") for tile in tiles if tile.attrib["class"] == "tile failed"]
    assert bad[0] == "real ranks equal virtual ranks bit for bit, world 4: 1 passed, 1 failed"
    assert [text.text for text in matrix.iter("text")][:4] == ["2", "4", "6", "8"]
    width, height = float(matrix.attrib["width"]), float(matrix.attrib["height"])
    for rect in matrix.iter("rect"):
        assert float(rect.attrib["x"]) + float(rect.attrib["width"]) <= width
        assert float(rect.attrib["y"]) + float(rect.attrib["height"]) <= height


def test_the_strip_of_time_names_its_parts() -> None:
    strip = svgs(html(qualified()))[1]
    parts = [group.findtext("title") for group in strip.iter("g")]
    assert len(parts) == 9
    assert re.fullmatch(r"tensor velocities stay within the error budget: 58\.2 s, 39\.\d %", str(parts[0]))
    assert abs(sum(float(rect.attrib["width"].rstrip("%")) for rect in strip.iter("rect")) - 100) < 0.1


def test_a_run_without_checks_has_no_drawings() -> None:
    report = in_progress()
    report["checks"], report["coverage"]["missing"] = [], []
    assert svgs(html(report)) == []


def test_every_check_is_in_the_folded_table() -> None:
    report = not_qualified()
    codes = Counter(Page(html(report)).of("code"))
    assert all(codes[check["check"]] >= 1 for check in report["checks"])


def test_a_comparison_is_announced_in_the_verdict() -> None:
    report = not_qualified()
    report["comparison"] = compare_reports(qualified(), report, where="old/report.json")
    texts = [text for _, text in Page(html(report)).texts]
    assert texts.index("Worse than the earlier run") < texts.index("What failed: 3 failures, 2 problems")
    assert "Compared with old/report.json" in texts
    assert report["comparison"]["worse"][0] in texts


def test_a_hostile_run_adds_no_element_and_no_attribute() -> None:
    def shape(report: Report) -> list[tuple[str, list[str]]]:
        return [(tag, sorted(attrs)) for tag, attrs in Page(html(report)).elements]

    assert shape(hostile()) == shape(tamed(hostile()))


def test_hostile_strings_are_shown_as_they_are() -> None:
    source = html(hostile())
    page = Page(source)
    shown = " ".join(clean(HOSTILE).split())
    assert page.of("h3") == [shown, shown]
    assert "<script" not in source
    assert "&lt;script&gt;alert(&#34;1&#34;)&lt;/script&gt;" in source
    assert not set("\x1b\x00\u202e\r") & set(source)


@pytest.mark.parametrize(
    "raw", ["<script>alert(1)</script>", '"><svg onload=x>', "&amp;", "{{ 7 * 7 }}", "</style>", "</title>"]
)
def test_a_string_is_text_wherever_it_stands(raw: str) -> None:
    report = not_qualified()
    report["run"]["host"] = report["verdict"]["word"] = report["failures"][0]["problem"] = raw
    report["checks"][0]["name"] = raw
    page = Page(html(report))
    assert f"✗ {raw}" in page.of("h1")
    assert raw in page.of("h3")
    assert page.of("title")[0] == f"{raw} - h3core on {raw}"
    assert not page.tags["script"]


def test_the_styles_serve_dark_screens_phones_and_paper() -> None:
    css = package_text("report.css")
    for query in ("prefers-color-scheme: dark", "max-width: 600px", "@media print"):
        assert query in css
    assert 'name="viewport" content="width=device-width, initial-scale=1"' in html(qualified())


def luminance(colour: str) -> float:
    """WCAG 2.1, relative luminance."""
    digits = colour.lstrip("#") if len(colour) == 7 else "".join(2 * digit for digit in colour.lstrip("#"))
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1])
def test_text_has_the_contrast_that_wcag_aa_asks_for(scheme: int) -> None:
    found = re.findall(r":root \{(.*?)\}", package_text("report.css"), re.S)[scheme]
    colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{3,6})", found))
    pairs = [("ink", "page"), ("quiet", "page"), ("quiet", "panel"), ("ink", "panel")]
    pairs += [(name, f"{name}-fill") for name in ("good", "bad", "open", "none")]
    pairs += [("ink", f"{name}-fill") for name in ("good", "bad", "open", "none")]
    for front, back in pairs:
        low, high = sorted((luminance(colours[front]), luminance(colours[back])))
        assert (high + 0.05) / (low + 0.05) >= 4.5, (front, back)


def test_without_jinja2_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    _template.cache_clear()
    with pytest.raises(ReportError, match=r"got no jinja2, expected it; pip install 'h3core\[qualify\]'"):
        html(qualified())
