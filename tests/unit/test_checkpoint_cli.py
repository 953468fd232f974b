"""`h3core checkpoint synthesize`: what the command line writes, prints and refuses.

A pass means: it writes exactly what its dry run says, a mistake is one line and code 2, and a terminated run leaves
nothing. Run: pytest tests/unit/test_checkpoint_cli.py
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from h3core.checkpoint.cli import FORMATS, add_parser
from h3core.checkpoint.layout import expected_tensors
from h3core.checkpoint.safetensors_format import file_bytes
from h3core.checkpoint.synthesize import plan_files
from h3core.config import H3, TINY
from tests.unit.synthetic_checkpoints import written


def command(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["checkpoint", "synthesize", *map(str, arguments)])
    return int(args.run(args))


@pytest.mark.parametrize("format_", FORMATS)
def test_the_dry_run_writes_nothing_and_ends_with_the_bytes_that_the_run_then_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], format_: str
) -> None:
    out = tmp_path / "out"
    assert command(out, "--size", "tiny", "--format", format_, "--dry-run") == 0
    assert list(tmp_path.iterdir()) == []
    lines = capsys.readouterr().out.splitlines()
    layout, quant = FORMATS[format_]
    specs = expected_tensors(TINY, layout, quant)
    assert len(lines) == 1 + len(specs) + 1
    assert [line.split()[:2] for line in lines[1:-1]] == [[name, spec.dtype] for name, spec in specs.items()]
    assert command(out, "--size", "tiny", "--format", format_) == 0
    files = [out] if out.is_file() else list(out.glob("*.safetensors"))
    assert int(lines[-1]) == sum(file.stat().st_size for file in files) == file_bytes(specs)
    captured = capsys.readouterr()
    assert captured.err == ""  # no progress bar where there is no terminal


@pytest.mark.parametrize("format_", FORMATS)
def test_the_dry_run_of_the_released_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str], format_: str) -> None:
    assert command(tmp_path / "out", "--size", "h3", "--format", format_, "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    layout, quant = FORMATS[format_]
    files = plan_files(tmp_path / "out", expected_tensors(H3, layout, quant), layout)
    assert sum(line.startswith(str(tmp_path)) for line in lines) == len(files)
    assert int(lines[-1]) == sum(map(file_bytes, files.values()))
    if format_ == "nvfp4-pruned":
        assert lines[-1] == "12528636800"
        assert lines[-2] == "blocks.9.mlp.fc2.weight U8 5376x7168 12489985624-12528520792"
        assert lines[0].endswith("12528636800 bytes, header 116000, 1132 tensors")


def test_a_mistake_is_one_line_and_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    arguments = (out, "--size", "tiny", "--format", "nvfp4-pruned")
    assert command(*arguments) == 0
    before = out.read_bytes()
    capsys.readouterr()
    assert command(*arguments, "--seed", 1) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"h3core: error: output {out}: exists; ")
    assert error.count("\n") == 1
    assert out.read_bytes() == before
    assert command(*arguments, "--seed", 1, "--force") == 0
    assert out.read_bytes() != before
    assert command(tmp_path / ("n" * 300), "--size", "tiny", "--format", "native") == 2
    assert "h3core: error: [Errno 36] File name too long" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_terminated_run_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    code = (
        "import argparse, signal, sys\n"
        # A shell starts its background jobs with SIGINT ignored, and Python then leaves it so.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from h3core.checkpoint.cli import add_parser\n"
        "parser = argparse.ArgumentParser()\n"
        "add_parser(parser.add_subparsers(required=True))\n"
        "args = parser.parse_args()\n"
        "sys.exit(args.run(args))\n"
    )
    arguments = ["checkpoint", "synthesize", str(tmp_path / "out"), "--size", "h3", "--format", "nvfp4-pruned"]
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not any(p.stat().st_size > 1 << 20 for p in tmp_path.iterdir()):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
        os.kill(process.pid, number)
        assert process.wait(30) != 0
    finally:
        process.kill()
        process.wait()
    assert list(tmp_path.iterdir()) == []


def test_the_seed_has_its_default(tmp_path: Path) -> None:
    assert command(tmp_path / "a", "--size", "tiny", "--format", "nvfp4-pruned") == 0
    written(tmp_path, "pruned", "nvfp4", seed=440420, name="b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
