"""Ways to start pytest under which a green run would mean nothing: each is a usage error."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Final

import pytest

from h3core.qualify.tiers import Tier

TORCHRUN: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")
RETRIES: Final = {
    "reruns": "pytest-rerunfailures",
    "retries": "pytest-retry",
    "count": "pytest-repeat",
    "force_flaky": "flaky",
    "flake_finder_runs": "pytest-flakefinder",
}
"""Options of plugins that run a check until it passes, or several times under one name."""


def is_inert(config: pytest.Config) -> bool:
    """Whether pytest was only asked to show something: --collect-only, --fixtures, --markers, --help and the like."""
    names = ("collectonly", "setupplan", "setuponly", "showfixtures", "show_fixtures_per_test", "markers", "help")
    return any(bool(config.getoption(name, False)) for name in (*names, "version", "cacheshow"))


def is_worker(config: pytest.Config) -> bool:
    """Whether this process is one of xdist's, which reports to a controller."""
    return hasattr(config, "workerinput")


def refuse(config: pytest.Config, tier: Tier | None, environ: Mapping[str, str]) -> None:
    """Raise `pytest.UsageError` for the first of them that applies to a qualification of `tier`.

    Without a tier only xdist together with a report is refused: workers' evidence does not reach it.
    """
    spread = config.getoption("numprocesses", None) or config.getoption("tx", None)
    if spread and (tier is not None or config.getoption("report_dir") is not None):
        raise pytest.UsageError("xdist (-n): rank checks run in this process, and their evidence; leave -n out")
    if tier is None:
        return
    if sys.flags.optimize:
        raise pytest.UsageError("python -O, or PYTHONOPTIMIZE: asserts of tests would not run; start Python without it")
    for option, plugin in RETRIES.items():
        value = config.getoption(option, None)
        if value and not (option == "count" and value == 1):
            raise pytest.UsageError(
                f"{plugin} is on: a check repeated until it passes proves nothing; leave its option out"
            )
    found = [name for name in TORCHRUN if name in environ]
    if found:
        raise pytest.UsageError(
            f"{', '.join(found)} set: this is torchrun, or a copy of its environment, and the suite starts its own "
            "ranks; start pytest alone, or unset them"
        )
