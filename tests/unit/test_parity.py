"""The judgement that real ranks equal virtual ranks: each part is judged, and nothing that proves nothing passes.

A pass means that one bit in the latents or one other payload is an error which says where. Run it with:
pytest tests/unit/test_parity.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from h3core.qualify.checks.compare import ComparisonError
from h3core.qualify.checks.loop import Outcome
from h3core.qualify.checks.parity import AUDIO, DIGESTS, PARTS, VIDEO, Unequal, equals_virtual


def outcome(rank: int = 1, **changes) -> Outcome:
    phases = {name: {"calls": 4, "bytes_sent": 8, "received_digest": name * 4} for name in ("qkv", "out", "latents")}
    latents = torch.arange(12.0).view(3, 4)
    return replace(Outcome(rank, 4, latents, latents + 1, phases, 0, 0, 0, {}, {}), **changes)


def one_bit_off(x: torch.Tensor) -> torch.Tensor:
    changed = x.clone()
    changed.view(torch.uint8)[1, 0] ^= 1
    return changed


def with_digest(phase: str, digest: str | None) -> dict:
    phases = outcome().phases
    return phases | {phase: phases[phase] | {"received_digest": digest}}


def test_equal_outcomes_give_one_piece_of_evidence_a_part_in_the_ranks_name():
    evidence = equals_virtual("a case", outcome(), outcome())
    assert [item.what for item in evidence] == [f"{part}, a case, rank 1 of 4" for part in PARTS]
    assert [item.rank for item in evidence] == [1, 1, 1]
    assert [item.elements for item in evidence] == [12, 12, 3]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"video": one_bit_off(outcome().video)}, VIDEO),
        ({"audio": one_bit_off(outcome().audio)}, AUDIO),
        ({"phases": with_digest("out", "another")}, DIGESTS),
        ({"phases": {name: facts for name, facts in outcome().phases.items() if name != "out"}}, DIGESTS),
    ],
    ids=["video", "audio", "digest", "missing phase"],
)
def test_a_difference_in_one_part_is_an_error_that_names_it(changes, part):
    for real, virtual in ((outcome(**changes), outcome()), (outcome(), outcome(**changes))):
        with pytest.raises(ComparisonError, match=f"{part}, a case, rank 1 of 4") as caught:
            equals_virtual("a case", real, virtual)
        assert isinstance(caught.value, Unequal)
        assert caught.value.parts == (part,)


def test_all_parts_are_judged_before_one_error_names_every_difference():
    off = outcome(
        video=one_bit_off(outcome().video), audio=one_bit_off(outcome().audio), phases=with_digest("qkv", "x")
    )
    with pytest.raises(Unequal) as caught:
        equals_virtual("a case", off, outcome())
    assert caught.value.parts == PARTS
    assert all(part in str(caught.value) for part in PARTS)


def test_outcomes_without_any_exchange_prove_nothing():
    with pytest.raises(Unequal, match="nothing to compare") as caught:
        equals_virtual("a case", outcome(phases={}), outcome(phases={}))
    assert caught.value.parts == (DIGESTS,)


def test_digests_that_were_not_kept_are_refused_though_both_lack_them():
    without = outcome(phases=with_digest("qkv", None))
    with pytest.raises(ValueError, match="no digest of qkv; run the case with digest=True"):
        equals_virtual("a case", without, without)


def test_outcomes_of_different_ranks_are_refused():
    with pytest.raises(ValueError, match="got rank 1 of 4 and virtual rank 2 of 4"):
        equals_virtual("a case", outcome(), outcome(rank=2))
