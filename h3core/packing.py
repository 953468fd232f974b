"""Geometry to packed sequence: how many rows, of which modality, at which positions.

The sequence is `[text | audio (left, then right) | video]`, one document with full attention: no mask,
no padding. Positions and patch order follow MiniMax-H3 as diffusers 0.42.1 computes them.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import torch
from torch import Tensor

from h3core.config import AUDIO_CHANNELS, AUDIO_RATE, FPS, H3Config
from h3core.partition import Span

VIDEO, TEXT, AUDIO = 0, 1, 2
"""Modality tags: the row of an AdaLN table that belongs to a sequence row."""

CANVAS_MULTIPLE: Final = 32
"""Pixels: the video VAE's 16x, times a patch of 2."""
VAE_SCALE: Final = 16
FRAMES_PER_CHUNK: Final = 17
LATENTS_PER_CHUNK: Final = 5
LATENT_SPANS: Final = (1, 4, 4, 4, 4)
"""Pixel frames that the five latent frames of a chunk stand for."""
FRAME_UNIT: Final = 5.0 / 3.0
"""Rotary time of one pixel frame: 40 audio latents a second over 24 frames a second."""
SPATIAL_UNIT: Final = 32.0
RELEASED_FRAMES: Final = (107, 362)
"""Frames that the released model was made for: 4 to 15 seconds."""


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Sizes of a request's latents: video (1, C, frames, height, width), audio (2, 32, audio).

    Raises `ValueError` for sizes that cannot be patched.
    """

    frames: int
    height: int
    width: int
    audio: int

    def __post_init__(self) -> None:
        if min(self.frames, self.height, self.width, self.audio) < 1:
            raise ValueError(f"latents: got {self}, expected every size to be at least 1")

    def grid(self, patch_size: tuple[int, int, int]) -> tuple[int, int, int]:
        """(frames, rows, columns) of patches. Raises `ValueError` where the patch does not divide the latents."""
        sizes = (self.frames, self.height, self.width)
        if any(size % patch for size, patch in zip(sizes, patch_size, strict=True)):
            raise ValueError(f"video latents (t, h, w) {sizes}: got a size that is no multiple of patch {patch_size}")
        t, h, w = (size // patch for size, patch in zip(sizes, patch_size, strict=True))
        return t, h, w


@dataclass(frozen=True, slots=True)
class Geometry:
    """A clip: width and height in pixels, frames at 24 a second.

    Raises `ValueError` where width or height is no multiple of 32, or there are fewer than 5 frames.
    A frame count off the video VAE's grid is snapped up to the next 17n + 5, with a `UserWarning`;
    so is announced a length outside the 4 to 15 seconds that the model was released for.
    """

    width: int
    height: int
    frames: int

    def __post_init__(self) -> None:
        for name, value in (("width", self.width), ("height", self.height)):
            if value < CANVAS_MULTIPLE or value % CANVAS_MULTIPLE:
                below = max(CANVAS_MULTIPLE, value // CANVAS_MULTIPLE * CANVAS_MULTIPLE)
                raise ValueError(
                    f"geometry {name}: got {value}, expected a positive multiple of {CANVAS_MULTIPLE} pixels; "
                    f"try {below} or {below + CANVAS_MULTIPLE}"
                )
        if self.frames < 1:
            raise ValueError(f"geometry frames: got {self.frames}, expected at least 1")
        snapped = snap_frames(self.frames)
        if snapped != self.frames:
            warnings.warn(f"geometry frames: {self.frames} is not 17n + 5; using {snapped}", stacklevel=3)
            object.__setattr__(self, "frames", snapped)
        low, high = RELEASED_FRAMES
        if not low <= snapped <= high:
            warnings.warn(
                f"geometry frames: {snapped} ({snapped / FPS:.2f} s) is outside the {low} to {high} frames that "
                "MiniMax-H3 was released for",
                stacklevel=3,
            )

    @classmethod
    def parse(cls, text: str) -> Geometry:
        """Read `WIDTHxHEIGHTxFRAMES`, such as `864x480x141`. Raises `ValueError` for anything else."""
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
        if match is None:
            raise ValueError(f"geometry: got {text!r}, expected WIDTHxHEIGHTxFRAMES, such as 864x480x141")
        return cls(*(int(part) for part in match.groups()))

    def __str__(self) -> str:
        return f"{self.width}x{self.height}x{self.frames}"

    @property
    def seconds(self) -> float:
        """Length of the clip in seconds."""
        return self.frames / FPS

    @property
    def latents(self) -> LatentShape:
        """Latent sizes: one latent per 16 x 16 pixels, five latent frames per 17 frames and two more."""
        chunks = (self.frames - LATENTS_PER_CHUNK) // FRAMES_PER_CHUNK
        return LatentShape(
            frames=chunks * LATENTS_PER_CHUNK + 2,
            height=self.height // VAE_SCALE,
            width=self.width // VAE_SCALE,
            audio=round(self.frames / FPS * AUDIO_RATE),
        )


def snap_frames(frames: int) -> int:
    """The next frame count of the form 17n + 5 that is not below `frames`."""
    chunks = max(0, -(-(frames - LATENTS_PER_CHUNK) // FRAMES_PER_CHUNK))
    return chunks * FRAMES_PER_CHUNK + LATENTS_PER_CHUNK


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of one modality and one clock: they share one AdaLN row.

    `clock` names the schedule that gives their timestep: "video" (text rows follow it too) or "audio".
    """

    rows: Span
    tag: int
    clock: str


