"""What is left of a report when times, ids and temporary paths are taken out.

A pass means: two equal runs are equal, and every difference that says something about the machine or the checks stays.
Run: pytest tests/unit/test_report_stable.py
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from h3core.qualify.report.compare import compare_reports
from h3core.qualify.report.stable import DROPPED, stable
from tests.unit.sample_reports import SAMPLES, Report, edited, not_qualified, qualified


def other_run(make: Callable[[], Report]) -> Report:
    """The same again, some time later in another folder."""
    report = edited(
        make(),
        run__id="f" * 32,
        run__started_utc="2027-02-03T04:05:06Z",
        run__duration_s=1.5,
        run__host="6c1f0e9d2b7a",
        run__command="python -m pytest -m gloo --report-dir=/tmp/b",
        verdict__line="other",
        comparison=compare_reports(make(), make()),
    )
    report["run"]["options"][2]["value"] = "/tmp/b"
    report["presence"].reverse()
    for item in report["checks"]:
        item["duration_s"] = 77.0
    for rank in report["presence"]:
        rank["pid"] += 1000
    for finding in report["preflight"]:
        finding["got"] = "other"
    for failure in report["failures"]:
        failure["details"] = "other"
    return report


@pytest.mark.parametrize("name", SAMPLES)
def test_two_equal_runs_are_equal(name: str) -> None:
    report = SAMPLES[name]()
    kept = copy.deepcopy(report)
    assert stable(report) == stable(other_run(SAMPLES[name]))
    assert report == kept, "a copy"


def test_temporary_paths_addresses_and_ports_are_replaced() -> None:
    first, second = not_qualified(), not_qualified()
    first["failures"][0]["problem"] = "rank 1 (pid 12): /tmp/pytest-of-me/pytest-1/a: 127.0.0.1:4711 at 0x7f0012345678"
    second["failures"][0]["problem"] = "rank 1 (pid 99): /var/folders/x/b: 127.0.0.1:99 at 0x7fffffffffff"
    assert stable(first)["failures"][0] == stable(second)["failures"][0]
    assert stable(first)["failures"][0]["problem"] == "rank 1 (pid <pid>): <temporary>: 127.0.0.1:<port> at <address>"


def test_only_what_is_promised_is_dropped() -> None:
    def keys(value: Any, path: str = "") -> set[str]:
        if isinstance(value, dict):
            inner = {f"{path}.{key}".lstrip(".") for key in value}
            return inner.union(*(keys(item, f"{path}.{key}".lstrip(".")) for key, item in value.items()))
        if isinstance(value, list):
            return set().union(*(keys(item, f"{path}[]") for item in value))
        return set()

    assert keys(not_qualified()) - keys(stable(not_qualified())) == set(DROPPED)


@pytest.mark.parametrize(
    "change",
    [
        {"verdict__outcome": "incomplete"},
        {"verdict__reasons": ["x"]},
        {"coverage__passed": 1},
        {"machine__torch": "x"},
        {"environment": {}},
        {"run__worlds": [2]},
        {"tables": []},
        {"controls__caught": 4},
        {"run__pytest_exit_status": 1},
    ],
)
def test_real_differences_stay(change: dict[str, Any]) -> None:
    assert stable(qualified()) != stable(edited(qualified(), **change))


@pytest.mark.parametrize("key", ["outcome", "comparisons", "elements", "largest_difference", "ranks", "reason"])
def test_differences_of_a_check_stay(key: str) -> None:
    other = qualified()
    other["checks"][7][key] = [9] if key == "ranks" else 9
    assert stable(qualified()) != stable(other)
