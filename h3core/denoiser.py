"""The MiniMax-H3 denoiser: embed, blocks, heads. It knows no mode by name; `Mode` crosses the ranks.

Each rank holds its own rows of `[text | audio | video]`; what a rank lacks of a modality is an empty
tensor. The maths is that of diffusers 0.42.1's MiniMaxH3Transformer3DModel, bit for bit on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from h3core.adaln import modulation
from h3core.config import MODALITIES, H3Config
from h3core.layers import inverse_frequencies, modulate, rms_norm, rotary_tables
from h3core.linear import blocked
from h3core.packing import PackedSequence, Segment, clip_segments
from h3core.parallel import Mode, Rotary
from h3core.partition import Span
from h3core.schedule import Evaluation
from h3core.weights import BlockWeights, DenoiserWeights


@dataclass(frozen=True, slots=True)
class Request:
    """What stays the same over all evaluations of one request, for one rank's rows."""

    sequence: PackedSequence
    segments: tuple[Segment, ...]
    """The rank's own, rebased to its first row."""
    text_RH: Tensor
    """Refined text of the rank's own text rows."""
    video: Span
    audio: Span
    """The rank's own rows among all video (audio) rows."""
    rotary: Rotary


class Denoiser:
    """One rank's denoiser. `dtype` is that of the residual stream; the fp32 islands are at least fp32."""

    def __init__(self, config: H3Config, weights: DenoiserWeights, mode: Mode, dtype: torch.dtype) -> None:
        self.config = config
        self.weights = weights
        self.mode = mode
        self.dtype = dtype
        self.adaln = modulation(weights.adaln, config, dtype)

    def begin(self, sequence: PackedSequence, prompt_embeds: Tensor) -> Request:
        """Prepare a request: `prompt_embeds` (text rows, text_dim). The refiner runs here, once: it reads no timestep.

        Raises `ValueError` where the embedding does not fit the sequence or the model.
        """
        expected = (sequence.text.size, self.config.text_dim)
        if tuple(prompt_embeds.shape) != expected:
            raise ValueError(f"prompt_embeds: got shape {tuple(prompt_embeds.shape)}, expected {expected}")
        rows = self.mode.rows
        text = self._refine(prompt_embeds.to(self.dtype))
        rotary_rows = self.mode.rotary_rows
        positions = sequence.positions[rotary_rows.start : rotary_rows.stop].to(torch.float32).to(text.device)
        frequencies = inverse_frequencies(self.config.rope_freq_dim, self.config.rope_theta).to(text.device)
        own_text = sequence.text.clip(rows)
        return Request(
            sequence=sequence,
            segments=clip_segments(sequence.segments, rows),
            text_RH=text[own_text.start : own_text.stop],
            video=sequence.video.clip(rows).shifted(-sequence.video.start),
            audio=sequence.audio.clip(rows).shifted(-sequence.audio.start),
            rotary=rotary_tables(positions, frequencies),
        )

    def velocity(self, request: Request, video: Tensor, audio: Tensor, evaluation: Evaluation) -> tuple[Tensor, Tensor]:
        """Predicted velocities of the rank's own latent rows at one evaluation.

        `video` (own video rows, 96) and `audio` (own audio rows, 32), fp32; results likewise, fp32 (fp64 where
        the denoiser runs in fp64).
        """
        h_RH = self._embed(request, video, audio)
        condition = self.adaln.condition(evaluation.timesteps.to(h_RH.device))
        for index, block in enumerate(self.weights.blocks):
            table = self.adaln.block(index, condition)
            h_RH = self._block(h_RH, block, table, request, evaluation)
        return self.heads(h_RH, self.adaln.final(condition), request, evaluation)

    def _refine(self, prompt_LE: Tensor) -> Tensor:
        """Project the text and run the refiner blocks: no AdaLN, no RoPE, whole weights on every rank."""
        weights, config = self.weights, self.config
        alone = self.mode.alone(prompt_LE.shape[0])
        h = torch.nn.functional.linear(prompt_LE, weights.text_in.weight, weights.text_in.bias)
        for block in weights.refiner:
            h = h + alone.attention(rms_norm(h, block.norm1, config.norm_eps), block.attn, None)
            h = h + alone.mlp(rms_norm(h, block.norm2, config.norm_eps), block.mlp)
        return rms_norm(h, weights.refiner_norm, config.final_norm_eps)

    def _embed(self, request: Request, video: Tensor, audio: Tensor) -> Tensor:
        """Own rows (R, H) of the packed sequence; latent rows are projected in fp32 and rounded once."""
        audio_e = blocked(audio, self.weights.audio_in)
        video_e = blocked(video, self.weights.video_in)
        return torch.cat([request.text_RH, audio_e.to(self.dtype), video_e.to(self.dtype)])

    def _block(
        self, h_RH: Tensor, block: BlockWeights, table: Tensor, request: Request, evaluation: Evaluation
    ) -> Tensor:
        """h += gate * attention(modulated norm), then the same with the MLP."""
        eps = self.config.norm_eps
        rows = [(slice(*segment.rows), table_row(segment, evaluation)) for segment in request.segments]
        y_RH = modulate_rows(rms_norm(h_RH, block.norm1, eps), table[:, 0], table[:, 1], rows)
        add_gated(h_RH, self.mode.attention(y_RH, block.attn, request.rotary), table[:, 2], rows)
        y_RH = modulate_rows(rms_norm(h_RH, block.norm2, eps), table[:, 3], table[:, 4], rows)
        add_gated(h_RH, self.mode.mlp(y_RH, block.mlp), table[:, 5], rows)
        return h_RH

    def heads(self, h_RH: Tensor, table: Tensor, request: Request, evaluation: Evaluation) -> tuple[Tensor, Tensor]:
        """The last norm, modulated by timestep alone, and the two output heads on their own rows, in fp32."""
        weights = self.weights
        audio_start = request.text_RH.shape[0]
        video_start = audio_start + request.audio.size
        spans = {"audio": Span(audio_start, video_start), "video": Span(video_start, h_RH.shape[0])}
        velocities = {}
        for clock, affine in (("audio", weights.audio_out), ("video", weights.video_out)):
            rows = slice(*spans[clock])
            shift, scale = table[evaluation.clocks[clock]]
            y = rms_norm(h_RH[rows], weights.final_norm, self.config.final_norm_eps)
            velocities[clock] = blocked(modulate(y, scale, shift), affine)
        return velocities["video"], velocities["audio"]


Rows = Sequence[tuple[slice, int]]
"""Rows of each segment, and the table row that modulates them."""


def modulate_rows(y_RH: Tensor, shift: Tensor, scale: Tensor, rows: Rows) -> Tensor:
    """y * (1 + scale) + shift, with each segment's row of the tables (3 M, H)."""
    out = torch.empty_like(y_RH)
    for part, row in rows:
        out[part] = modulate(y_RH[part], scale[row], shift[row])
    return out


def add_gated(h_RH: Tensor, y_RH: Tensor, gate: Tensor, rows: Rows) -> None:
    """h += gate * y in place, with each segment's row of the table (3 M, H)."""
    for part, row in rows:
        h_RH[part] += gate[row] * y_RH[part]


def table_row(segment: Segment, evaluation: Evaluation) -> int:
    """The AdaLN table row of a segment: timestep index x 3 + modality tag."""
    return evaluation.clocks[segment.clock] * MODALITIES + segment.tag
