"""One logical model written in every layout, by hand from separate q, k, v, gate and up matrices.

So reading is checked against what `checkpoints.md` says, not against the package's own tables.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from h3core.config import TINY, H3Config
from h3core.nvfp4 import quantize
from h3core.weights import named_tensors

KINDS = ["native", "diffusers", "pruned", "nvfp4"]
RANK, GRID = 4, 9

# Sizes that differ from one another, so that a swapped cut cannot have the right shape.
CONFIG = dataclasses.replace(TINY, num_layers=2, num_refiner_layers=1, text_dim=64)
Files = dict[str, Tensor]


def logical(config: H3Config, seed: int = 0) -> Files:
    """The model in native names, but with q, k, v and gate, up apart; everything random, norms too."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    hidden, inner, ffn, dim = config.hidden_size, config.inner_dim, config.ffn_dim, config.attention_head_dim
    time_hidden, fp32 = config.time_embed_hidden_dim, torch.float32
    model: Files = {}

    def linear(name: str, rows: int, cols: int, dtype: torch.dtype = torch.bfloat16) -> None:
        model[f"{name}.weight"], model[f"{name}.bias"] = make(rows, cols, dtype=dtype), make(rows, dtype=dtype)

    linear("video_patch_proj", hidden, config.video_row_dim, fp32)
    linear("audio_patch_proj", hidden, config.audio_in_channels, fp32)
    linear("condition_proj", hidden, config.text_dim)
    linear("time_embedder.proj_in", time_hidden, config.freq_dim, fp32)
    linear("time_embedder.proj_out", config.time_embed_dim, time_hidden, fp32)
    refiner = [f"token_refiner.blocks.{index}" for index in range(config.num_refiner_layers)]
    blocks = [f"blocks.{index}" for index in range(config.num_layers)]
    for block in [*refiner, *blocks]:
        for name in ("norm1", "norm2"):
            model[f"{block}.{name}.weight"] = make(hidden)
        for name in ("q", "k"):
            model[f"{block}.attn.{name}_norm.weight"] = make(dim)
        for name in "qkv":
            model[f"{block}.{name}"] = make(inner, hidden)
        for name in ("gate", "up"):
            model[f"{block}.{name}"] = make(ffn, hidden)
        model[f"{block}.attn.out_proj.weight"] = make(hidden, inner)
        model[f"{block}.mlp.fc2.weight"] = make(hidden, ffn)
    for block in blocks:
        linear(f"{block}.adaln_proj.linear", config.adaln_dim, config.time_embed_dim)
    model["token_refiner.final_norm.weight"] = make(hidden)
    model["final_layer.norm.weight"] = make(hidden)
    linear("final_layer.adaln_proj.linear", 2 * hidden, config.time_embed_dim)
    linear("final_layer.video_out", config.video_row_dim, hidden, fp32)
    linear("final_layer.audio_out", config.audio_in_channels, hidden, fp32)
    count = config.rope_freq_dim
    model["rope.inv_freq"] = config.rope_theta ** -(torch.arange(count) / count)
    return model


def parts(model: Files) -> tuple[list[str], Files]:
    """Blocks that have fused tensors, and the model without those."""
    blocks = [name.removesuffix(".q") for name in model if name.endswith(".q")]
    fused = {f"{block}.{part}" for block in blocks for part in ("q", "k", "v", "gate", "up")}
    return blocks, {name: tensor for name, tensor in model.items() if name not in fused}


def native(model: Files, config: H3Config) -> Files:
    blocks, files = parts(model)
    for block in blocks:
        heads = [model[f"{block}.{part}"].chunk(config.num_attention_heads) for part in "qkv"]
        rows = [heads[part][head] for head in range(config.num_attention_heads) for part in range(3)]
        files[f"{block}.attn.qkv_proj.weight"] = torch.cat(rows)
        files[f"{block}.mlp.fc1.weight"] = torch.cat([model[f"{block}.gate"], model[f"{block}.up"]])
    return files