def clip_segments(segments: tuple[Segment, ...], rows: Span) -> tuple[Segment, ...]:
    """The segments inside the token rows `rows`, rebased so that `rows.start` is 0; empty ones are dropped."""
    clipped = (
        Segment(segment.rows.clip(rows).shifted(-rows.start), segment.tag, segment.clock) for segment in segments
    )
    return tuple(segment for segment in clipped if segment.rows.size)


@dataclass(frozen=True)
class PackedSequence:
    """One request's rows: spans of each modality, and the fp64 rotary positions (rows, 3) of all of them."""

    text: Span
    audio: Span
    video: Span
    latents: LatentShape
    patch_size: tuple[int, int, int]

    @classmethod
    def build(cls, latents: LatentShape, text_rows: int, patch_size: tuple[int, int, int]) -> PackedSequence:
        """Pack `text_rows` rows of text with the rows of `latents`.

        Raises `ValueError` where there is no text, or the patch does not divide the latents.
        """
        if text_rows < 1:
            raise ValueError(f"text rows: got {text_rows}, expected at least 1; an empty prompt has no rows")
        grid_t, grid_h, grid_w = latents.grid(patch_size)
        audio = Span(text_rows, text_rows + AUDIO_CHANNELS * latents.audio)
        video = Span(audio.stop, audio.stop + grid_t * grid_h * grid_w)
        return cls(Span(0, text_rows), audio, video, latents, patch_size)

    @property
    def rows(self) -> int:
        """Rows of the whole sequence."""
        return self.video.stop

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Text, audio, video: the three runs of rows that share an AdaLN row."""
        return (
            Segment(self.text, TEXT, "video"),
            Segment(self.audio, AUDIO, "audio"),
            Segment(self.video, VIDEO, "video"),
        )

    @cached_property
    def positions(self) -> Tensor:
        """(rows, 3) float64: (t, h, w) of each row.

        Text row i is (i, 0, 0). Audio and video share one clock that starts at the text's length: one unit is
        one audio latent (1/40 s), a pixel frame is 5/3 units. The left and the right channel stand at the two
        ends of the width axis.
        """
        _, grid_h, grid_w = self.latents.grid(self.patch_size)
        area = float(np.sqrt(self.latents.height * self.latents.width))
        h_axis = _spatial_axis(self.latents.height, grid_h, area)
        w_axis = _spatial_axis(self.latents.width, grid_w, area)
        origin = float(self.text.size)

        positions = torch.zeros(self.rows, 3, dtype=torch.float64)
        positions[: self.text.stop, 0] = torch.arange(self.text.size, dtype=torch.float64)
        audio = positions[self.audio.start : self.audio.stop].view(AUDIO_CHANNELS, self.latents.audio, 3)
        audio[:, :, 0] = origin + torch.arange(self.latents.audio, dtype=torch.float64)
        audio[0, :, 2] = w_axis[0]
        audio[1, :, 2] = w_axis[-1]
        video = positions[self.video.start :].view(-1, grid_h, grid_w, 3)
        video[..., 0] = _frame_times(self.latents.frames, origin)[:, None, None]
        video[..., 1] = h_axis[:, None]
        video[..., 2] = w_axis
        return positions


def _spatial_axis(size: int, points: int, area: float) -> Tensor:
    """`points` coordinates, centred, 32 units for the side of a square of the same area, right end left out.

    numpy's linspace: torch's rounds differently in the last place.
    """
    extent = size / area
    left = (1.0 - extent) / 2.0
    return torch.from_numpy(np.linspace(left, left + extent, points, endpoint=False) * SPATIAL_UNIT)


def _frame_times(frames: int, origin: float) -> Tensor:
    """Start of each latent frame on the rotary clock: latent frames stand for 1, 4, 4, 4, 4 pixel frames."""
    spans = torch.tensor([FRAME_UNIT * LATENT_SPANS[k % LATENTS_PER_CHUNK] for k in range(frames)], dtype=torch.float64)
    return origin + torch.cat([torch.zeros(1, dtype=torch.float64), spans.cumsum(0)[:-1]])


def patchify(latents: Tensor, patch_size: tuple[int, int, int]) -> Tensor:
    """Video latents (1, C, T, H, W) to rows (T'*H'*W', C*pt*ph*pw).

    Rows are ordered frame, row, column; features channel, t, h, w, channel slowest.
    """
    _, channels, t, h, w = latents.shape
    pt, ph, pw = patch_size
    patches = latents.reshape(channels, t // pt, pt, h // ph, ph, w // pw, pw).permute(1, 3, 5, 0, 2, 4, 6)
    return patches.reshape(-1, channels * pt * ph * pw).contiguous()


def unpatchify(rows: Tensor, latents: LatentShape, patch_size: tuple[int, int, int]) -> Tensor:
    """The exact inverse of `patchify`: rows back to (1, C, T, H, W)."""
    t, h, w = latents.grid(patch_size)
    pt, ph, pw = patch_size
    patches = rows.reshape(t, h, w, -1, pt, ph, pw).permute(3, 0, 4, 1, 5, 2, 6)
    return patches.reshape(1, -1, latents.frames, latents.height, latents.width).contiguous()


def audio_rows_to_latents(rows: Tensor) -> Tensor:
    """Audio rows (2*A, 32), left channel first, to latents (2, 32, A)."""
    return rows.view(AUDIO_CHANNELS, -1, rows.shape[-1]).transpose(1, 2).contiguous()


@dataclass(frozen=True, slots=True)
class Noise:
    """The starting rows of a request: video (rows, 96) and audio (rows, 32), fp32 on the CPU."""

    video: Tensor
    audio: Tensor

    @classmethod
    def draw(cls, config: H3Config, latents: LatentShape, seed: int) -> Noise:
        """Draw for the whole sequence from one CPU generator: video as latents, then audio as rows.

        A seed so means the same at every world size. It is diffusers' order; SGLang's audio differs.
        """
        generator = torch.Generator().manual_seed(seed)
        shape = (1, config.in_channels, latents.frames, latents.height, latents.width)
        video = torch.randn(shape, generator=generator)
        audio = torch.randn((AUDIO_CHANNELS * latents.audio, config.audio_in_channels), generator=generator)
        return cls(patchify(video, config.patch_size), audio)
