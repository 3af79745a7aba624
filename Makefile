# Two commands on a fresh machine: `make demo` and `make test`. Each makes .venv and installs what it needs.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet -c constraints.txt
# The numerical libraries' own threads only slow a sweep down.
export OMP_NUM_THREADS ?= 1
export OPENBLAS_NUM_THREADS ?= 1

.PHONY: help demo test test-oracles lint format type pytest audit bench pins clean

help:           ## this list
	@sed -n 's/^\([a-z-]*\):.*##/  make \1\t/p' Makefile | expand -t 18

demo: $(VENV)/run.stamp   ## the two worked examples: GPT-3 175B on 1,024 A100, Llama-3 70B on 64 H100
	$(BIN)/tuner search --model gpt3-175b --cluster a100x1024 --seq 2048 --global-batch 1536
	@echo
	$(BIN)/tuner search --model llama3-70b --cluster h100x64 --seq 8192 --global-batch 512

test: lint type pytest   ## lint, type check, tests: what CI runs

lint: $(VENV)/test.stamp  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/test.stamp  ## ruff: rewrite
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

type: $(VENV)/test.stamp  ## mypy --strict
	$(BIN)/mypy

pytest: $(VENV)/test.stamp  ## the tests alone
	$(BIN)/python -m pytest

test-oracles: $(VENV)/test.stamp  ## the frameworks' own parsers judge what is exported (installs about 3.8 GB into .oracles once)
	$(BIN)/python -m tests.oracles --write docs/oracles.md

audit: $(VENV)/test.stamp  ## known vulnerabilities of the pinned versions (needs the advisory service)
	$(BIN)/pip-audit --strict --progress-spinner off --timeout 20 --disable-pip --no-deps -r constraints.txt

bench: $(VENV)/test.stamp  ## speed of the sweep; with ROWS="runs/*.jsonl" also the accuracy on these measured runs
	@for bench in $(filter-out benchmarks/accuracy.py benchmarks/operators.py benchmarks/replay.py benchmarks/measured_search.py benchmarks/document.py,$(wildcard benchmarks/*.py)); do \
	    echo "== $$bench"; $(BIN)/python $$bench || exit 1; done
	@if [ -n "$(ROWS)" ]; then echo "== benchmarks/accuracy.py"; $(BIN)/python benchmarks/accuracy.py $(ROWS); fi

pins: clean $(VENV)/test.stamp  ## what a fresh environment holds, to refresh constraints.txt with
	$(PIP) freeze --exclude-editable

clean:          ## remove .venv and caches
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"tuner needs Python 3.11 or later, $(PYTHON) is {sys.version.split()[0]}")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/run.stamp: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing into $(VENV) ..." >&2
	$(INSTALL) hatchling editables
	$(INSTALL) --no-build-isolation -e .
	@touch $@

$(VENV)/test.stamp: $(VENV)/run.stamp
	@echo "installing the test tools into $(VENV) ..." >&2
	$(INSTALL) --no-build-isolation -e '.[test]'
	@touch $@
