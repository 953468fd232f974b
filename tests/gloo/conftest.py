"""Checkpoints and sequences that the Gloo tier shares; written once a session, mapped by every rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from h3core.checkpoint.synthesize import synthesize
from h3core.config import TINY
from h3core.packing import LatentShape

WIDE = replace(TINY, num_attention_heads=56, hidden_size=128, ffn_dim=14336, num_layers=1, num_refiner_layers=1)
"""56 heads and 112 FFN units, dealt as the released model's are: 10, 10, 9, 9, 9, 9 at six ranks."""


@dataclass(frozen=True)
class Sequence:
    """Text rows and latent sizes: how many rows of each modality."""

    text: int
    latents: LatentShape

    def __str__(self) -> str:
        video = self.latents.frames * self.latents.height * self.latents.width // 4
        return f"{self.text}|{2 * self.latents.audio}|{video}"


MIXED = Sequence(19, LatentShape(7, 6, 8, 37))
"""19 text, 74 audio and 84 video rows: segments end inside ranks at every world."""
AUDIO_HEAVY = Sequence(5, LatentShape(5, 4, 6, 37))
"""5 | 74 | 30: ranks in the middle own nothing but audio."""
TEXT_HEAVY = Sequence(60, LatentShape(4, 6, 6, 2))
"""60 | 4 | 36: the few audio rows fall to one or two ranks."""
BUDGET = Sequence(30, LatentShape(5, 12, 18, 70))
"""30 | 140 | 270: rows enough for the error budget's statistic."""


def smallest(world: int) -> Sequence:
    """One row a rank, as far as text, both audio channels and video allow: at least four rows."""
    video = max(1, world - 3)
    return Sequence(1, LatentShape(video, 2, 2, 1))


def four_a_rank(world: int) -> Sequence:
    """Four rows a rank."""
    return Sequence(world, LatentShape(world, 2, 2, world))


@dataclass(frozen=True)
class Checkpoints:
    """Paths of the tier's checkpoints, as strings that travel to ranks."""

    nvfp4: str
    bf16: str
    diffusers: str
    wide: str


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    kinds = {
        "nvfp4": (TINY, "pruned", "nvfp4"),
        "bf16": (TINY, "pruned", "bf16"),
        "diffusers": (TINY, "diffusers", "bf16"),
        "wide": (WIDE, "pruned", "nvfp4"),
    }
    paths = {}
    for name, (config, layout, quant) in kinds.items():
        path = folder / (name if layout == "diffusers" else f"{name}.safetensors")
        synthesize(path, config=config, layout=layout, quant=quant, seed=7)
        paths[name] = str(path)
    return Checkpoints(**paths)
