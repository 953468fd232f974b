"""`python -m h3core report ...`: read, render and compare the reports of runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from h3core.qualify.report import view
from h3core.qualify.report.compare import compare_reports
from h3core.qualify.report.files import read_report, write_forms
from h3core.qualify.report.schema import Report
from h3core.qualify.report.text import clean, cleaned, one_line, plural, shortened

INCOMPLETE: Final = 10
"""Exit code where there is no result yet; qualify's own for INCOMPLETE."""
MOST: Final = 20
"""Lines of a list that the terminal gets."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `report`; its parsed arguments carry `run`, which takes them and returns an exit code."""
    parser = subparsers.add_parser(
        "report",
        help="show, render and compare reports of the suite",
        description="Show what a report says; of several, what got worse from the first to the last. The exit code "
        "is the (last) report's: 0 qualified or passed, 1 not qualified, 10 incomplete or in progress; "
        "2 for a report that cannot be read.",
    )
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help="a report.json, or a folder that holds one")
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help="write report.md, report.html and junit.xml of the (last) report there",
    )
    parser.add_argument("--compare", metavar="FILE", type=Path, help="the earlier report; same as naming it first")
    parser.add_argument("--force", action="store_true", help="replace forms that exist in DIR")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run a parsed `report` command. Returns the verdict's exit code, or 2 after one line on stderr."""
    try:
        report = _read(args)
        try:
            _show(report, args)
            sys.stdout.flush()
        except BrokenPipeError:
            # `| head`. Python flushes stdout once more on exit, and would complain again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        sys.stderr.write(_printable(f"h3core: error: {one_line(clean(str(error)))}\n", sys.stderr.encoding))
        return 2
    return exit_code(report)


def exit_code(report: Report) -> int:
    """The exit code that a report stands for; one without a result is incomplete."""
    code = report["verdict"]["exit_code"]
    return INCOMPLETE if report["run"]["state"] != "ended" or code is None else int(code)


def _read(args: argparse.Namespace) -> Report:
    """The last report, compared with the first where there are several."""
    paths: list[Path] = [*([args.compare] if args.compare else []), *args.files]
    reports = [read_report(path) for path in paths]  # the ones between too: one that cannot be read is no detail
    report = reports[-1]
    if len(reports) > 1:
        report["comparison"] = compare_reports(reports[0], report, where=str(paths[0]))
    return report


def _show(report: Report, args: argparse.Namespace) -> None:
    harmless = cleaned(report)
    _facts(harmless)
    if args.compare or len(args.files) > 1:
        _comparison(harmless["comparison"])
    if args.out is not None:
        for path in write_forms(report, args.out, force=args.force):
            _say(f"wrote {path}")


def _facts(report: Report) -> None:
    said, coverage = report["verdict"], report["coverage"]
    _say(said["line"] or view.headline(report))
    _say(f"  meaning: {view.meaning(report)}")
    for reason in said["reasons"][:MOST]:
        _say(f"  reason: {reason}")
    for narrowed in said["narrowed"]:
        _say(f"  narrowed by {narrowed}")
    _say(f"  run: {view.scope(report) or 'no tier'}; {view.when(report)}; host {report['run']['host'] or 'unknown'}")
    _say(f"  coverage: {view.counts(report)}")
    for group in view.groups(report)[:MOST]:
        _failure(group)
    for why, checks in list(view.missing_by_reason(report).items())[:MOST]:
        _say(f"  did not run ({plural(len(checks), 'check')}): {checks[0]}{' ...' if len(checks) > 1 else ''}: {why}")
    for control in view.unmet(report):
        _say(f"  control {'did not run' if control['caught'] is None else 'not caught'}: {control['name']}")
    step = view.next_step(report)
    if step and coverage["missing"]:
        _say(f"  next: {step}")


def _failure(group: view.Group) -> None:
    more = f" and {len(group.failures) - 1} more" if len(group.failures) > 1 else ""
    _say(f"  failed: {group.first['check']}{more}: {group.problem}")
    _say(f"    why: {group.label}")
    for name, key in (("meaning", "meaning"), ("next", "action"), ("reproduce", "reproduce")):
        if group.first[key]:
            _say(f"    {name}: {group.first[key]}")


def _comparison(found: Mapping[str, Any]) -> None:
    _say(f"compared with {found['with']}: {found['with_verdict'] or 'no verdict'}")
    if not found["comparable"]:
        _say(f"  not comparable: {found['why_not']}")
    for name in ("worse", "better", "changed"):
        entries = found[name]
        _say(f"  {name}: {len(entries) or 'nothing'}")
        for entry in entries[:MOST]:
            _say(f"    {entry}")
        if len(entries) > MOST:
            _say(f"    ... and {len(entries) - MOST} more; --out=DIR writes them all")


def _say(line: str) -> None:
    # One line each, so that no string of a report can pretend to be another line of this output.
    indent = line[: len(line) - len(line.lstrip())]
    sys.stdout.write(_printable(f"{indent}{shortened(one_line(line), 2000)}\n", sys.stdout.encoding))


def _printable(text: str, encoding: str | None) -> str:
    """`text` with what a terminal's encoding does not have as escapes."""
    name = encoding or "ascii"
    return text.encode(name, "backslashreplace").decode(name)