RENAMES = [
    (r"^video_patch_proj", "proj_in"),
    (r"^audio_patch_proj", "audio_proj_in"),
    (r"^condition_proj", "context_embedder"),
    (r"^time_embedder\.proj_in", "time_embedder.linear_1"),
    (r"^time_embedder\.proj_out", "time_embedder.linear_2"),
    (r"^blocks", "transformer_blocks"),
    (r"^token_refiner\.blocks", "token_refiner.refiner_blocks"),
    (r"attn\.q_norm", "attn.norm_q"),
    (r"attn\.k_norm", "attn.norm_k"),
    (r"attn\.out_proj", "attn.to_out.0"),
    (r"mlp\.fc2", "ff.net.2"),
    (r"^final_layer\.norm", "norm_out.norm"),
    (r"^final_layer\.adaln_proj\.linear", "norm_out.linear"),
    (r"^final_layer\.video_out", "proj_out"),
    (r"^final_layer\.audio_out", "audio_proj_out"),
]


def diffusers(model: Files, config: H3Config) -> Files:
    blocks, files = parts(model)
    del files["rope.inv_freq"]
    for block in blocks:
        for part in "qkv":
            files[f"{block}.attn.to_{part}.weight"] = model[f"{block}.{part}"]
        files[f"{block}.ff.net.0.proj.weight"] = torch.cat([model[f"{block}.up"], model[f"{block}.gate"]])
    for pattern, replacement in RENAMES:
        files = {re.sub(pattern, replacement, name): tensor for name, tensor in files.items()}
    return files


def pruned(model: Files, config: H3Config) -> Files:
    blocks, files = parts(model)
    files = {name: tensor for name, tensor in files.items() if not name.startswith("time_embedder.")}
    generator = torch.Generator().manual_seed(1)
    files["adaln_t_table"] = torch.randn(GRID, RANK, generator=generator)
    for name in list(files):
        if "adaln_proj" in name:
            shape = (files[name].shape[0], RANK) if name.endswith("weight") else files[name].shape
            files[name] = torch.randn(shape, generator=generator).half()
    for block in blocks:
        files[f"{block}.attn.qkv_proj.weight"] = torch.cat([model[f"{block}.{part}"] for part in "qkv"])
        files[f"{block}.mlp.fc1.weight"] = torch.cat([model[f"{block}.gate"], model[f"{block}.up"]])
    return files


def nvfp4(model: Files, config: H3Config) -> Files:
    files = pruned(model, config)
    for name in [
        name for name in files if re.fullmatch(r"blocks\.\d+\.(attn\.(qkv|out)_proj|mlp\.fc[12])\.weight", name)
    ]:
        weight, base = quantize(files[name]), name.removesuffix(".weight")
        files[name] = weight.codes
        files[f"{base}.weight_scale"] = weight.scales
        files[f"{base}.weight_scale_2"] = weight.scale_2
        files[f"{base}.comfy_quant"] = torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8)
    return files


WRITERS: dict[str, Callable[[Files, H3Config], Files]] = {
    "native": native,
    "diffusers": diffusers,
    "pruned": pruned,
    "nvfp4": nvfp4,
}


def write_layouts(folder: Path) -> dict[str, Path]:
    """One file of each kind, all of the same logical model: `logical(CONFIG)`."""
    model = logical(CONFIG)
    paths = {kind: folder / kind / "model.safetensors" for kind in KINDS}
    for kind, path in paths.items():
        path.parent.mkdir()
        save_file({name: t.contiguous() for name, t in WRITERS[kind](model, CONFIG).items()}, path)
    return paths


def same_bytes(left: Tensor, right: Tensor) -> bool:
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
    )


def differing(left: Any, right: Any) -> list[str]:
    """Paths of tensors that differ between two structures; all of them where the paths themselves differ."""
    ours, theirs = dict(named_tensors(left)), dict(named_tensors(right))
    if not ours or set(ours) != set(theirs):
        return sorted(set(ours) ^ set(theirs)) or ["nothing"]
    return [name for name, tensor in ours.items() if not same_bytes(tensor, theirs[name])]
