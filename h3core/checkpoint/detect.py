"""Which layout a checkpoint has, and whether it is all there: told from its tensors, never from its file name.

The published names are ambiguous: three publishers use one name for files of different structure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from h3core.checkpoint.errors import CheckpointError, bullets, listed
from h3core.checkpoint.foreign import SUPPORTED, refuse_foreign
from h3core.checkpoint.layout import CURVE_TABLE, INV_FREQ, TensorSpec, expected_tensors, names_of
from h3core.checkpoint.shards import Checkpoint
from h3core.config import H3Config

DIFFUSERS_CLASS: Final = "MiniMaxH3Transformer3DModel"
_MAX_BLOCKS: Final = 4096
_PATCH: Final = (1, 2, 2)
_FREQ_DIM: Final = 256
_HEAD_TO_FREQ: Final = 8
"""Head channels per rotary frequency of an axis in the released model: 128 / 16."""


class Described(Protocol):
    """Anything with a dtype and a shape: `TensorInfo` of a file, or `TensorSpec`."""

    @property
    def dtype(self) -> str:
        """As safetensors spells it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes."""


@dataclass(frozen=True, slots=True)
class Detected:
    """What a checkpoint is. `adaln_rank` and `adaln_grid` are 0 where AdaLN is full.

    `body` is the dtype of what the published files keep in BF16: "F32" in a float32 checkpoint.
    """

    layout: str
    quant: str
    config: H3Config
    adaln_rank: int
    adaln_grid: int
    body: str = "BF16"


def detect(checkpoint: Checkpoint) -> Detected:
    """Tell layout, quantisation and sizes, and hold every tensor against the layout's list.

    In layouts native and diffusers, all BF16 tensors may be F32 instead (a float32 checkpoint); some of them may not.
    Raises `CheckpointError`: for a kind of file that is not read, by name; for an unknown layout; and for missing,
    surplus, mis-shaped and wrongly typed tensors and a wrong rope.inv_freq, all in one error.
    """
    refuse_foreign(checkpoint)
    tensors = checkpoint.tensors
    layout = _layout_of(checkpoint)
    quant = "nvfp4" if any(name.endswith(".weight_scale_2") for name in tensors) else "bf16"
    if quant == "nvfp4" and layout != "pruned":
        raise CheckpointError(f"{checkpoint.path}: got NVFP4 tensors in layout {layout} (full AdaLN); {SUPPORTED}")
    grid, rank = (_dim(tensors, CURVE_TABLE, 0), _dim(tensors, CURVE_TABLE, 1)) if layout == "pruned" else (0, 0)
    config = infer_config(tensors, layout, checkpoint.config_json)
    expected = expected_tensors(config, layout, quant, adaln_rank=rank, adaln_grid=grid)
    body = "BF16"
    if layout != "pruned" and all(
        tensors[name].dtype == "F32" for name, spec in expected.items() if spec.dtype == "BF16" and name in tensors
    ):
        body = "F32"
        expected = expected_tensors(config, layout, quant, body=body)
    problems = list(_differences(tensors, expected))
    if INV_FREQ in expected and tensors.get(INV_FREQ, TensorSpec("", ()))[:2] == expected[INV_FREQ]:
        problems += _rope_problems(np.frombuffer(checkpoint.read(INV_FREQ), dtype="<f4"), config)
    if problems:
        raise bullets(
            f"{checkpoint.path}: layout {layout}, {quant}, does not hold the tensors of a denoiser of "
            f"{config.num_layers} blocks, hidden {config.hidden_size}, {config.num_attention_heads} heads; download it "
            "again, and name the folder or index where it is sharded:",
            problems,
        )
    return Detected(layout, quant, config, rank, grid, body)


def infer_config(
    tensors: Mapping[str, Described], layout: str, config_json: Mapping[str, Any] | None = None
) -> H3Config:
    """The sizes of the model that these tensors belong to.

    A `config.json` of diffusers is taken at its word (`detect` holds the tensors against it). Without one, sizes that
    no tensor shows are the released model's: patch 1 x 2 x 2, eps, theta, and in `diffusers` a rotary frequency per
    eight head channels. A pruned file no longer shows the time embedding, which nothing reads: its widths are set in
    the released proportion to the hidden size.
    Raises `CheckpointError` where a tensor that shows a size is missing or sizes do not divide.
    """
    if config_json is not None and _is_ours(config_json, layout):
        try:
            return H3Config.from_dict(config_json)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"config.json beside the checkpoint: {error}; download it again") from error
    names = names_of(layout)
    blocks, refiner = _indices(tensors, names.blocks), _indices(tensors, names.refiner)
    block = f"{names.blocks}.{min(blocks)}"
    hidden = _dim(tensors, f"{block}.{names.norm1}.weight", 0)
    head_dim = _dim(tensors, f"{block}.{names.q_norm}.weight", 0)
    rows_per_head = 3 * head_dim // len(names.qkv)
    qkv = f"{block}.{names.qkv[0]}.weight"
    rows = _dim(tensors, qkv, 0)
    if not rows_per_head or rows % rows_per_head:
        raise CheckpointError(f"{qkv}: got {rows} rows, expected a multiple of {rows_per_head} (head_dim {head_dim})")
    fc2 = f"{block}.{names.fc2}.weight"
    video = _dim(tensors, f"{names.video_in}.weight", 1)
    patch = _PATCH if video % 4 == 0 else (1, 1, 1)
    if layout == "pruned":
        freq, time_hidden, time_dim = _FREQ_DIM, hidden, max(1, hidden // 2)
    else:
        freq, time_hidden = _dim(tensors, f"{names.time_in}.weight", 1), _dim(tensors, f"{names.time_in}.weight", 0)
        time_dim = _dim(tensors, f"{names.time_out}.weight", 0)
    try:
        return H3Config(
            num_attention_heads=rows // rows_per_head,
            attention_head_dim=head_dim,
            hidden_size=hidden,
            num_layers=max(blocks) + 1,
            num_refiner_layers=max(refiner) + 1,
            # Two codes a byte.
            ffn_dim=_dim(tensors, fc2, 1) * (2 if tensors[fc2].dtype == "U8" else 1),
            in_channels=video // (patch[1] * patch[2]),
            audio_in_channels=_dim(tensors, f"{names.audio_in}.weight", 1),
            patch_size=patch,
            text_dim=_dim(tensors, f"{names.text_in}.weight", 1),
            freq_dim=freq,
            time_embed_hidden_dim=time_hidden,
            time_embed_dim=time_dim,
            rope_freq_dim=head_dim // _HEAD_TO_FREQ if layout == "diffusers" else _dim(tensors, INV_FREQ, 0),
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"sizes told from the tensors: {error}; this is no MiniMax-H3 denoiser") from error


def _layout_of(checkpoint: Checkpoint) -> str:
    """The layout that the names belong to."""
    tensors = checkpoint.tensors
    if CURVE_TABLE in tensors:
        return "pruned"
    for layout in ("diffusers", "native"):
        names = names_of(layout)
        block = re.compile(rf"{re.escape(names.blocks)}\.\d+\.{re.escape(names.qkv[0])}\.weight")
        if any(block.fullmatch(name) for name in tensors):
            return layout
    raise CheckpointError(
        f"{checkpoint.path}: got an unknown layout of {len(tensors)} tensors, such as {listed(sorted(tensors), 5)}; "
        f"{SUPPORTED}; use one of these files, or name the folder of the shards"
    )


def _is_ours(config_json: Mapping[str, Any], layout: str) -> bool:
    """Whether a config.json is diffusers' one for this model; a stranger's is an error only where it must be ours."""
    name = config_json.get("_class_name")
    if name == DIFFUSERS_CLASS or (name is None and layout == "diffusers"):
        return True
    if layout == "diffusers":
        raise CheckpointError(
            f"config.json beside the checkpoint: got class {name!r}, expected {DIFFUSERS_CLASS}; the files of two "
            "models are in one folder"
        )
    return False


def _indices(tensors: Mapping[str, Described], prefix: str) -> set[int]:
    """Block numbers below a prefix. Raises `CheckpointError` for none, or for one that cannot be meant."""
    numbered = re.compile(rf"{re.escape(prefix)}\.(\d{{1,9}})\.")
    found = {int(match[1]) for name in tensors if (match := numbered.match(name))}
    # The list of expected tensors is built from this number: a stray name must not make it endless.
    if not found or max(found) >= _MAX_BLOCKS:
        got = f"block {max(found)}" if found else "no tensors"
        raise CheckpointError(f"{prefix}.*: got {got}, expected blocks from 0 to at most {_MAX_BLOCKS - 1}")
    return found


def _dim(tensors: Mapping[str, Described], name: str, axis: int) -> int:
    """One size of one tensor."""
    if name not in tensors:
        raise CheckpointError(f"{name}: missing, and the model's sizes cannot be told without it; download it again")
    shape = tensors[name].shape
    if len(shape) <= axis:
        raise CheckpointError(f"{name}: got shape {shape}, expected at least {axis + 1} dimensions; download it again")
    return shape[axis]


def _differences(tensors: Mapping[str, Described], expected: Mapping[str, TensorSpec]) -> Iterator[str]:
    """One line for each class of difference: missing, surplus, shape, dtype."""
    both = [name for name in expected if name in tensors]
    classes = {
        "missing": [name for name in expected if name not in tensors],
        "surplus": [name for name in tensors if name not in expected],
        "with a wrong shape": [
            f"{name}: got {tensors[name].shape}, expected {expected[name].shape}"
            for name in both
            # The text of a .comfy_quant has been read; how it is spaced does not matter.
            if tensors[name].shape != expected[name].shape and not name.endswith(".comfy_quant")
        ],
        "with a wrong dtype": [
            f"{name}: got {tensors[name].dtype}, expected {expected[name].dtype}"
            for name in both
            if tensors[name].dtype != expected[name].dtype
        ],
    }
    for kind, items in classes.items():
        if items:
            yield f"{len(items)} tensors {kind}: {listed(items)}"


def _rope_problems(stored: np.ndarray[Any, np.dtype[np.float32]], config: H3Config) -> Iterator[str]:
    """Rotary frequencies that are not theta^(-i/n): the model computes them and would not notice."""
    count = config.rope_freq_dim
    right = config.rope_theta ** -(np.arange(count, dtype=np.float64) / count)
    wrong = ~np.isclose(stored, right, rtol=1e-5, atol=0)
    if wrong.any():
        at = int(wrong.argmax())
        yield (
            f"{INV_FREQ}: {int(wrong.sum())} of {count} differ from {config.rope_theta:g}^(-i/{count}): at i={at} "
            f"got {stored[at]:.9g}, expected {right[at]:.9g}"
        )
