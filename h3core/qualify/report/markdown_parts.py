"""The parts of report.md, each a function from a report to Markdown; empty where there is nothing to say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from h3core.qualify.report import view
from h3core.qualify.report.markdown_text import bullets, code, fenced, folded, inside_html, prose, table
from h3core.qualify.report.matrix import MARKS, matrix, state, unlisted, world_label
from h3core.qualify.report.schema import Report
from h3core.qualify.report.text import count, plural

FEW: Final = 5
"""Items that a list shows before it is folded."""
MOST: Final = 200
"""Items that a folded list shows; report.json has them all."""
GROUPS: Final = 20
"""Problems that are told in full."""

STATE_SIGNS: Final = {"problem": "✗", "warning": "!", "not measured": "?", "ok": "✓"}


def verdict(report: Report) -> str:
    """The verdict, what it means, and why it is not better."""
    said = report["verdict"]
    lines = [f"### {view.symbol(report)} {prose(view.headline(report), 4000)}", prose(view.meaning(report))]
    reasons = said["reasons"][:FEW]
    reasons += [f"{len(said['reasons']) - FEW} more reasons"] * (len(said["reasons"]) > FEW)
    lines += [bullets(prose(reason) for reason in reasons)] if reasons else []
    step = view.next_step(report)
    lines += [f"**Next:** {prose(step)}"] if step else []
    worse = (report["comparison"] or {}).get("worse")
    lines += [f"**Worse than the earlier run** in {plural(len(worse), 'point')}, see the comparison."] if worse else []
    if step and report["run"]["command"]:
        lines.append(f"The command of this run:\n\n{fenced([report['run']['command']])}")
    return "\n\n".join(lines)


def failed(report: Report) -> str:
    """What failed: where, why, what it means, what to do, and the command; one problem is said once."""
    found = view.groups(report)
    if not found:
        return ""
    blocks = [_group(group) for group in found[:GROUPS]]
    if len(found) > GROUPS:
        blocks.append(f"... and {plural(len(found) - GROUPS, 'more problem')}, in report.json.")
    failures = plural(len(report["failures"]), "failure")
    heading = failures if len(found) == len(report["failures"]) else f"{failures}, {plural(len(found), 'problem')}"
    return "\n\n".join([f"### What failed: {heading}", *blocks])


def errors(report: Report) -> str:
    """The long text of one failure of each problem, folded."""
    found = [group for group in view.groups(report)[:GROUPS] if group.first["details"]]
    return "\n\n".join(
        folded(f"Error in full: {inside_html(group.first['check'])}", fenced(group.first["details"].splitlines()))
        for group in found
    )


def coverage(report: Report) -> str:
    """Required checks in numbers."""
    found = report["coverage"]
    names = {"required": "required", "passed": "passed", "failed": "failed", "not_run": "did not run"}
    numbers = ", ".join(f"{count(found[key])} {name}" for key, name in names.items())
    return f"### Coverage\n\n{numbers}. In all: {view.totals(report)}."


def missing(report: Report) -> str:
    """Required checks that did not run, by reason and name."""
    reasons = view.missing_by_reason(report)
    blocks = [
        f"Did not run, {prose(why)} ({plural(len(checks), 'check')}):\n\n{_checks(checks)}"
        for why, checks in list(reasons.items())[:GROUPS]
    ]
    if len(reasons) > GROUPS:
        blocks.append(f"... and {plural(len(reasons) - GROUPS, 'more reason')}, in report.json.")
    return "\n\n".join(blocks)


def controls(report: Report) -> str:
    """Planted faults: how many were caught, and those that were not by name."""
    found = report["controls"]
    if not found["required"] and not found["list"]:
        return ""
    unmet = view.unmet(report)
    body = bullets(_control(control) for control in view.controls(report)[:MOST])
    numbers = f"{count(found['caught'])} of {count(found['required'])} planted faults caught"
    # What was caught can be folded away, what was not cannot.
    return f"### Controls: {numbers}\n\n" + (body if unmet else folded(inside_html(numbers), body) if body else "")


def checks(report: Report) -> str:
    """Checks by name, one column a world."""
    found = matrix(report)
    if not found.lines:
        return ""
    worlds = [world_label(world) for world in found.worlds]
    rows = [
        [
            code(line.name),
            *(cell.mark for cell in line.cells),
            f"{line.comparisons:,}",
            f"{line.elements:,}",
            f"{line.seconds:,.1f}",
        ]
        for line in found.lines[:MOST]
    ]
    head = ["check", *(f"W={world}" for world in worlds), "comparisons", "elements", "seconds"]
    legend = {"passed": "passed", "failed": "failed", "not run": "required, did not run", "skipped": "skipped"}
    key = ", ".join(f"{MARKS[name]} {words}" for name, words in legend.items())  # type: ignore[index]
    note = f"\n\n... and {len(found.lines) - MOST:,} more names, in report.json." if len(found.lines) > MOST else ""
    width = len(head)
    return f"### Checks\n\n{table(head, rows, range(width - 3, width))}{note}\n\n{key}; W is the number of ranks."


def every_check(report: Report) -> str:
    """The full table, folded."""
    rows = [*report["checks"], *unlisted(report)]
    if not rows:
        return ""
    cells = [
        [
            f"{MARKS[state(row)]} {row['outcome']}",
            code(row["check"]),
            "yes" if row["required"] else "unknown" if row["required"] is None else "no",
            count(row["comparisons"]),
            count(row["elements"]),
            "-" if row["duration_s"] is None else f"{row['duration_s']:.2f}",
            prose(row["reason"] or ""),
        ]
        for row in rows
    ]
    head = ["outcome", "check", "required", "comparisons", "elements", "seconds", "reason"]
    return folded(f"Every check ({len(rows):,})", table(head, cells, (3, 4, 5)))


def preflight(report: Report) -> str:
    """What was looked at before the first check: problems open, the rest folded."""
    bad, well = view.preflight(report)
    if not bad and not well:
        return ""
    problems = sum(finding["state"] == "problem" for finding in bad)
    warnings = len(bad) - problems
    numbers = [plural(problems, "problem")] * bool(problems) + [f"{warnings} to look at"] * bool(warnings)
    lines = [f"### Preflight: {', '.join([*numbers, f'{len(well)} ok'])}"]
    lines += [_findings(bad)] if bad else []
    lines += [folded(f"{len(well)} ok", _findings(well))] if well else []
    return "\n\n".join(lines)


def machine(report: Report) -> str:
    """The machine, its GPUs, and the ranks' own account of themselves."""
    run = report["run"]
    lines = ["### Machine", table(("fact", "value"), [(prose(k), prose(v)) for k, v in view.machine(report)])]
    gpus = report["machine"]["gpus"]
    if gpus:
        head = ("GPU", "name", "memory", "compute capability", "UUID")
        lines.append(table(head, [[prose(cell) for cell in row] for row in view.gpus(report)]))
    ranks = [[prose(cell) for cell in row] for row in view.presence(report)]
    lines.append(
        "Ranks, as they saw themselves:\n\n" + table(("world", "ranks", "backend", "devices"), ranks)
        if ranks
        else "No rank gave an account of itself."
    )
    rows = [(code(o["name"]), code(o["value"] or ""), prose(o["source"])) for o in run["options"]]
    body = [fenced([run["command"]])] if run["command"] else []
    body += [table(("option", "value", "from"), rows)] if rows else []
    body += [fenced(f"{name}={value}" for name, value in report["environment"].items())] * bool(report["environment"])
    lines += [folded("Command, options and environment", "\n\n".join(body))] if body else []
    return "\n\n".join(lines)


