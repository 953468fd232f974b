"""The pytest plugin: options, the plan of a run, and the fixtures of rank checks. `Recorder` has the other hooks.

`pytest -m gloo` qualifies this machine's software on its CPU; `--world N[,N]` says at which numbers of ranks.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from h3core.qualify.closing import begin_report, refuse_report
from h3core.qualify.controls import Caught
from h3core.qualify.journal import Journal
from h3core.qualify.opening import older_report, plan_of, refused_plan, register_markers
from h3core.qualify.options import OPTIONS, resolve
from h3core.qualify.preflight import blocking, judge, read_box
from h3core.qualify.recorder import Recorder
from h3core.qualify.refusals import is_inert, is_worker
from h3core.qualify.report.files import read_report
from h3core.qualify.report.schema import ReportError
from h3core.qualify.run import SUPERVISOR, Plan, Run
from h3core.ranks import RankPool

RUN = pytest.StashKey[Run]()
HANDLERS = pytest.StashKey[dict[int, Any]]()
PATIENCE: Final = 10.0
"""Seconds after an interruption in which no other one counts: ending ranks and writing the report takes less."""


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add h3core's options; an older report does not outlive a command line that pytest is about to refuse."""
    group = parser.getgroup("h3core", "MiniMax-H3 over several ranks")
    for option in OPTIONS:
        group.addoption(option.flag, **option.words())
    config = pluginmanager.get_plugin("pytestconfig")
    if config is not None:
        arguments, folder = config.invocation_params.args, config.invocation_params.dir
        older = older_report(arguments, os.environ, folder)
        if older is not None:
            plan = Plan(resolve({}, {}), "gloo", None, (), (), "python -m pytest", older.parent)
            refuse_report(plan, "pytest did not accept its command line")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Decide what this run is to do; refuse what cannot be done; start the report as INCOMPLETE."""
    expression = str(config.getoption("markexpr", "") or "")
    register_markers(config, expression)
    inert = is_inert(config) or is_worker(config)
    try:
        run = _opened(config, expression, inert)
    except pytest.UsageError as error:
        if not inert and (plan := refused_plan(config, expression, os.environ)) is not None:
            refuse_report(plan, str(error))
        raise
    config.stash[RUN] = run
    if config.pluginmanager.register(Recorder(run), "h3core-recorder") is None:
        raise pytest.UsageError("-p no:h3core-recorder: without it nothing would be judged; leave it out")
    if not inert and threading.current_thread() is threading.main_thread():
        config.stash[HANDLERS] = _heed(run)
        _end_with_supervisor(os.environ.get(SUPERVISOR))


def _opened(config: pytest.Config, expression: str, inert: bool) -> Run:
    plan = plan_of(config, expression, os.environ)
    run = Run(plan, Journal(None if inert else plan.folder))
    if inert:
        return run
    if earlier := plan.settings["compare"].value:
        try:
            read_report(Path(earlier))
        except (OSError, ReportError) as error:
            raise pytest.UsageError(f"--compare: {error}") from None
    if plan.tier is not None:
        run.preflight = judge(
            read_box(),
            world=max(plan.worlds),
            device=plan.tier.device,
            share_gpus=plan.settings["share_gpus"].value,
        )
        if bad := blocking(run.preflight):
            raise pytest.UsageError("; ".join(f"{item.name}: {item.got}; {item.action}" for item in bad))
    try:
        begin_report(run)
    except (OSError, ValueError) as error:
        raise pytest.UsageError(f"--report-dir: {error}") from None
    return run


def _heed(run: Run) -> dict[int, Any]:
    """Make SIGTERM and Ctrl-C pytest's interrupt; the handlers that were there.

    Often the next signal comes at once, from an impatient hand or because a whole group of processes is told to end,
    and must not cost the report. SIGINT stays ignored where it was, as in a shell's background job.
    """
    last = -PATIENCE

    def interrupted(number: int, _: Any) -> None:
        nonlocal last
        if time.monotonic() - last < PATIENCE:
            return
        last = time.monotonic()
        run.interrupted_by = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        raise KeyboardInterrupt(run.interrupted_by)

    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        numbers.append(signal.SIGINT)
    return {number: signal.signal(number, interrupted) for number in numbers}


def _end_with_supervisor(supervisor: str | None) -> None:
    """End this run, with its ranks and its report, when the process that started and judges it is gone."""

    def watch() -> None:
        while os.getppid() == int(supervisor or 0):
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    if supervisor is not None and supervisor == str(os.getppid()):
        threading.Thread(target=watch, daemon=True).start()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Give the signals and the folder back."""
    if RUN in config.stash and (claim := config.stash[RUN].claim) is not None:
        claim.release()
    for number, handler in config.stash.get(HANDLERS, {}).items():
        signal.signal(number, handler)
    config.stash[HANDLERS] = {}


@pytest.fixture(scope="session")
def run(request: pytest.FixtureRequest) -> Run:
    """This run: its plan, and what has been seen."""
    return request.config.stash[RUN]


@pytest.fixture(scope="session")
def plan(run: Run) -> Plan:
    """What this run is to do: worlds, modes, settings."""
    return run.plan


@pytest.fixture(scope="session")
def control_world(plan: Plan) -> int:
    """The world at which the negative controls run."""
    return plan.control_world or max(plan.worlds)


@pytest.fixture(scope="session")
def pool(world: int, run: Run) -> Iterator[RankPool]:
    """Real ranks over Gloo, kept for all checks of one world; they prove their presence when they come up."""
    yield from _present(world, run)


@pytest.fixture(scope="session")
def alone(run: Run) -> Iterator[RankPool]:
    """A pool of one rank, kept for the whole run."""
    yield from _present(1, run)


def _present(world: int, run: Run) -> Iterator[RankPool]:
    with RankPool(world, backend="gloo", timeout=run.plan.settings["rank_timeout"].value) as ranks:
        run.presence[world] = ranks.facts
        yield ranks


@pytest.fixture
def record(request: pytest.FixtureRequest, run: Run) -> Any:
    """Takes the evidence of a check: `record(evidence)` or `record(list_of_evidence)`, any depth of lists."""
    return lambda evidence: run.journal.add(request.node.nodeid, evidence)


@pytest.fixture
def caught(run: Run) -> Any:
    """Takes a negative control that was caught: `caught(slug, Caught(...))`, the slug being the check's variant."""

    def keep(slug: str, control: Caught) -> None:
        run.caught[slug] = control

    return keep


@pytest.fixture
def row_invariance(run: Run) -> Any:
    """Takes the results of a row-invariance probe, for one table over all worlds: `row_invariance(dtype, results)`."""
    return run.journal.row_invariance


@pytest.fixture
def note(run: Run) -> Any:
    """Takes a line or a table for the summary at the end: `note(title, lines)`."""
    return run.journal.note
