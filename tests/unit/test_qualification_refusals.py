"""Runs that would mean nothing are refused, and what is no qualification gets no verdict.

Run it with: pytest tests/unit/test_qualification_refusals.py
"""

from __future__ import annotations

import os

import pytest

from h3core.qualify.opening import older_report
from tests.unit.qualify_runs import GLOO, last_line, outcome


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--wrold=2",), "unrecognized arguments: --wrold=2"),
        (("--world=10",), "asked for 10 ranks, the test model has 9 heads"),
        (("--checkpoint=x",), "the gloo tier would ignore it"),
        (("--compare=no-such.json",), "--compare: "),
        (("-n", "2"), "leave -n out"),
        (("-m", "gloo or nccl"), "run one"),
        (("-m", "gloo and"), "-m"),
    ],
)
def test_a_run_that_is_refused_disowns_the_older_report(suite, words, message):
    assert suite.run(*GLOO).returncode == 0
    result = suite.run(*GLOO, "--report-dir=report", *words)
    assert result.returncode == 4
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert outcome(suite) == ("incomplete", 4)
    for name in ("report.md", "report.html", "junit.xml"):
        assert "QUALIFIED (software" not in (suite.folder / "report" / name).read_text()


@pytest.mark.parametrize(
    "words", [("--collect-only",), ("--help",), ("--markers",), ("--fixtures",), ("--setup-plan",)]
)
def test_showing_things_touches_no_report_and_gives_no_verdict(suite, words):
    assert suite.run(*GLOO).returncode == 0
    before = (suite.folder / "report" / "report.json").read_text()
    result = suite.run(*GLOO, *words)
    assert result.returncode == 0
    assert "QUALIFIED" not in result.stdout
    assert "did not run" not in result.stdout
    assert (suite.folder / "report" / "report.json").read_text() == before


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"PYTHONOPTIMIZE": "1"}, "python -O"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK, WORLD_SIZE, LOCAL_RANK set"),
        ({"H3_WORLD_SIZE": "two"}, "H3_WORLD_SIZE: got 'two'"),
    ],
)
def test_environments_that_would_mean_nothing_are_refused(suite, environment, message):
    words = ("-m", "gloo") if "H3_WORLD_SIZE" in environment else GLOO
    result = suite.run_apart(*words, **environment)
    assert result.returncode == 4
    assert message in result.stderr


@pytest.mark.parametrize("option", ["--reruns", "--retries", "--count"])
def test_plugins_that_repeat_until_it_passes_are_refused(suite, option):
    suite.write(
        "conftest.py",
        (suite.folder / "conftest.py").read_text()
        + f"\ndef pytest_addoption(parser):\n    parser.addoption({option!r}, type=int, default=0)\n",
    )
    assert suite.run(*GLOO, f"{option}=3").returncode == 4
    assert suite.run(*GLOO).returncode == 0


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(suite):
    result = suite.run(*GLOO, "--report-dir=/dev/null/x")
    assert result.returncode == 4
    assert "--report-dir: " in result.stderr


def test_without_a_tier_there_is_no_verdict_and_pytests_own_code(suite):
    result = suite.run("--world=2")
    assert result.returncode == 0
    assert "QUALIFIED" not in result.stdout
    assert not (suite.folder / "report").exists()
    suite.replace("test_a.py", "    record([compare(", "    assert False\n    record([compare(")
    assert suite.run("--world=2").returncode == 1


def test_without_a_tier_rank_checks_that_were_all_skipped_are_no_success(suite):
    for name in ("test_a.py", "test_b.py", "test_c.py"):
        text = (suite.folder / name).read_text().replace("    record(", "    pytest.skip('no')\n    record(")
        suite.write(name, text)
    result = suite.run("--world=2")
    assert result.returncode == 10, result.stdout
    assert "every rank check was skipped" in last_line(result)


def test_without_a_tier_a_check_that_owes_evidence_fails_without_it(suite):
    suite.replace("test_a.py", "for _ in range(2)]", "for _ in range(1)]")
    result = suite.run("--world=2")
    assert result.returncode == 1
    assert "passed with too little evidence: 1 comparisons, 2 owed" in result.stdout


