"""What each synthetic tensor is: which logical tensor a name on disk stands for, and how its values are drawn.

Every logical tensor (the q rows of block 3, say) has a random stream of its own, seeded by (seed, logical name):
one tensor or one shard can be made without the rest, and native, diffusers and pruned bf16 files of one seed are
the same model, its rows arranged as the layout wants them. Two exceptions: the pruned AdaLN is a curve of its own,
not a decomposition of the full one, and NVFP4 weights are drawn as codes, because quantising 19 billion values
takes longer than writing them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from h3core.checkpoint.errors import CheckpointError
from h3core.checkpoint.layout import (
    COMFY_QUANT,
    CURVE_TABLE,
    INV_FREQ,
    Piece,
    TensorSpec,
    fc1_pieces,
    names_of,
    qkv_pieces,
)
from h3core.checkpoint.safetensors_format import torch_dtype
from h3core.checkpoint.streams import Law, Stream
from h3core.config import MODALITIES, H3Config
from h3core.partition import Span

GAIN: Final[Mapping[str, float]] = {"out": 2.0, "fc2": 1.6, "time_out": 1.5}
"""Standard deviation of a linear's output for inputs of order one, where it is not 1.

Attention averages values and SwiGLU shrinks them; these two bring a branch back to order one.
"""

BIAS: Final = 0.2
"""Standard deviation of biases."""

MODULATION: Final = 0.12
"""Standard deviation of AdaLN shifts and scales, once for what follows the timestep and once for the bias."""

ACTIVATED_RMS: Final = 0.85
"""Root mean square of SiLU(time embedding) with the weights drawn here, as measured."""

TIME_SWING: Final = 2.5
"""How far a hidden unit of the time MLP moves between t = 0 and t = 1, in standard deviations of its constant part."""

SCALE_CODE: Final = 0x68
"""E4M3 code of 64, the lowest block scale drawn; the 16 codes from here are the two octaves up to 240."""

SCALE_RMS: Final = 148.32
"""Root mean square of those 16 scales."""

E2M1_RMS: Final = math.sqrt(8.5625)
"""Root mean square of the 16 E2M1 values: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""


def synthetic_tensor(config: H3Config, layout: str, quant: str, name: str, spec: TensorSpec, seed: int) -> Tensor:
    """One tensor of a synthetic checkpoint, on the CPU, with the dtype and shape of `spec`.

    A pure function of its arguments; the same `seed` gives the same model in every float layout. Raises
    `CheckpointError` for a name that the layout does not have.
    """
    if name == CURVE_TABLE:
        return _curve(spec, seed)
    if name == INV_FREQ:
        # The formula that diffusers computes at load time, in its order of operations: equal bits.
        exponents = torch.arange(0, 2 * config.rope_freq_dim, 2, dtype=torch.float32) / (2 * config.rope_freq_dim)
        return 1.0 / config.rope_theta**exponents
    base, _, kind = name.rpartition(".")
    place = _place(layout, base)
    if kind == "comfy_quant":
        return torch.frombuffer(bytearray(COMFY_QUANT), dtype=torch.uint8)
    if quant == "nvfp4" and place.block.startswith("blocks") and place.role in ("qkv", "out", "fc1", "fc2"):
        return _nvfp4(config, place, kind, spec, seed)
    if place.role == "qkv":
        pieces = qkv_pieces(config, layout, place.disk, Span(0, config.num_attention_heads))
        return _arranged(config, spec, seed, base, pieces, place, ("q", "k", "v"), config.inner_dim)
    if place.role == "fc1":
        pieces = fc1_pieces(config, layout, place.disk, Span(0, config.ffn_dim))
        return _arranged(config, spec, seed, base, pieces, place, ("gate", "up"), config.ffn_dim)
    if place.role in ("adaln", "final_adaln"):
        return _adaln(config, place, kind, spec, seed, curve=layout == "pruned")
    stream = Stream(seed, f"{place.logical}.{kind}")
    if place.role.endswith("norm") or place.role in ("norm1", "norm2"):
        # Wide q and k norms: attention logits get a standard deviation of about 2.4, the product of their rms.
        law = Law("uniform", 1.5) if place.role in ("q_norm", "k_norm") else Law("around_one", 0.5)
        return stream.tensor(law, spec)
    if kind == "bias":
        return stream.tensor(Law("normal", BIAS), spec)
    if place.role == "time_in":
        return _time_in(stream, spec)
    return stream.tensor(Law("normal", _std(place.role, spec.shape[1])), spec)


