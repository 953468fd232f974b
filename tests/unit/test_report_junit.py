"""junit.xml: what CI systems read, which know tests and no verdicts.

A pass means: the counts are those of the cases; only a QUALIFIED or PASSED run that its own report bears out is green;
every required check that did not run is an error; no string breaks the XML.
Run: pytest tests/unit/test_report_junit.py
"""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree as xml

import pytest

from h3core.qualify.report.junit import VERDICT, junit
from tests.unit.sample_hostile import HOSTILE, hostile
from tests.unit.sample_reports import (
    SAMPLES,
    Report,
    edited,
    in_progress,
    incomplete,
    not_qualified,
    qualified,
    unit_run,
)

BAD = {"failure", "error"}


def suite(report: Report) -> xml.Element:
    root = xml.fromstring(junit(report).encode())
    assert root.tag == "testsuites"
    assert len(root) == 1
    return root[0]


def cases(report: Report) -> dict[str, xml.Element]:
    found = [case for case in suite(report) if case.tag == "testcase"]
    names = [f"{case.attrib['classname']}::{case.attrib['name']}" for case in found]
    assert len(names) == len(set(names)), "GitLab takes the first of two with one name"
    return {case.attrib["name"]: case for case in found}


def green(report: Report) -> bool:
    return not any(child.tag in BAD for case in cases(report).values() for child in case)


def verdict(report: Report) -> xml.Element | None:
    case = cases(report)[VERDICT]
    return case[0] if len(case) else None


@pytest.mark.parametrize("name", [*SAMPLES, "hostile"])
def test_counts_and_times_are_those_of_the_cases(name: str) -> None:
    report = (SAMPLES | {"hostile": hostile})[name]()
    root = xml.fromstring(junit(report).encode())
    tags = [child.tag for case in root.iter("testcase") for child in case]
    for element in (root, root[0]):
        assert element.attrib["tests"] == str(len(list(root.iter("testcase"))))
        assert element.attrib["failures"] == str(tags.count("failure"))
        assert element.attrib["errors"] == str(tags.count("error"))
        assert float(element.attrib["time"]) == report["run"]["duration_s"]
    assert root[0].attrib["skipped"] == str(tags.count("skipped"))
    assert set(root.attrib) == {"name", "tests", "failures", "errors", "time"}
    assert root[0].attrib["timestamp"] == "2026-11-30T23:59:01"


@pytest.mark.parametrize("name", [*SAMPLES, "hostile"])
def test_the_elements_are_those_that_parsers_know(name: str) -> None:
    root = xml.fromstring(junit((SAMPLES | {"hostile": hostile})[name]()).encode())
    assert [child.tag for child in root] == ["testsuite"]
    assert root[0][0].tag == "properties"
    assert {child.tag for child in root[0][1:]} == {"testcase"}
    for case in root.iter("testcase"):
        assert set(case.attrib) == {"classname", "name", "time"}
        assert re.fullmatch(r"\d+\.\d{3}", case.attrib["time"])
        assert len(case) <= 1
        for child in case:
            assert child.tag in BAD | {"skipped"}
            assert set(child.attrib) == {"type", "message"}
            assert child.text


def test_a_qualified_run_is_green_with_one_case_a_check_and_the_verdict() -> None:
    report = qualified()
    assert green(report)
    found = cases(report)
    assert len(found) == len(report["checks"]) + 1
    case = found["test_max_over_ranks_finds_the_one_that_holds_it[world=4]"]
    assert case.attrib["classname"] == "tests.gloo.test_transport"
    assert case.attrib["time"] == "0.011"


@pytest.mark.parametrize(("make", "tag"), [(not_qualified, "failure"), (incomplete, "error"), (in_progress, "error")])
def test_a_run_that_is_not_good_is_never_green(make: Any, tag: str) -> None:
    report = make()
    element = verdict(report)
    assert element is not None
    assert element.tag == tag
    assert element.text is not None
    assert report["verdict"]["line"] in element.text
    report["checks"], report["failures"], report["coverage"]["missing"] = [], [], []
    assert not green(report), "even where nothing else says so"


@pytest.mark.parametrize(
    "changes",
    [
        {"run__state": "in progress"},
        {"verdict__exit_code": 1},
        {"coverage__not_run": 1},
        {"coverage__required": 0, "coverage__passed": 0},
        {"controls__caught": 4},
    ],
)
def test_a_good_verdict_that_its_report_does_not_bear_out_is_not_green(changes: dict[str, Any]) -> None:
    element = verdict(edited(qualified(), **changes))
    assert element is not None
    assert element.tag == "error"
    assert "qualified, and " in str(element.text)


