"""What several test modules of the unit tier share; files are written once a session and only read."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.unit.generate_calls import LAUNCH, Inputs, make_inputs
from tests.unit.layout_files import write_layouts
from tests.unit.qualify_runs import Suite


@pytest.fixture
def process_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`h3core.__main__.main` belongs to a process of its own: put back what it sets."""
    for name in LAUNCH:
        monkeypatch.delenv(name, raising=False)
    threads, show = torch.get_num_threads(), warnings.showwarning
    yield
    torch.set_num_threads(threads)
    warnings.showwarning = show


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """What a good call of `generate` reads."""
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="session")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One checkpoint file of each kind, all of the same logical model."""
    return write_layouts(tmp_path_factory.mktemp("layouts"))


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Suite:
    """A small suite with a manifest of its own, to qualify with."""
    return Suite(pytester, monkeypatch)
