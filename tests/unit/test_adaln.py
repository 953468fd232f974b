"""The pruned AdaLN, which diffusers has not: its curve, its order of rows and chunks, and the model that it makes.

A pass means that a pruned checkpoint denoises as the full one does where both are the same function. Run it
with: pytest tests/unit/test_adaln.py
"""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from h3core.adaln import CurveModulation
from h3core.checkpoint import DenoiserReader
from h3core.comm import alone
from h3core.config import TINY
from h3core.denoiser import Denoiser
from h3core.layers import timestep_embedding
from h3core.packing import AUDIO, TEXT, VIDEO, LatentShape, Noise, PackedSequence
from h3core.parallel import build_mode
from h3core.schedule import Evaluation
from h3core.weights import Affine, CurveAdaLN, FullAdaLN
from tests.unit.oracle import SMALL, save_oracle

GRID = 1025
CHUNKS = ("shift_msa", "scale_msa", "gate_msa", "shift_mlp", "scale_mlp", "gate_mlp")


def curve(table: torch.Tensor, hidden: int, blocks: list[Affine] | None = None, final: Affine | None = None):
    config = replace(TINY, hidden_size=hidden)
    weights = CurveAdaLN(table, blocks or [], final or Affine(torch.zeros(1), torch.zeros(1)))
    return CurveModulation(weights, config, torch.float32)


def test_the_curve_is_interpolated_linearly_on_a_grid_over_zero_to_one():
    table = torch.randn(GRID, 8, generator=torch.Generator().manual_seed(1))
    times = torch.tensor([0.0, 1e-4, 0.25, 0.33333, 0.5004, 0.99900001, 1.0, -0.5, 1.5])
    expected = np.stack(
        [np.interp(times.double().numpy(), np.linspace(0, 1, GRID), c) for c in table.double().T.numpy()]
    )
    got = curve(table, 4).condition(times)
    # fp32: t * 1024 is exact, the two products and the sum are not.
    torch.testing.assert_close(got.double(), torch.from_numpy(expected.T), rtol=0, atol=1e-5)
    assert torch.equal(got[0], table[0])
    assert torch.equal(got[6], table[-1])


def test_rows_are_timestep_then_modality_and_chunks_are_in_the_published_order():
    """Output row = modality * 6 * hidden + chunk * hidden + channel; the biases here spell out where they stand."""
    hidden = 5
    bias = torch.tensor(
        [
            100.0 * modality + 10.0 * chunk + channel
            for modality in range(3)
            for chunk in range(6)
            for channel in range(hidden)
        ]
    )
    table = torch.zeros(GRID, 8)
    modulation = curve(table, hidden, [Affine(torch.zeros(18 * hidden, 8), bias)])
    got = modulation.block(0, modulation.condition(torch.tensor([0.1, 0.7])))
    assert got.shape == (6, 6, hidden)
    assert (VIDEO, TEXT, AUDIO) == (0, 1, 2)
    for timestep in range(2):
        for modality in range(3):
            for chunk in range(len(CHUNKS)):
                expected = 100.0 * modality + 10.0 * chunk + torch.arange(hidden)
                assert torch.equal(got[timestep * 3 + modality, chunk], expected)


def test_the_final_modulation_is_shift_then_scale_in_fp32():
    final = Affine(torch.zeros(10, 8), torch.arange(10.0))
    modulation = curve(torch.zeros(GRID, 8), 5, final=final)
    shift, scale = modulation.final(modulation.condition(torch.tensor([0.5])))[0]
    assert shift.tolist() == [0, 1, 2, 3, 4]
    assert scale.tolist() == [5, 6, 7, 8, 9]
    assert shift.dtype == torch.float32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("rank8")
    save_oracle(path, replace(SMALL, time_embed_dim=8))
    return path


@pytest.mark.parametrize("points", [(0,), (256, 700), (1, 1023)])
def test_a_pruned_model_is_diffusers_model_where_both_are_the_same_function(folder, points):
    """With a time embedding of width 8, SiLU of it is a curve of rank 8: tabulated, it must give diffusers' velocity.

    fp32, timesteps on the grid: only sums in another order are left, 1e-5.
    """
    from diffusers import MiniMaxH3Transformer3DModel

    torch.set_num_threads(1)
    model = MiniMaxH3Transformer3DModel.from_pretrained(folder).eval()
    reader = DenoiserReader(folder)
    config, weights = reader.config, reader.load(dtype=torch.float32)
    full = weights.adaln
    if not isinstance(full, FullAdaLN):
        raise TypeError(type(full))
    times = timestep_embedding(torch.arange(GRID) / (GRID - 1), config.freq_dim)
    hidden = F.silu(F.linear(times, full.time_in.weight, full.time_in.bias))
    table = F.silu(F.linear(hidden, full.time_out.weight, full.time_out.bias))
    weights.adaln = CurveAdaLN(table, full.blocks, full.final)

    latents = LatentShape(3, 4, 6, 8)
    sequence = PackedSequence.build(latents, 7, config.patch_size)
    embeds = torch.randn(7, config.text_dim, generator=torch.Generator().manual_seed(2))
    noise = Noise.draw(config, latents, 3)
    timesteps = torch.tensor(points) / (GRID - 1)
    clocks = {"video": 0, "audio": len(points) - 1}
    tags = torch.tensor([TEXT] * sequence.text.size + [AUDIO] * sequence.audio.size + [VIDEO] * sequence.video.size)
    with torch.inference_mode():
        mode = build_mode("single", config, sequence.rows, alone())
        denoiser = Denoiser(config, weights, mode, torch.float32)
        request = denoiser.begin(sequence, embeds)
        got = denoiser.velocity(request, noise.video, noise.audio, Evaluation(timesteps, clocks))
        expected = model(
            hidden_states=noise.video[None],
            audio_hidden_states=noise.audio[None],
            encoder_hidden_states=embeds[None],
            timestep=timesteps,
            timestep_indices=(tags == AUDIO).long() * clocks["audio"],
            token_tags=tags,
            position_ids=sequence.positions,
            video_indices=torch.arange(*sequence.video),
            audio_indices=torch.arange(*sequence.audio),
            text_indices=torch.arange(*sequence.text),
            return_dict=False,
        )
    assert asdict(config)["time_embed_dim"] == 8
    for ours, theirs in zip(got, expected, strict=True):
        assert (ours - theirs[0]).norm() / theirs.norm() < 1e-5
