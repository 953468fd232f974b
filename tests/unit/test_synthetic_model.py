"""A synthesised model behaves: activations of order one through 50 blocks, and nothing in it is idle.

A pass means that a comparison on synthetic weights can see a fault in any row and in any weight. Run it with:
pytest tests/unit/test_synthetic_model.py
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from h3core.checkpoint import DenoiserReader
from h3core.checkpoint.synthesize import synthesize
from h3core.config import TINY
from h3core.denoiser import Denoiser
from h3core.packing import LatentShape, Noise, PackedSequence
from h3core.parallel import Single
from h3core.schedule import Schedules
from h3core.weights import named_tensors

LATENTS = LatentShape(3, 6, 6, 8)
TEXT_ROWS = 9
SLIM = replace(TINY, num_attention_heads=2, ffn_dim=256)
DEEP = replace(SLIM, num_layers=50)
FORMATS = {"nvfp4-pruned": ("pruned", "nvfp4"), "bf16-pruned": ("pruned", "bf16"), "diffusers": ("diffusers", "bf16")}


class Probe:
    """A model, one request, and its velocities at the second evaluation (two distinct timesteps)."""

    def __init__(self, path, config, format):
        layout, quant = FORMATS[format]
        synthesize(path, config=config, layout=layout, quant=quant, seed=11)
        self.config = config
        self.weights = DenoiserReader(path).load(dtype=torch.float32)
        self.sequence = PackedSequence.build(LATENTS, TEXT_ROWS, config.patch_size)
        self.embeds = torch.randn(TEXT_ROWS, config.text_dim, generator=torch.Generator().manual_seed(1))
        noise = Noise.draw(config, LATENTS, 2)
        self.video, self.audio = noise.video, noise.audio
        self.evaluation = Schedules.build(4).evaluation(1)
        self.levels: list[float] = []

    def run(self) -> dict[str, torch.Tensor]:
        probe = self

        class Watched(Denoiser):
            def _block(self, h, *rest):
                h = super()._block(h, *rest)
                probe.levels.append(float(h.pow(2).mean().sqrt()))
                return h

        self.levels = []
        with torch.inference_mode():
            denoiser = Watched(self.config, self.weights, Single(self.config, self.sequence.rows), torch.float32)
            request = denoiser.begin(self.sequence, self.embeds)
            video, audio = denoiser.velocity(request, self.video, self.audio, self.evaluation)
        return {"video": video, "audio": audio}


@pytest.fixture(scope="module", params=FORMATS)
def tiny(request, tmp_path_factory) -> Probe:
    folder = tmp_path_factory.mktemp("tiny")
    name = "model" if request.param == "diffusers" else "model.safetensors"
    return Probe(folder / name, SLIM, request.param)


@pytest.mark.parametrize("format", FORMATS)
def test_activations_stay_of_order_one_through_fifty_blocks(tmp_path, format):
    probe = Probe(tmp_path / ("model" if format == "diffusers" else "model.safetensors"), DEEP, format)
    velocities = probe.run()
    assert len(probe.levels) == 50
    assert 0.3 < min(probe.levels) <= max(probe.levels) < 4.0
    assert all(0.3 < velocity.std() < 4.0 for velocity in velocities.values())


# A change of a hundredth of a bf16 ulp would not be seen by a comparison in bf16: what is asked for is 1e-4 and more.
VISIBLE = 1e-4


def change(before: dict, after: dict, *, but: tuple[str, int] | None = None) -> float:
    """Relative change of both velocities; the row `but` (modality, index) is left out."""
    moved, size = 0.0, 0.0
    for name, rows in before.items():
        keep = [index for index in range(rows.shape[0]) if but != (name, index)]
        moved += float((after[name] - rows)[keep].pow(2).sum())
        size += float(rows[keep].pow(2).sum())
    return (moved / size) ** 0.5


def test_the_output_of_other_rows_depends_on_every_row(tiny):
    before = tiny.run()
    for name in ("embeds", "video", "audio"):
        rows = getattr(tiny, name)
        for index in range(rows.shape[0]):
            kept = rows[index].clone()
            rows[index] = -kept
            moved = change(before, tiny.run(), but=(name, index))
            rows[index] = kept
            assert moved > VISIBLE, f"{name} row {index}: other rows changed by {moved:.2g}"


def test_the_output_depends_on_every_weight(tiny):
    before = tiny.run()
    for name, tensor in named_tensors(tiny.weights):
        kept = tensor.clone()
        if tensor.dtype == torch.uint8:
            tensor.copy_(kept.flip(0))
        elif tensor.dtype == torch.float8_e4m3fn:
            tensor.view(torch.uint8).copy_(kept.view(torch.uint8).flip(0))
        else:
            tensor.mul_(1.25)
        moved = change(before, tiny.run())
        tensor.copy_(kept)
        assert moved > VISIBLE, f"{name}: the output changed by {moved:.2g}"
    assert change(before, tiny.run()) == 0.0, "a weight was not put back"


def test_the_output_depends_on_both_timesteps(tiny):
    before = tiny.run()
    for clock in (0, 1):
        kept = tiny.evaluation
        times = kept.timesteps.clone()
        times[clock] += 0.1
        tiny.evaluation = replace(kept, timesteps=times)
        moved = change(before, tiny.run())
        tiny.evaluation = kept
        assert moved > VISIBLE
