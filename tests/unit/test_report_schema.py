"""What a report is: the shipped schema, the reader of it, and verdicts that the rest of a report rules out.

A pass means: the samples are reports; the standard-library reader refuses what jsonschema refuses and no more; a
QUALIFIED beside anything that failed, is missing or was not caught is no report.
Run: pytest tests/unit/test_report_schema.py
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from h3core.qualify.report.schema import SCHEMA, ReportError, schema
from h3core.qualify.report.validate import KEYWORDS, contradictions, validate
from tests.unit.sample_hostile import hostile
from tests.unit.sample_reports import SAMPLES, Report, edited, not_qualified, qualified

JUDGE = jsonschema.Draft202012Validator(schema())
WRONG: tuple[Any, ...] = (None, True, -1, 1.5, "x", [], {}, [None], 10**400, float("nan"))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of everything in a value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def replaced(report: Report, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copied = copy.deepcopy(report)
    place: Any = copied
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = new
    return copied


def small() -> Report:
    """A report with one item in each list."""

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cut(item) for key, item in value.items()}
        return [cut(value[0])] if isinstance(value, list) and value else value

    return cut(hostile())  # type: ignore[no-any-return]


def refused(report: Any) -> bool:
    try:
        validate(report)
    except ReportError as error:
        return "not to be trusted" not in str(error)
    return False


@pytest.mark.parametrize("name", SAMPLES)
def test_every_sample_is_a_report(name: str) -> None:
    report = SAMPLES[name]()
    JUDGE.validate(report)
    assert validate(report) is report
    assert json.loads(json.dumps(report)) == report


def test_the_schema_is_a_schema_and_uses_no_keyword_that_nobody_reads() -> None:
    JUDGE.check_schema(schema())

    def keywords(rule: Any) -> Iterator[str]:
        for key, value in rule.items():
            yield key
            if key in ("properties", "$defs"):
                for inner in value.values():
                    yield from keywords(inner)
            elif isinstance(value, dict) and key != "const":
                yield from keywords(value)

    assert set(keywords(schema())) == KEYWORDS


def test_every_object_is_closed_and_every_key_is_required() -> None:
    def objects(rule: Any) -> Iterator[Any]:
        if isinstance(rule, dict):
            if "properties" in rule and "type" in rule:
                yield rule
            for value in rule.values():
                yield from objects(value)

    found = list(objects(schema()))
    assert len(found) > 15
    for rule in found:
        assert rule["additionalProperties"] is False
        assert rule["required"] == list(rule["properties"])


def test_schema_gives_a_fresh_copy() -> None:
    schema()["properties"].clear()
    assert schema()["properties"]["schema"] == {"const": SCHEMA}


def test_the_reader_and_jsonschema_refuse_the_same() -> None:
    report = small()
    seen = {True: 0, False: 0}
    for path in places(report):
        for wrong in WRONG:
            changed = replaced(report, path, wrong)
            bad = not JUDGE.is_valid(changed) or wrong != wrong  # jsonschema takes NaN for a number; JSON has none
            assert refused(changed) == bad, (path, wrong)
            seen[bad] += 1
    assert min(seen.values()) > 100


def test_a_key_too_few_or_too_many_is_refused_wherever_it_is() -> None:
    report = small()
    for path in places(report):
        place: Any = report
        for key in path:
            place = place[key]
        if not isinstance(place, dict) or path == ("environment",):
            continue
        with pytest.raises(ReportError, match="expected only"):
            validate(replaced(report, path, place | {"surplus": 1}))
        for key in place:
            fewer = {name: value for name, value in place.items() if name != key}
            with pytest.raises(ReportError, match=f"{key!r}|got schema None"):
                validate(replaced(report, path, fewer))


def test_an_error_names_the_place_what_was_found_and_what_was_expected() -> None:
    report = qualified()
    report["checks"][3]["outcome"] = "ok"
    with pytest.raises(
        ReportError, match=r"report\.checks\[3\]\.outcome: got 'ok', expected one of 'passed', 'failed'"
    ):
        validate(report)


def test_another_schema_is_named_with_its_version() -> None:
    with pytest.raises(
        ReportError, match=r"got schema 'h3core-evidence-1' by h3core '0.1.0', expected 'h3core-report-1'"
    ):
        validate(edited(qualified(), schema="h3core-evidence-1"))


RULED_OUT = {
    "in progress": {"run__state": "in progress"},
    "exit code 1": {"verdict__exit_code": 1},
    "exit code None": {"verdict__exit_code": None},
    "a failure": {"failures": not_qualified()["failures"]},
    "151 of 152": {"coverage__passed": 151},
    "0 of 0": {"coverage__required": 0, "coverage__passed": 0},
    "are missing": {"coverage__missing": [{"check": "a", "world": 2, "mode": None, "why": "b"}]},
    "missing": {"coverage__failed": 1},
    "checks that are missing": {"coverage__not_run": 1},
    "4 of 5 controls": {"controls__caught": 4},
    "5 of 5 controls": {"controls__list": [{"name": "a", "world": 2, "caught": None, "how": None}]},
}


@pytest.mark.parametrize("outcome", ["qualified", "passed"])
@pytest.mark.parametrize("what", RULED_OUT)
def test_a_good_verdict_is_refused_beside_what_rules_it_out(what: str, outcome: str) -> None:
    report = edited(qualified(), verdict__outcome=outcome, **RULED_OUT[what])
    assert len(contradictions(report)) == 1
    with pytest.raises(ReportError, match=f"{outcome}, and .*{what}.*; its verdict is not to be trusted"):
        validate(report)


@pytest.mark.parametrize("outcome", ["failed", "error", "skipped", "not run"])
def test_a_good_verdict_is_refused_beside_a_required_check_that_did_not_pass(outcome: str) -> None:
    report = qualified()
    report["checks"][7]["outcome"] = outcome
    with pytest.raises(ReportError, match=r"required and not passed|failed: "):
        validate(report)


def test_a_check_that_nobody_required_may_be_skipped_but_not_fail() -> None:
    report = qualified()
    report["checks"].append(report["checks"][0] | {"check": "other", "required": False, "outcome": "skipped"})
    validate(report)
    report["checks"][-1]["outcome"] = "error"
    with pytest.raises(ReportError, match="failed: other"):
        validate(report)


@pytest.mark.parametrize("outcome", ["not qualified", "incomplete"])
def test_a_bad_verdict_has_no_exit_code_of_success(outcome: str) -> None:
    with pytest.raises(ReportError, match=f"{outcome}, and exit code 0"):
        validate(edited(qualified(), verdict__outcome=outcome))


@pytest.mark.parametrize("thing", [None, [], "x", 3])
def test_what_is_no_object_is_no_report(thing: Any) -> None:
    with pytest.raises(ReportError, match="expected an object"):
        validate(thing)
