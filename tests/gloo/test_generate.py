"""`generate` under torchrun: the same latents as alone, and one clear end when the ranks do not fit together.

The refusal tests the suite's own wording, not the machine, so it carries no marker. Run both with:
pytest tests/gloo/test_generate.py
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from h3core.checkpoint.synthesize import synthesize
from h3core.config import TINY
from h3core.qualify.checks.compare import Identical, compare, equal_facts

RANKS = 3
BY_RANK = """
import os, sys
from h3core.__main__ import main
option, values = sys.argv[1].split("=")
sys.exit(main([*sys.argv[2:], option, values.split(",")[int(os.environ["RANK"])]]))
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


@pytest.mark.gloo
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


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--geometry=96x64x22,96x64x22,96x64x39", r"geometry: 96x64x22 on ranks \[0, 1\], 96x64x39 on ranks \[2\]"),
        ("--seed=1,2,1", r"seed: 1 on ranks \[0, 2\], 2 on ranks \[1\]"),
    ],
)
def test_ranks_with_different_requests_all_end_with_one_error(folder, option, message):
    clip = () if option.startswith("--geometry") else ("--geometry", "96x64x22")
    result = run(folder, "mixed", *clip, script=("by_rank.py", option))
    assert result.returncode != 0
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("h3core: error:")]
    assert re.search(message, error), error
    assert not (folder / "mixed.safetensors").exists()
