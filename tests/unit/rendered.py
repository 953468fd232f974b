"""Markdown as its readers get it, in tests of what is written in it."""

from __future__ import annotations

from collections import Counter
from html.parser import HTMLParser

from markdown_it import MarkdownIt


class Page(HTMLParser):
    """The tags and the text of rendered Markdown."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.text = ""
        self.feed(MarkdownIt("gfm-like", {"html": True, "linkify": False}).render(source))

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags[tag] += 1

    def handle_data(self, data: str) -> None:
        self.text += data


def shown(source: str) -> str:
    """The text that a reader sees."""
    return Page(source).text.replace("\u200b", "").strip()
