"""Every size of the MiniMax-H3 denoiser, in one frozen dataclass.

Field names are those of the `transformer/config.json` that diffusers ships, so
`H3Config.from_dict(json.load(f))` reads one. `H3` is the released model; `TINY` has the same
structure at a size that eight CPU processes run in milliseconds, with nine heads so that every
split over 2, 4, 6 or 8 ranks is ragged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

MODALITIES: Final = 3
"""AdaLN keeps one set of parameters per (timestep, modality): 0 video, 1 text, 2 audio."""

FPS: Final = 24
"""Video frames a second; the model has no other rate."""

AUDIO_RATE: Final = 40
"""Audio latents a second and channel."""

AUDIO_CHANNELS: Final = 2
"""Stereo: the rows of the left channel come first, then those of the right one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class H3Config:
    """Sizes of one denoiser. Raises `ValueError` (got, expected) for sizes that cannot be built."""

    num_attention_heads: int
    attention_head_dim: int
    hidden_size: int
    num_layers: int
    num_refiner_layers: int
    ffn_dim: int
    in_channels: int
    """Video latent channels; one row carries `in_channels * prod(patch_size)` values."""
    audio_in_channels: int
    patch_size: tuple[int, int, int]
    text_dim: int
    freq_dim: int
    """Width of the sinusoidal timestep embedding."""
    time_embed_hidden_dim: int
    time_embed_dim: int
    rope_freq_dim: int
    """Rotary frequencies per axis; `6 * rope_freq_dim` of the head's channels are rotated."""
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    qk_norm_eps: float = 1e-5
    final_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "patch_size":
                if not isinstance(value, tuple) or len(value) != 3 or any(type(v) is not int or v < 1 for v in value):
                    raise ValueError(f"patch_size: got {value!r}, expected three positive integers (t, h, w)")
            elif field.type == "int":
                if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                    raise ValueError(f"{field.name}: got {value!r}, expected a positive integer")
            elif not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"{field.name}: got {value!r}, expected a positive number")
        if self.rotary_dim > self.attention_head_dim:
            raise ValueError(
                f"rope_freq_dim: got {self.rope_freq_dim}, which rotates {self.rotary_dim} channels; expected at most "
                f"attention_head_dim={self.attention_head_dim}, so at most {self.attention_head_dim // 6}"
            )

    @property
    def inner_dim(self) -> int:
        """Width of all heads together: `heads * head_dim`, not the hidden size."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def rotary_dim(self) -> int:
        """Leading channels of each head that RoPE rotates: 2 halves x 3 axes x frequencies."""
        return 6 * self.rope_freq_dim

    @property
    def video_row_dim(self) -> int:
        """Values in one video latent row, features ordered (channel, t, h, w), channel slowest."""
        t, h, w = self.patch_size
        return self.in_channels * t * h * w

    @property
    def adaln_dim(self) -> int:
        """Outputs of one block's AdaLN projection: modality x 6 chunks x hidden."""
        return MODALITIES * 6 * self.hidden_size

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> H3Config:
        """Read a diffusers `config.json`; keys that start with `_` are ignored.

        Raises `ValueError` naming every unknown and every missing key.
        """
        known = {field.name: field for field in fields(cls)}
        given = {key: value for key, value in values.items() if not key.startswith("_")}
        unknown = sorted(set(given) - set(known))
        optional = {"rope_theta", "norm_eps", "qk_norm_eps", "final_norm_eps"}
        missing = sorted(set(known) - set(given) - optional)
        if unknown or missing:
            raise ValueError(f"config: unknown keys {unknown}, missing keys {missing}; expected {sorted(known)}")
        if isinstance(given["patch_size"], list):
            given["patch_size"] = tuple(given["patch_size"])
        return cls(**given)


H3: Final = H3Config(
    num_attention_heads=56,
    attention_head_dim=128,
    hidden_size=5376,
    num_layers=50,
    num_refiner_layers=2,
    ffn_dim=14336,
    in_channels=24,
    audio_in_channels=32,
    patch_size=(1, 2, 2),
    text_dim=5120,
    freq_dim=256,
    time_embed_hidden_dim=5376,
    time_embed_dim=2688,
    rope_freq_dim=16,
)
"""The released model: 33,122,992,896 parameters."""

TINY: Final = H3Config(
    num_attention_heads=9,
    attention_head_dim=128,
    hidden_size=256,
    num_layers=2,
    num_refiner_layers=2,
    ffn_dim=1280,
    in_channels=24,
    audio_in_channels=32,
    patch_size=(1, 2, 2),
    text_dim=128,
    freq_dim=256,
    time_embed_hidden_dim=256,
    time_embed_dim=128,
    rope_freq_dim=16,
)
"""Nine heads and ten FFN units: ragged at 2, 4, 6 and 8 ranks, with the released head geometry."""
