"""The hooks that watch a run: which checks there are, how each ended and with what evidence, and the verdict."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from h3core.qualify.closing import finish
from h3core.qualify.diagnosis import failure_of
from h3core.qualify.manifest import key_of, row_of
from h3core.qualify.opening import header
from h3core.qualify.preflight import lines as preflight_lines
from h3core.qualify.refusals import is_inert, is_worker
from h3core.qualify.run import Run
from h3core.qualify.summary import sections
from h3core.qualify.tiers import TIERS, selects, world_marker
from h3core.qualify.verdict import Seen


class Recorder:
    """Fills a `Run`. Registered with pytest once the run's plan stands."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def pytest_report_header(self) -> list[str]:
        """What this run stands on, where each value came from, and what the machine was seen to be."""
        return [*header(self.run), *preflight_lines(self.run.preflight)]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """A rank check that asks for `world` or `mode` runs once at each; same worlds run together and share a pool."""
        if not any(metafunc.definition.get_closest_marker(tier) for tier in TIERS):
            return
        plan = self.run.plan
        if "world" in metafunc.fixturenames:
            metafunc.parametrize("world", plan.worlds, scope="session", ids=lambda number: f"world={number}")
        if "mode" in metafunc.fixturenames:
            # No wider scope: pytest would then group by mode, and start every world's ranks anew for each.
            metafunc.parametrize("mode", plan.modes, scope="function", ids=str)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Name each rank check as the manifest does, mark its world, and leave out modes that were not asked for."""
        left_out = []
        for item in items:
            tier = next((name for name in TIERS if item.get_closest_marker(name)), None)
            if tier is None:
                continue
            callspec = getattr(item, "callspec", None)
            params: dict[str, Any] = {} if callspec is None else callspec.params
            check = f"{item.path.name}::{getattr(item, 'originalname', None) or item.name}"
            row = row_of(check, tier)
            controls = row is not None and row.worlds == "control"
            world = self.run.plan.control_world if controls else params.get("world")
            key = key_of(check, "" if callspec is None else callspec.id, world, params.get("mode"), row)
            if key in self.run.keys.values():
                self.run.broken.append(f"two checks answer to {key}, one of them {item.nodeid}: rename it")
            self.run.keys[item.nodeid] = key
            item.add_marker(world_marker(key.world))
            if key.mode is not None and key.mode not in self.run.plan.modes:
                left_out.append(item)
        if left_out:
            gone = set(left_out)
            items[:] = [item for item in items if item not in gone]
            config.hook.pytest_deselected(items=left_out)

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Remember what left a required check out."""
        for item in items:
            if item.nodeid in self.run.keys:
                self.run.deselected[self.run.keys[item.nodeid]] = self._why_deselected(item)

    def _why_deselected(self, item: pytest.Item) -> str:
        names = {marker.name for marker in item.iter_markers()}
        by = [f"-m {self.run.plan.expression!r}"] * (not selects(self.run.plan.expression or "any", names))
        by = by or [narrowing for narrowing in self.run.plan.narrowed if not narrowing.startswith("--world")]
        return f"deselected by {' or '.join(by) or 'a plugin or conftest'}"

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Every check that is to run is known now: one that never comes to an end is missed by name."""
        self.run.collected = True
        for item in session.items:
            self.run.seen[item.nodeid] = Seen(item.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A test file that cannot be collected."""
        if report.failed:
            lines = str(report.longrepr).strip().splitlines()
            errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E ")] or lines[-1:]
            reason = errors[-1] if errors else "no reason"
            self.run.broken.append(f"{report.nodeid} could not be collected: {reason}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Keep each check's outcome; without a verdict to hold it, a check that brings too little evidence fails."""
        report = yield
        sight = self.run.seen.setdefault(item.nodeid, Seen(item.nodeid))
        sight.seconds += report.duration
        if report.when == "call" and report.passed:
            self.run.journal.weigh(sight)
            lacking = self._lacking(item, sight)
            if lacking and (self.run.plan.tier is None or self.run.row(item.nodeid) is None):
                report.outcome = "failed"
                report.longrepr = f"{item.nodeid}: passed with too little evidence: {lacking}"
        self._keep(sight, report, call)
        return report

    def _lacking(self, item: pytest.Item, sight: Seen) -> str | None:
        lacking = self.run.shortfall(item.nodeid)
        if lacking is None and "record" in getattr(item, "fixturenames", ()) and not sight.comparisons:
            return "it recorded no evidence of what it compared"
        return lacking

    def _keep(self, sight: Seen, report: pytest.TestReport, call: pytest.CallInfo[None]) -> None:
        """The outcome so far; nothing that comes later makes a failure or an error better."""
        if report.skipped or hasattr(report, "wasxfail"):  # an expected failure, or one that surprises, checks nothing
            if sight.outcome not in ("failed", "error"):
                sight.outcome, sight.reason = "skipped", _skip_reason(report)
            return
        if report.passed:
            if report.when == "call" and sight.outcome is None:
                sight.outcome = "passed"
            return
        text = report.longreprtext
        error = call.excinfo.value if call.excinfo is not None else AssertionError(text)
        failure = failure_of(error, text)
        judged = report.when == "call" or failure.judged  # what ranks said in a fixture counts as what they said
        if sight.outcome != "failed":
            sight.outcome, sight.reason = ("failed" if judged else "error"), failure.problem
        self.run.failures.setdefault(report.nodeid, failure)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """One line in the journal for each check, as soon as it has ended."""
        if nodeid in self.run.seen:
            self.run.write_line(nodeid)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Ctrl-C, SIGTERM, or pytest.exit."""
        if self.run.interrupted_by is not None:
            return
        if type(excinfo.value) is KeyboardInterrupt:
            self.run.interrupted_by = "Ctrl-C"
        elif isinstance(excinfo.value, pytest.exit.Exception):
            self.run.interrupted_by = f"pytest.exit: {excinfo.value}"
        elif not self.run.broken:  # pytest's own way to stop: after errors of collection, which are known, or others
            self.run.broken.append(f"pytest stopped: {excinfo.value}")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Tables that checks noted, what failed and what to do next, what was compared."""
        if is_inert(terminalreporter.config):
            return
        for title, lines in sections(self.run).items():
            terminalreporter.section(title)
            for line in lines:
                terminalreporter.write_line(line)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        """The verdict: it sets the exit status, and has the last line."""
        if is_inert(session.config) or is_worker(session.config):
            yield
            return
        with unmoved():
            yield
            lines, code = finish(self.run, int(session.exitstatus))
            session.exitstatus = code
            terminal = session.config.pluginmanager.get_plugin("terminalreporter")
            for line in lines:
                if terminal is None:
                    sys.stdout.write(f"{line}\n")
                else:
                    terminal.write_line(line, bold=True)


@contextmanager
def unmoved() -> Iterator[None]:
    """Let no signal cost the report while ranks are ended and it is written: seconds, all of them bounded."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _skip_reason(report: pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        return f"marked as expected to fail: {report.wasxfail}"
    longrepr = report.longrepr
    return str(longrepr[2] if isinstance(longrepr, tuple) else longrepr).removeprefix("Skipped: ")
