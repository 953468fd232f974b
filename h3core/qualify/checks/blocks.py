"""Rank tasks for parts of one block: segments, attention, MLP and output heads against one rank's whole.

Each takes the checkpoint's first block, this rank's shard of it, and the same random rows on every rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from h3core.checkpoint import DenoiserReader
from h3core.config import H3Config
from h3core.denoiser import Denoiser, add_gated, modulate_rows, table_row
from h3core.layers import inverse_frequencies, rotary_tables
from h3core.packing import AUDIO, TEXT, VIDEO, LatentShape, PackedSequence, clip_segments
from h3core.parallel import Mode, Single, build_mode, shard_for
from h3core.partition import split
from h3core.qualify.checks.compare import Comparisons, Demand, Evidence, Identical, RelativeRows
from h3core.qualify.checks.loop import comm_of
from h3core.qualify.checks.transport import draw
from h3core.ranks import Rank
from h3core.schedule import Schedules

FP64 = RelativeRows(1e-12, "fp64 sums in another order; a logic error is orders of magnitude larger")


def segments(rank: Rank, latents: LatentShape, text_rows: int, hidden: int) -> list[Evidence]:
    """Modulation and gating by clipped segments equal a per-row look-up, on this rank's rows."""
    sequence = PackedSequence.build(latents, text_rows, (1, 2, 2))
    own = split(sequence.rows, rank.world, "token rows")[rank.rank]
    tags = torch.tensor([TEXT] * sequence.text.size + [AUDIO] * sequence.audio.size + [VIDEO] * sequence.video.size)
    checks = Comparisons(rank.rank)
    for index in (0, 1):  # one distinct timestep, then two
        evaluation = Schedules.build(2).evaluation(index)
        clocks = torch.tensor([evaluation.clocks["audio" if tag == AUDIO else "video"] for tag in tags])
        look_up = (clocks * 3 + tags)[own.start : own.stop]
        tables = draw(5, 3, 3 * len(evaluation.timesteps), hidden, dtype=torch.bfloat16)
        shift, scale, gate = tables.unbind(0)
        y, h = draw(6, 2, own.size, hidden, dtype=torch.bfloat16).unbind(0)
        rows = [(slice(*s.rows), table_row(s, evaluation)) for s in clip_segments(sequence.segments, own)]
        label = f"rows {own.start}..{own.stop}, evaluation {index}"
        expected = y * (1.0 + scale[look_up]) + shift[look_up]
        checks.compare(f"modulation, {label}", modulate_rows(y, shift, scale, rows), expected, Identical())
        expected, got = h + gate[look_up] * y, h.clone()
        add_gated(got, y, gate, rows)
        checks.compare(f"gate, {label}", got, expected, Identical())
    return checks.finish()


def block_parts(
    rank: Rank, checkpoint: str, mode: str, latents: LatentShape, text_rows: int, dtype: torch.dtype
) -> list[Evidence]:
    """Attention and MLP of block 0 over the ranks against one rank: ulysses to the bit, tensor to 1e-12 in fp64."""
    reader = DenoiserReader(checkpoint)
    config = reader.config
    sequence, sharded, alone = _modes(rank, config, mode, latents, text_rows)
    own = reader.load(shard=shard_for(mode, config, rank.rank, rank.world), dtype=dtype)
    whole = reader.load(dtype=dtype)
    demand: Demand = Identical() if mode == "ulysses" else FP64
    y = draw(11, sequence.rows, config.hidden_size, dtype=dtype)
    cos, sin = rotary_tables(sequence.positions.float(), inverse_frequencies(config.rope_freq_dim, config.rope_theta))
    rows, rotary_rows = slice(*sharded.rows), slice(*sharded.rotary_rows)
    checks = Comparisons(rank.rank)
    with torch.inference_mode():
        got = sharded.attention(y[rows], own.blocks[0].attn, (cos[rotary_rows], sin[rotary_rows]))
        expected = alone.attention(y, whole.blocks[0].attn, (cos, sin))[rows]
        checks.compare(f"{mode} attention, {dtype}", got, expected, demand)
        got, expected = sharded.mlp(y[rows], own.blocks[0].mlp), alone.mlp(y, whole.blocks[0].mlp)[rows]
        checks.compare(f"{mode} MLP, {dtype}", got, expected, demand)
    return checks.finish()


def output_heads(
    rank: Rank, checkpoint: str, latents: LatentShape, text_rows: int, dtype: torch.dtype
) -> list[Evidence]:
    """The last norm and both output heads on own rows, gathered, equal those of one rank, to the bit."""
    reader = DenoiserReader(checkpoint)
    config = reader.config
    sequence, sharded, alone = _modes(rank, config, "ulysses", latents, text_rows)
    weights = reader.load(dtype=dtype)
    evaluation = Schedules.build(2).evaluation(1)
    hidden = draw(21, sequence.rows, config.hidden_size, dtype=dtype)
    embeds = draw(22, text_rows, config.text_dim, dtype=dtype)

    def velocities(mode: Mode) -> tuple[Tensor, Tensor]:
        denoiser = Denoiser(config, weights, mode, dtype)
        request = denoiser.begin(sequence, embeds)
        table = denoiser.adaln.final(denoiser.adaln.condition(evaluation.timesteps))
        video, audio = denoiser.heads(hidden[slice(*mode.rows)], table, request, evaluation)
        return mode.gather(video, sequence.video), mode.gather(audio, sequence.audio)

    with torch.inference_mode():
        got, expected = velocities(sharded), velocities(alone)
    checks = Comparisons(rank.rank)
    for name, ours, whole in zip(("video", "audio"), got, expected, strict=True):
        checks.compare(f"{name} output head, {dtype}", ours, whole, Identical())
    return checks.finish()


def _modes(
    rank: Rank, config: H3Config, mode: str, latents: LatentShape, text_rows: int
) -> tuple[PackedSequence, Mode, Mode]:
    sequence = PackedSequence.build(latents, text_rows, config.patch_size)
    return sequence, build_mode(mode, config, sequence.rows, comm_of(rank)), Single(config, sequence.rows)
