"""A report in which every string that comes from a run is an attack on what shows it."""

from __future__ import annotations

from typing import Any

from tests.unit.sample_checks import Report
from tests.unit.sample_reports import not_qualified

HOSTILE = (
    '</pre><script>alert("1")</script>|`x` & "q" \'s\' \x1b[31mred\x1b[0m\x00\u202e ]]> $a$ @joe'
    "\r\n## heading <!-- %0A::error::x"
)
"""A string that breaks what is careless with it: HTML, Markdown, XML, a terminal, a workflow command."""


def hostile() -> Report:
    """A report in which every string that comes from a run is hostile."""
    report = not_qualified()
    report["coverage"]["missing"] = [{"check": HOSTILE, "world": 2, "mode": HOSTILE, "why": HOSTILE}]
    report["controls"]["list"].append({"name": HOSTILE, "world": None, "caught": False, "how": HOSTILE})
    report["environment"][HOSTILE] = HOSTILE
    report["comparison"] = {"with": HOSTILE, "with_verdict": HOSTILE, "comparable": False, "why_not": HOSTILE}
    report["comparison"] |= {key: [HOSTILE] for key in ("worse", "better", "changed")}
    report["machine"]["gpus"] = [
        dict.fromkeys(("name", "uuid", "compute_capability"), "") | {"index": 0, "memory_bytes": 1}
    ]
    fixed = {"schema", "id", "state", "started_utc", "outcome", "fault_class"}
    return _poisoned(report, fixed)  # type: ignore[no-any-return]


def tamed(value: Any) -> Any:
    """The same with a harmless word for each hostile string."""
    if isinstance(value, dict):
        return {tamed(key): tamed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [tamed(item) for item in value]
    return "tame" if value == HOSTILE else value


def _poisoned(value: Any, fixed: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: item if key in fixed else _poisoned(item, fixed) for key, item in value.items()}
    if isinstance(value, list):
        return [_poisoned(item, fixed) for item in value]
    return HOSTILE if isinstance(value, str) else value
