"""Which runs are qualifications: the marker expression decides, read as pytest reads it.

Run it with: pytest tests/unit/test_tiers.py
"""

from __future__ import annotations

import pytest

from h3core.qualify.tiers import selected_tier, selects, worlds_named


@pytest.mark.parametrize(
    ("expression", "tier"),
    [
        ("gloo", "gloo"),
        ("gloo and world8", "gloo"),
        ("gloo and not world2", "gloo"),
        ("world4 and gloo", "gloo"),
        ("gloo and not nccl", "gloo"),
        ("nccl", "nccl"),
        ("gate and world8", "gate"),
        ("", None),
        ("not nccl", None),
        ("not gloo", None),
        ("gloo or not gloo", None),
        ("gloo or not nccl", None),
        ("slow", None),
        ("gloo and slow", None),
        ("world8 and world4", None),
        ("gloo and not gloo", None),
    ],
)
def test_the_expression_selects_a_tier_or_none(expression, tier):
    found = selected_tier(expression, (2, 4, 6, 8))
    assert (found.name if found else None) == tier


@pytest.mark.parametrize("expression", ["gloo or nccl", "world8", "not (slow or not gloo) or gate"])
def test_several_tiers_at_once_are_refused(expression):
    with pytest.raises(pytest.UsageError, match=r"selects the tiers .*run one"):
        selected_tier(expression, (2, 8))


def test_bad_syntax_is_a_usage_error():
    with pytest.raises(pytest.UsageError, match="-m 'gloo and'"):
        selects("gloo and", ("gloo",))


def test_keyword_calls_match_no_marker_of_ours():
    assert not selects("gloo(device='cpu')", ("gloo",))


def test_worlds_are_found_as_whole_words():
    assert worlds_named("gloo and (world8 or world12) and not myworld3 and world0 and world02") == (8, 12)