# --- which logical tensor a name on disk stands for ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """A part of the model: its role (a field of `Names`), its block as native files and as this layout call it."""

    role: str
    block: str = ""
    disk: str = ""

    @property
    def logical(self) -> str:
        return f"{self.block}.{self.role}" if self.block else self.role


@lru_cache(maxsize=8)
def _roles(layout: str) -> dict[str, str]:
    """Disk name -> role; names of block parts are relative to the block."""
    names = names_of(layout)
    roles: dict[str, str] = {}
    for field in fields(names):
        value = getattr(names, field.name)
        roles |= dict.fromkeys(value if isinstance(value, tuple) else (value,), field.name)
    return roles


def _place(layout: str, base: str) -> _Place:
    roles = _roles(layout)
    names, native = names_of(layout), names_of("native")
    # The refiner's prefix may hold the blocks' prefix: the longer one is tried first.
    for ours, theirs in ((names.refiner, native.refiner), (names.blocks, native.blocks)):
        if base.startswith(f"{ours}."):
            index, _, part = base[len(ours) + 1 :].partition(".")
            if part in roles and index.isdecimal():
                return _Place(roles[part], f"{theirs}.{index}", f"{ours}.{index}")
    if base not in roles:
        raise CheckpointError(f"tensor {base}: no such part in layout {layout}")
    return _Place(roles[base])


# --- the tensors that are more than one draw -------------------------------------------------------------------


def _std(role: str, columns: int) -> float:
    return GAIN.get(role, 1.0) / math.sqrt(columns)


