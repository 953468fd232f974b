"""Real ranks against virtual ranks: the one judgement that the check and the negative controls share.

A pass means that one rank's latents have the same bytes as those of the virtual rank with the same part, and
that every payload it received in the loop did. Run the check with: pytest -m gloo tests/gloo/test_denoise.py
"""

from __future__ import annotations

from typing import Final

from h3core.qualify.checks.compare import ComparisonError, Comparisons, Evidence, Identical
from h3core.qualify.checks.loop import Outcome

VIDEO: Final = "video latents"
AUDIO: Final = "audio latents"
DIGESTS: Final = "digests of received payloads"
PARTS: Final = (VIDEO, AUDIO, DIGESTS)
"""What is judged. Latents can absorb a single bit; digests cannot."""


class Unequal(ComparisonError):
    """A real rank and its virtual one differ. `parts`: those of `PARTS` that do."""

    def __init__(self, message: str, parts: tuple[str, ...]) -> None:
        super().__init__(message)
        self.parts = parts


def equals_virtual(what: str, real: Outcome, virtual: Outcome) -> list[Evidence]:
    """Hold a real rank's outcome of the case `what` against its virtual rank's, bit for bit: one `Evidence` a part.

    Raises `Unequal`, after all parts were judged, with every problem; ValueError where the two are not the same rank
    of the same world, or where one kept no digests.
    """
    if (real.rank, real.world) != (virtual.rank, virtual.world):
        raise ValueError(
            f"{what}: got rank {real.rank} of {real.world} and virtual rank {virtual.rank} of {virtual.world}, "
            "expected the same rank of the same world"
        )
    label = f"{what}, rank {real.rank} of {real.world}"
    checks = Comparisons(real.rank)
    checks.compare(f"{VIDEO}, {label}", real.video, virtual.video, Identical())
    checks.compare(f"{AUDIO}, {label}", real.audio, virtual.audio, Identical())
    checks.equal_facts(f"{DIGESTS}, {label}", received_digests(real), received_digests(virtual))
    try:
        return checks.finish()
    except ComparisonError as error:
        differing = tuple(part for part in PARTS if any(problem.startswith(part) for problem in checks.problems))
        raise Unequal(str(error), differing) from None


def received_digests(outcome: Outcome) -> dict[str, str]:
    """Per phase, the digest of all payloads that this rank received. Raises ValueError where none was kept."""
    digests = {phase: facts["received_digest"] for phase, facts in outcome.phases.items()}
    without = sorted(phase for phase, digest in digests.items() if digest is None)
    if without:
        raise ValueError(f"rank {outcome.rank}: no digest of {', '.join(without)}; run the case with digest=True")
    return digests
