# Two commands: `make qualify` and `make test`. Both do their own set-up, in .venv, from a fresh clone.
# PYTHON=... picks the interpreter whose torch is used; torch is installed only where it has none.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: qualify test setup lint clean

qualify: setup  ## The Gloo tier on this machine's CPU: one rank against 2, 4, 6 and 8, in both modes.
	$(BIN)/python -m h3core qualify gloo --report-dir=report

test: setup lint  ## Everything that needs no GPU: style, types, unit tests, the Gloo tier.
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

setup: $(READY)

$(READY): pyproject.toml constraints.txt tools/make_venv.py
	$(PYTHON) tools/make_venv.py $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[qualify,dev]'
	touch $@

clean:
	rm -rf $(VENV) report .pytest_cache .mypy_cache .ruff_cache
