"""The two flow-matching schedules, video and audio, and their Euler update.

Time runs from 0 (noise) to 1 (clean), t = 1 - sigma; the model predicts v = x0 - noise.
Everything is fp32 on the CPU, so that the schedule does not depend on the accelerator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

VIDEO_SHIFT: Final = 12.0
AUDIO_SHIFT: Final = 3.0
MOST_EVALUATIONS: Final = 1 << 20
"""Beyond it, a slip of the keyboard: refused before anything is built."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """One modality's grid: `sigmas` (evaluations + 1,) from 1 to 0, `timesteps` (evaluations,), fp32."""

    sigmas: Tensor
    timesteps: Tensor

    @classmethod
    def build(cls, evaluations: int, shift: float) -> Schedule:
        """sigma' = s*sigma / (1 + (s-1)*sigma) over evaluations + 1 even points, duplicates collapsed.

        diffusers' `num_inference_steps` counts grid points, so it is `evaluations + 1`.
        Raises `ValueError` below 1 evaluation, and where fp32 cannot tell that many points apart.
        """
        if evaluations < 1:
            raise ValueError(f"evaluations: got {evaluations}, expected at least 1")
        if evaluations > MOST_EVALUATIONS:
            raise ValueError(f"evaluations: got {evaluations}, expected at most {MOST_EVALUATIONS:,}; use fewer")
        base = torch.linspace(1.0, 0.0, evaluations + 1, dtype=torch.float32)
        sigmas = torch.unique_consecutive(shift * base / (1 + (shift - 1) * base))
        if len(sigmas) != evaluations + 1:
            raise ValueError(
                f"evaluations: got {evaluations}, of which fp32 keeps only {len(sigmas) - 1} apart at shift {shift}; "
                "use fewer"
            )
        return cls(sigmas, 1.0 - sigmas[:-1])

    def step(self, x: Tensor, velocity: Tensor, index: int) -> Tensor:
        """The Euler update of rows `x` with their `velocity` at evaluation `index`; both fp32 (or fp64).

        x0 = x + (1 - t) v, then x' = r x + (1 - r) x0 with r = sigma' / sigma. The sigma of x0 comes from the
        timestep and r from the grid: below 0.5, 1 - (1 - sigma) is not sigma, and the reference keeps them apart.
        """
        clean = x + (1.0 - self.timesteps[index]).to(x.dtype) * velocity
        ratio = (self.sigmas[index + 1] / self.sigmas[index]).to(x.dtype)
        return ratio * x + (1.0 - ratio) * clean


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One forward pass: its distinct `timesteps` (M,), sorted, and the index of each clock into them."""

    timesteps: Tensor
    clocks: dict[str, int]


@dataclass(frozen=True, slots=True)
class Schedules:
    """Both modalities' schedules, stepping together."""

    video: Schedule
    audio: Schedule

    @classmethod
    def build(cls, evaluations: int) -> Schedules:
        """Video at shift 12, audio at shift 3. Raises `ValueError` as `Schedule.build` does."""
        return cls(Schedule.build(evaluations, VIDEO_SHIFT), Schedule.build(evaluations, AUDIO_SHIFT))

    def __len__(self) -> int:
        return len(self.video.timesteps)

    def evaluation(self, index: int) -> Evaluation:
        """Distinct timesteps of evaluation `index`: one at the first (both start at 0), two later."""
        times = torch.stack([self.video.timesteps[index], self.audio.timesteps[index]])
        distinct, inverse = torch.unique(times, sorted=True, return_inverse=True)
        return Evaluation(distinct, {"video": int(inverse[0]), "audio": int(inverse[1])})