def test_a_run_without_verdict_is_skipped_as_one_and_red_where_pytest_failed() -> None:
    element = verdict(unit_run())
    assert element is not None
    assert element.tag == "skipped"
    element = verdict(edited(unit_run(), verdict__exit_code=10))
    assert element is not None
    assert element.tag == "error"


def test_a_failure_says_everything_in_its_text() -> None:
    report = not_qualified()
    failure = report["failures"][1]
    case = cases(report)[failure["check"].rpartition("::")[2]]
    assert case[0].tag == "failure"
    assert case[0].attrib == {"type": "interconnect", "message": failure["problem"]}
    for part in ("problem", "meaning", "action", "reproduce", "details"):
        assert failure[part] in str(case[0].text)
    assert "ranks 3, 7" in str(case[0].text)
    assert suite(report).attrib["failures"] == "4", "three checks and the verdict"


@pytest.mark.parametrize("named_as", ["manifest", "pytest"])
def test_a_required_check_that_did_not_run_is_an_error_once(named_as: str) -> None:
    report = incomplete()
    if named_as == "pytest":  # collected and skipped
        for check in report["checks"]:
            if check["outcome"] == "not run":
                check |= {"check": f"tests/gloo/{check['check']}", "outcome": "skipped"}
    found = [case for name, case in cases(report).items() if name != VERDICT and len(case)]
    assert len(found) == 108
    for case in found:
        assert case[0].tag == "error"
        assert case[0].text == "required, did not run: deselected by -k 'blocks'"


def test_a_required_check_that_only_the_list_of_missing_ones_knows_is_an_error() -> None:
    report = incomplete()
    report["checks"] = [check for check in report["checks"] if check["outcome"] == "passed"]
    assert suite(report).attrib["errors"] == "109"
    assert suite(report).attrib["tests"] == "153"


def test_other_outcomes() -> None:
    report = unit_run()
    for check, outcome in zip(report["checks"], ("skipped", "error", "failed", "not run"), strict=False):
        check |= {"outcome": outcome, "reason": None}
    tags = [case[0].tag for name, case in cases(report).items() if name != VERDICT and len(case)]
    assert tags == ["skipped", "error", "failure", "skipped"]


def test_a_failure_that_is_no_checks_has_its_case() -> None:
    report = not_qualified()
    report["failures"].append(report["failures"][0] | {"check": "tests/gloo/test_broken.py", "problem": "ImportError"})
    case = cases(report)["tests/gloo/test_broken.py"]
    assert case[0].tag == "error"
    assert str(case[0].text).startswith("ImportError")


def test_of_two_checks_with_one_name_none_hides_the_other() -> None:
    report = unit_run()
    report["checks"] = [
        report["checks"][0] | {"check": check} for check in ("a.py::test_x[\x00]", "a.py::test_x[\x01]")
    ]
    report["checks"][1]["outcome"] = "failed"
    found = cases(report)
    assert [len(found[name]) for name in ("test_x[]", "test_x[] (2)")] == [0, 1]


def test_classes_and_modules_make_the_class_name() -> None:
    report = unit_run()
    report["checks"] = [
        report["checks"][0] | {"check": check} for check in ("tests/a.py::TestA::test_x[b::c/d.py]", "b.py::test_y")
    ]
    names = {case.attrib["classname"]: case.attrib["name"] for case in cases(report).values()}
    assert names == {"h3core": VERDICT, "tests.a.TestA": "test_x[b::c/d.py]", "b": "test_y"}


def test_characters_that_xml_has_not_are_stripped_and_the_rest_stays() -> None:
    text = junit(hostile())
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]", text)
    shown = HOSTILE.replace("\x1b[31m", "").replace("\x1b[0m", "").replace("\x00\u202e", "").replace("\r\n", "\n")
    element = verdict(hostile())
    assert element is not None
    assert str(element.text).startswith(shown)


@pytest.mark.parametrize("code", [*range(32), 0x7F, 0x9B, 0xD800, 0xFFFE, 0xFFFF])
def test_every_control_character_is_survived(code: int) -> None:
    report = edited(not_qualified(), run__host=f"a{chr(code)}b")
    report["failures"][0] |= {"problem": f"a{chr(code)}b", "check": f"t.py::t[{chr(code)}]"}
    xml.fromstring(junit(report).encode())


def test_machine_facts_are_properties_of_the_suite() -> None:
    found = {item.attrib["name"]: item.attrib["value"] for item in suite(qualified()).iter("property")}
    assert found["torch"] == "2.13.0+cpu"
    assert found["verdict"] == "QUALIFIED (software, CPU)"
    assert "driver" not in found, "unknown"
