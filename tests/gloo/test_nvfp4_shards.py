"""Row and column shards of NVFP4 keep their layout, at the released sizes, as ranks read them from a file.

A pass means that each rank's codes and un-swizzled scales are the rows and columns of the whole tensors that
its heads and FFN units stand for. Run it with: pytest -m gloo tests/gloo/test_nvfp4_shards.py
"""

from __future__ import annotations

from dataclasses import replace

import comfy_kitchen as ck
import pytest
import torch
from safetensors.torch import save_file

from h3core.config import H3, TINY
from h3core.partition import shards
from h3core.qualify.checks.compare import equal_facts
from h3core.qualify.checks.shards import block_shard, expected_shard

pytestmark = pytest.mark.gloo

CONFIGS = {"released": replace(H3, num_layers=1), "tiny": TINY}


@pytest.fixture(scope="module", params=CONFIGS)
def block(request, tmp_path_factory):
    """One block's tensors in a file, its codes, and its scales un-swizzled by comfy-kitchen."""
    config = CONFIGS[request.param]
    hidden, inner, ffn = config.hidden_size, config.inner_dim, config.ffn_dim
    sizes = {
        "qkv": ("attn.qkv_proj", 3 * inner, hidden),
        "out": ("attn.out_proj", hidden, inner),
        "fc1": ("mlp.fc1", 2 * ffn, hidden),
        "fc2": ("mlp.fc2", hidden, ffn),
    }
    generator = torch.Generator().manual_seed(1)
    tensors, codes, scales = {}, {}, {}
    for name, (key, rows, cols) in sizes.items():
        codes[name] = torch.randint(0, 256, (rows, cols // 2), generator=generator, dtype=torch.uint8)
        raw = torch.randint(0x20, 0x60, (rows, cols // 16), generator=generator, dtype=torch.uint8)
        scales[name] = ck.from_blocked(raw, rows, cols // 16).contiguous()
        tensors[f"blocks.0.{key}.weight"] = codes[name]
        tensors[f"blocks.0.{key}.weight_scale"] = raw.view(torch.float8_e4m3fn)
        tensors[f"blocks.0.{key}.weight_scale_2"] = torch.tensor(0.01)
    for key, size in (("norm1", hidden), ("norm2", hidden), ("attn.q_norm", 128), ("attn.k_norm", 128)):
        tensors[f"blocks.0.{key}.weight"] = torch.rand(size, generator=generator).bfloat16()
    path = tmp_path_factory.mktemp("block") / "block.safetensors"
    save_file(tensors, path)
    return config, str(path), codes, scales


def test_shards_of_one_block_are_the_rows_and_columns_of_the_whole(pool, world, block, record):
    config, path, codes, scales = block
    held = 0
    for rank, found in enumerate(pool.run(block_shard, path, config)):
        expected = expected_shard(config, shards(config, world)[rank], codes, scales)
        got = {name: (shape, digest) for name, (shape, digest, _) in found.items()}
        record(equal_facts(f"rank {rank} of {world}: shapes and digests", got, expected, rank=rank))
        held += sum(size for _, _, size in found.values())
    whole = sum(codes[name].numel() + scales[name].numel() + 4 for name in codes)
    record(equal_facts("bytes of all shards", held, whole + 4 * len(codes) * (world - 1)))
