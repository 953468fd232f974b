"""How a run ends, and how its report begins: the verdict, the files, the last line, GitHub's summary."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from h3core.qualify.assemble import report_of
from h3core.qualify.claim import Claim
from h3core.qualify.journal import Journal
from h3core.qualify.preflight import machine_facts, read_box
from h3core.qualify.report import github
from h3core.qualify.report.compare import compare_reports
from h3core.qualify.report.files import begin, read_report, write_all_forms
from h3core.qualify.report.schema import ReportError
from h3core.qualify.run import Plan, Run
from h3core.qualify.verdict import EXIT_INCOMPLETE, Covered, Verdict

SKIPPED_ALL = "no verdict, and every rank check was skipped: nothing was checked"


def begin_report(run: Run) -> None:
    """Claim the folder, and replace whatever report stands there by one that says INCOMPLETE.

    Raises `OSError` or `ValueError`.
    """
    if run.plan.folder is None:
        return
    run.plan.folder.mkdir(parents=True, exist_ok=True)
    run.claim = Claim(run.plan.folder)
    begin(run.plan.folder, _report(run, None))
    run.journal.start()


def refuse_report(plan: Plan, problem: str) -> None:
    """Leave a report that says why nothing ran. A folder that cannot be written is the lesser problem then."""
    if plan.folder is None:
        return
    run = Run(plan, Journal(plan.folder))
    line = f"INCOMPLETE: nothing ran: {problem}"
    verdict = Verdict("incomplete", "INCOMPLETE", 4, (f"nothing ran: {problem}",), (), line)
    try:
        plan.folder.mkdir(parents=True, exist_ok=True)
        claim = Claim(plan.folder)  # a report that another run is writing is not ours to disown
        try:
            begin(plan.folder, _report(run, None, verdict))
            write_all_forms(_report(run, 4, verdict), plan.folder)
        finally:
            claim.release()
    except (OSError, ValueError):
        return


def finish(run: Run, pytest_exit: int) -> tuple[list[str], int]:
    """Judge, write the report, and give the last lines of the terminal with the exit code."""
    plan = run.plan
    coverage = run.coverage()
    verdict = run.verdict(pytest_exit, coverage=coverage)
    if verdict is None:
        return _without_verdict(run, pytest_exit)
    report = _report(run, pytest_exit, verdict, coverage)
    lines = []
    try:
        if earlier := plan.settings["compare"].value:
            report["comparison"] = compare_reports(read_report(Path(earlier)), report, where=str(earlier))
    except (OSError, ReportError) as error:  # checked at the start as well: it has gone since
        lines.append(f"--compare: {error}")
    problem = _write(report, plan)
    if problem is not None:
        verdict = _unwritten(verdict, problem)
        report = _report(run, pytest_exit, verdict, coverage)
    if os.environ.get("GITHUB_ACTIONS") == "true":
        lines += github.annotations(report)
    if summary := github.append_step_summary(report, os.environ):
        lines.append(summary)
    where = f"no report: {problem}" if problem else f"report: {_shown(plan.folder)}"
    return [*lines, f"{verdict.line}; {where}"], verdict.exit_code


def _without_verdict(run: Run, pytest_exit: int) -> tuple[list[str], int]:
    """pytest's own outcome; but rank checks that were all skipped are no success."""
    checks = [run.seen[nodeid] for nodeid in run.seen if nodeid in run.keys]
    empty = pytest_exit == 0 and bool(checks) and all(sight.outcome == "skipped" for sight in checks)
    code = EXIT_INCOMPLETE if empty else pytest_exit
    lines = [SKIPPED_ALL] if empty else []
    if run.plan.folder is not None:
        problem = _write(_report(run, code), run.plan)
        if problem is not None:
            return [*lines, f"no report: {problem}"], code or EXIT_INCOMPLETE
        lines.append(f"no verdict, because -m selects no tier; report: {_shown(run.plan.folder)}")
    return lines, code


def _report(
    run: Run, pytest_exit: int | None, verdict: Verdict | None = None, coverage: Sequence[Covered] | None = None
) -> dict[str, Any]:
    coverage = run.coverage() if coverage is None else coverage
    verdict = run.verdict(pytest_exit, coverage=coverage) if verdict is None else verdict
    ended = pytest_exit is not None
    return report_of(run, verdict, coverage, pytest_exit=pytest_exit, ended=ended, machine=machine_facts(read_box()))


def _write(report: dict[str, Any], plan: Plan) -> str | None:
    """Write every form; what went wrong, in words."""
    if plan.folder is None:
        return "no folder"
    try:
        write_all_forms(report, plan.folder)
    except (OSError, ValueError) as error:  # no room, no right, or a report that contradicts itself
        return f"{plan.folder}: {error}"
    return None


def _unwritten(verdict: Verdict, problem: str) -> Verdict:
    """A pass that nobody can be shown is none."""
    reason = f"the report could not be written: {problem}"
    if verdict.outcome in ("not qualified", "incomplete"):
        return replace(verdict, reasons=(*verdict.reasons, reason))
    return replace(
        verdict,
        outcome="incomplete",
        word="INCOMPLETE",
        exit_code=EXIT_INCOMPLETE,
        reasons=(reason,),
        line=f"INCOMPLETE: {reason}; without that: {verdict.line}",
    )


def _shown(folder: Path | None) -> str:
    """A path as short as it can be said from here."""
    path = Path(folder or ".", "report.html")
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
