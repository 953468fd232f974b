"""A run as the dictionary that report.json holds; its shape is report/report.schema.json."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from h3core import __version__
from h3core.qualify.controls import CONTROLS
from h3core.qualify.manifest import Key
from h3core.qualify.preflight import environment_facts
from h3core.qualify.run import Run
from h3core.qualify.verdict import Covered, Seen, Verdict

SCHEMA: Final = "h3core-report-1"
NAMES: Final = {control.slug: control.name for control in CONTROLS}
DETAILS: Final = 8000
"""Characters of an error's text that the report keeps, from its end: that is where the cause stands."""


def report_of(
    run: Run,
    verdict: Verdict | None,
    coverage: Sequence[Covered],
    *,
    pytest_exit: int | None,
    ended: bool,
    machine: Mapping[str, Any],
) -> dict[str, Any]:
    """The whole report. `ended` False: the run is in progress, or was never started."""
    return {
        "schema": SCHEMA,
        "h3core": __version__,
        "run": _run(run, pytest_exit, ended),
        "verdict": _verdict(verdict, pytest_exit),
        "failures": [_failure(run, nodeid) for nodeid in run.failed()],
        "coverage": _coverage(coverage),
        "controls": _controls(run, coverage),
        "checks": _checks(run, coverage),
        "presence": [
            {
                "world": world,
                "rank": fact.rank,
                "world_seen": fact.world,
                "backend": fact.backend,
                "pid": fact.pid,
                "device": fact.device,
                "device_name": fact.device_name,
                "device_uuid": fact.device_uuid,
                "cpus": list(fact.cpus),
            }
            for world, facts in sorted(run.presence.items())
            for fact in facts
        ],
        "preflight": [finding.as_dict() for finding in run.preflight],
        "tables": [{"title": title, "lines": lines} for title, lines in run.journal.sections().items()],
        "machine": dict(machine),
        "environment": environment_facts(os.environ),
        "comparison": None,
    }


def _run(run: Run, pytest_exit: int | None, ended: bool) -> dict[str, Any]:
    plan = run.plan
    return {
        "id": run.ident,
        "state": "ended" if ended else "in progress",
        "started_utc": run.started_utc(),
        "duration_s": round(time.time() - run.started, 3),
        "host": platform.node(),
        "command": plan.command,
        "tier": None if plan.tier is None else plan.tier.name,
        "worlds": list(plan.selected_worlds),
        "modes": list(plan.modes),
        "options": [
            {"name": setting.option.flag, "value": setting.text, "source": setting.source}
            for setting in plan.settings.values()
            if plan.tier is None or plan.tier.name in setting.option.tiers
        ],
        "pytest_exit_status": pytest_exit,
    }


def _verdict(verdict: Verdict | None, pytest_exit: int | None) -> dict[str, Any]:
    if verdict is None:
        word = "NO VERDICT"
        line = f"{word}: not a qualification, because -m selects no tier"
        return {
            "word": word,
            "outcome": None,
            "exit_code": pytest_exit if pytest_exit is not None else 10,
            "line": line,
            "reasons": [],
            "narrowed": [],
        }
    return {
        "word": verdict.word,
        "outcome": verdict.outcome,
        "exit_code": verdict.exit_code,
        "line": verdict.line,
        "reasons": list(verdict.reasons),
        "narrowed": list(verdict.narrowed),
    }


def _failure(run: Run, nodeid: str) -> dict[str, Any]:
    failure, diagnosis, key = run.failures[nodeid], run.diagnosis(nodeid), run.keys.get(nodeid)
    return {
        "check": nodeid,
        "world": None if key is None else key.world,
        "mode": None if key is None else key.mode,
        "ranks": list(failure.ranks),
        "fault_class": diagnosis.fault_class,
        "problem": failure.problem,
        "meaning": diagnosis.meaning,
        "action": diagnosis.action,
        "reproduce": run.reproduce(nodeid),
        "details": failure.text[-DETAILS:],
    }


def _coverage(coverage: Sequence[Covered]) -> dict[str, Any]:
    count = {state: sum(item.state == state for item in coverage) for state in ("passed", "failed", "not run")}
    return {
        "required": len(coverage),
        "passed": count["passed"],
        "failed": count["failed"],
        "not_run": count["not run"],
        "missing": [
            {
                "check": str(item.required.key),
                "world": item.required.key.world,
                "mode": item.required.key.mode,
                "why": item.why or "unknown",
            }
            for item in coverage
            if item.state == "not run"
        ],
    }


def _controls(run: Run, coverage: Sequence[Covered]) -> dict[str, Any]:
    controls = [item for item in coverage if item.required.requirement.area == "control"]
    entries = []
    for item in controls:
        key = item.required.key
        caught = run.caught.get(key.variant)
        entries.append(
            {
                "name": NAMES.get(key.variant, key.variant),
                "world": key.world,
                "caught": {"passed": True, "failed": False, "not run": None}[item.state],
                "how": item.why if caught is None or item.state != "passed" else caught.how,
            }
        )
    caught_count = sum(item.state == "passed" for item in controls)
    return {"required": len(controls), "caught": caught_count, "list": entries}


def _checks(run: Run, coverage: Sequence[Covered]) -> list[dict[str, Any]]:
    """Every check that pytest collected, then those that it should have."""
    owed = {item.required.key: item for item in coverage}
    rows = []
    for sight in run.seen.values():
        key = run.keys.get(sight.nodeid)
        rows.append(_check(sight, key, None if key is None else owed.pop(key, None)))
    rows += [_check(Seen(str(key), reason=item.why), key, item) for key, item in owed.items()]
    return rows


def _check(sight: Seen, key: Key | None, item: Covered | None) -> dict[str, Any]:
    required = None if item is None else item.required
    short = item is not None and item.state == "not run" and sight.outcome == "passed"
    return {
        "check": sight.nodeid,
        "name": sight.nodeid.rpartition("::")[2].partition("[")[0],
        "world": None if key is None else key.world,
        "mode": None if key is None else key.mode,
        "required": item is not None,
        "outcome": "not run" if short or sight.outcome is None else sight.outcome,
        "duration_s": round(sight.seconds, 3),
        "comparisons": sight.comparisons,
        "exact": sight.exact,
        "elements": sight.elements,
        "bytes": sight.bytes,
        "largest_difference": sight.largest,
        "ranks": sorted(sight.ranks),
        "owed": None
        if required is None
        else {"comparisons": required.comparisons, "elements": required.elements, "ranks": required.ranks},
        "reason": item.why if item is not None and short else sight.reason,
    }
