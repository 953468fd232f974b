"""What the documents say of the suite is what the code has: options, variables, commands, controls, workflows.

Run it with: pytest tests/unit/test_docs.py
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from h3core.qualify.controls import CONTROLS
from h3core.qualify.options import OPTIONS

ROOT = Path(__file__).parents[2]
QUALIFICATION = (ROOT / "docs" / "qualification.md").read_text()
WORKFLOWS = sorted((ROOT / "docs" / "github-actions").glob("*.yml"))


def test_every_option_and_its_variable_is_documented():
    table = QUALIFICATION[QUALIFICATION.index("## Options") :]
    for option in OPTIONS:
        assert option.flag in table
    named = {option.variable for option in OPTIONS if option.variable in table}
    assert {"H3_WORLD_SIZE", "H3_MODE", "H3_SEED", "H3_RANK_TIMEOUT", "H3_REPORT_DIR", "H3_COMPARE"} <= named


def test_no_option_is_documented_that_is_not_there():
    flags = {option.flag for option in OPTIONS}
    others = {"--collect-only", "--fixtures", "--markers", "--setup-plan", "--help", "--out", "--opt", "--device"}
    assert set(re.findall(r"--[a-z][a-z-]+", QUALIFICATION)) <= flags | others


def test_every_control_is_documented():
    for control in CONTROLS:
        assert f"| {control.name} |" in QUALIFICATION


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name
)
def test_commands_of_the_documents_exist(path):
    commands = set(re.findall(r"python -m h3core ([a-z]+)", path.read_text()))
    assert commands <= {"generate", "checkpoint", "qualify", "preflight", "report"}
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make (?:PYTHON=\S+ )?([a-z]+)`", path.read_text()):
        assert f"\n{target}:" in makefile


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_fail_with_the_verdict_and_keep_the_report_whatever_happens(path):
    jobs = yaml.safe_load(path.read_text())["jobs"]
    for job in jobs.values():
        assert "continue-on-error" not in str(job)
        runs = [step["run"] for step in job["steps"] if "run" in step]
        assert any("qualify" in run for run in runs)
        assert not any("||" in run or "| " in run for run in runs)
        (upload,) = [step for step in job["steps"] if "upload-artifact" in step.get("uses", "")]
        assert upload["if"] == "always()"
        assert upload["with"]["if-no-files-found"] == "error"


def test_there_is_a_workflow_for_cpu_and_one_for_a_gpu_box():
    assert [path.name for path in WORKFLOWS] == ["qualify-cpu.yml", "qualify-gpu.yml"]
