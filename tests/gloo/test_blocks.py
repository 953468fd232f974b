"""Each part of a block, sharded, against one rank's whole.

A pass means that segments, attention, MLP and output heads are cut where they should be. Run it with:
pytest -m gloo tests/gloo/test_blocks.py
"""

from __future__ import annotations

import pytest
import torch

from h3core.qualify.checks import blocks
from tests.gloo.conftest import AUDIO_HEAVY, MIXED, TEXT_HEAVY, four_a_rank

pytestmark = pytest.mark.gloo

SEQUENCES = {"mixed": MIXED, "audio-heavy": AUDIO_HEAVY, "text-heavy": TEXT_HEAVY}


@pytest.mark.parametrize("name", [*SEQUENCES, "four-a-rank"])
def test_segments_are_clipped_inside_a_rank_and_at_its_edge(pool, world, name, record):
    sequence = SEQUENCES.get(name) or four_a_rank(world)
    record(pool.run(blocks.segments, sequence.latents, sequence.text, 32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("checkpoint", ["nvfp4", "wide"])
def test_ulysses_attention_and_mlp_equal_one_rank(pool, world, checkpoints, checkpoint, dtype, record):
    path = getattr(checkpoints, checkpoint)
    record(pool.run(blocks.block_parts, path, "ulysses", MIXED.latents, MIXED.text, dtype))


@pytest.mark.parametrize("checkpoint", ["nvfp4", "bf16", "wide"])
def test_tensor_parallel_attention_and_mlp_equal_one_rank_in_fp64(pool, world, checkpoints, checkpoint, record):
    path = getattr(checkpoints, checkpoint)
    record(pool.run(blocks.block_parts, path, "tensor", MIXED.latents, MIXED.text, torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_output_heads_equal_one_rank(pool, world, checkpoints, dtype, record):
    record(pool.run(blocks.output_heads, checkpoints.nvfp4, AUDIO_HEAVY.latents, AUDIO_HEAVY.text, dtype))
    record(pool.run(blocks.output_heads, checkpoints.diffusers, MIXED.latents, MIXED.text, dtype))
