"""What a run tells GitHub Actions: the job summary, and annotations on the job's page.

Sources: GitHub's documentation, "Workflow commands for GitHub Actions", and the escaping in actions/toolkit
(packages/core/src/command.ts). The caller decides whether it runs there (`GITHUB_ACTIONS=true`).
"""

# No `from __future__ import annotations`: a function here has that name.

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from h3core.atomic import write_all
from h3core.qualify.report import view
from h3core.qualify.report.markdown import Section, sections
from h3core.qualify.report.markdown_text import prose
from h3core.qualify.report.schema import Report
from h3core.qualify.report.text import cleaned, listed, one_line, plural, shortened

LIMIT: Final = 1024 * 1024
"""Bytes of one step's summary; over it, GitHub shows nothing of the summary at all."""
ERRORS: Final = 10
"""Error annotations of one step; GitHub drops the rest without a word."""


def append_step_summary(report: Report, environ: Mapping[str, str]) -> str | None:
    """Append the report's Markdown to the file that $GITHUB_STEP_SUMMARY names; None where it names none.

    Otherwise a sentence about what was done. What is in the file counts: sections are left out, full tables first and
    the verdict never, until the whole stays under GitHub's limit. A summary that cannot be written fails no run.
    """
    name = environ.get("GITHUB_STEP_SUMMARY")
    if not name:
        return None
    path = Path(name)
    try:
        with path.open("ab+", buffering=0) as file:
            file.seek(0)
            before = file.read(LIMIT) or b""
            # A blank line, or the heading would belong to whatever an earlier command wrote.
            gap = b"" if not before or before.endswith(b"\n\n") else b"\n" if before.endswith(b"\n") else b"\n\n"
            text, left_out = fitted(sections(report), LIMIT - len(before) - len(gap))
            if not text:
                return f"GitHub summary: no room left in {path}, of {LIMIT:,} bytes a step"
            try:
                write_all(file, gap + text)
            except BaseException:
                file.truncate(len(before))  # half a report could end before the verdict's reasons
                raise
    except OSError as error:
        return f"GitHub summary: {error}"
    without = f", without {listed(left_out, 20)}" if left_out else ""
    return f"GitHub summary: {len(text):,} bytes{without}"


def fitted(parts: list[Section], room: int) -> tuple[bytes, list[str]]:
    """The sections that fit into `room` bytes of UTF-8, and the names of the rest. Empty: not even the verdict fits."""
    kept, left_out = list(parts), list[str]()
    while True:
        text = _joined(kept, left_out)
        if len(text) <= room:
            return text, left_out
        last = max((section.rank for section in kept), default=0)
        if not last:
            break
        left_out += [section.name for section in kept if section.rank == last]
        kept = [section for section in kept if section.rank != last]
    # The first line alone, which is the verdict; half a line could say the opposite.
    first = (kept[0].text.partition("\n")[0] + "\n").encode() if kept else b""
    return (first if len(first) <= room else b""), [*left_out, "all but the verdict"]


def annotations(report: Report) -> list[str]:
    """Workflow commands, one a line: the verdict first, then at most ten errors in all; what is left is counted."""
    harmless = cleaned(report)
    outcome, line = harmless["verdict"]["outcome"], harmless["verdict"]["line"] or view.headline(harmless)
    if outcome in ("qualified", "passed", None):
        return [_command("notice", f"h3core: {view.word(harmless)}", line)]
    found = [(f"h3core: {view.word(harmless)}", line)]
    for group in view.groups(harmless):
        facts = [group.problem, group.where, group.first["meaning"], group.first["action"], group.first["reproduce"]]
        names = listed([failure["check"] for failure in group.failures], 3)
        found.append((names, "\n".join(fact for fact in facts if fact)))
    for why, checks in view.missing_by_reason(harmless).items():
        found.append((f"did not run: {plural(len(checks), 'required check')}", f"{why}\n{listed(checks, 5)}"))
    for control in view.unmet(harmless):
        state = "control did not run" if control["caught"] is None else "control not caught"
        found.append((state, f"{control['name']}\n{control['how'] or ''}".strip()))
    if len(found) > ERRORS:
        rest = len(found) - ERRORS + 1
        found[ERRORS - 1 :] = [(f"h3core: {rest:,} more errors", f"{rest:,} more errors are in the report")]
    return [_command("error", title, message) for title, message in found]


def _joined(kept: list[Section], left_out: list[str]) -> bytes:
    texts = [section.text for section in kept]
    if left_out:
        texts.append(
            prose(f"Left out, since GitHub shows at most 1024 KiB a step: {listed(left_out, 20)}. See report.md.")
        )
    return ("\n\n".join(texts) + "\n").encode()


def _command(name: str, title: str, message: str) -> str:
    title, message = shortened(one_line(title), 200), shortened(message.strip(), 4000)
    return f"::{name} title={_property(title)}::{_data(message)}"


def _data(text: str) -> str:
    """Escaped as a command's message: a newline would end the command, and the next line could be another one."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """Escaped as a property's value, which "," and ":" would end."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")
