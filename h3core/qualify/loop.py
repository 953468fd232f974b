"""The whole denoising loop as a rank task: the same code on real ranks, on virtual ones and on one.

`run_case` takes any `Comm`; `real_ranks` and `virtual_ranks` are tasks for a `RankPool`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from h3core.checkpoint import DenoiserReader
from h3core.comm import Comm, ProcessGroupComm, ThreadComm, run_virtual
from h3core.config import H3Config
from h3core.denoise import Step, denoise
from h3core.denoiser import Denoiser
from h3core.packing import LatentShape, Noise, PackedSequence
from h3core.parallel import build_mode, shard_for
from h3core.ranks import Rank
from h3core.schedule import Schedules
from h3core.weights import held_bytes


@dataclass(frozen=True, slots=True)
class Case:
    """One denoising run to compare. Everything that decides its bits, except the world."""

    checkpoint: str
    mode: str
    latents: LatentShape
    text_rows: int
    evaluations: int
    seed: int = 440420
    dtype: torch.dtype = torch.bfloat16
    linear: str = "w4a16"
    attention: str = "sdpa"
    reduce_dtype: str = "activation"
    digest: bool = True
    keep_velocities: tuple[int, ...] = ()
    """Evaluations whose velocities are returned; with `feed`, they are computed from its latents."""
    feed: tuple[tuple[Tensor, Tensor], ...] = ()
    """Latent rows (video, audio) to start each of `keep_velocities` from, instead of the loop's own."""


@dataclass(slots=True)
class Outcome:
    """What one rank saw: latents of the whole sequence, traffic, and what it held."""

    rank: int
    world: int
    video: Tensor
    audio: Tensor
    phases: dict[str, dict[str, Any]]
    held_bytes: int
    own_rows: int
    own_heads: int
    velocities: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    trajectory: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Latents that each of `keep_velocities` started from."""


def prompt_embeds(config: H3Config, text_rows: int, seed: int) -> Tensor:
    """A random embedding (text_rows, text_dim), fp32: what a text encoder would have given."""
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn(text_rows, config.text_dim, generator=generator)


def run_case(comm: Comm, case: Case, device: torch.device) -> Outcome:
    """Load this rank's shard, denoise, and gather the latents. Call it in inference mode."""
    reader = DenoiserReader(case.checkpoint)
    config = reader.config
    sequence = PackedSequence.build(case.latents, case.text_rows, config.patch_size)
    mode = build_mode(
        case.mode,
        config,
        sequence.rows,
        comm,
        attention=case.attention,
        linear=case.linear,
        reduce_dtype=case.reduce_dtype,
    )
    shard = shard_for(case.mode, config, comm.rank, comm.world)
    weights = reader.load(shard=shard, dtype=case.dtype, device=device)
    denoiser = Denoiser(config, weights, mode, case.dtype)
    embeds = prompt_embeds(config, case.text_rows, case.seed).to(case.dtype).to(device)
    noise = Noise.draw(config, case.latents, case.seed)
    comm.reset()
    velocities: dict[int, tuple[Tensor, Tensor]] = {}
    trajectory: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(step: Step) -> None:
        if step.index in case.keep_velocities and not case.feed:
            velocities[step.index] = gathered(denoiser, sequence, step.velocity_video, step.velocity_audio)
            trajectory[step.index] = gathered(denoiser, sequence, step.video, step.audio)

    video, audio = denoise(denoiser, sequence, embeds, noise, Schedules.build(case.evaluations), on_step=keep)
    phases = comm.report()
    if case.feed:
        velocities = fed_velocities(denoiser, sequence, embeds, case)
    return Outcome(
        comm.rank,
        comm.world,
        video.cpu(),
        audio.cpu(),
        phases,
        held_bytes(weights),
        mode.rows.size,
        shard.heads.size,
        velocities,
        trajectory,
    )


def gathered(denoiser: Denoiser, sequence: PackedSequence, video: Tensor, audio: Tensor) -> tuple[Tensor, Tensor]:
    """All ranks' rows of both modalities, on the host."""
    mode = denoiser.mode
    return mode.gather(video, sequence.video).cpu(), mode.gather(audio, sequence.audio).cpu()


def fed_velocities(
    denoiser: Denoiser, sequence: PackedSequence, embeds: Tensor, case: Case
) -> dict[int, tuple[Tensor, Tensor]]:
    """Velocities at `keep_velocities`, each computed from the given latents: errors do not add up over steps."""
    schedules = Schedules.build(case.evaluations)
    request = denoiser.begin(sequence, embeds)
    dtype = torch.promote_types(case.dtype, torch.float32)
    velocities = {}
    for index, (video, audio) in zip(case.keep_velocities, case.feed, strict=True):
        own = (
            video[slice(*request.video)].to(embeds.device, dtype),
            audio[slice(*request.audio)].to(embeds.device, dtype),
        )
        velocities[index] = gathered(denoiser, sequence, *denoiser.velocity(request, *own, schedules.evaluation(index)))
    return velocities


def real_ranks(rank: Rank, cases: Sequence[Case]) -> list[Outcome]:
    """Task: each case over the pool's process group."""
    if rank.group is None:
        raise ValueError(f"rank {rank.rank}: expected a process group")
    outcomes = []
    with torch.inference_mode():
        for case in cases:
            comm = ProcessGroupComm(rank.group, rank.device, digest=case.digest)
            outcomes.append(run_case(comm, case, rank.device))
    return outcomes


def virtual_ranks(rank: Rank, world: int, cases: Sequence[Case]) -> list[list[Outcome]]:
    """Task for a pool of one rank: each case over `world` virtual ranks; result[case][rank]."""
    return [
        run_virtual(
            world, partial(_virtual_case, case=case, device=rank.device), device=rank.device, digest=case.digest
        )
        for case in cases
    ]


def _virtual_case(comm: ThreadComm, *, case: Case, device: torch.device) -> Outcome:
    return run_case(comm, case, device)