def tables(report: Report) -> str:
    """What checks noted, folded."""
    found = [folded(inside_html(item["title"]), fenced(item["lines"])) for item in report["tables"]]
    return "\n\n".join(["### Tables", *found]) if found else ""


def comparison(report: Report) -> str:
    """What got worse since an earlier run, what got better, what changed."""
    found = report["comparison"]
    if found is None:
        return ""
    with_ = f"### Compared with {code(found['with'] or 'an earlier run')}"
    lines = [with_, f"Its verdict: {prose(found['with_verdict'] or 'none')}"]
    if not found["comparable"]:
        lines.append(f"**Not comparable:** {prose(found['why_not'] or 'for no given reason')}")
    for name in ("worse", "better", "changed"):
        entries = [prose(entry) for entry in found[name]]
        lines.append(f"**{name.capitalize()}:** " + ("nothing" if not entries else f"\n\n{_fold(entries)}"))
    return "\n\n".join(lines)


def _group(group: view.Group) -> str:
    first, where = group.first, group.where
    lines = [f"#### ✗ {prose(group.problem)}"]
    facts = {
        "Where": prose(where) if where else "",
        "Why": prose(group.label),
        "Meaning": prose(first["meaning"] or ""),
        "Next": prose(first["action"] or ""),
    }
    lines.append(bullets(f"**{name}:** {text}" for name, text in facts.items() if text))
    # A paragraph between the lists, or Markdown would make one of them.
    lines += ["Checks:", _checks(group.checks)]
    if first["reproduce"]:
        lines += ["Reproduce:", fenced([first["reproduce"]])]
    return "\n\n".join(lines)


def _checks(names: Sequence[str]) -> str:
    return _fold([code(name) for name in names])


def _fold(items: Sequence[str]) -> str:
    """A list of ready items: a few open, more folded, very many cut."""
    shown = [*items[:MOST], *([f"... and {len(items) - MOST:,} more, in report.json"] if len(items) > MOST else [])]
    if len(shown) <= FEW:
        return bullets(shown)
    return f"{bullets(shown[: FEW - 2])}\n\n{folded(f'and {len(items) - FEW + 2:,} more', bullets(shown[FEW - 2 :]))}"


def _control(control: Mapping[str, Any]) -> str:
    mark = {True: "✓ caught", False: "✗ **not caught**", None: "! **did not run**"}[control["caught"]]
    world = f" at world {control['world']}" if control["world"] else ""
    return f"{mark}: {prose(control['name'])}{world}" + (f": {prose(control['how'])}" if control["how"] else "")


def _findings(findings: Sequence[Mapping[str, Any]]) -> str:
    keys = ("name", "got", "expected", "action")
    rows = [[f"{STATE_SIGNS[f['state']]} {f['state']}", *(prose(f[key] or "") for key in keys)] for f in findings]
    return table(("", "what", "got", "expected", "next"), rows)
