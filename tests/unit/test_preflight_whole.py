"""The preflight as a whole: healthy and sick boxes, from the files and answers that were read to findings and lines.

A pass means: a healthy box has no finding but "ok", each sickness shows in its own finding alone, a probe that breaks
is "not measured", and looking makes no CUDA context. Run: pytest tests/unit/test_preflight_whole.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from h3core.qualify.preflight import Finding, NotMeasured, blocking, judge, lines, machine_facts, unread
from h3core.qualify.preflight.box import run_program
from h3core.qualify.preflight.finding import Unreadable, amount, attempt, gpu_names
from h3core.qualify.preflight.judging import BLOCKING, REQUIRED
from h3core.qualify.preflight.shm import Shm
from tests.unit.preflight_boxes import GIB, HEALTHY, healthy_root, read, recording, text, torch_build

ALL = [
    *("GPUs", "GPU list", "duplicate GPUs", "GPU models", "lost GPUs", "MIG", "driver", "kernel images"),
    *("kernel module", "clock events", "ECC errors", "row remapping", "Xid events"),
    *("/dev/shm", "host memory", "CPUs", "stale NCCL files", "locked memory"),
    *("NCCL", "NCCL variables", "NCCL files", "IOMMU", "ACS"),
]


def states(findings: list[Finding]) -> dict[str, str]:
    return {finding.name: finding.state for finding in findings}


def test_a_healthy_box_of_eight_is_well_in_everything(tmp_path: Path) -> None:
    findings = judge(read(healthy_root(tmp_path)), world=8, device="cuda", needed_bytes=100 * GIB)
    assert states(findings) == dict.fromkeys(ALL, "ok")
    assert blocking(findings) == unread(findings) == []
    assert all(finding.expected is finding.action is finding.fault_class is None for finding in findings)


SICK: dict[str, tuple[dict[str, Any], dict[str, str | None], dict[str, str]]] = {
    "duplicates": ({"nvml": "nvml_duplicate_uuid.json"}, {}, {"duplicate GPUs": "problem"}),
    "a 5090 among PRO 6000": (
        {"nvml": "nvml_mixed.json"},
        {},
        {"GPU models": "problem", "ECC errors": "not measured", "row remapping": "not measured"},
    ),
    "driver 570": (
        {"nvml": "nvml_driver_570.json"},
        {"proc/driver/nvidia/version": "driver_proprietary.txt"},
        {"driver": "problem"},
    ),
    "a torch without sm_120": (
        {"build": torch_build(8, version="2.6.0+cu124", cuda="12.4", archs=("sm_80", "sm_90"))},
        {},
        {"kernel images": "problem"},
    ),
    "docker's /dev/shm": ({"shm": (64 << 20, 1 << 20)}, {}, {"/dev/shm": "problem"}),
    "ACS": ({"outputs": {"lspci": text("lspci_acs_on.txt")}}, {}, {"ACS": "warning"}),
    "Xid 79 and 48": ({}, {"dev/kmsg": "kmsg_xid.txt"}, {"Xid events": "problem"}),
    "slowdown, ECC, remap, lost": (
        {"nvml": "nvml_sick.json", "devices": 5},
        {},
        {"clock events": "problem", "ECC errors": "problem", "row remapping": "problem", "lost GPUs": "problem"},
    ),
    "MIG": ({"nvml": "nvml_h100_mig.json", "devices": 1}, {}, {"MIG": "warning"}),
    "an NCCL variable": ({"environ": {"NCCL_P2P_DISABLE": "1"}}, {}, {"NCCL variables": "warning"}),
    "an NCCL file": ({}, {"etc/nccl.conf": "nccl.conf"}, {"NCCL files": "warning"}),
    "a hidden kernel log": ({}, {"dev/kmsg": None}, {"Xid events": "not measured"}),
}


@pytest.mark.parametrize("sickness", SICK)
def test_each_sickness_shows_in_its_own_finding_alone(tmp_path: Path, sickness: str) -> None:
    options, files, expected = SICK[sickness]
    root = healthy_root(tmp_path)
    for name, source in files.items():
        (root / name).write_text(text(source)) if source else (root / name).unlink()
    findings = judge(read(root, **options), world=None, device="cuda")
    assert {name: state for name, state in states(findings).items() if state != "ok"} == expected
    for finding in findings:
        if finding.state in ("problem", "warning"):
            assert finding.got, finding.name
            assert finding.expected, finding.name
            assert finding.action, finding.name


def test_a_run_on_the_cpu_is_held_against_the_host_alone(tmp_path: Path) -> None:
    findings = judge(read(healthy_root(tmp_path), nvml=None), world=100, device="cpu", needed_bytes=2000 * GIB)
    assert states(findings) == {
        "GPUs": "not measured",
        "/dev/shm": "ok",
        "host memory": "problem",
        "CPUs": "warning",
    }
    assert findings[0].got == "the Gloo tier uses no GPU"
    assert blocking(findings) == unread(findings) == []


def test_what_blocks_and_what_is_required(tmp_path: Path) -> None:
    assert BLOCKING <= REQUIRED <= set(ALL)
    for name in ALL:
        found = [Finding(name, "problem", "got"), Finding(name, "warning", "got"), Finding(name, "not measured", "got")]
        assert blocking(found) == (found[:1] if name in BLOCKING else [])
    assert sorted(BLOCKING) == ["GPU models", "GPUs", "driver", "duplicate GPUs", "kernel images"]
    findings = judge(read(healthy_root(tmp_path), nvml=None, build=torch_build(8)), world=8, device="cuda")
    assert {finding.name for finding in unread(findings)} == {
        "GPU list",
        "duplicate GPUs",
        "GPU models",
        "kernel images",
    }


def test_nothing_readable_is_nothing_well(tmp_path: Path) -> None:
    box = read(
        tmp_path,
        nvml=None,
        build=torch_build(NotMeasured("no"), archs=(), nccl=NotMeasured("no")),
        shm=lambda path: 1 / 0,  # type: ignore[arg-type, return-value]
        outputs={},
    )
    findings = judge(box, world=8, device="cuda", needed_bytes=1)
    well = {name for name, state in states(findings).items() if state != "not measured"}
    # Variables were handed over, and that a file is not there is a reading.
    assert well == {"NCCL variables", "NCCL files"}
    assert {finding.name for finding in unread(findings)} == REQUIRED
    assert "ZeroDivisionError: division by zero" in next(f.got for f in findings if f.name == "/dev/shm")


def test_a_rule_that_breaks_has_measured_nothing(tmp_path: Path) -> None:
    broken = replace(read(healthy_root(tmp_path)), shm=Shm(1, 1, None))  # type: ignore[arg-type]
    (found,) = [finding for finding in judge(broken, world=1, device="cuda") if finding.name == "stale NCCL files"]
    assert found.state == "not measured"
    assert found.got.startswith("this rule failed: TypeError: ")


def test_a_reading_that_fails_says_why() -> None:
    def fail(error: Exception) -> NotMeasured:
        def read() -> int:
            raise error

        reading = attempt(read)
        assert isinstance(reading, NotMeasured)
        return reading

    assert fail(Unreadable("in words")).reason == "in words"
    assert fail(OSError(13, "Permission denied", "/x")).reason == "cannot read /x: Permission denied"
    assert fail(ValueError("two\n lines")).reason == "ValueError: two lines"
    assert attempt(lambda: 5) == 5
    assert attempt(lambda: warnings.warn("an old driver", stacklevel=1)) is None


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["h3core-no-such-program"], "is not installed"),
        ([sys.executable, "-c", "import sys; sys.exit('not permitted')"], "ended with code 1: not permitted"),
    ],
)
def test_a_program_that_does_not_answer_says_why(command: list[str], reason: str) -> None:
    with pytest.raises(Unreadable, match=reason):
        run_program(command)


def test_a_programs_output_is_returned() -> None:
    assert run_program([sys.executable, "-c", "print('hello')"]) == "hello\n"


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (64 << 20, "64 MiB"), (97887 << 20, "95.6 GiB"), (65536, "64 KiB")],
)
def test_bytes_for_people(count: int, expected: str) -> None:
    assert amount(count) == expected


@pytest.mark.parametrize(
    ("indices", "expected"),
    [([3], "GPU 3"), ([0, 1, 2, 3], "GPUs 0-3"), ([6, 0, 1, 3], "GPUs 0-1, 3, 6")],
)
def test_gpus_are_named_in_runs(indices: list[int], expected: str) -> None:
    assert gpu_names(indices) == expected


def test_findings_are_plain_values() -> None:
    found = Finding("driver", "problem", "570", "580", "choose another host", "stack")
    assert json.loads(json.dumps(found.as_dict())) == {
        "name": "driver",
        "state": "problem",
        "got": "570",
        "expected": "580",
        "action": "choose another host",
        "fault_class": "stack",
    }


def test_lines_begin_with_what_is_wrong() -> None:
    findings = [
        Finding("CPUs", "ok", "64 allowed"),
        Finding("NCCL files", "ok", "none"),
        Finding("NCCL variables", "ok", "none"),
        Finding("ACS", "not measured", "lspci is not installed"),
        Finding("GPU list", "not measured", "no NVML"),
        Finding("MIG", "not measured", "no NVML"),
        Finding("locked memory", "warning", "limited to 64 KiB", "no limit", "use --ulimit memlock=-1"),
        Finding("driver", "problem", "570", "580", "choose another host", "stack"),
    ]
    assert lines(findings) == [
        "preflight: 1 problem, 1 warning, 3 not measured, 3 ok",
        "PROBLEM       driver          570",
        "                              expected: 580",
        "                              do: choose another host",
        "warning       locked memory   limited to 64 KiB",
        "                              expected: no limit",
        "                              do: use --ulimit memlock=-1",
        "not measured  ACS             lspci is not installed",
        "not measured  GPU list        no NVML (also: MIG)",
        "ok            CPUs            64 allowed",
        "ok            NCCL files      none",
        "ok            NCCL variables  none",
    ]
    assert lines([]) == ["preflight: 0 problems, 0 warnings, 0 not measured, 0 ok"]


def test_long_lines_are_folded_and_nothing_is_lost(tmp_path: Path) -> None:
    findings = judge(read(healthy_root(tmp_path), nvml="nvml_mixed.json"), world=9, device="cuda")
    printed = lines(findings)
    assert max(map(len, printed)) <= 120
    words = " ".join(" ".join(printed).split())
    for finding in findings:
        if finding.state in ("problem", "warning"):
            assert " ".join(finding.got.split()) in words
            assert f"do: {finding.action}" in words


def test_machine_facts_have_every_key_of_the_report(tmp_path: Path) -> None:
    facts = machine_facts(read(healthy_root(tmp_path)))
    assert list(facts) == [
        *("python", "torch", "torch_cuda", "platform", "cpu", "cpu_capability", "cores", "memory_bytes"),
        *("gpus", "driver", "nccl"),
    ]
    assert facts["cpu"] == "AMD EPYC 9575F 64-Core Processor"
    assert facts["memory_bytes"] == 1056403456 << 10
    assert (facts["driver"], facts["nccl"], facts["torch_cuda"]) == ("580.95.05", "2.28.9", "13.0")
    assert facts["gpus"][6] == {
        "index": 6,
        "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "uuid": "GPU-6a3f5c1e-7d20-4b86-9c4e-0f1e2d3c4b66",
        "memory_bytes": 97887 << 20,
        "compute_capability": "12.0",
    }
    assert len(facts["gpus"]) == 8


def test_unknown_machine_facts_are_null(tmp_path: Path) -> None:
    answers = recording("nvml_pro6000_x8.json")
    answers["gpus"][0] |= {"uuid": {"error": "Unknown"}, "memory": {"error": "NotSupported"}}
    answers["gpus"][0] |= {"capability": {"error": "NotSupported"}}
    gpu = machine_facts(read(healthy_root(tmp_path), nvml=answers))["gpus"][0]
    assert (gpu["uuid"], gpu["memory_bytes"], gpu["compute_capability"]) == (None, None, None)
    facts = machine_facts(read(tmp_path / "nowhere", nvml=None, build=torch_build(0, nccl=NotMeasured("no"))))
    assert [facts[key] for key in ("cpu", "memory_bytes", "driver", "nccl")] == [None] * 4
    assert facts["gpus"] == []
    assert json.loads(json.dumps(facts)) == facts


REAL = """
import json, sys
import torch
from h3core.qualify.preflight import judge, read_box
box = read_box()
findings = [f.as_dict() for device in ("cpu", "cuda") for f in judge(box, world=1, device=device, needed_bytes=1)]
print(json.dumps([findings, torch.cuda.is_initialized(), "comfy_kitchen" in sys.modules]))
"""


def test_this_machine_is_read_without_touching_cuda() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", REAL], capture_output=True, text=True, check=True)
    findings, initialised, comfy_kitchen = json.loads(done.stdout)
    assert done.stderr == ""
    assert not initialised
    assert not comfy_kitchen
    assert not [found for found in findings if "this rule failed" in found["got"]]
    for found in findings:
        if found["name"] in ("/dev/shm", "host memory", "CPUs"):
            # Some sandboxes mount no control groups; everything else is on every Linux.
            assert found["state"] != "not measured" or "cgroup" in found["got"], found


def test_every_recorded_file_is_used() -> None:
    data = Path(__file__).parents[1] / "data" / "boxes"
    used = "".join(path.read_text() for path in Path(__file__).parent.glob("*preflight*.py"))
    assert [path.name for path in data.iterdir() if path.name != "README.md" and path.name not in used] == []
    assert set(HEALTHY.values()) <= {path.name for path in data.iterdir()}
