"""Every attention backend against a softmax in fp64.

A pass means the scale is 1/sqrt(head width), there is no mask, and heads do not mix. Run it with:
pytest tests/unit/test_attention.py
"""

from __future__ import annotations

import pytest
import torch

from h3core.attention import BACKENDS, attention_backend


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_is_softmax_attention(name, dtype):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(37, 3, 128, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3))
    scores = torch.einsum("tnd,snd->nts", q.double(), k.double()) / 128**0.5
    expected = torch.einsum("nts,snd->tnd", scores.softmax(-1), v.double())
    got = attention_backend(name)(q, k, v)
    assert got.shape == q.shape
    assert got.dtype == dtype
    # Rounded probabilities and a rounded result, with room for the order of the sums; another scale is 10 % off.
    limit = 16 * torch.finfo(dtype).eps
    assert (got.double() - expected).norm() / expected.norm() < limit


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="got 'flash9', expected one of sdpa, math"):
        attention_backend("flash9")
