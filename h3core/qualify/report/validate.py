"""Whether a dictionary is a report: the shipped schema, and what no schema can say.

A small reader of the JSON Schema keywords that report.schema.json uses, so that reading a report needs nothing but the
standard library; the unit tests hold it against jsonschema. Renderers may then rely on every key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from h3core.qualify.report.schema import SCHEMA, Report, ReportError, schema

KEYWORDS: Final = frozenset(
    (
        *("$schema", "$id", "$defs", "$ref", "title", "description", "type", "const", "enum", "pattern"),
        *("minimum", "maximum", "properties", "required", "additionalProperties", "items"),
    )
)
"""What the shipped schema may use. A keyword that is not read here would be a rule that nobody enforces."""


def validate(report: Any) -> Report:
    """`report` itself where it is one. Raises `ReportError` that names the first thing that is wrong."""
    if not isinstance(report, dict):
        raise ReportError(f"report: got {_kind(report)}, expected an object with the schema {SCHEMA}")
    if report.get("schema") != SCHEMA:
        raise ReportError(
            f"report: got schema {report.get('schema')!r:.80} by h3core {report.get('h3core')!r:.40}, "
            f"expected {SCHEMA!r}; read it with the version of h3core that wrote it"
        )
    rules = schema()
    for problem in _problems("report", report, rules, rules["$defs"]):
        raise ReportError(f"{problem}; see h3core/qualify/report/report.schema.json")
    for problem in contradictions(report):
        raise ReportError(f"report: {problem}; its verdict is not to be trusted, run the suite again")
    return report


def contradictions(report: Report) -> list[str]:
    """What the report says against its own verdict: a good one must not stand beside what rules it out."""
    run, verdict, coverage, controls = (report[key] for key in ("run", "verdict", "coverage", "controls"))
    outcome, exit_code = verdict["outcome"], verdict["exit_code"]
    if outcome in ("not qualified", "incomplete"):
        return [f"{outcome}, and exit code 0"] if exit_code == 0 else []
    if outcome is None:
        return []
    bad = [check["check"] for check in report["checks"] if check["outcome"] in ("failed", "error")]
    absent = [check["check"] for check in report["checks"] if check["required"] and check["outcome"] != "passed"]
    against = {
        "in progress": run["state"] != "ended",
        f"exit code {exit_code}": exit_code != 0,
        "a failure": bool(report["failures"]),
        f"failed: {', '.join(bad[:3])}": bool(bad),
        f"required and not passed: {', '.join(absent[:3])}": bool(absent),
        "required checks that are missing": bool(coverage["missing"] or coverage["failed"] or coverage["not_run"]),
        f"{coverage['passed']} of {coverage['required']} required checks passed": not coverage["required"]
        or coverage["passed"] != coverage["required"],
        f"{controls['caught']} of {controls['required']} controls caught": controls["caught"] != controls["required"]
        or any(control["caught"] is not True for control in controls["list"]),
    }
    return [f"{outcome}, and {what}" for what, holds in against.items() if holds]


def _problems(where: str, value: Any, rule: Mapping[str, Any], defs: Mapping[str, Any]) -> Iterator[str]:
    """Everything in `value` that `rule` forbids, as got and expected."""
    if "$ref" in rule:
        yield from _problems(where, value, defs[rule["$ref"].rpartition("/")[2]], defs)
    types = rule.get("type")
    if types is not None:
        types = [types] if isinstance(types, str) else types
        if not any(TYPES[name](value) for name in types):
            yield f"{where}: got {_kind(value)}, expected {' or '.join(types)}"
            return
    if "const" in rule and value != rule["const"]:
        yield f"{where}: got {value!r:.80}, expected {rule['const']!r}"
    if "enum" in rule and value not in rule["enum"]:
        yield f"{where}: got {value!r:.80}, expected one of {', '.join(map(repr, rule['enum']))}"
    if isinstance(value, str) and "pattern" in rule and not re.search(rule["pattern"], value):
        yield f"{where}: got {value!r:.80}, expected a match of {rule['pattern']}"
    if TYPES["number"](value) and not rule.get("minimum", -math.inf) <= value <= rule.get("maximum", math.inf):
        yield f"{where}: got {value}, expected {rule.get('minimum', 'any')} to {rule.get('maximum', 'any')}"
    if isinstance(value, dict):
        yield from _members(where, value, rule, defs)
    if isinstance(value, list) and "items" in rule:
        for index, item in enumerate(value):
            yield from _problems(f"{where}[{index}]", item, rule["items"], defs)


def _members(where: str, value: Mapping[str, Any], rule: Mapping[str, Any], defs: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with an object's keys and values."""
    for name in rule.get("required", ()):
        if name not in value:
            yield f"{where}: got no {name!r}, expected it in every report"
    properties, others = rule.get("properties", {}), rule.get("additionalProperties", True)
    for name, item in value.items():
        if name in properties:
            yield from _problems(f"{where}.{name}", item, properties[name], defs)
        elif others is False:
            yield f"{where}: got {name!r:.80}, expected only {', '.join(properties)}"
        elif others is not True:
            yield from _problems(f"{where}.{name:.80}", item, others, defs)


def _is_number(value: Any) -> bool:
    # A bool is an int in Python, and no number in JSON; NaN and infinities are in neither.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


TYPES: Final[Mapping[str, Callable[[Any], bool]]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": _is_number,
    "integer": lambda value: _is_number(value) and value == int(value),
}


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), f"{value!r:.80}")
