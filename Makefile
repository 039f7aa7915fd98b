# Everything that a newcomer needs, with nothing but make and Python 3.11 or newer. Stamp files keep repeated runs quick.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= smollm2-135m
HOST ?= 127.0.0.1
PORT ?= 8000

# What the installed package is built from: the list of dependencies, the build hook, the kernels.
BUILT_FROM := pyproject.toml hatch_build.py src/hopon/native/build.py $(wildcard src/hopon/native/src/*)

.PHONY: install model serve test lint bench soak clean

install: $(VENV)/.installed

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hopon needs Python 3.11 or newer, $(PYTHON) is " + sys.version)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BUILT_FROM) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

model: $(VENV)/.installed
	@$(BIN)/hopon pull $(MODEL) >/dev/null

serve: $(VENV)/.installed
	@$(BIN)/hopon serve $(MODEL) --host $(HOST) --port $(PORT) $(FLAGS)

test: $(VENV)/.test
	@$(BIN)/hopon pull smollm2-135m >/dev/null
	$(BIN)/python -m pytest tests $(PYTEST_FLAGS)

# The long versions of the random, fault and load tests.
soak: $(VENV)/.test
	@$(BIN)/hopon pull smollm2-135m >/dev/null
	$(BIN)/python -m pytest tests --soak --timeout 3600 $(PYTEST_FLAGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# For example: make bench FLAGS='--workloads W1,W2 --hopon "bf16=--dtype bf16" --server peer=http://127.0.0.1:8080'
bench: $(VENV)/.test
	@$(BIN)/hopon pull smollm2-135m >/dev/null
	$(BIN)/python -m benchmarks $(FLAGS)

clean:
	rm -rf $(VENV) build dist src/hopon/native/lib .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
