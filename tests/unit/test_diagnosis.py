"""What is said of a failure: its fault class, what it means and what to do next.

Run it with: pytest tests/unit/test_diagnosis.py
"""

from __future__ import annotations

import pytest

from h3core.qualify.checks.compare import ComparisonError
from h3core.qualify.diagnosis import BY_AREA, SIGNS, diagnose, failure_of
from h3core.ranks import RankError, RankFailure


def rank_error(kind: str, message: str, rank: int = 2) -> RankError:
    return RankError([RankFailure(rank, kind, message)], world=4, doing="h3core.qualify.checks.loop.real_ranks")


@pytest.mark.parametrize(
    ("error", "area", "fault_class", "words"),
    [
        (rank_error("died", "killed by SIGKILL before it answered"), "transport", "stack", "lack of memory"),
        (rank_error("died", "killed by SIGSEGV before it answered"), "parity", "stack", "crashed in native code"),
        (rank_error("died", "killed by SIGBUS before it answered"), "loading", "stack", "Shared memory"),
        (rank_error("hung", "no answer within 120 s"), "numerics", "interconnect", "never came"),
        (rank_error("raised", "ComparisonError: rows to heads: 3 elements"), "transport", "interconnect", "Bytes"),
        (rank_error("raised", "ComparisonError: gemm: differs"), "computation", "hardware", "silent data corruption"),
        (rank_error("raised", "TypeError: no"), "transport", "suite", "itself broke"),
        (rank_error("raised", "RuntimeError: CUDA error: uncorrectable ECC error"), None, "hardware", "own memory"),
        (rank_error("raised", "RuntimeError: CUDA error: no kernel image is available"), None, "stack", "fit together"),
        (ComparisonError("video latents, rank 3: differ"), "parity", "stack", "same partition"),
        (ComparisonError("fp64: row 3"), "numerics", "stack", "row-invariance"),
        (AssertionError("held"), "loading", "suite", "its share"),
        (OSError("no such file"), "loading", "suite", "itself broke"),
        (ComparisonError("something else"), None, "suite", "itself broke"),
        (OSError(28, "No space left on device"), "loading", "stack", "full"),
    ],
)
def test_a_failure_is_given_its_class(error, area, fault_class, words):
    found = diagnose(failure_of(error, str(error)), area, frozenset())
    assert found.fault_class == fault_class
    assert words in found.meaning + found.action


def test_a_difference_of_the_whole_is_blamed_on_the_part_that_is_broken():
    failure = failure_of(ComparisonError("video latents, rank 1 of 4: 3 elements differ"), "")
    assert diagnose(failure, "parity", frozenset({"transport", "computation"})).fault_class == "interconnect"
    assert diagnose(failure, "parity", frozenset({"computation"})).fault_class == "hardware"
    assert diagnose(failure, "parity", frozenset({"numerics"})).fault_class == "stack"
    for area in ("parity", "numerics", "loading", "control"):
        found = diagnose(failure, area, frozenset({"transport", area}))
        assert (found.fault_class, found.meaning[:22]) == ("interconnect", "Probably a consequence")
    assert diagnose(failure, "transport", frozenset({"transport", "computation"})) is BY_AREA["transport"]


def test_ranks_that_an_error_names_are_kept():
    assert failure_of(rank_error("hung", "no answer within 3 s", rank=3), "").ranks == (3,)
    assert failure_of(ComparisonError("digests, rank 2 of 6: got a, rank 1"), "").ranks == (1, 2)


def test_all_ranks_that_are_as_likely_the_cause_are_kept():
    raised = [RankFailure(rank, "raised", "ComparisonError: bytes") for rank in (3, 1)]
    left = RankFailure(0, "hung", "still inside", stacks="torch/distributed/x.py")
    assert failure_of(RankError([*raised, left], world=4, doing="x"), "").ranks == (1, 3)
    died = RankFailure(2, "died", "killed by SIGKILL")
    assert failure_of(RankError([*raised, died], world=4, doing="x"), "").ranks == (2,)


def test_every_diagnosis_says_what_to_do():
    for diagnosis in [*BY_AREA.values(), *(diagnosis for _, diagnosis in SIGNS)]:
        assert diagnosis.meaning.endswith(".")
        assert diagnosis.action.endswith(".")
