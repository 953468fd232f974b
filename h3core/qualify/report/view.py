"""What the forms for people say about a run, decided once: Markdown and HTML only write it down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from h3core.qualify.report.schema import Report
from h3core.qualify.report.text import count, listed, plural, seconds, shortened, size

SYMBOLS: Final = {"qualified": "✓", "passed": "✓", "not qualified": "✗", "incomplete": "!", None: "-"}
"""Said beside the word, so that the outcome never hangs on a colour."""

MEANINGS: Final = {
    "qualified": "Every required check ran, brought the evidence it owes, and passed; every planted fault was caught.",
    "passed": "All that was asked for passed, but less was asked for than a qualification needs.",
    "not qualified": "Something failed. Do not trust results from this machine until it is explained.",
    "incomplete": "Something required did not run, so nothing is known about it. This is not a pass.",
    None: "This run selects no tier, so it is no qualification and has no verdict.",
}

STOPPED: Final = "The run is still going on, or it was killed: what it had not reached is unknown. This is not a pass."

TIERS: Final = {
    "gloo": "The gloo tier runs the software on CPU ranks: no GPU and no link is tested.",
    "nccl": "The nccl tier tests that GPUs and links carry the right bytes, not how fast.",
    "gate": "The gate tier tests speed.",
}

CLASSES: Final[Mapping[str | None, str]] = {
    "hardware": "hardware: a GPU, CPU or memory",
    "interconnect": "interconnect: links between ranks",
    "stack": "software stack: driver, libraries, limits",
    "suite": "suite: the check itself",
    None: "fault class unknown",
}


@dataclass(frozen=True, slots=True)
class Group:
    """One diagnosis, said once, and the failures that it was made of."""

    fault_class: str | None
    failures: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def first(self) -> Mapping[str, Any]:
        """The failure whose meaning, action, command and details stand for all."""
        return self.failures[0]

    @property
    def problem(self) -> str:
        """What the first failure saw."""
        problem: str = self.first["problem"]
        return problem

    @property
    def checks(self) -> list[str]:
        """Each failed check, with what it saw where that is not what the first one saw."""
        return [
            failure["check"]
            if failure["problem"] == self.problem
            else f"{failure['check']}: {shortened(failure['problem'], 160)}"
            for failure in self.failures
        ]

    @property
    def label(self) -> str:
        """The fault class in words."""
        return CLASSES[self.fault_class]

    @property
    def where(self) -> str:
        """Worlds, modes and ranks over all failures, in words."""
        worlds = sorted({failure["world"] for failure in self.failures} - {None})
        modes = sorted({failure["mode"] for failure in self.failures} - {None})
        ranks = sorted({rank for failure in self.failures for rank in failure["ranks"]})
        parts = [(f"world{'s' * (len(worlds) > 1)}", worlds), (f"mode{'s' * (len(modes) > 1)}", modes)]
        parts.append((f"rank{'s' * (len(ranks) > 1)}", ranks))
        return ", ".join(f"{name} {listed(items)}" for name, items in parts if items)


def groups(report: Report) -> list[Group]:
    """Failures with the same class, meaning and next action together, in the order of the first of each.

    Where those are unknown, failures with the same problem.
    """
    found: dict[tuple[str | None, ...], Group] = {}
    for failure in report["failures"]:
        told = (failure["meaning"], failure["action"])
        key = (failure["fault_class"], *(told if any(told) else (failure["problem"],)))
        found.setdefault(key, Group(failure["fault_class"])).failures.append(failure)
    return list(found.values())


def word(report: Report) -> str:
    """The verdict in one or a few words."""
    return str(report["verdict"]["word"] or "NO VERDICT")


def symbol(report: Report) -> str:
    """The verdict as one sign."""
    return SYMBOLS[report["verdict"]["outcome"]]


def meaning(report: Report) -> str:
    """What the verdict says about the machine, in a sentence or two."""
    if report["run"]["state"] != "ended":
        return STOPPED
    outcome, tier = report["verdict"]["outcome"], TIERS.get(report["run"]["tier"])
    return f"{MEANINGS[outcome]} {tier}" if tier and outcome in ("qualified", "passed") else MEANINGS[outcome]


def scope(report: Report) -> str:
    """Tier, worlds and modes."""
    run = report["run"]
    worlds = f"world{'s' * (len(run['worlds']) > 1)} {', '.join(map(str, run['worlds']))}" if run["worlds"] else ""
    modes = f"mode{'s' * (len(run['modes']) > 1)} {listed(run['modes'])}" if run["modes"] else ""
    return ", ".join(part for part in (run["tier"] and f"tier {run['tier']}", worlds, modes) if part)


def counts(report: Report) -> str:
    """Required checks and controls, as `passed of required`."""
    coverage, controls = report["coverage"], report["controls"]
    return (
        f"{count(coverage['passed'])} of {count(coverage['required'])} required checks passed, "
        f"{count(controls['caught'])} of {count(controls['required'])} controls caught"
    )


def when(report: Report) -> str:
    """Duration, and when the run started."""
    run = report["run"]
    return f"{seconds(run['duration_s'])}, {run['started_utc'].replace('T', ' ').removesuffix('Z')} UTC"


def headline(report: Report) -> str:
    """The verdict with scope, counts, time, and what narrowed the run: one line that can stand alone."""
    narrowed = report["verdict"]["narrowed"]
    parts = [scope(report), counts(report), when(report)]
    parts += [f"narrowed by {listed(narrowed)}"] if narrowed else []
    return f"{word(report)}: {'; '.join(part for part in parts if part)}"


def next_step(report: Report) -> str | None:
    """What to do where no failure says it: nothing failed, and yet the run is no pass."""
    if report["failures"] or report["verdict"]["outcome"] != "incomplete":
        return None
    if report["run"]["state"] != "ended":
        return "Wait for its end; if the run was killed, look for why (dmesg, the job's log), and run it again."
    if report["verdict"]["narrowed"]:
        return "Run it again without what narrowed it."
    problems = [finding for finding in report["preflight"] if finding["state"] == "problem" and finding["action"]]
    if problems:
        return str(problems[0]["action"])
    return "Mend what kept the checks below from running, then run the command again."


def controls(report: Report) -> list[Mapping[str, Any]]:
    """The planted faults: missed ones first, then those that did not run."""
    order = {False: 0, None: 1, True: 2}
    return sorted(report["controls"]["list"], key=lambda control: order[control["caught"]])


def unmet(report: Report) -> list[Mapping[str, Any]]:
    """Controls that were missed or did not run."""
    return [control for control in controls(report) if control["caught"] is not True]


def preflight(report: Report) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Findings to look at, problems first; and those that are well."""
    order = {"problem": 0, "warning": 1, "not measured": 2, "ok": 3}
    findings = sorted(report["preflight"], key=lambda finding: order[finding["state"]])
    return [f for f in findings if f["state"] != "ok"], [f for f in findings if f["state"] == "ok"]


