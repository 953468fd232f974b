"""The on-disk layouts of a MiniMax-H3 denoiser: which tensors, of which dtype and shape, in which row order.

- `native`: the original MiniMax files. qkv rows are interleaved by head (q, k, v of head 0, then of head 1),
  fc1 rows are [gate; up], AdaLN is full, `rope.inv_freq` is stored.
- `diffusers`: to_q, to_k and to_v apart, ff.net.0.proj rows are [up; gate], AdaLN is full.
- `pruned`: native names, but qkv rows are [q; k; v] and AdaLN is a low-rank curve (`adaln_t_table`).
  As bf16, or with the blocks' four linears in NVFP4.

Everything follows from an `H3Config`; nothing here knows a released size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from h3core.checkpoint.errors import CheckpointError
from h3core.config import H3Config
from h3core.nvfp4 import BLOCK, TILE_COLS, TILE_ROWS
from h3core.partition import Span

LAYOUTS: Final = ("native", "diffusers", "pruned")
QUANTS: Final = ("bf16", "nvfp4")
CURVE_TABLE: Final = "adaln_t_table"
INV_FREQ: Final = "rope.inv_freq"
COMFY_QUANT: Final = b'{"format": "nvfp4"}'
"""Bytes of the `.comfy_quant` tensor that stands beside every NVFP4 weight: 19, without an end mark."""

# The writers of the published files sort by dtype, the wider alignment first, and then by name.
_DTYPE_ORDER: Final = ("F64", "F32", "BF16", "F16", "F8_E4M3", "I8", "U8")


class TensorSpec(NamedTuple):
    """One tensor of a file: dtype as safetensors spells it ("BF16"), and shape."""

    dtype: str
    shape: tuple[int, ...]


class Piece(NamedTuple):
    """Consecutive rows of one tensor on disk: tensor name without `.weight`, and the rows."""

    name: str
    rows: Span


@dataclass(frozen=True, slots=True)
class Names:
    """What a layout calls each part. Block parts are relative to the block (`attn.out_proj`)."""

    video_in: str
    audio_in: str
    text_in: str
    time_in: str
    time_out: str
    refiner: str
    refiner_norm: str
    blocks: str
    norm1: str
    norm2: str
    qkv: tuple[str, ...]
    out: str
    q_norm: str
    k_norm: str
    fc1: str
    fc2: str
    adaln: str
    final_norm: str
    final_adaln: str
    video_out: str
    audio_out: str


_NATIVE: Final = Names(
    video_in="video_patch_proj",
    audio_in="audio_patch_proj",
    text_in="condition_proj",
    time_in="time_embedder.proj_in",
    time_out="time_embedder.proj_out",
    refiner="token_refiner.blocks",
    refiner_norm="token_refiner.final_norm",
    blocks="blocks",
    norm1="norm1",
    norm2="norm2",
    qkv=("attn.qkv_proj",),
    out="attn.out_proj",
    q_norm="attn.q_norm",
    k_norm="attn.k_norm",
    fc1="mlp.fc1",
    fc2="mlp.fc2",
    adaln="adaln_proj.linear",
    final_norm="final_layer.norm",
    final_adaln="final_layer.adaln_proj.linear",
    video_out="final_layer.video_out",
    audio_out="final_layer.audio_out",
)

_DIFFUSERS: Final = Names(
    video_in="proj_in",
    audio_in="audio_proj_in",
    text_in="context_embedder",
    time_in="time_embedder.linear_1",
    time_out="time_embedder.linear_2",
    refiner="token_refiner.refiner_blocks",
    refiner_norm="token_refiner.final_norm",
    blocks="transformer_blocks",
    norm1="norm1",
    norm2="norm2",
    qkv=("attn.to_q", "attn.to_k", "attn.to_v"),
    out="attn.to_out.0",
    q_norm="attn.norm_q",
    k_norm="attn.norm_k",
    fc1="ff.net.0.proj",
    fc2="ff.net.2",
    adaln="adaln_proj.linear",
    final_norm="norm_out.norm",
    final_adaln="norm_out.linear",
    video_out="proj_out",
    audio_out="audio_proj_out",
)


def names_of(layout: str) -> Names:
    """The names of a layout. Raises `CheckpointError` for a layout that does not exist."""
    if layout not in LAYOUTS:
        raise CheckpointError(f"layout: got {layout!r}, expected one of {', '.join(LAYOUTS)}")
    return _DIFFUSERS if layout == "diffusers" else _NATIVE


def qkv_pieces(config: H3Config, layout: str, block: str, heads: Span) -> list[Piece]:
    """Where the normal form's rows [q; k; v] of `heads` lie on disk, in the normal form's order.

    `block` is the block's prefix (`blocks.3`). The same rows hold for the weight and for its block scales.
    """
    names = [f"{block}.{name}" for name in names_of(layout).qkv]
    dim, inner = config.attention_head_dim, config.inner_dim
    if layout == "native":
        return [
            Piece(names[0], Span((3 * head + part) * dim, (3 * head + part + 1) * dim))
            for part in range(3)
            for head in range(*heads)
        ]
    held = heads.scaled(dim)
    if layout == "diffusers":
        return [Piece(name, held) for name in names]
    return [Piece(names[0], held.shifted(part * inner)) for part in range(3)]


def fc1_pieces(config: H3Config, layout: str, block: str, ffn: Span) -> list[Piece]:
    """Where the normal form's rows [gate; up] of the FFN columns `ffn` lie on disk, in that order."""
    name = f"{block}.{names_of(layout).fc1}"
    lower, upper = Piece(name, ffn), Piece(name, ffn.shifted(config.ffn_dim))
    return [upper, lower] if layout == "diffusers" else [lower, upper]


