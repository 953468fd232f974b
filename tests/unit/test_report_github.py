"""What GitHub Actions gets: a summary under its limit, and commands that no string can forge.

A pass means: whatever is in the file already, the whole stays under 1024 KiB and the verdict is there or nothing is;
an annotation is one line, at most ten are errors, and what is left out is counted.
Run: pytest tests/unit/test_report_github.py
"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from h3core import atomic
from h3core.qualify.report import github
from h3core.qualify.report.github import ERRORS, LIMIT, annotations, append_step_summary, fitted
from h3core.qualify.report.markdown import Section, markdown, sections
from tests.unit.sample_hostile import hostile
from tests.unit.sample_reports import Report, gpu_box, in_progress, incomplete, not_qualified, qualified, unit_run


def appended(tmp_path: Path, report: Report, before: bytes = b"") -> tuple[str | None, bytes]:
    path = tmp_path / "summary"
    path.write_bytes(before)
    said = append_step_summary(report, {"GITHUB_STEP_SUMMARY": str(path)})
    after = path.read_bytes()
    assert after.startswith(before)
    return said, after[len(before) :]


@pytest.mark.parametrize("environ", [{}, {"GITHUB_STEP_SUMMARY": ""}])
def test_nothing_is_done_where_no_file_is_named(environ: dict[str, str]) -> None:
    assert append_step_summary(qualified(), environ) is None


def test_the_whole_report_is_appended(tmp_path: Path) -> None:
    said, text = appended(tmp_path, not_qualified())
    assert text.decode() == markdown(not_qualified())
    assert said == f"GitHub summary: {len(text):,} bytes"


@pytest.mark.parametrize(("before", "gap"), [(b"x", "\n\n"), (b"x\n", "\n"), (b"x\n\n", ""), (b"", "")])
def test_a_heading_begins_a_line_of_its_own(tmp_path: Path, before: bytes, gap: str) -> None:
    assert appended(tmp_path, qualified(), before)[1].decode() == gap + markdown(qualified())


def test_a_file_that_is_not_there_yet_is_made(tmp_path: Path) -> None:
    append_step_summary(qualified(), {"GITHUB_STEP_SUMMARY": str(tmp_path / "new")})
    assert (tmp_path / "new").read_text() == markdown(qualified())


def test_two_reports_stand_one_after_the_other(tmp_path: Path) -> None:
    for report in (qualified(), incomplete()):
        append_step_summary(report, {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary")})
    assert (tmp_path / "summary").read_text() == f"{markdown(qualified())}\n{markdown(incomplete())}"


def test_at_every_fill_of_the_file_the_whole_stays_under_the_limit_with_the_verdict_first(tmp_path: Path) -> None:
    report = not_qualified()
    report["comparison"] = {"with": "a", "with_verdict": "b", "comparable": True, "why_not": None, "worse": ["c"]}
    report["comparison"] |= {"better": [], "changed": []}
    verdict = sections(report)[0].text.partition("\n")[0]
    lengths = []
    for room in [0, 1, *range(100, 40_000, 499)]:
        said, text = appended(tmp_path, report, b"x\n\n" + b"y" * (LIMIT - room - 5) + b"\n\n")
        assert len(text) <= room
        assert not text or text.decode().startswith(verdict + "\n")
        assert said is not None
        assert ("no room left" in said) == (not text)
        lengths.append(len(text))
    assert lengths[0] == 0
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 8, "section by section"
    assert lengths[-1] == len(markdown(report).encode())


def test_a_file_over_the_limit_is_left_alone(tmp_path: Path) -> None:
    said, text = appended(tmp_path, qualified(), b"x" * (LIMIT + 7))
    assert text == b""
    assert "no room left" in str(said)


def test_exactly_the_limit_fits(tmp_path: Path) -> None:
    length = len(markdown(qualified()).encode())
    _, text = appended(tmp_path, qualified(), b"y" * (LIMIT - length - 2) + b"\n\n")
    assert text.decode() == markdown(qualified())
    _, text = appended(tmp_path, qualified(), b"y" * (LIMIT - length - 2))
    assert text.decode() == f"\n\n{markdown(qualified())}"
    _, text = appended(tmp_path, qualified(), b"y" * (LIMIT - length - 1))
    assert b"Every check" not in text
    _, text = appended(tmp_path, qualified(), b"y" * (LIMIT - length - 1) + b"\n\n")
    assert b"Every check" not in text


def test_full_tables_go_first_and_what_went_is_named(tmp_path: Path) -> None:
    report = qualified()
    report["checks"] = [report["checks"][0] | {"check": f"a.py::test_x[{n}-{'z' * 100}]"} for n in range(9000)]
    report["coverage"] |= {"required": 9000, "passed": 9000}
    said, text = appended(tmp_path, report)
    assert said is not None
    assert said.endswith("without every check")
    assert b"Left out, since GitHub shows at most 1024 KiB a step: every check." in text
    assert b"### Tables" in text


def test_the_order_in_which_sections_go() -> None:
    report = not_qualified()
    report["comparison"] = {"with": "a", "with_verdict": "b", "comparable": True, "why_not": None, "worse": ["c"]}
    report["comparison"] |= {"better": [], "changed": []}
    report["coverage"]["missing"] = incomplete()["coverage"]["missing"][:2]
    room, gone = 10**6, list[str]()
    while True:
        text, left_out = fitted(sections(report), room)
        gone += [name for name in left_out if name not in gone]
        if not text or "all but the verdict" in left_out:
            break
        room = len(text) - 1
    assert gone == [
        "every check", "tables", "comparison", "errors in full", "machine", "checks by name", "controls", "preflight",
        "required checks that did not run", "what failed", "coverage", "all but the verdict",
    ]  # fmt: skip


def test_bytes_count_and_not_characters() -> None:
    parts = [Section("verdict", "✓" * 10, 0), Section("more", "✗" * 10, 1)]
    assert fitted(parts, 63)[0] == ("✓" * 10 + "\n\n" + "✗" * 10 + "\n").encode()
    assert fitted(parts, 62)[1]
    assert fitted(parts, 30)[0] == b""
    assert fitted(parts, 31)[0] == ("✓" * 10 + "\n").encode()


@pytest.mark.parametrize("name", ["missing/summary", "."])
def test_a_summary_that_cannot_be_written_fails_no_run(tmp_path: Path, name: str) -> None:
    said = append_step_summary(qualified(), {"GITHUB_STEP_SUMMARY": str(tmp_path / name)})
    assert said is not None
    assert said.startswith("GitHub summary: [Errno")


def test_a_disk_that_fills_midway_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(file: object, data: bytes) -> None:
        atomic.write_all(file, data[:100])  # type: ignore[arg-type]
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(github, "write_all", half)
    said, text = appended(tmp_path, qualified(), b"before\n")
    assert text == b""
    assert "No space left" in str(said)


# --- annotations -------------------------------------------------------------------------------------------------


def test_a_good_run_is_one_notice() -> None:
    assert annotations(qualified()) == [
        f"::notice title=h3core%3A QUALIFIED (software%2C CPU)::{qualified()['verdict']['line']}"
    ]
    assert annotations(gpu_box())[0].startswith("::notice title=h3core%3A PASSED%2C REDUCED%3A mode ulysses::")
    assert annotations(unit_run())[0].startswith("::notice title=h3core%3A NO VERDICT::")


def test_a_bad_run_is_an_error_for_the_verdict_and_one_for_each_problem() -> None:
    report = not_qualified()
    lines = annotations(report)
    assert len(lines) == 3
    assert lines[0] == f"::error title=h3core%3A NOT QUALIFIED::{report['verdict']['line']}"
    first = report["failures"][0]
    assert lines[1].startswith("::error title=tests/gloo/test_denoise.py%3A%3Atest_real_ranks")
    assert f"::{first['problem']}%0Aworlds 4 and 8" in lines[1]
    assert f"%0A{first['reproduce']}" in lines[1]


@pytest.mark.parametrize("make", [incomplete, in_progress])
def test_what_did_not_run_is_an_error_by_reason(make: object) -> None:
    assert callable(make)
    report = make()
    lines = annotations(report)
    assert lines[0].startswith("::error title=h3core%3A INCOMPLETE::")
    count = len(report["coverage"]["missing"])
    assert any(line.startswith(f"::error title=did not run%3A {count} required checks::") for line in lines)
    assert sum("control did not run" in line for line in lines) == 5


def test_at_most_ten_are_errors_and_the_rest_is_counted() -> None:
    report = not_qualified()
    for problems, expected in ((9, 10), (10, 10), (40, 10)):
        report["failures"] = [
            report["failures"][0] | {"problem": f"problem {n}", "meaning": f"{n}"} for n in range(problems)
        ]
        lines = annotations(report)
        assert len(lines) == expected <= ERRORS
        assert all(line.startswith("::error ") for line in lines)
        assert ("more errors" in lines[-1]) == (problems > 9)
    assert lines[-1] == "::error title=h3core%3A 32 more errors::32 more errors are in the report"


def test_no_string_forges_a_command() -> None:
    for line in annotations(hostile()):
        assert "\n" not in line
        assert "\r" not in line
        title = line.removeprefix("::error title=").partition("::")[0]
        assert not set(title) & set(":,")
        assert "%250A" in line or "more" in line, "a percent sign is a percent sign"


def test_escapes_are_those_of_the_toolkit() -> None:
    report = not_qualified()
    report["verdict"] |= {"word": "a,b:c%d", "line": "e,f:g%h\ni"}
    assert annotations(report)[0] == "::error title=h3core%3A a%2Cb%3Ac%25d::e,f:g%25h%0Ai"


def test_long_messages_are_cut() -> None:
    report = not_qualified()
    report["failures"][0]["problem"] = "x" * 100_000
    assert max(map(len, annotations(report))) < 5000
