"""The denoising loop: own rows in, own rows out, gathered once at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from h3core.denoiser import Denoiser
from h3core.packing import Noise, PackedSequence
from h3core.schedule import Schedules


@dataclass(frozen=True, slots=True)
class Step:
    """One evaluation of one rank, own rows: the latents it read, the velocities it predicted."""

    index: int
    video: Tensor
    audio: Tensor
    velocity_video: Tensor
    velocity_audio: Tensor


def denoise(
    denoiser: Denoiser,
    sequence: PackedSequence,
    prompt_embeds: Tensor,
    noise: Noise,
    schedules: Schedules,
    *,
    on_step: Callable[[Step], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """The final latent rows of the whole sequence, on every rank: video (rows, 96) and audio (rows, 32).

    `prompt_embeds` (text rows, text_dim) lies on the denoiser's device; `noise` is that of the whole sequence and
    is cut here. Latents are fp32 (fp64 where the denoiser runs in fp64). Run it under `torch.inference_mode()`.
    """
    device = prompt_embeds.device
    dtype = torch.promote_types(denoiser.dtype, torch.float32)
    request = denoiser.begin(sequence, prompt_embeds)
    video = noise.video[slice(*request.video)].to(device, dtype)
    audio = noise.audio[slice(*request.audio)].to(device, dtype)
    for index in range(len(schedules)):
        velocity_video, velocity_audio = denoiser.velocity(request, video, audio, schedules.evaluation(index))
        step = Step(index, video, audio, velocity_video, velocity_audio)
        video = schedules.video.step(video, velocity_video, index)
        audio = schedules.audio.step(audio, velocity_audio, index)
        if on_step is not None:
            on_step(step)
    return denoiser.mode.gather(video, sequence.video), denoiser.mode.gather(audio, sequence.audio)
