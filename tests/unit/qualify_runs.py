"""A small suite of its own, with a manifest of its own, to qualify with in the tests of the plugin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from h3core.qualify import manifest

GLOO = ("-m", "gloo", "--world=2")
FOREIGN = ("PYTEST_ADDOPTS", "H3_", "GITHUB_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC")
REPOSITORY = Path(__file__).parents[2]

CONFTEST = """
import os
os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")
from h3core.qualify import manifest
from h3core.qualify.manifest import Requirement

manifest.MANIFEST = (
    Requirement("gloo", "test_a.py::test_bytes", "transport", 2, 12, by_rank=False),
    Requirement("gloo", "test_a.py::test_loop", "parity", 1, 6, modes=("ulysses", "tensor"), by_rank=False),
    Requirement("gloo", "test_b.py::test_once", "numerics", 1, 6, variants=("x", "y"), worlds="one", by_rank=False),
    Requirement("gloo", "test_c.py::test_control", "control", 1, 1, ("flip",), worlds="control", by_rank=False),
)
pytest_plugins = ["h3core.qualify.plugin"]
"""

TEST_A = """
import pytest, torch
from h3core.qualify.checks.compare import Identical, compare

pytestmark = pytest.mark.gloo
X = torch.arange(6.0)

def test_bytes(world, record):
    record([compare("bytes", X, X.clone(), Identical()) for _ in range(2)])

def test_loop(world, mode, record):
    record(compare(f"loop {mode}", X + world, X + world, Identical()))
"""

TEST_B = """
import pytest, torch
from h3core.qualify.checks.compare import Identical, compare

@pytest.mark.gloo
@pytest.mark.parametrize("name", ["x", "y"])
def test_once(name, record):
    record(compare(name, torch.arange(6.0), torch.arange(6.0), Identical()))

def test_without_a_tier():
    pass
"""

TEST_C = """
import pytest
from h3core.qualify.checks.compare import equal_facts
from h3core.qualify.controls import Caught

@pytest.mark.gloo
@pytest.mark.parametrize("control", ["flip"])
def test_control(control, control_world, record, caught):
    record(equal_facts("caught", 1, 1))
    caught("flip", Caught("a flipped bit", control_world, "the digest differed", []))
"""

POOLED = """
import os, signal, time
import pytest, torch
import torch.distributed as dist
from h3core.qualify.checks.compare import equal_facts

pytestmark = pytest.mark.gloo

def total(rank):
    count = torch.tensor(rank.rank)
    dist.all_reduce(count, group=rank.group)
    return equal_facts("sum of ranks", int(count), sum(range(rank.world)), rank=rank.rank)

def killed(rank):
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return total(rank)

def asleep(rank):
    if rank.rank == 1:
        time.sleep(600)
    return total(rank)

def test_sum(pool, world, record):
    record(pool.run(TASK))
"""
"""A check with real ranks; TASK stands for the task."""


@dataclass(frozen=True)
class Result:
    """How a run ended, and what it said."""

    returncode: int
    stdout: str
    stderr: str


class Suite:
    """A folder with that suite, qualified in a pytest of its own: `run` in this process, `run_apart` in a new one."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder = pytester.path
        self._pytester, self._monkeypatch = pytester, monkeypatch
        for name in os.environ:
            if name.startswith(FOREIGN):
                monkeypatch.delenv(name)
        monkeypatch.setattr(manifest, "MANIFEST", ())  # the suite's conftest puts its own there
        (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers -p no:cacheprovider\n")
        self.write("conftest.py", CONFTEST)
        for name, text in (("test_a.py", TEST_A), ("test_b.py", TEST_B), ("test_c.py", TEST_C)):
            self.write(name, text)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def replace(self, name: str, old: str, new: str) -> None:
        text = (self.folder / name).read_text()
        if old not in text:
            raise ValueError(f"{name}: no {old!r}")
        self.write(name, text.replace(old, new))

    def pooled(self, task: str) -> None:
        """One check with real ranks instead of the others, required at each world."""
        row = '    Requirement("gloo", "test_a.py::test_sum", "transport", 1, 1),\n)'
        self.write(
            "conftest.py",
            CONFTEST.split("manifest.MANIFEST = (")[0] + f"manifest.MANIFEST = (\n{row}\n"
            'pytest_plugins = ["h3core.qualify.plugin"]\n',
        )
        self.write("test_a.py", POOLED.replace("TASK", task))
        for name in ("test_b.py", "test_c.py"):
            (self.folder / name).unlink()

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "pytest", "-q", *words]

    def environment(self, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
        return {**kept, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": "", **more}

    def run(self, *words: str, **environment: str) -> Result:
        """Qualify in this process; a tenth of the time of a new one."""
        with self._monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            result = self._pytester.runpytest_inprocess("-q", *words)
        return Result(int(result.ret), result.stdout.str(), result.stderr.str())

    def run_apart(self, *words: str, **environment: str) -> Result:
        """Qualify in a new process, as a user does."""
        done = self._subprocess(*words, **environment)
        return Result(done.returncode, done.stdout, done.stderr)

    def _subprocess(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words),
            cwd=self.folder,
            env=self.environment(**environment),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def report(self, folder: str | Path = "report") -> dict:
        return json.loads((self.folder / folder / "report.json").read_text())


def last_line(result: Result) -> str:
    """The last line of the terminal."""
    return result.stdout.rstrip().splitlines()[-1] if result.stdout.strip() else ""


def outcome(suite: Suite) -> tuple[str, int]:
    verdict = suite.report()["verdict"]
    return verdict["outcome"], verdict["exit_code"]
