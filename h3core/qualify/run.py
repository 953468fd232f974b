"""One pytest run as the suite sees it: what it is to do, what it has seen, and what that amounts to."""

from __future__ import annotations

import shlex
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from h3core.qualify import manifest
from h3core.qualify.claim import Claim
from h3core.qualify.controls import Caught
from h3core.qualify.diagnosis import URGENCY, Diagnosis, Failure, diagnose
from h3core.qualify.journal import Journal
from h3core.qualify.manifest import Area, Key, Required, Requirement
from h3core.qualify.options import RANK_MODES, Settings, reductions
from h3core.qualify.preflight import Finding
from h3core.qualify.tiers import Tier, selects, world_marker
from h3core.qualify.verdict import Covered, Seen, Verdict, absent_ranks, cover, judge
from h3core.ranks import RankFacts

DEFAULT_FOLDER: Final = "report"
SUPERVISOR: Final = "H3CORE_SUPERVISOR"
"""Variable with the process that started pytest and judges its end; pytest does not outlive it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run is to do. `tier` None: it is no qualification, and has no verdict."""

    settings: Settings
    expression: str
    tier: Tier | None
    worlds: tuple[int, ...]
    narrowed: tuple[str, ...]
    command: str
    folder: Path | None

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes that checks run in."""
        modes: tuple[str, ...] = self.settings["mode"].value
        return modes

    @property
    def selected_worlds(self) -> tuple[int, ...]:
        """The worlds whose checks the marker expression keeps."""
        if self.tier is None:
            return self.worlds
        return tuple(w for w in self.worlds if selects(self.expression, (self.tier.name, world_marker(w))))

    @property
    def control_world(self) -> int | None:
        """Where the negative controls run: the largest world; None where none is selected."""
        return max(self.selected_worlds, default=None)

    def required(self) -> list[Required]:
        """The manifest's checks that this run owes."""
        if self.tier is None:
            return []
        owed = manifest.required(self.tier.name, self.worlds, self.modes, self.control_world)
        return [item for item in owed if selects(self.expression, item.markers)]

    def left_out(self) -> list[str]:
        """Worlds that the manifest always has and the marker expression leaves out: a reduction, in words."""
        owed = manifest.required("" if self.tier is None else self.tier.name, (), self.modes, None)
        return ["no world 1"] if owed and not any(item.key.world == 1 for item in self.required()) else []

    def scope(self) -> str:
        """Worlds and modes in words."""
        worlds = ", ".join(map(str, sorted({item.key.world for item in self.required()} | set(self.selected_worlds))))
        modes = "both modes" if self.modes == RANK_MODES else f"mode {', '.join(self.modes)}"
        return f"worlds {worlds}; {modes}"


