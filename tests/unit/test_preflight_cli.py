"""`h3core preflight`: what it prints, its exit codes, and how much memory it takes a checkpoint to need.

A pass means: a script can trust the exit code, and a box with GPUs never passes for one without.
Run: pytest tests/unit/test_preflight_cli.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from h3core.qualify.preflight import Finding, NotMeasured
from h3core.qualify.preflight.cli import add_parser, device_of, exit_code, ranks_that_fit
from h3core.qualify.preflight.judging import REQUIRED
from h3core.qualify.preflight.loading import host_bytes
from tests.unit.preflight_boxes import healthy_root, read, torch_build


def command(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["preflight", *map(str, arguments)])
    return int(args.run(args))


def findings(**states: Any) -> list[Finding]:
    return [Finding(name, states.get(name.replace(" ", "_"), "ok"), "got") for name in (*REQUIRED, "ACS")]


@pytest.mark.parametrize(
    ("states", "code"),
    [
        ({}, 0),
        ({"driver": "warning", "ACS": "not measured"}, 0),
        ({"ACS": "problem"}, 1),
        ({"driver": "not measured"}, 10),
        ({"GPU_list": "not measured"}, 10),
        ({"driver": "not measured", "GPUs": "problem"}, 1),
    ],
)
def test_exit_codes(states: dict[str, str], code: int) -> None:
    assert exit_code(findings(**states)) == code


def test_a_run_on_the_cpu_needs_no_reading_of_gpus() -> None:
    assert exit_code([Finding("GPUs", "not measured", "the Gloo tier uses no GPU")]) == 0


@pytest.mark.parametrize(
    ("environ", "nvml", "count", "device"),
    [
        ({}, "nvml_pro6000_x8.json", 8, "cuda"),
        ({}, "nvml_pro6000_x8.json", 0, "cuda"),  # an old driver, or a torch for the CPU
        ({}, None, 2, "cuda"),
        ({}, None, 0, "cpu"),
        ({}, None, NotMeasured("no"), "cpu"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "nvml_pro6000_x8.json", 0, "cpu"),
        ({"CUDA_VISIBLE_DEVICES": "9"}, "nvml_pro6000_x8.json", 0, "cuda"),
    ],
)
def test_auto_never_takes_a_box_with_gpus_for_one_without(
    tmp_path: Path, environ: dict[str, str], nvml: str | None, count: int, device: str
) -> None:
    box = read(healthy_root(tmp_path), nvml=nvml, build=torch_build(count), environ=environ)
    assert device_of(box, "auto") == device
    assert device_of(box, "cpu") == "cpu"
    assert device_of(box, "cuda") == "cuda"


def test_memory_is_counted_for_one_rank_on_each_gpu(tmp_path: Path) -> None:
    root = healthy_root(tmp_path)
    assert ranks_that_fit(read(root), "cuda") == 8
    assert ranks_that_fit(read(root), "cpu") == 1
    assert ranks_that_fit(read(root, build=torch_build(0)), "cuda") == 1


def test_on_the_cpu_it_prints_what_the_gloo_tier_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--device", "cpu", "--world", 1) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("preflight: ")
    assert "not measured  GPUs         the Gloo tier uses no GPU" in out
    assert any("host memory" in line for line in out)


def test_json_holds_findings_and_facts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("H3_API_KEY", "hunter2")
    command("--device", "cpu", "--world", 2, "--json")
    out = capsys.readouterr().out
    assert "hunter2" not in out
    said = json.loads(out)
    assert (said["device"], said["world"]) == ("cpu", 2)
    assert [found["name"] for found in said["findings"]] == ["GPUs", "/dev/shm", "host memory", "CPUs"]
    assert said["environment"]["NCCL_DEBUG"] == "INFO"
    assert said["machine"]["torch"] == torch.__version__


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="this machine has GPUs")
def test_gpus_that_are_asked_for_and_not_there_are_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--device", "cuda", "--world", 2) == 1
    out = capsys.readouterr().out
    assert "PROBLEM       GPUs" in out
    assert "expected: 2, one for each rank" in out


@pytest.mark.parametrize("world", ["0", "-1", "two", "1.5"])
def test_a_number_of_ranks_is_a_number(world: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command(f"--world={world}")
    assert f"got {world!r}, expected a number of ranks from 1 on" in capsys.readouterr().err


def checkpoint(path: Path, *sizes: int) -> Path:
    save_file({f"t{i}": torch.zeros(size, dtype=torch.uint8) for i, size in enumerate(sizes)}, path, {"format": "pt"})
    return path


def test_memory_that_loading_takes(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "m.safetensors", 1000, 300, 200)
    assert host_bytes(path, "cuda", 8) == 8 * 1000
    assert host_bytes(path, "cpu", 2) == 2 * (1500 + 1000)
    assert host_bytes(tmp_path, "cuda", 1) == 1000


def test_memory_that_loading_shards_takes(tmp_path: Path) -> None:
    checkpoint(tmp_path / "m-00001-of-00002.safetensors", 1000)
    checkpoint(tmp_path / "m-00002-of-00002.safetensors", 700)
    checkpoint(tmp_path / "another.safetensors", 5000)
    index = tmp_path / "m.safetensors.index.json"
    weights = {"a": "m-00001-of-00002.safetensors", "b": "m-00002-of-00002.safetensors"}
    index.write_text(json.dumps({"weight_map": weights}))
    for named in (index, tmp_path):
        assert host_bytes(named, "cpu", 1) == 1700 + 1000


def test_a_checkpoint_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.safetensors").write_text("no weights at all, only this text")
    (tmp_path / "short.safetensors").write_bytes(b"abc")
    (tmp_path / "index.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    checkpoint(tmp_path / "no_tensor.safetensors")
    for name, words in {
        "text.safetensors": "got no safetensors file",
        "short.safetensors": "got no safetensors file",
        "index.json": "got no index of shards",
        "empty": "got a folder with 0 checkpoints",
        "no_tensor.safetensors": "got no tensor",
        "missing.safetensors": "No such file",
    }.items():
        assert command("--device", "cpu", f"--checkpoint={tmp_path / name}") == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("h3core: error: ")
        assert words in captured.err
        assert name in captured.err


def test_memory_is_held_against_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = checkpoint(tmp_path / "m.safetensors", 1 << 20)
    command("--device", "cpu", "--world", 2, f"--checkpoint={path}")
    assert "; loading takes 4 MiB" in capsys.readouterr().out
    command("--device", "cpu", "--world", 1 << 20, f"--checkpoint={path}")
    assert "expected: at least 2048 GiB for loading" in capsys.readouterr().out