def machine(report: Report) -> list[tuple[str, str]]:
    """The machine as names and values; what is unknown is left out, GPUs apart."""
    facts, run = report["machine"], report["run"]
    named = {
        "host": run["host"],
        "platform": facts["platform"],
        "CPU": facts["cpu"],
        "CPU capability": facts["cpu_capability"],
        "cores": facts["cores"],
        "memory": facts["memory_bytes"] and size(facts["memory_bytes"]),
        "driver": facts["driver"],
        "CUDA of torch": facts["torch_cuda"],
        "NCCL": facts["nccl"],
        "torch": facts["torch"],
        "Python": facts["python"],
        "h3core": report["h3core"],
    }
    return [(name, str(value)) for name, value in named.items() if value is not None]


def gpus(report: Report) -> list[tuple[str, ...]]:
    """For each GPU: index, name, memory, compute capability, UUID."""
    return [
        (
            str(gpu["index"]),
            gpu["name"] or "unknown",
            size(gpu["memory_bytes"]),
            gpu["compute_capability"] or "unknown",
            gpu["uuid"] or "unknown",
        )
        for gpu in report["machine"]["gpus"]
    ]


def presence(report: Report) -> list[tuple[str, str, str, str]]:
    """For each world: its name, ranks, backend, and devices as the ranks themselves saw them."""
    rows = []
    for world in sorted({rank["world"] for rank in report["presence"]}, key=lambda world: world or 0):
        ranks = sorted((r for r in report["presence"] if r["world"] == world), key=lambda rank: int(rank["rank"]))
        seen = sorted({rank["world_seen"] for rank in ranks if rank["world_seen"] is not None} - {world})
        numbers = f"{spans([rank['rank'] for rank in ranks])}{f'; they saw {listed(seen)} ranks' if seen else ''}"
        backends = listed(sorted({rank["backend"] or "unknown" for rank in ranks}))
        devices = [_device(rank) for rank in ranks]
        rows.append((count(world), numbers, backends, listed(list(dict.fromkeys(devices)), 16)))
    return rows


def _device(rank: Mapping[str, Any]) -> str:
    device = str(rank["device"] or "unknown")
    if rank["device_uuid"]:
        return f"{device} {rank['device_uuid']}"
    return f"{device}, CPUs {spans(rank['cpus'])}" if device == "cpu" and rank["cpus"] else device


def spans(numbers: list[int]) -> str:
    """`0-3, 8` for 0, 1, 2, 3, 8."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def missing_by_reason(report: Report) -> dict[str, list[str]]:
    """Required checks that did not run, by why."""
    found: dict[str, list[str]] = {}
    for item in report["coverage"]["missing"]:
        found.setdefault(item["why"], []).append(item["check"])
    return found


def totals(report: Report) -> str:
    """Comparisons, elements and checks of the whole run."""
    checks = report["checks"]
    sums = {key: sum(check[key] or 0 for check in checks) for key in ("comparisons", "exact", "elements")}
    return (
        f"{plural(len(checks), 'check')}, {plural(sums['comparisons'], 'comparison')} "
        f"({sums['exact']:,} of them bit for bit), {plural(sums['elements'], 'element')}"
    )
