# The two commands a newcomer needs are `make demo` and `make test`; both build their own .venv.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-for-jali
EXTRAS := dev,report,triton,docs,diffusers,quality,slurm
WORKERS ?= 2

.PHONY: weights demo test test-full coverage lint format docs tables clean install
.DEFAULT_GOAL := help

help:
	@echo "make demo       one clip, dense and sparse, by the model in this repository;"
	@echo "                make demo PROMPT=\"a cyan star spins\" takes your words"
	@echo "make test       lint, types and tests, each suite with its time;"
	@echo "                make test SUITES=\"tests/cli tests/methods\" runs those alone"
	@echo "make test-full  the same with the slow cases"
	@echo "make coverage   the same, and which lines of jali ran"
	@echo "make lint       ruff and mypy"
	@echo "make format     let ruff rewrite"
	@echo "make docs       the pages, into site/"
	@echo "make weights    the networks behind LPIPS, once (64 MB)"
	@echo "make tables     README and docs tables from benchmarks/results, docs/cli.md"
	@echo "make clean      remove what was built (the .venv too)"

install: $(STAMP)

# torch comes first and alone: its exact pin finds the small CPU build where there is one.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "jali needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
	       "run e.g.: make PYTHON=python3.11"; exit 1; }
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing (a few minutes the first time)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check \
	  "$$(grep '^torch==' constraints.txt)" 2> >(grep -v '^WARNING' >&2)
	@$(BIN)/python -m pip install -q --disable-pip-version-check \
	  -c constraints.txt -e '.[$(EXTRAS)]' 2> >(grep -v '^WARNING' >&2)
	@touch $@

export PROMPT
demo: $(STAMP)
	@$(BIN)/jali demo $(if $(PROMPT),--prompt "$$PROMPT")

lint: $(STAMP)
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

format: $(STAMP)
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

test: $(STAMP)
	@$(BIN)/python .ci/suites.py --workers $(WORKERS) $(SUITES)

test-full: $(STAMP)
	@$(BIN)/python .ci/suites.py --workers $(WORKERS) --full $(SUITES)

coverage: $(STAMP)
	@$(BIN)/python .ci/suites.py --workers $(WORKERS) --coverage $(SUITES)
	@echo "outputs/coverage/html/index.html"

docs: $(STAMP)
	@$(BIN)/python benchmarks/tables.py --check
	@$(BIN)/python docs/generate_cli.py --check
	@$(BIN)/python docs/generate_notebook.py --check
	@$(BIN)/zensical build --strict --clean
	@echo "site/index.html"

# The tests fetch them too; where the network is slow, this does it beforehand.
weights: $(STAMP)
	@$(BIN)/python -m jali evaluate --fetch-weights

tables: $(STAMP)
	@$(BIN)/python benchmarks/tables.py
	@$(BIN)/python docs/generate_cli.py

clean:
	rm -rf $(VENV) site .cache outputs build dist .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find src tests benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} +