def test_a_tier_without_gpus_or_without_checks_is_refused(suite):
    result = suite.run("-m", "nccl", H3_WORLD_SIZE="2")
    assert result.returncode == 4
    assert "0 GPUs are visible" in result.stderr
    result = suite.run("-m", "nccl", "--world=2", "--share-gpus")
    assert result.returncode == 4
    assert "the nccl tier has no checks in h3core" in result.stderr


def test_an_unknown_variable_is_named(suite):
    assert "nothing reads it: H3_WORLDSIZE" in suite.run("-v", "-m", "gloo", "--world=2", H3_WORLDSIZE="8").stdout


@pytest.mark.parametrize("flag", ["--report-dir", "--compare", "--checkpoint", "--gates"])
def test_a_path_option_takes_an_existing_path_outside_of_the_repository(suite, tmp_path, flag):
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    if flag == "--compare":
        assert suite.run_apart(*GLOO, f"--report-dir={outside}").returncode == 0
    result = suite.run_apart(*GLOO, f"{flag}={outside}")
    if flag in ("--checkpoint", "--gates"):
        assert result.returncode == 4
        assert "the gloo tier would ignore it" in result.stderr
        return
    assert result.returncode == 0, result.stdout + result.stderr
    assert "6 of 6 required checks" in last_line(result)
    assert os.listdir(outside)


def test_evidence_of_another_kind_is_refused(suite):
    suite.replace("test_b.py", "record(compare(name, torch.arange(6.0), torch.arange(6.0), Identical()))", "record(5)")
    result = suite.run("--world=2")
    assert result.returncode == 1
    assert "got int, expected Evidence or a list of it" in result.stdout


def test_a_check_of_its_own_that_records_nothing_fails(suite):
    suite.write("test_d.py", "import pytest\n\n@pytest.mark.gloo\ndef test_new(record):\n    record([])\n")
    assert suite.run("--world=2").returncode == 1
    result = suite.run(*GLOO)
    assert result.returncode == 1
    assert "it recorded no evidence of what it compared" in result.stdout


def test_a_test_without_a_tier_keeps_its_own_world(suite):
    suite.write(
        "test_d.py",
        "import pytest\n\n@pytest.mark.parametrize('world', [7])\ndef test_own(world):\n    assert world == 7\n",
    )
    assert suite.run("test_d.py").returncode == 0


@pytest.mark.parametrize("expression", ["not gloo", "not nccl and not gloo"])
def test_a_run_that_is_no_qualification_leaves_an_older_report_alone(suite, expression):
    assert suite.run(*GLOO).returncode == 0
    before = (suite.folder / "report" / "report.json").read_text()
    assert suite.run("-m", expression, "--world=2").returncode == 0
    assert (suite.folder / "report" / "report.json").read_text() == before


def test_a_refused_run_disowns_the_folder_that_it_names_and_no_other(suite):
    for folder in ("named", "report"):
        assert suite.run(*GLOO, f"--report-dir={folder}").returncode == 0
    for words in (("--report-dir=named",), ("--report-dir", "named")):
        assert suite.run(*GLOO, *words, "--bogus").returncode == 4
    assert suite.report("named")["verdict"]["outcome"] == "incomplete"
    assert suite.report("report")["verdict"]["outcome"] == "qualified"


def test_pytest_without_any_argument_runs(suite):
    assert older_report([], {}, suite.folder) is None
    assert older_report(["-m"], {}, suite.folder) is None


def test_blocking_what_judges_is_refused(suite):
    result = suite.run(*GLOO, "-p", "no:h3core-recorder")
    assert result.returncode == 4
    assert "nothing would be judged" in result.stderr


def test_credentials_in_a_command_line_reach_no_report(suite):
    word = "junit_suite_name=sk-abcdefghij1234567"
    suite.run(*GLOO, "-k", "nosuch", "-o", word, PYTEST_ADDOPTS="-o junit_suite_name=hf_abcdefghij1234567")
    for name in ("report.json", "report.md", "report.html", "junit.xml"):
        text = (suite.folder / "report" / name).read_text()
        assert "abcdefghij" not in text


def test_the_same_evidence_counts_once(suite):
    suite.replace(
        "test_a.py", "    record([compare(", "    same = compare('x', X, X.clone(), Identical())\n    record([("
    )
    suite.replace("test_a.py", '("bytes", X, X.clone(), Identical()) for _', "same for _")
    result = suite.run(*GLOO)
    assert result.returncode == 1
    assert "was recorded twice, and counts once" in result.stdout
