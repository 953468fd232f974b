"""Arrows between modules run downward only, and nobody below the suite knows of it.

A pass means that a room can be changed without reading the rooms above it. Run it with:
pytest tests/unit/test_architecture.py
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "h3core"
LAYERS = (
    ("numerics", "config", "atomic", "attention", "layers"),
    ("partition", "nvfp4"),
    ("packing", "weights", "comm"),
    ("schedule", "linear", "adaln"),
    ("parallel", "checkpoint", "launch", "ranks"),
    ("denoiser",),
    ("denoise",),
    ("generate",),
    ("qualify",),
    ("__main__",),
)
"""From the bottom up. A module may import from lower layers and from its own package."""

LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def sources() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" if node.module == "h3core" else node.module for alias in node.names]
        else:
            continue
        rooms |= {name.split(".")[1] for name in names if name.startswith("h3core.")}
    return rooms - {"__version__"}


def test_every_room_has_its_layer():
    assert {room(path) for path in sources()} == set(LEVEL)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downward(path):
    here = room(path)
    upward = {there for there in imported_rooms(path) - {here} if LEVEL[there] >= LEVEL[here]}
    assert not upward, f"{path.name} imports {sorted(upward)}, which stand no lower than {here}"


def test_the_denoiser_knows_no_mode_by_name():
    tree = ast.parse((ROOT / "denoiser.py").read_text())
    words = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert not words & {"Ulysses", "TensorParallel", "Single"}
    assert not texts & {"ulysses", "tensor", "single"}


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_library_code_never_asserts_and_rarely_prints(path):
    tree = ast.parse(path.read_text())
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)], "python -O drops assert"
    prints = [
        n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "print"
    ]
    assert not prints or path.name in ("__main__.py", "generate.py", "cli.py")


def test_no_module_holds_a_process_group_or_works_at_import():
    for path in sources():
        text = path.read_text()
        module_level = [node for node in ast.parse(text).body if isinstance(node, ast.Expr)]
        calls = [node.lineno for node in module_level if isinstance(node.value, ast.Call)]
        assert not calls or path.name == "__main__.py", f"{path}: calls at import, lines {calls}"
        assert not re.search(r"^global ", text, re.M)


SUITE = {
    "checks": set(),
    "controls": {"checks"},
    "preflight": set(),
    "report": set(),
}
"""What each room of the suite may import of the others; the modules beside them run the session and use them all."""


@pytest.mark.parametrize("name", SUITE)
def test_rooms_of_the_suite_know_only_what_they_stand_on(name):
    others = set()
    for path in (ROOT / "qualify" / name).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("h3core.qualify"):
                parts = (node.module or "").split(".")[2:]
                others |= {parts[0]} if parts else {alias.name for alias in node.names}
    assert others - {name} <= SUITE[name]
