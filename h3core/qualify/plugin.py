"""The pytest plugin: options, markers, worlds, rank pools, and the evidence of each check.

`pytest -m gloo` runs the CPU tier at 2, 4, 6 and 8 ranks; `--world N[,N]` narrows it.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch

from h3core import __version__
from h3core.config import TINY
from h3core.qualify.evidence import Journal
from h3core.ranks import RankPool

DEFAULT_WORLDS = (2, 4, 6, 8)
JOURNAL = pytest.StashKey[Journal]()
POOLS = pytest.StashKey[dict[int, RankPool]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add h3core's options."""
    group = parser.getgroup("h3core", "MiniMax-H3 over several ranks")
    group.addoption("--world", default=None, metavar="N[,N]", help="ranks to run rank checks at (default: 2,4,6,8)")
    group.addoption(
        "--rank-timeout", type=float, default=120.0, metavar="SECONDS", help="longest that ranks may take for one task"
    )
    group.addoption(
        "--report-dir", default=None, metavar="DIR", help="write the evidence of each check to DIR/report.json"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register markers; refuse worlds that cannot be run."""
    config.addinivalue_line("markers", "gloo: real ranks on this machine's CPU, over Gloo")
    worlds(config)
    if config.getoption("--rank-timeout") <= 0:
        raise pytest.UsageError("--rank-timeout: expected a positive number of seconds")
    folder = config.getoption("--report-dir")
    if config.getoption("numprocesses", None) and (folder is not None or "gloo" in config.getoption("markexpr", "")):
        raise pytest.UsageError("xdist (-n): rank checks run in this process, and their evidence; leave -n out")
    config.stash[JOURNAL] = Journal(folder, worlds(config))
    if not config.getoption("collectonly"):
        try:
            config.stash[JOURNAL].write(None)  # in progress: an older report must not be taken for this run's
        except (OSError, ValueError) as error:
            raise pytest.UsageError(f"--report-dir: {error}") from None
    config.stash[POOLS] = {}


def worlds(config: pytest.Config) -> tuple[int, ...]:
    """The worlds of this run. Raises `pytest.UsageError` for what the test model cannot be cut into."""
    text = config.getoption("--world")
    if text is None:
        return DEFAULT_WORLDS
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise pytest.UsageError(f"--world: got {text!r}, expected N or N,N,...") from None
    most = TINY.num_attention_heads
    if any(not 2 <= number <= most for number in numbers):
        raise pytest.UsageError(
            f"--world: got {text!r}, expected 2 to {most}: the test model has {most} heads, and world 1 always runs"
        )
    return numbers


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A rank check that asks for `world` runs once at each; same worlds run together and share a pool."""
    if "world" in metafunc.fixturenames and metafunc.definition.get_closest_marker("gloo"):
        metafunc.parametrize("world", worlds(metafunc.config), scope="session", ids=lambda number: f"world={number}")


def pytest_report_header(config: pytest.Config) -> list[str]:
    """What this run stands on."""
    return [
        f"h3core {__version__}, torch {torch.__version__}, CPU {torch.backends.cpu.get_cpu_capability()}, "
        f"{os.cpu_count()} cores, worlds {', '.join(map(str, worlds(config)))}"
    ]


@pytest.fixture(scope="session")
def pool(world: int, request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Real ranks over Gloo, kept for all checks of one world."""
    with RankPool(world, backend="gloo", timeout=request.config.getoption("--rank-timeout")) as ranks:
        yield ranks


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Any:
    """Takes the evidence of a check: `record(evidence)` or `record(list_of_evidence)`, any depth of lists."""
    journal = request.config.stash[JOURNAL]
    return lambda evidence: journal.add(request.node.nodeid, evidence)


@pytest.fixture
def row_invariance(request: pytest.FixtureRequest) -> Any:
    """Takes the results of a row-invariance probe, for one table over all worlds: `row_invariance(dtype, results)`."""
    return request.config.stash[JOURNAL].row_invariance


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Any:
    """Takes a line or a table for the summary at the end: `note(title, lines)`."""
    return request.config.stash[JOURNAL].note


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A rank check that passes without having recorded any evidence is a failure: nothing was checked."""
    report = yield
    journal = item.config.stash[JOURNAL]
    owes = "record" in getattr(item, "fixturenames", ())
    if report.when == "call" and report.passed and owes and not journal.count(item.nodeid):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: passed without recording evidence of what it compared"
    if report.when == "call":
        journal.outcome(item.nodeid, report.outcome, report.duration)
    elif not report.passed:
        journal.outcome(item.nodeid, "error" if report.failed else report.outcome, report.duration)
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tables that checks noted, then what the rank checks compared."""
    journal = terminalreporter.config.stash[JOURNAL]
    for title, lines in journal.sections().items():
        terminalreporter.section(title)
        for line in lines:
            terminalreporter.write_line(line)
    if journal.evidence:
        terminalreporter.section("evidence")
        for line in journal.summary():
            terminalreporter.write_line(line)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the report, whatever the outcome."""
    if not session.config.getoption("collectonly"):
        session.config.stash[JOURNAL].write(int(exitstatus))
