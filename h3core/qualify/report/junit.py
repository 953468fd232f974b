"""junit.xml: a run for GitHub, GitLab, Jenkins and whatever else reads JUnit.

Such a reader knows tests and failures, no verdicts. So the verdict is a test case of its own, and so is every required
check that did not run: a run that is INCOMPLETE or NOT QUALIFIED never looks green. GitLab shows the text of an element
and no `message`, so the text says everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final
from xml.etree import ElementTree as xml

from h3core.qualify.report import view
from h3core.qualify.report.matrix import unlisted
from h3core.qualify.report.schema import Report
from h3core.qualify.report.text import cleaned, one_line, shortened
from h3core.qualify.report.validate import contradictions

VERDICT: Final = "h3core.verdict"
COUNTED: Final = {"failure": "failures", "error": "errors", "skipped": "skipped"}
DETAILS: Final = 20_000
"""Characters of an error's text."""


def junit(report: Report) -> str:
    """A valid report as JUnit XML (the xunit2 family), all of it one suite."""
    harmless = cleaned(report)
    run = harmless["run"]
    cases = [_verdict(harmless), *_checks(harmless)]
    tags = Counter(child.tag for case in cases for child in case)
    numbers = {name: str(tags[tag]) for tag, name in COUNTED.items()}
    totals: dict[str, str] = {"tests": str(len(cases)), **numbers, "time": _seconds(run["duration_s"])}
    suite = xml.Element("testsuite", {"name": f"h3core {run['tier'] or 'tests'}", **totals})
    suite.set("timestamp", run["started_utc"].removesuffix("Z"))
    suite.set("hostname", run["host"] or "unknown")
    properties = xml.SubElement(suite, "properties")
    for name, value in (("verdict", view.word(harmless)), ("run", run["id"]), *view.machine(harmless)):
        xml.SubElement(properties, "property", name=name, value=value)
    suite.extend(cases)
    del totals["skipped"]  # the common schemas know it on a suite, and not on the root
    root = xml.Element("testsuites", {"name": "h3core", **totals})
    root.append(suite)
    xml.indent(root, " ")
    return '<?xml version="1.0" encoding="utf-8"?>\n' + xml.tostring(root, encoding="unicode") + "\n"


def _verdict(report: Report) -> xml.Element:
    """The verdict as a test case: green for QUALIFIED and PASSED alone, and only where the report bears it out."""
    said, case = report["verdict"], xml.Element("testcase", classname="h3core", name=VERDICT, time="0.000")
    against = contradictions(report)
    good = said["outcome"] in ("qualified", "passed") and not against
    if good:
        return case
    text = "\n".join([said["line"] or view.headline(report), *said["reasons"], *against])
    if said["outcome"] is None and said["exit_code"] == 0:
        _mark(case, "skipped", "no qualification", text)
    else:
        tag = "failure" if said["outcome"] == "not qualified" else "error"
        _mark(case, tag, said["outcome"] or "no verdict", text)
    return case


def _checks(report: Report) -> list[xml.Element]:
    """A test case for each check, for each required one that did not run, and for failures that are no check's."""
    failures: dict[str, list[Mapping[str, Any]]] = {}
    for failure in report["failures"]:
        failures.setdefault(failure["check"], []).append(failure)
    rows, names = [*report["checks"], *unlisted(report)], Counter[str]()
    cases = [_check(row, failures.pop(row["check"], [])) for row in rows]
    for name, found in failures.items():
        cases.append(_case(name, None))
        _mark(cases[-1], "error", found[0]["fault_class"], _account(found))
    for case in cases:
        # GitLab takes the first of two cases with one name, and the other one may be the failure.
        name = f"{case.attrib['classname']}::{case.attrib['name']}"
        names[name] += 1
        case.attrib["name"] += f" ({names[name]})" * (names[name] > 1)
    return cases


def _check(row: Mapping[str, Any], failures: list[Mapping[str, Any]]) -> xml.Element:
    case, outcome = _case(row["check"], row["duration_s"]), row["outcome"]
    reason = row["reason"] or "no reason given"
    if failures or outcome in ("failed", "error"):
        fault = failures[0]["fault_class"] if failures else None
        _mark(case, "failure" if outcome == "failed" else "error", fault, _account(failures) or reason)
    elif outcome != "passed" and row["required"] is not False:
        _mark(case, "error", "missing", f"required, did not run: {reason}")
    elif outcome != "passed":
        _mark(case, "skipped", outcome, reason)
    return case


def _case(check: str, duration: float | None) -> xml.Element:
    """A test case named as pytest's xunit2 names it: the module's dotted path, and the function with its parameters."""
    function, bracket, inside = check.partition("[")
    path, _, name = function.rpartition("::")
    file, _, inner = path.partition("::")
    module = ".".join(filter(None, (file.removesuffix(".py").replace("/", "."), inner.replace("::", ".")))) or "h3core"
    return xml.Element("testcase", classname=module, name=name + bracket + inside, time=_seconds(duration))


def _account(failures: list[Mapping[str, Any]]) -> str:
    """Everything that is known about the failures of one check."""
    parts = []
    for failure in failures:
        ranks = f"ranks {', '.join(map(str, failure['ranks']))}" if failure["ranks"] else ""
        said = {"": failure["problem"], "where: ": ranks, "meaning: ": failure["meaning"], "next: ": failure["action"]}
        said |= {"class: ": view.CLASSES[failure["fault_class"]], "reproduce: ": failure["reproduce"]}
        said |= {"\n": shortened(failure["details"] or "", DETAILS)}
        parts += [f"{name}{text}" for name, text in said.items() if text]
    return "\n".join(parts)


def _mark(case: xml.Element, tag: str, kind: str | None, text: str) -> None:
    message = shortened(one_line(text.partition("\n")[0]), 500)
    xml.SubElement(case, tag, type=kind or "unknown", message=message).text = text


def _seconds(value: float | None) -> str:
    return f"{value or 0.0:.3f}"
