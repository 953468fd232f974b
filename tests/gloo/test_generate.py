"""`generate` under torchrun: the same latents as alone, and one clear end when the ranks do not fit together.

Run it with: pytest -m gloo tests/gloo/test_generate.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from h3core.checkpoint.synthesize import synthesize
from h3core.config import TINY
from h3core.qualify.compare import Identical, compare, equal_facts

pytestmark = pytest.mark.gloo

RANKS = 3
BY_RANK = """
import os, sys
from h3core.__main__ import main
geometry = sys.argv[1].split(",")[int(os.environ["RANK"])]
sys.exit(main([*sys.argv[2:], "--geometry", geometry]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("generate")
    synthesize(path / "tiny.safetensors", config=TINY, layout="pruned", quant="nvfp4", seed=5)
    embeds = torch.randn(19, TINY.text_dim, generator=torch.Generator().manual_seed(1))
    save_file({"prompt_embeds": embeds.bfloat16()}, path / "prompt.safetensors")
    (path / "by_rank.py").write_text(BY_RANK)
    return path


def run(folder: Path, name: str, *words: str, ranks: int = RANKS, script: tuple[str, ...] = ("-m", "h3core")):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    arguments = [
        "generate",
        "--checkpoint",
        "tiny.safetensors",
        "--prompt-embeds",
        "prompt.safetensors",
        "--steps",
        "2",
    ]
    outputs = ["--device", "cpu", "--out", f"{name}.safetensors", "--report", f"{name}.json"]
    return subprocess.run(
        [sys.executable, *launcher, *script, *arguments, *outputs, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_ranks_under_torchrun_write_the_latents_of_one_process(folder, record):
    clip = ("--geometry", "96x64x22")
    assert run(folder, "alone", *clip, ranks=1).returncode == 0
    assert run(folder, "ulysses", *clip).returncode == 0
    alone, ulysses = (load_file(folder / f"{name}.safetensors") for name in ("alone", "ulysses"))
    for modality in ("video", "audio"):
        record(compare(f"{modality}, {RANKS} ranks", ulysses[modality], alone[modality], Identical()))
    report = json.loads((folder / "ulysses.json").read_text())
    record(equal_facts("ranks in the report", [rank["rank"] for rank in report["ranks"]], list(range(RANKS))))
    record(equal_facts("mode and world", (report["mode"], report["world"]), ("ulysses", str(RANKS))))


def test_ranks_with_different_clips_all_end_and_both_plans_are_shown(folder):
    result = run(folder, "mixed", script=("by_rank.py", "96x64x22,96x64x22,96x64x39"))
    assert result.returncode != 0
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("h3core: error:")]
    assert "ranks disagree on the split plan" in error
    assert "ranks [0, 1]" in error
    assert "ranks [2]" in error
    assert not (folder / "mixed.safetensors").exists()
