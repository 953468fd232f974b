"""At world 1 the modes are the same computation: zero maximum absolute error.

Run it with: pytest -m gloo tests/gloo/test_world_one.py
"""

from __future__ import annotations

import pytest
import torch

from h3core.qualify.checks.compare import Identical, compare, equal_facts
from h3core.qualify.checks.loop import Case, real_ranks
from tests.gloo.conftest import MIXED

pytestmark = pytest.mark.gloo


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("checkpoint", ["nvfp4", "bf16", "diffusers"])
def test_ulysses_tensor_and_single_are_equal_at_world_one(alone, checkpoints, checkpoint, dtype, record):
    path = getattr(checkpoints, checkpoint)
    cases = [Case(path, mode, MIXED.latents, MIXED.text, 4, dtype=dtype) for mode in ("single", "ulysses", "tensor")]
    ((single, ulysses, tensor),) = alone.run(real_ranks, cases)
    for name, outcome in (("ulysses", ulysses), ("tensor", tensor)):
        for modality in ("video", "audio"):
            what = f"{name} against single, {modality}"
            got, expected = getattr(outcome, modality), getattr(single, modality)
            evidence = compare(what, got, expected, Identical(), rank=outcome.rank)
            record(evidence)
            record(equal_facts(f"{what}: largest absolute error", evidence.max_abs, 0.0, rank=outcome.rank))
