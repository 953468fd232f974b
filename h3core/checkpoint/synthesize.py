"""Random denoiser weights that behave like a model, in every layout, for machines without the real ones.

What "behave" means: activations stay of order one through any number of blocks, attention is neither flat nor
one-hot, AdaLN moves with the timestep and the modality, the velocity is of order one, and every row and every
weight reaches the output. A check that runs on such weights can therefore see a fault in any of them.

Every logical tensor (the q rows of block 3, say) has a random stream of its own, seeded by (seed, logical name):
one tensor or one shard can be made without the rest, and native, diffusers and pruned bf16 files of one seed are
the same model, its rows arranged as the layout wants them. Two exceptions: the pruned AdaLN is a curve of its own,
not a decomposition of the full one, and NVFP4 weights are drawn as codes, because quantising 19 billion values
takes longer than writing them.

Streams are NumPy bit generators (their output is guaranteed across versions and processors; torch's is not) read
through tables of quantiles: 16 random bits pick one of 65,536 values of a distribution, already in the dtype of the
file. That is eight times as fast as drawing normal numbers and rounding them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache, partial
from pathlib import Path
from statistics import NormalDist
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
    expected_tensors,
    fc1_pieces,
    names_of,
    qkv_pieces,
)
from h3core.checkpoint.writer import Progress, plan_shards, torch_dtype, write_file, write_sharded
from h3core.config import MODALITIES, H3Config
from h3core.partition import Span

DEFAULT_SEED: Final = 440420

BASENAME: Final[Mapping[str, str]] = {"native": "model", "diffusers": "diffusion_pytorch_model"}
"""File names of the layouts that are folders; `pruned` is one file."""

SHARD_BYTES: Final[Mapping[str, int]] = {"native": 5 << 30, "diffusers": 5_000_000_000}
"""Limits that cut the released sizes into as many files as were published: 13 and 14."""

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

_CHUNK: Final = 1 << 16
"""Values looked up at once: fits the cache, and keeps NumPy's 64-bit copy of the indices small."""


def synthesize(
    out: Path,
    *,
    config: H3Config,
    layout: str,
    quant: str,
    seed: int = DEFAULT_SEED,
    force: bool = False,
    progress: Progress | None = None,
) -> int:
    """Write a synthetic checkpoint, all of it or nothing, and return the bytes of its safetensors files.

    `pruned`, and any layout whose `out` ends in `.safetensors` other than `diffusers`, is one file; the others are
    a folder, of several files where one would be too large. Raises as `write_file` does, and `CheckpointError`
    for a layout, quantisation or size that does not exist.
    """
    specs = expected_tensors(config, layout, quant)
    produce = partial(_produce, config, layout, quant, seed)
    files = plan_files(out, specs, layout)
    if out in files:
        return write_file(out, specs, produce, force=force, progress=progress)
    return write_sharded(
        out,
        specs,
        produce,
        max_shard_bytes=SHARD_BYTES[layout],
        basename=BASENAME[layout],
        extra={"config.json": _config_json(config)} if layout == "diffusers" else None,
        force=force,
        progress=progress,
    )


def plan_files(out: Path, specs: Mapping[str, TensorSpec], layout: str) -> dict[Path, dict[str, TensorSpec]]:
    """The safetensors files that `synthesize` would write, and the tensors of each, in order."""
    if layout == "pruned" or (layout == "native" and out.suffix == ".safetensors"):
        return {out: dict(specs)}
    return {out / name: part for name, part in plan_shards(specs, SHARD_BYTES[layout], BASENAME[layout]).items()}


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
    stream = _Stream(seed, f"{place.logical}.{kind}")
    if place.role.endswith("norm") or place.role in ("norm1", "norm2"):
        # Wide q and k norms: attention logits get a standard deviation of about 2.4, the product of their rms.
        law = _Law("uniform", 1.5) if place.role in ("q_norm", "k_norm") else _Law("around_one", 0.5)
        return stream.tensor(law, spec)
    if kind == "bias":
        return stream.tensor(_Law("normal", BIAS), spec)
    if place.role == "time_in":
        return _time_in(stream, spec)
    return stream.tensor(_Law("normal", _std(place.role, spec.shape[1])), spec)


def _produce(config: H3Config, layout: str, quant: str, seed: int, name: str, spec: TensorSpec) -> Tensor:
    return synthetic_tensor(config, layout, quant, name, spec, seed)


def _config_json(config: H3Config) -> bytes:
    values: dict[str, Any] = {"_class_name": "MiniMaxH3Transformer3DModel", **asdict(config)}
    return (json.dumps(values, indent=2) + "\n").encode()


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


