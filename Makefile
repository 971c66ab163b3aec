# make bench   set everything up and run the main job
# make test    set everything up and run every check but those of make stress: hosts killed, machines cut off, many ranks
# make benchmarks   all benchmarks that this machine can run, and docs/benchmarks.md of what they show (about an hour)
# The environment is .venv, built once from pyproject.toml under constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: bench test stress benchmarks lint clean

bench: $(VENV)/ready
	$(BIN)/gpubench train-bench

test: $(VENV)/ready-for-development lint
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not stress and not alone"
	$(BIN)/python -m pytest -m alone

stress: $(VENV)/ready-for-development
	$(BIN)/python -m pytest -m stress

benchmarks: $(VENV)/ready-for-development
	$(BIN)/python benchmarks/suite.py

lint: $(VENV)/ready-for-development
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/ready-for-development: $(VENV)/ready
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,wandb]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
