"""The manifest is exactly what pytest collects for each tier: no required check is missing, and none goes unrequired.

Run it with: pytest tests/unit/test_manifest.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from h3core.qualify import manifest
from h3core.qualify.controls import CONTROLS
from h3core.qualify.manifest import Key, cross, key_of, required, row_of
from h3core.qualify.options import RANK_MODES

ROOT = Path(__file__).parents[2]
WORLDS = (2, 8)


@pytest.fixture(scope="module")
def collected() -> list[str]:
    """Node ids of the Gloo tier at WORLDS."""
    words = [
        "-m",
        "pytest",
        "tests/gloo",
        "-m",
        "gloo",
        f"--world={','.join(map(str, WORLDS))}",
        "--collect-only",
        "-q",
    ]
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("H3_", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


def key_of_nodeid(nodeid: str) -> Key:
    """By the text alone, not by pytest's objects."""
    path, _, rest = nodeid.partition("::")
    function, _, ident = rest.removesuffix("]").partition("[")
    check = f"{Path(path).name}::{function}"
    row = row_of(check, "gloo")
    world = re.search(r"world=(\d+)", ident)
    mode = re.search(r"(?:^|-)(ulysses|tensor)(?=-|$)", ident) if row and len(row.modes) > 1 else None
    number = int(world[1]) if world else max(WORLDS) if row and row.worlds == "control" else None
    return key_of(check, ident, number, mode[1] if mode else None, row)


def test_every_required_check_is_collected_and_every_collected_one_required(collected):
    owed = {str(item.key) for item in required("gloo", WORLDS, RANK_MODES, max(WORLDS))}
    found = {str(key_of_nodeid(nodeid)) for nodeid in collected}
    assert found - owed == set(), "collected, but not required: add a row to h3core/qualify/manifest.py"
    assert owed - found == set(), "required, but not collected: renamed or deleted?"
    assert len(found) == len(collected)


def test_the_five_controls_are_required():
    slugs = {control.slug for control in CONTROLS}
    assert slugs == {item.key.variant for item in required("gloo", (2,), RANK_MODES, 2) if item.key.variant in slugs}
    assert len(slugs) == 5


def test_every_row_owes_something():
    for row in manifest.MANIFEST:
        assert row.comparisons >= 1
        assert row.elements >= 1
        assert row.variants


def test_a_check_is_in_the_table_once():
    names = [(row.tier, row.check) for row in manifest.MANIFEST]
    assert len(names) == len(set(names))


def test_ids_of_stacked_parameters_are_joined_as_pytest_joins_them():
    assert cross(("a", "b"), ("1", "2")) == ("a-1", "a-2", "b-1", "b-2")


@pytest.mark.parametrize(
    ("ident", "world", "mode", "variant"),
    [
        ("world=2-ulysses", 2, "ulysses", ""),
        ("world=12-tensor-torch.bfloat16", 12, "tensor", "torch.bfloat16"),
        ("released-world=2", 2, None, "released"),
        ("world=2-one a rank-9", 2, None, "one a rank-9"),
        ("world=2-ulysses-ulysses", 2, "ulysses", "ulysses"),
        ("", None, None, ""),
    ],
)
def test_world_and_mode_are_taken_out_of_an_id(ident, world, mode, variant):
    assert key_of("test_a.py::test_b", ident, world, mode, None) == Key("test_a.py::test_b", world or 1, mode, variant)


def test_a_check_in_one_mode_has_it_from_the_table():
    row = row_of("test_denoise.py::test_ulysses_latents_equal_one_rank_bit_for_bit", "gloo")
    assert key_of(row.check, "world=4", 4, None, row).mode == "ulysses"
