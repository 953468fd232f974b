"""Faults in code that every mode and world shares, each seen by an oracle that is not ours.

Real against virtual ranks cannot see them: both sides carry them. Run it with:
pytest tests/unit/test_planted_faults.py
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from h3core.checkpoint import DenoiserReader
from h3core.checkpoint.synthesize import synthesize
from h3core.config import TINY
from h3core.qualify.checks.compare import ComparisonError, Identical, compare
from h3core.weights import named_tensors
from tests import faults
from tests.unit.nvfp4_table import check_fp32_against_numpy, check_hand_table
from tests.unit.oracle import GEOMETRIES, SMALL, check_loop, run_oracle, save_oracle
from tests.unit.test_comm import check_bias_added_once


@pytest.fixture(scope="module")
def checks(tmp_path_factory) -> dict[str, Callable[[], object]]:
    """Oracles by name; each raises where it sees a fault."""
    folder = tmp_path_factory.mktemp("oracle")
    save_oracle(folder, SMALL)
    text_rows, clip = GEOMETRIES["64x32x124"]
    loops = {dtype: run_oracle(folder, dtype, text_rows, clip) for dtype in (torch.float32, torch.bfloat16)}
    paths = {layout: tmp_path_factory.mktemp(layout) / "model" for layout in ("native", "diffusers")}
    for layout, path in paths.items():
        synthesize(
            path.with_suffix(".safetensors") if layout == "native" else path,
            config=TINY,
            layout=layout,
            quant="bf16",
            seed=3,
        )

    def same_model_from_both_layouts() -> None:
        native, diffusers = (
            dict(named_tensors(DenoiserReader(p).load()))
            for p in (paths["native"].with_suffix(".safetensors"), paths["diffusers"])
        )
        for name, tensor in native.items():
            compare(name, tensor, diffusers[name], Identical())

    return {
        "diffusers fp32": lambda: check_loop(loops[torch.float32]),
        "diffusers bf16": lambda: check_loop(loops[torch.bfloat16]),
        "hand-written NVFP4": check_hand_table,
        "NVFP4 by numpy": check_fp32_against_numpy,
        "native = diffusers": same_model_from_both_layouts,
        "bias once": lambda: check_bias_added_once(3),
    }


MUST_SEE = {
    "swapped nibbles": (faults.swapped_nibbles, {"hand-written NVFP4", "NVFP4 by numpy"}),
    "row-major scales": (faults.row_major_scales, {"hand-written NVFP4", "NVFP4 by numpy"}),
    "native rows read as contiguous": (faults.native_rows_read_as_contiguous, {"native = diffusers"}),
    "QKV left interleaved": (faults.qkv_left_interleaved, {"diffusers fp32", "diffusers bf16"}),
    "gate and up swapped": (faults.gate_and_up_swapped, {"diffusers fp32", "diffusers bf16"}),
    "bias added on every rank": (faults.bias_on_every_rank, {"bias once"}),
    "SiLU after the cast": (faults.silu_after_the_cast, {"diffusers bf16"}),
    "AdaLN as one GEMM": (faults.adaln_as_one_gemm, {"diffusers fp32"}),
}


@pytest.mark.parametrize("fault", MUST_SEE)
def test_a_fault_in_shared_code_is_seen_by_an_oracle(checks, fault, note):
    plant, must_see = MUST_SEE[fault]
    red = set()
    with plant():
        for name, check in checks.items():
            try:
                check()
            except (ComparisonError, ValueError):
                red.add(name)
    note(
        "planted faults in shared code, and the oracles that saw them (as they must)",
        [f"{fault:38} {', '.join(sorted(red)) or 'NONE'}"],
    )
    assert must_see <= red


def test_without_a_fault_no_oracle_is_red(checks):
    for check in checks.values():
        check()