def expected_tensors(
    config: H3Config,
    layout: str,
    quant: str,
    *,
    adaln_rank: int = 8,
    adaln_grid: int = 1025,
    body: str = "BF16",
) -> dict[str, TensorSpec]:
    """Every tensor of a checkpoint, in the order in which the published files store them.

    `adaln_rank` and `adaln_grid` are the pruned curve's columns and rows; full AdaLN ignores them. `body` is the
    dtype of what the published files keep in BF16; "F32" describes a float32 checkpoint.
    Raises `CheckpointError` for an unknown layout or quantisation, for NVFP4 outside `pruned`, and for sizes
    that NVFP4 tiles do not divide.
    """
    names = names_of(layout)
    if quant not in QUANTS:
        raise CheckpointError(f"quantisation: got {quant!r}, expected one of {', '.join(QUANTS)}")
    if quant == "nvfp4" and layout != "pruned":
        raise CheckpointError(f"quantisation nvfp4 of layout {layout}: only layout pruned is published in NVFP4")
    pruned = layout == "pruned"
    hidden = config.hidden_size
    specs: dict[str, TensorSpec] = {}

    def linear(name: str, rows: int, cols: int, dtype: str) -> None:
        specs[f"{name}.weight"] = TensorSpec(dtype, (rows, cols))
        specs[f"{name}.bias"] = TensorSpec(dtype, (rows,))

    linear(names.video_in, hidden, config.video_row_dim, "F32")
    linear(names.audio_in, hidden, config.audio_in_channels, "F32")
    linear(names.text_in, hidden, config.text_dim, body)
    if not pruned:
        linear(names.time_in, config.time_embed_hidden_dim, config.freq_dim, "F32")
        linear(names.time_out, config.time_embed_dim, config.time_embed_hidden_dim, "F32")
    else:
        specs[CURVE_TABLE] = TensorSpec("F32", (adaln_grid, adaln_rank))
    if layout != "diffusers":
        specs[INV_FREQ] = TensorSpec("F32", (config.rope_freq_dim,))
    # F16, not BF16: the pruned files keep three more mantissa bits here, and readers widen to fp32.
    adaln_dtype, adaln_cols = ("F16", adaln_rank) if pruned else (body, config.time_embed_dim)
    for index in range(config.num_refiner_layers):
        specs.update(_block(config, names, f"{names.refiner}.{index}", "bf16", body))
    specs[f"{names.refiner_norm}.weight"] = TensorSpec(body, (hidden,))
    for index in range(config.num_layers):
        specs.update(_block(config, names, f"{names.blocks}.{index}", quant, body))
        linear(f"{names.blocks}.{index}.{names.adaln}", config.adaln_dim, adaln_cols, adaln_dtype)
    specs[f"{names.final_norm}.weight"] = TensorSpec(body, (hidden,))
    linear(names.final_adaln, 2 * hidden, adaln_cols, adaln_dtype)
    linear(names.video_out, config.video_row_dim, hidden, "F32")
    linear(names.audio_out, config.audio_in_channels, hidden, "F32")
    return file_order(specs)


