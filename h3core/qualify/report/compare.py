"""What got worse between two runs. Coverage and outcomes are held against each other, times never are.

Fewer comparisons of a check that still passes is worse: that is how a suite loses its teeth unseen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from h3core.qualify.report.identity import Known
from h3core.qualify.report.matrix import unlisted
from h3core.qualify.report.schema import Report
from h3core.qualify.report.text import count

EVIDENCE: Final = ("comparisons", "exact", "elements")
GOODNESS: Final = {"qualified": 2, "passed": 1, "incomplete": 0, "not qualified": -1}
BADNESS: Final = {"ok": 0, "warning": 1, "not measured": 1, "problem": 2}


@dataclass(slots=True)
class Found:
    """What changed, sorted by what it means."""

    worse: list[str] = field(default_factory=list)
    better: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    def judge(self, difference: int, text: str) -> None:
        """Put `text` among the worse where `difference` is negative, among the better where it is positive."""
        if difference:
            (self.worse if difference < 0 else self.better).append(text)


def compare_reports(old: Report, new: Report, *, where: str | None = None) -> dict[str, Any]:
    """The key `comparison` of the report `new`, against `old`, which stands at `where`. Both are valid reports.

    Where tier, worlds or modes differ, the runs are not comparable: then only checks, controls and findings that both
    have are compared, and `why_not` says so. Verdicts and the number of required checks are left alone.
    """
    why_not = _why_not(old, new)
    found = Found()
    if why_not is None:
        _verdicts(old, new, found)
        _required(old, new, found)
    _checks(old, new, found, overlap=why_not is not None)
    _controls(old, new, found, overlap=why_not is not None)
    _preflight(old, new, found, overlap=why_not is not None)
    found.changed += _machine(old, new)
    return {
        "with": where,
        "with_verdict": old["verdict"]["line"] or old["verdict"]["word"],
        "comparable": why_not is None,
        "why_not": why_not,
        "worse": found.worse,
        "better": found.better,
        "changed": found.changed,
    }


def _why_not(old: Report, new: Report) -> str | None:
    differ = []
    if old["schema"] != new["schema"]:
        differ.append(f"schema: {old['schema']} -> {new['schema']}")
    for key in ("tier", "worlds", "modes"):
        before, after = old["run"][key], new["run"][key]
        if isinstance(before, list):
            before, after = sorted(set(before)), sorted(set(after))
        if before != after:
            differ.append(f"{key}: {_plain(before)} -> {_plain(after)}")
    return f"{'; '.join(differ)}. Only what both runs have is compared." if differ else None


def _verdicts(old: Report, new: Report, found: Found) -> None:
    before, after = old["verdict"]["outcome"], new["verdict"]["outcome"]
    text = f"verdict: {old['verdict']['word']} -> {new['verdict']['word']}"
    if (before, after) == ("not qualified", "incomplete"):
        found.changed.append(text)  # a fault that was not looked for again has not gone
    elif before in GOODNESS and after in GOODNESS and before != after:
        found.judge(GOODNESS[after] - GOODNESS[before], text)
    elif old["verdict"]["word"] != new["verdict"]["word"]:
        found.changed.append(text)


def _rows(report: Report) -> list[Mapping[str, Any]]:
    return [*report["checks"], *unlisted(report)]


def _required(old: Report, new: Report, found: Found) -> None:
    """By name and not by number alone: one check for another is a check lost."""
    before, after = ([row for row in _rows(report) if row["required"]] for report in (old, new))
    known_before, known_after = Known(before), Known(after)
    numbers = f"{count(old['coverage']['required'])} -> {count(new['coverage']['required'])} in all"
    for row in before:
        if known_after.find(row["check"], row["world"], row["mode"]) is None:
            found.worse.append(f"no longer required: {row['check']} ({numbers})")
    for row in after:
        if known_before.find(row["check"], row["world"], row["mode"]) is None:
            found.better.append(f"newly required: {row['check']} ({numbers})")
    lost = (new["coverage"]["required"] or 0) - (old["coverage"]["required"] or 0)
    if lost < 0 and len(before) == len(after):
        found.worse.append(f"required checks: {numbers}")


def _checks(old: Report, new: Report, found: Found, *, overlap: bool) -> None:
    known = Known(_rows(new))
    for row in _rows(old):
        after = known.find(row["check"], row["world"], row["mode"])
        if after is None:
            if row["outcome"] == "passed" and not row["required"] and not overlap:
                found.changed.append(f"{row['check']}: passed, now not in the run")
            continue
        _check(row, after, found)
    if overlap:
        return
    known = Known(_rows(old))
    for row in _rows(new):
        if row["outcome"] in ("failed", "error") and known.find(row["check"], row["world"], row["mode"]) is None:
            found.worse.append(f"{row['check']}: {row['outcome']}, and was not in the earlier run")


def _check(old: Mapping[str, Any], new: Mapping[str, Any], found: Found) -> None:
    """One check of both runs: its outcome, and where it passes in both, how much it compared."""
    before, after, name = old["outcome"], new["outcome"], new["check"]
    if before == after == "passed":
        for key in EVIDENCE:
            difference = (new[key] or 0) - (old[key] or 0)
            found.judge(
                difference,
                f"{name}: {key.replace('exact', 'comparisons bit for bit')} {count(old[key])} -> {count(new[key])}",
            )
        lost = sorted(set(old["ranks"]) - set(new["ranks"]))
        if lost:
            found.worse.append(f"{name}: no evidence any more from ranks {_plain(lost)}")
        return
    if before == after:
        return
    text = f"{name}: {before} -> {after}" + (f" ({new['reason']})" if new["reason"] else "")
    if before == "passed":
        optional = new["required"] is False and after in ("skipped", "not run")
        (found.changed if optional else found.worse).append(text)
    elif after == "passed":
        found.better.append(text)
    elif after == "failed" and before != "error":
        found.worse.append(text)
    else:
        found.changed.append(text)


def _controls(old: Report, new: Report, found: Found, *, overlap: bool) -> None:
    before, after = ({(c["name"], c["world"]): c["caught"] for c in r["controls"]["list"]} for r in (old, new))
    words = {True: "caught", False: "not caught", None: "did not run"}
    for key, caught in before.items():
        name = f"control {key[0]}" + (f" at world {key[1]}" if key[1] else "")
        if key not in after:
            if not overlap:
                found.worse.append(f"{name}: {words[caught]}, now not in the run")
        elif caught != after[key]:
            text = f"{name}: {words[caught]}, now {words[after[key]]}"
            if (caught, after[key]) == (False, None):
                found.changed.append(text)
            else:
                found.judge(1 if after[key] else -1, text)


def _preflight(old: Report, new: Report, found: Found, *, overlap: bool) -> None:
    before = {finding["name"]: finding for finding in old["preflight"]}
    gone = before.keys() - {finding["name"] for finding in new["preflight"]}
    found.changed += [f"preflight {name}: now not looked at" for name in before if name in gone and not overlap]
    for finding in new["preflight"]:
        was = before.get(finding["name"])
        if was is None and overlap:
            continue
        state = "ok" if was is None else was["state"]
        text = f"preflight {finding['name']}: {'not looked at' if was is None else state}, now {finding['state']}"
        text += f" ({finding['got']})" if finding["got"] else ""
        found.judge(BADNESS[state] - BADNESS[finding["state"]], text)


def _machine(old: Report, new: Report) -> list[str]:
    """What may explain the rest: machine, software, options, environment."""
    pairs: list[tuple[str, Any, Any]] = [("h3core", old["h3core"], new["h3core"])]
    pairs.append(("run.host", old["run"]["host"], new["run"]["host"]))
    for key, value in old["machine"].items():
        if key != "gpus":
            pairs.append((f"machine.{key}", value, new["machine"][key]))
    pairs += _paired("machine.gpus", *({str(g["index"]): _gpu(g) for g in r["machine"]["gpus"]} for r in (old, new)))
    pairs += _paired("options", *({o["name"]: o["value"] for o in r["run"]["options"]} for r in (old, new)))
    pairs += _paired("environment", old["environment"], new["environment"])
    pairs.append(("narrowed by", old["verdict"]["narrowed"], new["verdict"]["narrowed"]))
    return [f"{name}: {_plain(before)} -> {_plain(after)}" for name, before, after in pairs if before != after]


def _paired(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterable[tuple[str, Any, Any]]:
    return ((f"{name}.{key}", old.get(key), new.get(key)) for key in dict.fromkeys([*old, *new]))


def _gpu(gpu: Mapping[str, Any]) -> str:
    return ", ".join(str(gpu[key]) for key in ("name", "uuid", "memory_bytes", "compute_capability"))


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
