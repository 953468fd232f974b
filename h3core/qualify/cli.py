"""`python -m h3core qualify TIER`: builds the pytest call and becomes it."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, Final

import h3core
from h3core.qualify.options import OPTIONS, PATHS
from h3core.qualify.run import DEFAULT_FOLDER
from h3core.qualify.tiers import TIERS

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
        words: dict[str, Any] = {"help": f"{option.help} (or {option.variable})"}
        words |= {"action": "store_const", "const": "1"} if option.metavar is None else {"metavar": option.metavar}
        parser.add_argument(option.flag, **words)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replace this process by pytest, so that signals and exit codes are pytest's; 4 where the suite is not here."""
    root = Path(h3core.__file__).parents[1]
    if not (root / "tests" / "gloo").is_dir():
        print(
            f"h3core: error: no test suite beside {Path(h3core.__file__).parent}; qualify from a clone of the "
            "repository, installed with pip install --editable",
            file=sys.stderr,
        )
        return USAGE_ERROR
    command = pytest_command(args, Path.cwd())
    for option in OPTIONS:
        if option.flag in PATHS and os.environ.get(option.variable):
            os.environ[option.variable] = str(Path.cwd() / os.environ[option.variable])
    os.chdir(root)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *command])


def pytest_command(args: argparse.Namespace, folder: Path) -> list[str]:
    """Arguments of Python for pytest in the repository's root; paths get absolute, from `folder`."""
    words = []
    for option in OPTIONS:
        value = getattr(args, option.name)
        if option.flag == "--report-dir" and value is None and not os.environ.get(option.variable):
            value = DEFAULT_FOLDER
        if value is not None:
            text = str(folder / value) if option.flag in PATHS and value else value
            words.append(option.flag if option.metavar is None else f"{option.flag}={text}")
    return ["-m", "pytest", "-m", args.tier, *words, *args.rest]