def file_order(specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """The same specs in the order of the published files: F32, BF16, F16, F8_E4M3, I8, U8, then by name.

    Raises `CheckpointError` for a dtype that no denoiser file holds.
    """
    unknown = sorted({spec.dtype for spec in specs.values()} - set(_DTYPE_ORDER))
    if unknown:
        raise CheckpointError(f"tensor dtypes: got {unknown}, expected some of {', '.join(_DTYPE_ORDER)}")
    return dict(sorted(specs.items(), key=lambda item: (_DTYPE_ORDER.index(item[1].dtype), item[0])))


def block_linears(config: H3Config, layout: str, block: str) -> dict[str, tuple[int, int]]:
    """(rows, columns) of a block's attention and MLP linears by name without `.weight`: those NVFP4 quantises."""
    names = names_of(layout)
    hidden, inner, ffn = config.hidden_size, config.inner_dim, config.ffn_dim
    qkv_rows = 3 * inner // len(names.qkv)
    shapes = {name: (qkv_rows, hidden) for name in names.qkv}
    shapes |= {names.out: (hidden, inner), names.fc1: (2 * ffn, hidden), names.fc2: (hidden, ffn)}
    return {f"{block}.{name}": shape for name, shape in shapes.items()}


def _block(config: H3Config, names: Names, block: str, quant: str, body: str) -> Iterator[tuple[str, TensorSpec]]:
    """One block without its AdaLN projection."""
    layout = "diffusers" if names is _DIFFUSERS else "native"
    for name in (names.norm1, names.norm2):
        yield f"{block}.{name}.weight", TensorSpec(body, (config.hidden_size,))
    for name in (names.q_norm, names.k_norm):
        yield f"{block}.{name}.weight", TensorSpec(body, (config.attention_head_dim,))
    for name, (rows, cols) in block_linears(config, layout, block).items():
        if quant == "nvfp4":
            yield from nvfp4_tensors(name, rows, cols)
        else:
            yield f"{name}.weight", TensorSpec(body, (rows, cols))


def nvfp4_tensors(name: str, rows: int, cols: int) -> Iterable[tuple[str, TensorSpec]]:
    """The four tensors that store one NVFP4 linear of shape (rows, cols).

    Raises `CheckpointError` where 128 x 64 tiles do not divide it: padded files are neither published nor read.
    """
    if rows % TILE_ROWS or cols % TILE_COLS:
        raise CheckpointError(
            f"NVFP4 {name}: got {rows} x {cols}, expected rows in multiples of {TILE_ROWS} and columns of {TILE_COLS}; "
            "store this linear as bf16"
        )
    return [
        (f"{name}.weight", TensorSpec("U8", (rows, cols // 2))),
        (f"{name}.weight_scale", TensorSpec("F8_E4M3", (rows, cols // BLOCK))),
        (f"{name}.weight_scale_2", TensorSpec("F32", ())),
        (f"{name}.comfy_quant", TensorSpec("U8", (len(COMFY_QUANT),))),
    ]
