"""`python -m h3core report`: what it prints, what it writes, and its exit code.

A pass means: the exit code is the (last) report's verdict's, never 0 for anything else; what cannot be read is one
line on stderr and 2; no string of a report acts on the terminal.
Run: pytest tests/unit/test_report_cli.py
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from h3core.qualify.report.cli import add_parser
from h3core.qualify.report.files import FORMS, begin, write_all_forms
from h3core.qualify.report.markdown import markdown
from tests.unit.folders import listing
from tests.unit.sample_hostile import hostile
from tests.unit.sample_reports import (
    SAMPLES,
    Report,
    edited,
    in_progress,
    incomplete,
    not_qualified,
    qualified,
    unit_run,
)

CODES = {"qualified": 0, "not qualified": 1, "incomplete": 10, "in progress": 10, "gpu box": 0, "unit run": 0}


def call(*words: object) -> int:
    parser = argparse.ArgumentParser(prog="h3core")
    add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["report", *map(str, words)])
    code: int = args.run(args)
    return code


def saved(folder: Path, report: Report) -> Path:
    folder.mkdir()
    (folder / "report.json").write_text(json.dumps(report))
    return folder / "report.json"


@pytest.mark.parametrize("name", SAMPLES)
def test_the_exit_code_is_the_verdicts_and_the_first_line_the_runs_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    report = SAMPLES[name]()
    assert call(saved(tmp_path / "a", report)) == CODES[name]
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == report["verdict"]["line"]
    assert err == ""


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"verdict__exit_code": 2}, 2),
        ({"verdict__exit_code": None}, 10),
        ({"run__state": "in progress", "verdict__exit_code": 4}, 10),
    ],
)
def test_other_exit_codes(tmp_path: Path, changes: dict[str, object], code: int) -> None:
    assert call(saved(tmp_path / "a", edited(incomplete(), **changes))) == code


def test_pytests_own_code_stays_where_there_is_no_verdict(tmp_path: Path) -> None:
    assert call(saved(tmp_path / "a", edited(unit_run(), verdict__exit_code=5))) == 5


def test_what_failed_is_told_with_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = not_qualified()
    call(saved(tmp_path / "a", report))
    out = capsys.readouterr().out
    failure = report["failures"][0]
    assert f"  failed: {failure['check']} and 1 more: {failure['problem']}\n" in out
    for said in (
        "why: interconnect: links between ranks",
        f"meaning: {failure['meaning']}",
        f"next: {failure['action']}",
    ):
        assert f"    {said}\n" in out
    assert f"    reproduce: {failure['reproduce']}\n" in out
    assert "  coverage: 149 of 152 required checks passed, 5 of 5 controls caught\n" in out


def test_what_did_not_run_is_told_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(saved(tmp_path / "a", incomplete()))
    out = capsys.readouterr().out
    assert "  narrowed by -k 'blocks' (command line)\n" in out
    assert "  did not run (108 checks): test_transport.py::test_rows_to_heads_and_back_is_the_identity" in out
    assert out.count("  control did not run: ") == 5
    assert "  next: Run it again without what narrowed it.\n" in out


def test_a_killed_run_shows_what_had_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begin(tmp_path, in_progress())
    entry = {"check": "a.py::test_b", "outcome": "passed", "duration_s": 1, "reason": None, "evidence": []}
    (tmp_path / "journal.jsonl").write_text(json.dumps(entry) + '\n{"check": "a.py::te')
    assert call(tmp_path) == 10
    assert "  reason: 1 check had ended: 1 passed\n" in capsys.readouterr().out


# --- comparison --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["named", "option"])
def test_several_reports_show_what_got_worse_from_the_first_to_the_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], way: str
) -> None:
    old, new = saved(tmp_path / "old", qualified()), saved(tmp_path / "new", not_qualified())
    between = saved(tmp_path / "between", incomplete())
    code = call(old, between, new) if way == "named" else call(f"--compare={old}", new)
    assert code == 1
    out = capsys.readouterr().out
    assert out.splitlines()[0] == not_qualified()["verdict"]["line"]
    assert f"compared with {old}: {qualified()['verdict']['line']}\n" in out
    assert "  worse: 5\n" in out
    assert "    verdict: QUALIFIED (software, CPU) -> NOT QUALIFIED\n" in out
    assert "  better: nothing\n" in out


def test_the_exit_code_is_the_last_ones_even_where_it_got_better(tmp_path: Path) -> None:
    good, bad = saved(tmp_path / "good", qualified()), saved(tmp_path / "bad", not_qualified())
    assert call(bad, good) == 0
    assert call(good, bad) == 1


def test_long_lists_are_cut_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(saved(tmp_path / "a", qualified()), saved(tmp_path / "b", in_progress()))
    out = capsys.readouterr().out
    assert "more; --out=DIR writes them all\n" in out
    assert len(out.splitlines()) < 60


def test_reports_that_cannot_be_compared_say_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(saved(tmp_path / "a", qualified()), saved(tmp_path / "b", edited(qualified(), run__worlds=[2])))
    assert (
        "  not comparable: worlds: 2, 4, 6, 8 -> 2. Only what both runs have is compared.\n" in capsys.readouterr().out
    )


# --- output ------------------------------------------------------------------------------------------------------


def test_out_writes_the_forms_with_the_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = saved(tmp_path / "old", qualified()), saved(tmp_path / "new", not_qualified())
    out = tmp_path / "out"
    assert call(old, new, f"--out={out}") == 1
    assert listing(out) == sorted(FORMS)
    assert f"### Compared with `{old}`" in (out / "report.md").read_text()
    assert f"wrote {out / 'report.html'}\n" in capsys.readouterr().out


def test_forms_that_exist_are_replaced_only_with_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path / "a", qualified())
    (tmp_path / "report.md").write_text("mine")
    assert call(path, f"--out={tmp_path}") == 2
    assert (tmp_path / "report.md").read_text() == "mine"
    assert "exists; choose another name, or --force to replace it" in capsys.readouterr().err
    assert call(path, f"--out={tmp_path}", "--force") == 0
    assert (tmp_path / "report.md").read_text() == markdown(qualified())


def test_forms_are_not_put_beside_another_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path / "a", qualified())
    write_all_forms(edited(not_qualified(), run__id="b" * 32), tmp_path)
    assert call(path, f"--out={tmp_path}", "--force") == 2
    assert "of another run" in capsys.readouterr().err


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["first", "between", "last", "compare"])
def test_a_report_that_cannot_be_read_is_one_line_and_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], which: str
) -> None:
    good, bad = saved(tmp_path / "good", qualified()), tmp_path / "bad.json"
    bad.write_text("{")
    words = {
        "first": (bad, good),
        "between": (good, bad, good),
        "last": (good, bad),
        "compare": (f"--compare={bad}", good),
    }[which]
    assert call(*words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"h3core: error: {bad}: ends in the middle, after 1 bytes; copy it again\n"


def test_a_verdict_that_its_report_rules_out_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(saved(tmp_path / "a", edited(not_qualified(), verdict__exit_code=0))) == 2
    assert "not qualified, and exit code 0" in capsys.readouterr().err


def test_nothing_acts_on_the_terminal_and_no_string_makes_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call(saved(tmp_path / "a", hostile()), saved(tmp_path / "b", hostile()))
    out = capsys.readouterr().out
    assert not set("\x1b\x00\u202e\r") & set(out)
    assert not [line for line in out.splitlines() if line.startswith("## heading")]
    call(tmp_path / "\x1b[31m\nfake")
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert err.count("\n") == 1


def test_a_terminal_without_unicode_gets_escapes(tmp_path: Path) -> None:
    report = edited(qualified(), run__host="büro")
    code = "import argparse; from h3core.qualify.report.cli import add_parser; p = argparse.ArgumentParser(); "
    code += "add_parser(p.add_subparsers()); a = p.parse_args(); raise SystemExit(a.run(a))"
    command = [sys.executable, "-c", code, "report", str(saved(tmp_path / "a", report))]
    environ = {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, env=environ, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert b"host b\\xfcro" in done.stdout


def test_a_reader_who_leaves_early_changes_no_exit_code(tmp_path: Path) -> None:
    path = saved(tmp_path / "a", not_qualified())
    code = "import argparse; from h3core.qualify.report.cli import add_parser; p = argparse.ArgumentParser(); "
    code += "add_parser(p.add_subparsers()); a = p.parse_args(); raise SystemExit(a.run(a))"
    command = f'"{sys.executable}" -c "{code}" report "{path}" | true; echo ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2], timeout=60
    )
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_the_command_needs_neither_torch_nor_pytest_nor_jinja2(tmp_path: Path) -> None:
    path = saved(tmp_path / "a", not_qualified())
    code = "import sys, argparse; from h3core.qualify.report.cli import add_parser; p = argparse.ArgumentParser(); "
    code += "add_parser(p.add_subparsers()); a = p.parse_args(); a.run(a); "
    code += "print(sorted({'torch', 'pytest', 'jinja2', 'jsonschema', 'numpy'} & set(sys.modules)))"
    command = [sys.executable, "-c", code, "report", str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2], timeout=60
    )
    assert done.stdout.endswith("[]\n"), done.stdout + done.stderr
