"""The health of each GPU: clocks held down, memory errors, rows waiting to be replaced.

A pass means: each sick GPU is named with what ails it, and one that does not answer is not called well.
Run: pytest tests/unit/test_preflight_health.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from h3core.qualify.preflight.health import CLOCK_EVENTS, clock_events
from tests.unit.preflight_boxes import finding, healthy_root, read, recording


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return healthy_root(tmp_path)


def test_clock_event_bits_are_those_of_nvidia_ml_py() -> None:
    pynvml = pytest.importorskip("pynvml")
    names = {
        "hardware slowdown": "HwSlowdown",
        "hardware thermal slowdown": "HwThermalSlowdown",
        "power brake": "HwPowerBrakeSlowdown",
        "software power cap": "SwPowerCap",
        "software thermal slowdown": "SwThermalSlowdown",
        "idle": "GpuIdle",
    }
    ours = {text: bit for bit, (_, text) in CLOCK_EVENTS.items()}
    for text, name in names.items():
        assert ours[text] == getattr(pynvml, f"nvmlClocksEventReason{name}")


@pytest.mark.parametrize(
    ("bits", "state", "words"),
    [
        (0, "ok", "none"),
        (0x1, "ok", "idle"),
        (0x4, "ok", "software power cap"),
        (0x8, "problem", "hardware slowdown"),
        (0x40, "problem", "hardware thermal slowdown"),
        (0x48, "problem", "hardware slowdown, hardware thermal slowdown"),
        (0x80, "problem", "power brake"),
        (0x24, "warning", "software power cap, software thermal slowdown"),
        (0x1000, "warning", "unknown reason 0x1000"),
    ],
)
def test_clock_events_in_words(bits: int, state: str, words: str) -> None:
    assert clock_events(bits) == (state, words)


def test_each_sick_gpu_is_named(root: Path) -> None:
    box = read(root, nvml="nvml_sick.json", devices=5)
    clocks, ecc, rows = (finding(box, name) for name in ("clock events", "ECC errors", "row remapping"))
    assert clocks.got == "GPU 1: hardware slowdown, hardware thermal slowdown"
    assert ecc.got == "GPU 3: 2 uncorrectable since the driver was loaded, 5 in its life"
    assert rows.got == "GPU 4: a faulty row waits for a reset to be replaced"
    assert {(found.state, found.fault_class) for found in (clocks, ecc, rows)} == {("problem", "hardware")}


@pytest.mark.parametrize(
    ("name", "field", "value", "state"),
    [
        ("ECC errors", "ecc", [0, 3], "warning"),
        ("ECC errors", "ecc", {"error": "NotSupported"}, "not measured"),
        ("row remapping", "remapped", [4, 1, 0, 0], "ok"),
        ("row remapping", "remapped", [0, 0, 0, 1], "problem"),
        ("row remapping", "remapped", {"error": "NotSupported"}, "not measured"),
        ("clock events", "clock_events", {"error": "Unknown"}, "not measured"),
        ("clock events", "clock_events", 0x4, "ok"),
    ],
)
def test_the_health_of_one_gpu_decides(root: Path, name: str, field: str, value: Any, state: str) -> None:
    answers = recording("nvml_pro6000_x8.json")
    answers["gpus"][2][field] = value
    found = finding(read(root, nvml=answers), name)
    assert found.state == state
    assert state == "ok" or found.got.startswith("GPU 2: ")
