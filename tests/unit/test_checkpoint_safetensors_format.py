"""Headers, offsets and sizes of safetensors files, against the published ones.

A pass means: what would be written for the released sizes has the tensors, the header length and the bytes of the
real files. Run: pytest tests/unit/test_checkpoint_safetensors_format.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from h3core.checkpoint.layout import expected_tensors
from h3core.checkpoint.safetensors_format import data_bytes, encode_header, file_bytes
from h3core.config import H3

DATA = Path(__file__).parents[1] / "data"
PUBLISHED = [("native", "bf16"), ("diffusers", "bf16"), ("pruned", "bf16"), ("pruned", "nvfp4")]


@pytest.mark.parametrize(("layout", "quant"), PUBLISHED)
def test_released_layouts_have_the_published_tensors_and_bytes(layout: str, quant: str) -> None:
    published = json.loads((DATA / f"denoiser_{layout}_{quant}.json").read_text())
    specs = expected_tensors(H3, layout, quant)
    assert [(n, s.dtype, list(s.shape)) for n, s in specs.items()] == [(n, *v) for n, v in published["tensors"].items()]
    assert data_bytes(specs) == published["data_bytes"]


def test_the_nvfp4_file_has_its_published_size_and_header_length() -> None:
    specs = expected_tensors(H3, "pruned", "nvfp4")
    encoded = encode_header(specs)
    assert len(encoded) - 8 == int.from_bytes(encoded[:8], "little") == 116_000
    assert file_bytes(specs) == 12_528_636_800
    offsets = json.loads(encoded[8:])["blocks.0.attn.qkv_proj.weight"]["data_offsets"]
    assert offsets == [2_913_992_614, 2_971_795_366]
