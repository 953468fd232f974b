"""The same seeded work on every rank, several times over: the check for silent corruption that any box can run.

A pass means that matrix products, attention and dequantisation gave the same bytes on every rank and at every repeat.
Run it with: pytest -m gloo tests/gloo/test_determinism.py
"""

from __future__ import annotations

import pytest

from h3core.qualify.checks.determinism import Work, judge, screen

pytestmark = pytest.mark.gloo

REPEATS = 4


def test_every_rank_computes_the_same_bytes_at_every_repeat(pool, record):
    record(judge(pool.run(screen, Work(), REPEATS)))
