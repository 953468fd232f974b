"""Negative controls: each fault is planted on purpose in this very run, and this run's checks must catch it.

A pass means that a green run of the other checks says something: sound ranks pass the comparison, one flipped bit does
not, and a rank that is lost is named. Run it with: pytest -m gloo tests/gloo/test_controls.py
"""

from __future__ import annotations

import pytest

from h3core.qualify.checks.loop import Case
from h3core.qualify.controls import CONTROLS, Bench, run_control
from h3core.ranks import RankPool
from tests.gloo.conftest import MIXED

pytestmark = pytest.mark.gloo

SLUGS = {control.name: control.slug for control in CONTROLS}


@pytest.fixture(scope="module")
def bench(control_world, checkpoints):
    """Sound ranks, and virtual ranks' outcomes in both modes, for all controls."""
    with RankPool(control_world) as ranks:
        yield Bench.build(ranks, Case(checkpoints.nvfp4, "ulysses", MIXED.latents, MIXED.text, 2))


@pytest.mark.parametrize("control", SLUGS, ids=SLUGS.values())
def test_a_planted_fault_is_caught(bench, control, caught, record):
    found = run_control(control, bench)
    record(found.evidence)
    caught(SLUGS[control], found)
