"""Files that look like a MiniMax-H3 denoiser and are not one that h3core reads: each is refused by its name.

Other programs load some of them and give noise without an error: a fused qkv in another row order, scales that did
not move with their rows. So what is not known is not guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from h3core.checkpoint.errors import CheckpointError, listed
from h3core.checkpoint.integrity import TensorInfo, parse_json
from h3core.checkpoint.shards import Checkpoint

SUPPORTED: Final = (
    "supported are the original MiniMax files (bf16), their diffusers form (bf16), and the pruned single file "
    "(bf16 or NVFP4)"
)
_WRAPPED: Final = "model.diffusion_model."
_LORA: Final = re.compile(r"(^|[._])lora_(A|B|down|up|a|b)([._]|$)|\.alpha$|\.hada_w|\.lokr_")
_TEXT: Final = re.compile(
    r"^(model\.(language_model\.|layers\.|embed_tokens|visual\.|norm\.)|visual\.|lm_head\.|language_model\.)"
)
_VAE: Final = re.compile(r"^(vae\.|first_stage_model\.|encoder\.|decoder\.|quant_conv|post_quant_conv|conv_(in|out)\.)")
_EIGHT_BIT: Final = {"I8": "int8 (int8_tensorwise or int8_convrot)", "F8_E4M3": "fp8_scaled", "F8_E5M2": "fp8_scaled"}
_MAX_QUANT_JSON: Final = 4096


def refuse_foreign(checkpoint: Checkpoint) -> None:
    """Raise `CheckpointError` for a known kind of file that is no denoiser, or a denoiser in an unsupported format.

    Every `.comfy_quant` tensor is read: it must hold {"format": "nvfp4"} and nothing else.
    """
    tensors = checkpoint.tensors
    kinds: tuple[tuple[str, Callable[[str], object], str], ...] = (
        ("a LoRA", _LORA.search, "merge it into a checkpoint first"),
        ("a text encoder", _TEXT.search, "give it as the text encoder, and the denoiser's own file here"),
        ("a VAE", _VAE.search, "give the denoiser's file"),
        (
            f"a denoiser whose names start with {_WRAPPED!r}",
            lambda name: name.startswith(_WRAPPED),
            "it was saved by a program that wraps the model: use the publisher's file",
        ),
    )
    for kind, matches, remedy in kinds:
        found = [name for name in tensors if matches(name)]
        if found:
            raise CheckpointError(
                f"{checkpoint.path}: got {kind} ({len(found)} of {len(tensors)} tensors, such as "
                f"{listed(found, 3)}); {SUPPORTED}; {remedy}"
            )
    _refuse_formats(checkpoint, tensors)


def _refuse_formats(checkpoint: Checkpoint, tensors: Mapping[str, TensorInfo]) -> None:
    """Quantised denoisers other than NVFP4 as published."""
    seen: dict[str, list[str]] = {}

    def found(what: str, names: Iterable[str]) -> None:
        for name in names:
            seen.setdefault(what, []).append(name)

    for name, info in tensors.items():
        if name.endswith(".comfy_quant"):
            fault = _quant_fault(checkpoint, name, info)
            if fault:
                found(fault, [name])
    for dtype, kind in _EIGHT_BIT.items():
        found(f"{kind} weights", (n for n, info in tensors.items() if n.endswith(".weight") and info.dtype == dtype))
    found("fp8_scaled scales", (n for n in tensors if n.endswith(".scale_weight") or n == "scaled_fp8"))
    nvfp4 = any(name.endswith(".weight_scale_2") for name in tensors)
    for suffix in (".input_scale", ".pre_quant_scale"):
        kind = f"NVFP4 with {suffix[1:]}" if nvfp4 else f"{suffix[1:]} tensors"
        found(kind, (n for n in tensors if n.endswith(suffix)))
    if not nvfp4:
        found("scaled weights of an unknown kind", (n for n in tensors if n.endswith(".weight_scale")))
    if "_quantization_metadata" in checkpoint.metadata:
        found("quantisation described in the header (_quantization_metadata)", ["__metadata__"])
    if seen:
        kinds = "; ".join(f"{what} ({len(names)}, such as {listed(names, 2)})" for what, names in seen.items())
        raise CheckpointError(
            f"{checkpoint.path}: got an unsupported quantisation: {kinds}; {SUPPORTED}; use one of these files"
        )


def _quant_fault(checkpoint: Checkpoint, name: str, info: TensorInfo) -> str:
    """What is unsupported in one `.comfy_quant` tensor; empty where it says NVFP4."""
    if info.dtype != "U8" or len(info.shape) != 1 or info.stop - info.start > _MAX_QUANT_JSON:
        return f"comfy_quant as {info.dtype} {info.shape}, expected a short U8 text"
    data = checkpoint.read(name)
    try:
        value = parse_json(data)
    except ValueError as error:
        return f"comfy_quant {data[:40]!r} is not JSON ({error})"
    if value == {"format": "nvfp4"}:
        return ""
    if value.get("format") == "nvfp4":
        return f"NVFP4 with options {value}"
    return f"comfy_quant format {value.get('format')!r}"