# --- random streams --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Law:
    """A distribution. normal: mean 0, std `scale`. uniform: mean `scale`, between 0.7 and 1.3 times it.

    around_one: 1 +- (0.1 .. 1) * `scale`, never 1 itself: a norm weight of 1 hides that it was not applied.
    signed: +-(0.75 .. 1.25) * `scale`, never near 0.
    """

    kind: str
    scale: float

    def quantiles(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Its 65,536 equally probable values, ascending."""
        u = (np.arange(65536) + 0.5) / 65536
        if self.kind == "normal":
            return _normal_quantiles() * self.scale
        if self.kind == "uniform":
            return self.scale * (0.7 + 0.6 * u)
        sign, inside = np.sign(u - 0.5), np.abs(2 * u - 1)
        if self.kind == "around_one":
            return 1 + sign * self.scale * (0.1 + 0.9 * inside)
        return sign * self.scale * (0.75 + 0.5 * inside)


@lru_cache(maxsize=1)
def _normal_quantiles() -> np.ndarray[Any, np.dtype[np.float64]]:
    inverse = NormalDist().inv_cdf
    return np.array([inverse((i + 0.5) / 65536) for i in range(65536)])


@lru_cache(maxsize=64)
def _table(law: _Law, dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """The law's values in `dtype`, as bit patterns: NumPy has no bfloat16."""
    bits = torch.int32 if dtype.itemsize == 4 else torch.int16
    # Through fp32, so that a bf16 file holds the rounded values of an fp32 file of the same seed.
    table: np.ndarray[Any, Any] = torch.from_numpy(law.quantiles()).float().to(dtype).view(bits).numpy()
    return table


class _Stream:
    """The random bits of one logical tensor."""

    def __init__(self, seed: int, name: str) -> None:
        digest = hashlib.sha256(f"h3core synthetic 1:{seed}:{name}".encode()).digest()
        self._bits = np.random.SFC64(int.from_bytes(digest[:16], "little"))

    def words(self, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """`count` words of 64 random bits."""
        return self._bits.random_raw(count)

    def fill(self, out: Tensor, law: _Law) -> None:
        """Overwrite `out`, contiguous, with values of `law`."""
        table = _table(law, out.dtype)
        flat = out.view(-1).view(torch.int32 if out.dtype.itemsize == 4 else torch.int16).numpy()
        for start in range(0, flat.size, _CHUNK):
            part = flat[start : start + _CHUNK]
            index = self.words(-(-part.size // 4)).view(np.uint16)[: part.size]
            # mode="clip" lets take write into `out` without a buffer; no index can be out of range.
            np.take(table, index, out=part, mode="clip")

    def tensor(self, law: _Law, spec: TensorSpec) -> Tensor:
        """A new tensor of that dtype and shape."""
        out = torch.empty(spec.shape, dtype=torch_dtype(spec))
        self.fill(out, law)
        return out

    def bytes(self, shape: tuple[int, ...], mask: int = 0xFF, offset: int = 0) -> Tensor:
        """Bytes (random & mask) + offset, uint8; the sum must not pass 255."""
        count = math.prod(shape)
        words = self.words(-(-count // 8))
        if mask != 0xFF:
            lanes = np.uint64(0x0101010101010101)
            words &= lanes * np.uint64(mask)
            words += lanes * np.uint64(offset)
        return torch.from_numpy(words.view(np.uint8)[:count]).view(shape)


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
    law = _Law("normal", _std(place.role, columns))
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
            rows = _Stream(seed, f"{place.block}.{part}.weight").tensor(law, part_spec)
        out[piece.rows.start : piece.rows.stop] = rows[offset : offset + piece.rows.size]
    return out


def _time_in(stream: _Stream, spec: TensorSpec) -> Tensor:
    """The first layer of the time MLP, (hidden, 2n), columns [cosines; sines].

    t is in [0, 1] and the frequencies run from 1 down to 1/10000, so all cosines are nearly 1 and few sines leave 0:
    equal weights would give an embedding that hardly knows the time. Cosines are held down, sines are raised.
    """
    hidden, columns = spec.shape
    half = columns // 2
    spread = half / (2 * math.log(10000))  # the sum of the squared frequencies
    dtype = torch_dtype(spec)
    cosines, sines = torch.empty(hidden, half, dtype=dtype), torch.empty(hidden, columns - half, dtype=dtype)
    stream.fill(cosines, _Law("normal", 0.5 / math.sqrt(half)))
    stream.fill(sines, _Law("normal", TIME_SWING / math.sqrt(spread)))
    return torch.cat([cosines, sines], dim=1)


def _adaln(config: H3Config, place: _Place, kind: str, spec: TensorSpec, seed: int, *, curve: bool) -> Tensor:
    """An AdaLN projection's weight or bias, rows (modality, chunk, channel) or, in the final layer, (chunk, channel).

    Chunks of a block: shift, scale, gate of attention, then of the MLP. Gates are about +-1/sqrt(2 * layers) and
    never 0: as many branches of order one then add up to order one.
    """
    stream = _Stream(seed, f"{'curve.' if curve else ''}{place.logical}.{kind}")
    chunks = 6 * MODALITIES if place.role == "adaln" else 2
    gate = 1 / math.sqrt(2 * config.num_layers)
    # What the projection is fed: the curve has rms `_curve_norm` as a vector, SiLU(temb) ACTIVATED_RMS per column.
    fed = _curve_norm(spec.shape[-1]) if curve else ACTIVATED_RMS * math.sqrt(spec.shape[-1])
    out = torch.empty(chunks, config.hidden_size, *spec.shape[1:], dtype=torch_dtype(spec))
    for chunk in range(chunks):
        gates = place.role == "adaln" and chunk % 3 == 2
        if kind == "bias":
            law = _Law("signed", gate) if gates else _Law("normal", MODULATION)
        else:
            law = _Law("normal", (0.3 * gate if gates else MODULATION) / fed)
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
    phases = (_Stream(seed, CURVE_TABLE).words(rank) >> np.uint64(11)) * (2 * math.pi / 2**53)
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
    stream = _Stream(seed, f"nvfp4.{place.logical}.{kind}")
    if kind == "weight":
        return stream.bytes(spec.shape)
    if kind == "weight_scale":
        return stream.bytes(spec.shape, mask=0x0F, offset=SCALE_CODE).view(torch.float8_e4m3fn)
    columns = {"qkv": config.hidden_size, "fc1": config.hidden_size, "out": config.inner_dim, "fc2": config.ffn_dim}
    # +-5%, so that no two linears share a scale by chance and a mixed-up one shows.
    vary = 0.95 + 0.1 * float(stream.words(1)[0]) / 2**64
    return torch.tensor(vary * _std(place.role, columns[place.role]) / (E2M1_RMS * SCALE_RMS))
