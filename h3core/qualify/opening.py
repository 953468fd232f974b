"""How a run begins: what it is to do, where each value came from, what narrows it, and whether it may start at all."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest
import torch

from h3core import __version__
from h3core.qualify import manifest
from h3core.qualify.options import OPTIONS, Setting, Settings, check_for_tier, resolve, worlds_for
from h3core.qualify.preflight import masked
from h3core.qualify.refusals import refuse
from h3core.qualify.run import DEFAULT_FOLDER, Plan, Run
from h3core.qualify.tiers import TIERS, Tier, selected_tier, world_marker, worlds_named

INERT_WORDS: Final = (
    "--collect-only",
    "--co",
    "--fixtures",
    "--fixtures-per-test",
    "--funcargs",
    "--markers",
    "--help",
    "-h",
    "--version",
    "-V",
    "--setup-plan",
    "--setup-only",
)
"""As `refusals.is_inert`, before pytest has parsed its command line."""


def register_markers(config: pytest.Config, expression: str) -> None:
    """Tiers, and the worlds that the expression or the defaults name: --strict-markers knows no patterns."""
    for tier in TIERS.values():
        config.addinivalue_line("markers", f"{tier.name}: {tier.help}")
    for world in sorted({*range(1, 65), *worlds_named(expression)}):
        config.addinivalue_line("markers", f"{world_marker(world)}: runs at {world} ranks")


def plan_of(config: pytest.Config, expression: str, environ: Mapping[str, str]) -> Plan:
    """What this run is to do. Raises `pytest.UsageError` for what cannot be done."""
    settings = resolve({option.name: config.getoption(option.name) for option in OPTIONS}, environ)
    tier = selected_tier(expression, settings["world"].value or ())
    refuse(config, tier, environ)
    device = "cpu" if tier is None else tier.device
    if tier is not None:
        check_for_tier(settings, tier)
    worlds = worlds_for(settings, device, torch.cuda.device_count() if device == "cuda" else 0)
    if tier is not None and not any(row.tier == tier.name for row in manifest.MANIFEST):
        raise pytest.UsageError(f"-m {expression}: the {tier.name} tier has no checks in h3core {__version__}")
    folder = settings["report_dir"].value or (None if tier is None else DEFAULT_FOLDER)
    return Plan(
        settings=settings,
        expression=expression,
        tier=tier,
        worlds=worlds,
        narrowed=narrowings(config, expression, settings, environ),
        command=command_of(config),
        folder=None if folder is None else Path(config.invocation_params.dir, folder),
    )


def command_of(config: pytest.Config) -> str:
    """The command line, as a shell takes it."""
    return masked(shlex.join(["python", "-m", "pytest", *map(str, config.invocation_params.args)]))


def narrowings(
    config: pytest.Config, expression: str, settings: Settings, environ: Mapping[str, str]
) -> tuple[str, ...]:
    """All that makes this run smaller than it could be, and by what: for the verdict's line."""
    found = [setting.describe() for setting in settings.values() if _narrows(setting.option.name) and setting.given]
    by_pytest = {
        "keyword": "-k",
        "deselect": "--deselect",
        "ignore": "--ignore",
        "ignore_glob": "--ignore-glob",
        "lf": "--last-failed",
        "stepwise": "--stepwise",
        "maxfail": "--maxfail",
    }
    for name, flag in by_pytest.items():
        if value := config.getoption(name, None):
            found.append(flag if value is True else f"{flag} {value}")
    if expression and expression not in TIERS:
        found.append(f"-m {expression!r}")
    own = config.args_source is pytest.Config.ArgsSource.ARGS
    if own and not (expression in TIERS and config.args == [TIERS[expression].folder]):
        found.append(f"paths {' '.join(config.args)}")
    if extra := environ.get("PYTEST_ADDOPTS"):
        found.append(f"PYTEST_ADDOPTS={extra}")
    return tuple(masked(text) for text in found)


def _narrows(name: str) -> bool:
    return name in ("world", "mode", "attention", "linear", "geometry", "steps", "seed", "share_gpus", "gates")


def refused_plan(config: pytest.Config, expression: str, environ: Mapping[str, str]) -> Plan | None:
    """A plan to report under when a run was refused; None where no report was asked for.

    Only the defaults are certain to be sound, so it has those.
    """
    named = config.getoption("report_dir") or environ.get("H3_REPORT_DIR")
    try:
        tier = selected_tier(expression, ())
    except pytest.UsageError:
        tier = None
    folder = named or (None if tier is None else DEFAULT_FOLDER)
    if folder is None:
        return None
    path = Path(config.invocation_params.dir, folder)
    return Plan(resolve({}, {}), expression, tier, (), (), command_of(config), path)


def header(run: Run) -> list[str]:
    """What this run stands on, and where each value came from."""
    plan = run.plan
    tier = "no tier: no verdict" if plan.tier is None else f"tier {plan.tier.name}"
    given = [setting.describe() for setting in plan.settings.values() if setting.given]
    usual = [f"{setting.option.flag}={setting.text}" for setting in plan.settings.values() if shown(setting, plan.tier)]
    known = {option.variable for option in OPTIONS} | LAUNCHER_VARIABLES
    strange = sorted(name for name in os.environ if name.startswith("H3_") and name not in known)
    return [
        f"h3core {__version__}, torch {torch.__version__}, {tier}, worlds {', '.join(map(str, plan.selected_worlds))}",
        *([f"given: {', '.join(given)}"] if given else []),
        *([f"defaults: {', '.join(usual)}"] if usual and plan.tier is not None else []),
        *([f"no such variable, nothing reads it: {', '.join(strange)}"] if strange else []),
        *([f"report: {plan.folder}"] if plan.folder is not None else []),
    ]


LAUNCHER_VARIABLES: Final = frozenset(
    {
        "H3_DISTRIBUTED_BENCHMARK",
        "H3_DISTRIBUTED_OUTPUT",
        "H3_DISTRIBUTED_MODES",
        "H3_GPU_COUNTS",
        "H3_TEXT_ENCODER_PATH",
        "H3_SAVE_LATENTS",
        "H3_PROMPT",
    }
)


def shown(setting: Setting, tier: Tier | None) -> bool:
    """Whether a default belongs in the header."""
    return not setting.given and setting.text is not None and tier is not None and tier.name in setting.option.tiers


def older_report(arguments: Sequence[str], environ: Mapping[str, str], folder: Path) -> Path | None:
    """Where a report of an earlier run stands that this command line is about to replace; None: nowhere.

    Looked at before pytest has parsed anything: it refuses an unknown option before any plugin is asked, and then the
    older report would be taken for this run's.
    """
    words = [*shlex.split(environ.get("PYTEST_ADDOPTS", "")), *map(str, arguments)]
    if any(word in INERT_WORDS for word in words):
        return None
    expression = _last_value(words, "-m", "-m")
    try:
        tier = selected_tier(expression or "", ())
    except pytest.UsageError:
        tier = None  # refused later, by whoever then knows the folder
    named = _last_value(words, "--report-dir", "--report-dir=")
    chosen = named or environ.get("H3_REPORT_DIR") or (None if tier is None else DEFAULT_FOLDER)
    if not chosen:
        return None
    path = folder / chosen / "report.json"
    return path if path.is_file() else None


def _last_value(words: Sequence[str], flag: str, prefix: str) -> str | None:
    """The last value of an option, given as the next word or joined to `prefix`."""
    value = None
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        if word == flag:
            value = following
        elif word.startswith(prefix):
            value = word.removeprefix(prefix)
    return value