@dataclass(slots=True)
class Run:
    """What has been seen. The plugin fills it; `verdict` and `report` read it."""

    plan: Plan
    journal: Journal
    seen: dict[str, Seen] = field(default_factory=dict)
    keys: dict[str, Key] = field(default_factory=dict)
    deselected: dict[Key, str] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    presence: dict[int, tuple[RankFacts, ...]] = field(default_factory=dict)
    caught: dict[str, Caught] = field(default_factory=dict)
    preflight: list[Finding] = field(default_factory=list)
    collected: bool = False
    interrupted_by: str | None = None
    claim: Claim | None = None
    started: float = field(default_factory=time.time)
    ident: str = field(default_factory=lambda: uuid.uuid4().hex)

    def row(self, nodeid: str) -> Requirement | None:
        """The manifest's row of a check; None where it has none."""
        key, tier = self.keys.get(nodeid), self.plan.tier
        names = [tier.name] if tier is not None else ["gloo", "nccl", "gate"]
        rows = (manifest.row_of(key.check, name) for name in names) if key else ()
        return next((row for row in rows if row is not None), None)

    def shortfall(self, nodeid: str) -> str | None:
        """What a check's evidence lacks of what the manifest says it owes; None: nothing, or it owes none."""
        row, sight = self.row(nodeid), self.seen[nodeid]
        if row is None:
            return None
        ranks = self.keys[nodeid].world if row.by_rank else 0
        owed = Required(self.keys[nodeid], row, row.comparisons * max(ranks, 1), row.elements, ranks)
        return owed.shortfall(sight.comparisons, sight.elements, sight.ranks)

    def write_line(self, nodeid: str) -> None:
        """Journal one check that has ended. A full disk is said once, at the end, by the report that fails too."""
        try:
            self.journal.end(self.seen[nodeid])
        except OSError as error:
            if not any(reason.startswith("the journal") for reason in self.broken):
                self.broken.append(f"the journal could not be written: {error}")

    def coverage(self) -> list[Covered]:
        """Every required check against what was seen."""
        by_key = {self.keys[nodeid]: sight for nodeid, sight in self.seen.items() if nodeid in self.keys}
        if self.collected:
            return cover(self.plan.required(), by_key, self.deselected, self._absent())
        return cover(self.plan.required(), by_key, self.deselected, "never ran")

    def _absent(self) -> str:
        """Why a check may not have been collected."""
        by = [narrowing for narrowing in self.plan.narrowed if not narrowing.startswith("--world")]
        return f"not collected: narrowed by {', '.join(by)}" if by else "not collected: no such check"

    def broken_areas(self) -> frozenset[Area]:
        """What failed checks were about, where something was measured."""
        rows = (self.row(nodeid) for nodeid, failure in self.failures.items() if failure.judged)
        return frozenset(row.area for row in rows if row is not None)

    def diagnosis(self, nodeid: str) -> Diagnosis:
        """The diagnosis of a failed check."""
        row = self.row(nodeid)
        return diagnose(self.failures[nodeid], None if row is None else row.area, self.broken_areas())

    def failed(self) -> list[str]:
        """Failed checks, likely causes before what may follow from them."""

        def urgency(nodeid: str) -> int:
            row = self.row(nodeid)
            return URGENCY.index(None if row is None else row.area)

        return sorted(self.failures, key=urgency)

    def reproduce(self, nodeid: str) -> str:
        """The command that runs one check alone, as this run ran it."""
        words = ["python", "-m", "pytest", nodeid]
        for setting in self.plan.settings.values():
            name = setting.option.name
            if setting.given and name not in ("report_dir", "compare", "world"):
                words.append(setting.option.flag + ("" if setting.option.metavar is None else f"={setting.text}"))
        key = self.keys.get(nodeid)
        if key is not None and key.world > 1:
            words.append(f"--world={key.world}")
        return shlex.join(words)

    def totals(self) -> str:
        """Comparisons and time in words."""
        comparisons = sum(sight.comparisons for sight in self.seen.values())
        return f"{comparisons:,} comparisons in {time.time() - self.started:.0f} s"

    def verdict(self, pytest_exit: int | None, *, coverage: Sequence[Covered] | None = None) -> Verdict | None:
        """The verdict; None where this run is no qualification. `pytest_exit` None: in progress."""
        tier = self.plan.tier
        if tier is None:
            return None
        coverage = self.coverage() if coverage is None else coverage
        owed_worlds = sorted({item.required.ranks for item in coverage} - {0})
        share = bool(self.plan.settings["share_gpus"].value)
        failed = {nodeid for nodeid, sight in self.seen.items() if sight.outcome == "failed"}
        owed = {item.required.key for item in coverage}
        errors = [
            f"{nodeid} broke: {sight.reason}"
            for nodeid, sight in self.seen.items()
            if sight.outcome == "error" and self.keys.get(nodeid) not in owed  # those are missed by name already
        ]
        lacking = self.broken + errors
        if self.interrupted_by:
            lacking = [f"interrupted by {self.interrupted_by}", *lacking]
        return judge(
            tier,
            coverage,
            pytest_exit=pytest_exit,
            failures=len(failed),
            errors=sum(sight.outcome == "error" for sight in self.seen.values()),
            lacking=lacking,
            absent=absent_ranks(owed_worlds, self.presence, tier, share_gpus=share),
            reductions=reductions(self.plan.settings, tier) + self.plan.left_out(),
            narrowed=self.plan.narrowed,
            scope=self.plan.scope(),
            totals=self.totals(),
        )

    def started_utc(self) -> str:
        """When the run started, as ISO 8601."""
        return datetime.fromtimestamp(self.started, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
