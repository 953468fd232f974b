"""The denoising loop: own rows in, own rows out, nothing gathered between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from h3core.denoiser import Denoiser
from h3core.packing import Noise, PackedSequence
from h3core.schedule import Schedules


@dataclass(frozen=True, slots=True)
class Step:
    """One evaluation of one rank: velocities and latents after the update, own rows, video and audio."""

    index: int
    velocity_video: Tensor
    velocity_audio: Tensor
    video: Tensor
    audio: Tensor


def steps(
    denoiser: Denoiser, sequence: PackedSequence, prompt_embeds: Tensor, noise: Noise, schedules: Schedules
) -> Iterator[Step]:
    """Run the loop, yielding after each evaluation. `noise` is that of the whole sequence; it is cut here.

    Latents are fp32 on the denoiser's device (fp64 where it runs in fp64). Run it under `torch.inference_mode()`.
    """
    device = prompt_embeds.device
    dtype = torch.promote_types(denoiser.dtype, torch.float32)
    request = denoiser.begin(sequence, prompt_embeds)
    video = noise.video[slice(*request.video)].to(device, dtype)
    audio = noise.audio[slice(*request.audio)].to(device, dtype)
    for index in range(len(schedules)):
        v_video, v_audio = denoiser.velocity(request, video, audio, schedules.evaluation(index))
        video = schedules.video.step(video, v_video, index)
        audio = schedules.audio.step(audio, v_audio, index)
        yield Step(index, v_video, v_audio, video, audio)


def denoise(
    denoiser: Denoiser,
    sequence: PackedSequence,
    prompt_embeds: Tensor,
    noise: Noise,
    schedules: Schedules,
    *,
    on_step: Callable[[Step], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """The final latent rows of the whole sequence, on every rank: video (rows, 96) and audio (rows, 32)."""
    last = None
    for last in steps(denoiser, sequence, prompt_embeds, noise, schedules):
        if on_step is not None:
            on_step(last)
    if last is None:
        raise ValueError("schedules hold no evaluation")
    return denoiser.mode.gather(last.video, sequence.video), denoiser.mode.gather(last.audio, sequence.audio)
