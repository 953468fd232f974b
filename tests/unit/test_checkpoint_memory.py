"""Loading a shard takes the shard's memory and one tensor's, and holds on to nothing of the file.

A pass means: under a limit on anonymous memory the shard, its largest tensor and 8 MiB suffice.
Run: pytest tests/unit/test_checkpoint_memory.py
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from h3core.checkpoint.layout import expected_tensors
from h3core.checkpoint.reader import load_denoiser
from h3core.config import TINY, H3Config
from h3core.partition import shards
from h3core.weights import held_bytes, named_tensors
from tests.unit.layout_files import CONFIG, KINDS, differing


def test_weights_do_not_refer_to_the_file(layouts: dict[str, Path], tmp_path: Path) -> None:
    for kind in KINDS:
        path = tmp_path / f"{kind}.safetensors"
        path.write_bytes(layouts[kind].read_bytes())
        shard = shards(CONFIG, 4)[1]
        loaded = load_denoiser(path, shard=shard)[1]
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
        # The second one is of a file that was left alone: two views of the same file would be equal, both zero.
        assert differing(loaded, load_denoiser(layouts[kind], shard=shard)[1]) == []
        path.unlink()


MEMORY = """
import json, resource, sys
import torch
torch.set_num_threads(1)
from h3core.checkpoint.reader import DenoiserReader
from h3core.partition import shards
from h3core.weights import held_bytes
def data_bytes():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmData"))
    return int(line.split()[1]) << 10
path, warm_up, held, largest = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
DenoiserReader(warm_up).load()
reader = DenoiserReader(path)
shard = shards(reader.config, 4)[1]
free = data_bytes()
def load(allowed):
    resource.setrlimit(resource.RLIMIT_DATA, (free + allowed, resource.RLIM_INFINITY))
    return held_bytes(reader.load(shard))
try:
    load(held // 2)
    starved = False
except (MemoryError, RuntimeError) as error:
    starved = "memory" in str(error)
print(json.dumps({"starved": starved, "held": load(held + largest + (8 << 20))}))
"""


def constant_file(path: Path, config: H3Config, layout: str, quant: str) -> None:
    """A file of constants: this is about its size, not its values."""
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "U8": torch.uint8}
    tensors = {}
    for name, spec in expected_tensors(config, layout, quant).items():
        if spec.dtype == "F8_E4M3":
            tensors[name] = torch.full(spec.shape, 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
        else:
            tensors[name] = torch.ones(spec.shape, dtype=dtypes[spec.dtype])
        if name.endswith(".comfy_quant"):
            tensors[name] = torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8)
    tensors["rope.inv_freq"] = config.rope_theta ** -(torch.arange(config.rope_freq_dim) / config.rope_freq_dim)
    save_file(tensors, path)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA counts anonymous memory on Linux only")
@pytest.mark.parametrize(("layout", "quant", "layers"), [("native", "bf16", 4), ("pruned", "nvfp4", 10)])
def test_loading_a_shard_needs_its_own_memory_and_one_tensor(
    layouts: dict[str, Path], tmp_path: Path, layout: str, quant: str, layers: int
) -> None:
    """Under a limit on anonymous memory the shard, its largest tensor and 8 MiB suffice; half the shard does not."""
    config = dataclasses.replace(
        TINY, hidden_size=1024, num_attention_heads=16, ffn_dim=4096, num_layers=layers, num_refiner_layers=1
    )
    path = tmp_path / "x.safetensors"
    constant_file(path, config, layout, quant)
    weights = load_denoiser(path, shard=shards(config, 4)[1])[1]
    held, size = held_bytes(weights), path.stat().st_size
    largest = max(tensor.nbytes for _, tensor in named_tensors(weights))
    del weights
    assert 90 << 20 < size < 300 << 20
    assert held + largest + (8 << 20) < 0.95 * size, "the limit must exclude loading the whole file"
    arguments = [str(path), str(layouts["native"]), str(held), str(largest)]
    done = subprocess.run([sys.executable, "-c", MEMORY, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"starved": True, "held": held}
