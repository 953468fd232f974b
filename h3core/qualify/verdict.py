"""The verdict of a run, from what was required and what was seen. Pure: no pytest, no files.

Absence of evidence is INCOMPLETE, never a pass; a failure is NOT QUALIFIED, whatever else happened.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from h3core.qualify.manifest import Key, Required
from h3core.qualify.tiers import Tier
from h3core.ranks import RankFacts

Outcome = Literal["qualified", "passed", "not qualified", "incomplete"]
EXIT_INCOMPLETE: Final = 10
"""Not 5: wrappers turn pytest's "nothing collected" into success."""
EXIT_CODES: Final[Mapping[Outcome, int]] = {
    "qualified": 0,
    "passed": 0,
    "not qualified": 1,
    "incomplete": EXIT_INCOMPLETE,
}
KEPT: Final[Mapping[int, str]] = {
    2: "the run was interrupted",
    3: "pytest itself failed",
    4: "pytest could not run with this command line or conftest",
}
"""Exit codes of pytest that keep their meaning, and what they say."""


@dataclass(slots=True)
class Seen:
    """What is known of one check that pytest collected."""

    nodeid: str
    outcome: Literal["passed", "failed", "error", "skipped"] | None = None
    reason: str | None = None
    seconds: float = 0.0
    comparisons: int = 0
    exact: int = 0
    elements: int = 0
    bytes: int = 0
    largest: float | None = None
    ranks: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Covered:
    """One required check, and whether it did what it owes."""

    required: Required
    state: Literal["passed", "failed", "not run"]
    why: str | None = None


def cover(
    required: Iterable[Required],
    seen: Mapping[Key, Seen],
    deselected: Mapping[Key, str],
    absent: str = "not collected: no such check",
) -> list[Covered]:
    """Hold every required check against what was seen.

    `deselected` has the reason for each that was left out, `absent` the one for those of which nothing is known.
    """
    found = []
    for owed in required:
        sight = seen.get(owed.key)
        if sight is None:
            found.append(Covered(owed, "not run", deselected.get(owed.key, absent)))
        elif sight.outcome == "failed":
            found.append(Covered(owed, "failed", sight.reason))
        elif sight.outcome != "passed":
            why = {"skipped": "skipped", "error": "broke before it could decide"}.get(sight.outcome or "", "never ran")
            found.append(Covered(owed, "not run", f"{why}: {sight.reason}" if sight.reason else why))
        elif lacking := owed.shortfall(sight.comparisons, sight.elements, sight.ranks):
            found.append(Covered(owed, "not run", f"passed with too little evidence: {lacking}"))
        else:
            found.append(Covered(owed, "passed"))
    return found


def absent_ranks(
    worlds: Iterable[int], presence: Mapping[int, Sequence[RankFacts]], tier: Tier, *, share_gpus: bool = False
) -> list[str]:
    """Worlds whose ranks have not proved, from inside, that they were there; in words."""
    problems = []
    for world in worlds:
        facts = presence.get(world, ())
        if not facts:
            problems.append(f"world {world}: no rank has proved its presence")
            continue
        wrong = []
        if sorted(fact.rank for fact in facts) != list(range(world)):
            wrong.append(f"ranks {sorted(fact.rank for fact in facts)}")
        if sizes := {fact.world for fact in facts} - {world}:
            wrong.append(f"process groups of {sorted(sizes)}")
        if backends := {fact.backend for fact in facts} - {tier.backend}:
            wrong.append(f"backend {', '.join(sorted(backends))}, expected {tier.backend}")
        if len({fact.pid for fact in facts}) != len(facts):
            wrong.append("ranks that share a process")
        if kinds := {fact.device.partition(":")[0] for fact in facts} - {tier.device}:
            wrong.append(f"ranks on {', '.join(sorted(kinds))}, expected {tier.device}")
        if tier.device == "cuda":
            uuids = {fact.device_uuid for fact in facts}
            if None in uuids:
                wrong.append("a GPU without a UUID")
            elif len(uuids) != world and not share_gpus:
                wrong.append(f"{len(uuids)} distinct GPUs for {world} ranks")
        elif not all(fact.cpus for fact in facts):
            wrong.append("a rank that may run on no CPU")
        if wrong:
            problems.append(f"world {world}: {'; '.join(wrong)}")
    return problems


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the run stands for. `line` is the last line of the terminal, without the report's path."""

    outcome: Outcome
    word: str
    exit_code: int
    reasons: tuple[str, ...]
    narrowed: tuple[str, ...]
    line: str


def judge(
    tier: Tier,
    coverage: Sequence[Covered],
    *,
    pytest_exit: int | None,
    failures: int,
    errors: int = 0,
    lacking: Sequence[str] = (),
    absent: Sequence[str] = (),
    reductions: Sequence[str] = (),
    narrowed: Sequence[str] = (),
    scope: str,
    totals: str,
) -> Verdict:
    """Decide. `failures`: failed tests of the run, required or not; `errors`: those that broke before they could fail;
    `lacking`: what else kept the run from being whole.

    `absent`: worlds without proof of presence. `reductions`: what makes the run less than the default profile.
    `pytest_exit` None: still in progress.
    """
    controls = [item for item in coverage if item.required.requirement.area == "control"]
    caught = sum(item.state == "passed" for item in controls)
    missing = [item for item in coverage if item.state == "not run"]
    passed = sum(item.state == "passed" for item in coverage)
    missed = [str(item.required.key) for item in controls if item.state == "failed"]
    bad = [f"{failures} checks failed" if failures != 1 else "1 check failed"] * bool(failures)
    bad += [f"control not caught: {name}" for name in missed]
    missing_out = list(lacking)
    if pytest_exit == 1 and not (bad or missing_out or errors):
        bad = ["pytest reports a failure outside the checks"]
    if pytest_exit is None:
        missing_out.append("in progress, or killed before it ended")
    elif pytest_exit not in (0, 1, 5):
        missing_out.append(KEPT.get(pytest_exit, f"pytest ended with {pytest_exit}"))
    if not coverage:
        missing_out.append("nothing is required of this run, so that nothing was shown")
    if missing:
        first = f"{missing[0].required.key}: {missing[0].why}"
        missing_out.append(f"{len(missing)} of {len(coverage)} required checks did not run (first: {first})")
    if pytest_exit is not None:
        missing_out += absent
    if coverage and not controls:
        reductions = [*reductions, "no negative controls"]

    outcome: Outcome
    if bad:
        outcome, word = "not qualified", "NOT QUALIFIED"
    elif missing_out:
        outcome, word = "incomplete", "INCOMPLETE"
    elif reductions:
        outcome, word = "passed", f"PASSED, REDUCED: {', '.join(reductions)}"
    else:
        outcome, word = "qualified", tier.qualified
    exit_code = EXIT_CODES[outcome] if pytest_exit is None or pytest_exit not in KEPT else pytest_exit
    reasons = (*bad, *missing_out)
    counts = f"{passed} of {len(coverage)} required checks, controls {caught} of {len(controls)} caught"
    parts = [word + (f": {reasons[0]}" if reasons else ""), scope, counts, totals]
    if narrowed:
        parts.append(f"narrowed by {', '.join(narrowed)}")
    return Verdict(outcome, word, exit_code, reasons, tuple(narrowed), "; ".join(part for part in parts if part))
