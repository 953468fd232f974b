"""The whole denoising loop as a rank task: the same code on real ranks, on virtual ones and on one.

`run_case` takes any `Comm`; `real_ranks` and `virtual_ranks` are tasks for a `RankPool`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from h3core.partition import Shard
from h3core.ranks import Rank
from h3core.schedule import Schedules
from h3core.weights import held_bytes

Rows = dict[int, tuple[Tensor, Tensor]]
"""Per evaluation: video rows and audio rows of the whole sequence."""


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
    keep: tuple[int, ...] = ()
    """Evaluations whose starting latents and velocities are returned."""


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
    trajectory: Rows
    """Latents that each evaluation of `keep` started from."""
    velocities: Rows


def prompt_embeds(config: H3Config, text_rows: int, seed: int) -> Tensor:
    """A random embedding (text_rows, text_dim), fp32: what a text encoder would have given."""
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn(text_rows, config.text_dim, generator=generator)


@dataclass(frozen=True, slots=True)
class Ready:
    """One rank, loaded: what a case needs before its first evaluation."""

    denoiser: Denoiser
    sequence: PackedSequence
    embeds: Tensor
    shard: Shard


def make_ready(comm: Comm, case: Case, device: torch.device) -> Ready:
    """Compare plans, load this rank's shard."""
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
    embeds = prompt_embeds(config, case.text_rows, case.seed).to(case.dtype).to(device)
    return Ready(Denoiser(config, weights, mode, case.dtype), sequence, embeds, shard)


def run_case(comm: Comm, case: Case, device: torch.device) -> Outcome:
    """Load this rank's shard, denoise, and gather the latents. Call it in inference mode."""
    ready = make_ready(comm, case, device)
    denoiser, sequence = ready.denoiser, ready.sequence
    noise = Noise.draw(denoiser.config, case.latents, case.seed)
    trajectory: Rows = {}
    velocities: Rows = {}

    def keep(step: Step) -> None:
        if step.index in case.keep:
            trajectory[step.index] = gathered(denoiser, sequence, step.video, step.audio)
            velocities[step.index] = gathered(denoiser, sequence, step.velocity_video, step.velocity_audio)

    comm.reset()
    video, audio = denoise(denoiser, sequence, ready.embeds, noise, Schedules.build(case.evaluations), on_step=keep)
    return Outcome(
        comm.rank,
        comm.world,
        video.cpu(),
        audio.cpu(),
        comm.report(),
        held_bytes(denoiser.weights),
        denoiser.mode.rows.size,
        ready.shard.heads.size,
        trajectory,
        velocities,
    )


def gathered(denoiser: Denoiser, sequence: PackedSequence, video: Tensor, audio: Tensor) -> tuple[Tensor, Tensor]:
    """All ranks' rows of both modalities, on the host."""
    mode = denoiser.mode
    return mode.gather(video, sequence.video).cpu(), mode.gather(audio, sequence.audio).cpu()


def velocities_at(comm: Comm, case: Case, latents: Rows, device: torch.device) -> Rows:
    """Velocities at some evaluations, each from the given latents: errors do not add up over steps."""
    ready = make_ready(comm, case, device)
    schedules = Schedules.build(case.evaluations)
    request = ready.denoiser.begin(ready.sequence, ready.embeds)
    dtype = torch.promote_types(case.dtype, torch.float32)
    velocities = {}
    for index, (video, audio) in latents.items():
        own_video = video[slice(*request.video)].to(device, dtype)
        own_audio = audio[slice(*request.audio)].to(device, dtype)
        rows = ready.denoiser.velocity(request, own_video, own_audio, schedules.evaluation(index))
        velocities[index] = gathered(ready.denoiser, ready.sequence, *rows)
    return velocities


def real_ranks(rank: Rank, cases: Sequence[Case]) -> list[Outcome]:
    """Task: each case over the pool's process group."""
    with torch.inference_mode():
        return [run_case(comm_of(rank, digest=case.digest), case, rank.device) for case in cases]


def real_velocities(rank: Rank, case: Case, latents: Rows) -> Rows:
    """Task: `velocities_at` over the pool's process group."""
    with torch.inference_mode():
        return velocities_at(comm_of(rank), case, latents, rank.device)


def comm_of(rank: Rank, *, digest: bool = False) -> Comm:
    """A fresh `Comm` over the pool's process group."""
    if rank.group is None:
        raise ValueError(f"rank {rank.rank}: expected a process group")
    return ProcessGroupComm(rank.group, rank.device, digest=digest)


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
