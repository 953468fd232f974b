"""`python -m h3core qualify TIER`: builds the pytest call, runs it, and believes it only with a finished report."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import h3core
from h3core.qualify.opening import INERT_WORDS
from h3core.qualify.options import OPTIONS, PATHS
from h3core.qualify.report.files import read_report
from h3core.qualify.report.schema import ReportError
from h3core.qualify.run import DEFAULT_FOLDER, SUPERVISOR
from h3core.qualify.tiers import TIERS
from h3core.qualify.verdict import EXIT_INCOMPLETE, KEPT

USAGE_ERROR: Final = 4
"""As pytest's own."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The `qualify` command."""
    parser = commands.add_parser(
        "qualify",
        help="find out whether this machine runs H3 right: a verdict and a report",
        usage="h3core qualify {gloo,nccl,gate} [options] [-- options of pytest]",
        description="Ends in QUALIFIED (exit code 0), NOT QUALIFIED (1) or INCOMPLETE (10), with a report. "
        "What follows -- goes to pytest as it stands.",
    )
    parser.add_argument(
        "tier", choices=list(TIERS), help="; ".join(f"{tier.name}: {tier.help}" for tier in TIERS.values())
    )
    for option in OPTIONS:
        parser.add_argument(option.flag, **option.words())
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run pytest and return its exit code, but success only with a finished report of this run; 4 without the suite."""
    root = Path(h3core.__file__).parents[1]
    if not (root / "tests" / "gloo").is_dir():
        print(
            f"h3core: error: no test suite beside {Path(h3core.__file__).parent}; qualify from a clone of the "
            "repository, installed with pip install --editable",
            file=sys.stderr,
        )
        return USAGE_ERROR
    if sys.flags.optimize or any(word.startswith("-m") for word in args.rest):
        why = "python -O drops what checks assert" if sys.flags.optimize else "-m is the tier's, and already given"
        print(f"h3core: error: {why}; leave it out", file=sys.stderr)
        return USAGE_ERROR
    folder = Path.cwd()
    report = folder / (args.report_dir or os.environ.get("H3_REPORT_DIR") or DEFAULT_FOLDER)
    before = _ident(report)
    command, environment = pytest_command(args, folder, root), {**os.environ, SUPERVISOR: str(os.getpid())}
    for option in OPTIONS:
        if option.flag in PATHS and environment.get(option.variable):
            environment[option.variable] = str(folder / environment[option.variable])
    sys.stdout.flush()
    code = supervised([sys.executable, *command], root, environment)
    if any(word in INERT_WORDS for word in args.rest):
        return code
    said, problem = ending(report, before, args.tier)
    if said == code or (said is None and code in KEPT):
        return code
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    with contextlib.suppress(OSError):  # a terminal that is gone, or a full disk: the exit code says it too
        print(f"INCOMPLETE: pytest {how}, and {problem}; report: {report}", flush=True)
    return said or EXIT_INCOMPLETE


def supervised(command: list[str], folder: Path, environment: Mapping[str, str]) -> int:
    """Run `command` to its end and return its code, negative for a signal.

    Ctrl-C and SIGTERM are handed on. A supervisor is needed because nothing inside a process survives
    an `_exit(0)` in it.
    """
    running: list[subprocess.Popen[bytes]] = []
    # Not SIG_IGN: a child inherits what is ignored, and pytest must heed Ctrl-C.
    before = {
        number: signal.signal(number, lambda number, _: _hand_on(number, running))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        with subprocess.Popen(command, cwd=folder, env=environment) as process:
            running.append(process)
            return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _hand_on(number: int, processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.send_signal(number)


def ending(report: Path, before: str | None, tier: str) -> tuple[int | None, str]:
    """The exit code that a folder's report gives a run of `tier` which began after `before`, and what to say of it.

    None where the report is not that of a finished run.
    """
    try:
        found = read_report(report)
    except ReportError as error:
        return None, str(error)
    if found["run"]["id"] == before:
        return None, "the report is an earlier run's"
    if found["run"]["state"] != "ended":
        return None, "its report was never finished"
    said: int = found["verdict"]["exit_code"]
    if found["run"]["tier"] != tier or (said == 0 and found["verdict"]["outcome"] not in ("qualified", "passed")):
        return EXIT_INCOMPLETE, f"its report is not that of a qualification: {found['verdict']['word']}"
    return said, f"its report says {found['verdict']['word']}"


def _ident(report: Path) -> str | None:
    try:
        ident: str = read_report(report)["run"]["id"]
    except ReportError:
        return None
    return ident


def pytest_command(args: argparse.Namespace, folder: Path, root: Path) -> list[str]:
    """Arguments of Python for pytest in the repository's root; paths get absolute, from `folder`."""
    words = []
    for option in OPTIONS:
        value = getattr(args, option.name)
        if option.flag == "--report-dir" and value is None and not os.environ.get(option.variable):
            value = DEFAULT_FOLDER
        if value is not None:
            text = str(folder / value) if option.flag in PATHS and value else value
            words.append(option.flag if option.metavar is None else f"{option.flag}={text}")
    # Only the tier's own folder: collecting the unit tests needs packages that a machine's qualification does not.
    folder_of_tier = TIERS[args.tier].folder
    where = [folder_of_tier] if (root / folder_of_tier).is_dir() else []
    return ["-m", "pytest", "-m", args.tier, *words, *args.rest, *where]
