"""Our whole denoising loop equals diffusers 0.42.1's, bit for bit, on one CPU thread.

A pass means that packing, positions, schedules, AdaLN, refiner, blocks, heads and rounding are the model's.
It holds what sharded comparisons cannot see, because both of their sides share our code. Run it with:
pytest tests/unit/test_oracle.py
"""

from __future__ import annotations

import pytest
import torch

from tests.unit.oracle import CONFIGS, GEOMETRIES, check_loop, run_oracle, save_oracle


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One saved oracle model for each config."""
    paths = {}
    for name, config in CONFIGS.items():
        paths[name] = tmp_path_factory.mktemp(name)
        save_oracle(paths[name], config)
    return paths


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("config", CONFIGS)
def test_denoise_loop_equals_diffusers_bit_for_bit(folders, config, geometry, dtype, record):
    text_rows, clip = GEOMETRIES[geometry]
    record(check_loop(run_oracle(folders[config], dtype, text_rows, clip)))


@pytest.mark.parametrize("mode", ["ulysses", "tensor"])
def test_both_modes_at_world_one_equal_diffusers(folders, mode, record):
    text_rows, clip = GEOMETRIES["64x32x124"]
    record(check_loop(run_oracle(folders["tiny"], torch.bfloat16, text_rows, clip), mode))