def _arranged(
    config: H3Config,
    spec: TensorSpec,
    seed: int,
    base: str,
    pieces: list[Piece],
    place: _Place,
    parts: tuple[str, ...],
    part_rows: int,
) -> Tensor:
    """Draw the parts of a fused linear one by one, and put their rows where `pieces` says this tensor has them."""
    columns = spec.shape[1]
    law = Law("normal", _std(place.role, columns))
    out = torch.empty(spec.shape, dtype=torch_dtype(spec))
    held, rows = "", torch.empty(0)
    at = 0
    for piece in pieces:
        part, offset = parts[at // part_rows], at % part_rows
        at += piece.rows.size
        if piece.name != base:
            continue
        if part != held:
            held = part
            part_spec = TensorSpec(spec.dtype, (part_rows, columns))
            rows = Stream(seed, f"{place.block}.{part}.weight").tensor(law, part_spec)
        out[piece.rows.start : piece.rows.stop] = rows[offset : offset + piece.rows.size]
    return out


def _time_in(stream: Stream, spec: TensorSpec) -> Tensor:
    """The first layer of the time MLP, (hidden, 2n), columns [cosines; sines].

    t is in [0, 1] and the frequencies run from 1 down to 1/10000, so all cosines are nearly 1 and few sines leave 0:
    equal weights would give an embedding that hardly knows the time. Cosines are held down, sines are raised.
    """
    hidden, columns = spec.shape
    half = columns // 2
    spread = half / (2 * math.log(10000))  # the sum of the squared frequencies
    dtype = torch_dtype(spec)
    cosines, sines = torch.empty(hidden, half, dtype=dtype), torch.empty(hidden, columns - half, dtype=dtype)
    stream.fill(cosines, Law("normal", 0.5 / math.sqrt(half)))
    stream.fill(sines, Law("normal", TIME_SWING / math.sqrt(spread)))
    return torch.cat([cosines, sines], dim=1)


def _adaln(config: H3Config, place: _Place, kind: str, spec: TensorSpec, seed: int, *, curve: bool) -> Tensor:
    """An AdaLN projection's weight or bias, rows (modality, chunk, channel) or, in the final layer, (chunk, channel).

    Chunks of a block: shift, scale, gate of attention, then of the MLP. Gates are about +-1/sqrt(2 * layers) and
    never 0: as many branches of order one then add up to order one.
    """
    stream = Stream(seed, f"{'curve.' if curve else ''}{place.logical}.{kind}")
    chunks = 6 * MODALITIES if place.role == "adaln" else 2
    gate = 1 / math.sqrt(2 * config.num_layers)
    # What the projection is fed: the curve has rms `_curve_norm` as a vector, SiLU(temb) ACTIVATED_RMS per column.
    fed = _curve_norm(spec.shape[-1]) if curve else ACTIVATED_RMS * math.sqrt(spec.shape[-1])
    out = torch.empty(chunks, config.hidden_size, *spec.shape[1:], dtype=torch_dtype(spec))
    for chunk in range(chunks):
        gates = place.role == "adaln" and chunk % 3 == 2
        if kind == "bias":
            law = Law("signed", gate) if gates else Law("normal", MODULATION)
        else:
            law = Law("normal", (0.3 * gate if gates else MODULATION) / fed)
        stream.fill(out[chunk], law)
    return out.view(spec.shape)


def _curve_weights(rank: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Amplitude of each column: falling, as those of a decomposition do, but all of them visible."""
    return np.sqrt(2 / (1 + np.arange(rank)))


def _curve_norm(rank: int) -> float:
    return math.sqrt(float((_curve_weights(rank) ** 2).sum()) / 2)


def _curve(spec: TensorSpec, seed: int) -> Tensor:
    """The pruned AdaLN's curve over t in [0, 1], (grid, rank): column j is a cosine of 1 + j/2 half periods."""
    grid, rank = spec.shape
    phases = (Stream(seed, CURVE_TABLE).words(rank) >> np.uint64(11)) * (2 * math.pi / 2**53)
    t = np.linspace(0, 1, grid)[:, None]
    columns = _curve_weights(rank) * np.cos(math.pi * (1 + np.arange(rank) / 2) * t + phases)
    return torch.from_numpy(columns).to(torch_dtype(spec))


def _nvfp4(config: H3Config, place: _Place, kind: str, spec: TensorSpec, seed: int) -> Tensor:
    """Codes, block scales or the tensor's scale of one NVFP4 linear.

    A normal distribution, scaled so that the largest of 16 values becomes 6, falls into the 16 codes almost equally
    often: its 16 equally probable values, times three, round to 0, .5, 1, 1.5, 2, 3, 4 and 6. So codes are plain
    random bytes. Two octaves of block scales make the swizzle visible: scales read row-major leave a correlation of
    0.866 with the right weight, where the real file's leave 0.868.
    """
    stream = Stream(seed, f"nvfp4.{place.logical}.{kind}")
    if kind == "weight":
        return stream.bytes(spec.shape)
    if kind == "weight_scale":
        return stream.bytes(spec.shape, mask=0x0F, offset=SCALE_CODE).view(torch.float8_e4m3fn)
    columns = {"qkv": config.hidden_size, "fc1": config.hidden_size, "out": config.inner_dim, "fc2": config.ffn_dim}
    # +-5%, so that no two linears share a scale by chance and a mixed-up one shows.
    vary = 0.95 + 0.1 * float(stream.words(1)[0]) / 2**64
    return torch.tensor(vary * _std(place.role, columns[place.role]) / (E2M1_RMS * SCALE_RMS))
