# Two commands for users, `make demo` and `make test`; each does all of its own set-up and can be run again at once.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TESTS ?= tests
WORKERS ?= -n 2 --no-loadscope-reorder

.PHONY: help demo test prove bench bench-engine evaluate lint generate resources clean

help: ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## /  make \1\t/' | expand -t 22

demo: $(VENV)/.local ## From nothing to a served, rescaled model on a local cluster (KEEP=1 keeps it, CONTEXT=name uses yours)
	@$(BIN)/tidegate-local demo $(if $(KEEP),--keep) $(if $(CONTEXT),--context "$(CONTEXT)") $(DEMO_ARGS)

test: $(VENV)/.dev ## Lint, types, import contracts, all tests
	@$(BIN)/tidegate-local setup
	@$(BIN)/python kernels/build_native.py
	@$(MAKE) --no-print-directory lint
	@$(BIN)/pytest $(WORKERS) $(TESTS)

prove: $(VENV)/.dev ## The fuzzers and soaks of the tests with their full numbers; goes on where it was stopped
	@$(BIN)/tidegate-local setup
	@TIDEGATE_PROVE=1 $(BIN)/pytest $(WORKERS) -m prove $(TESTS)

bench: $(VENV)/.dev ## Speed, as ratios within one run
	@$(BIN)/tidegate-local setup --images ""
	@for file in tests/bench/bench_*.py; do echo "== $$file"; $(BIN)/python $$file; done

bench-engine: $(VENV)/.dev ## Our engine beside transformers, llama.cpp and vLLM on this CPU (installs them once, beside the caches)
	@$(BIN)/python tests/bench/compare_engines.py $(BENCH_ARGS)

evaluate: $(VENV)/.dev ## Tidegate beside others' policies, simulated: docs/evaluation.md (DATA=folder of traces; hours, goes on where it was stopped)
	@$(BIN)/python -m tidegate_sim.evaluation $(if $(DATA),--data $(DATA)) --out docs/evaluation.md $(EVALUATE_ARGS)

lint: $(VENV)/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/mypy

generate: $(VENV)/.dev ## The CRD, from the pydantic models
	@$(BIN)/python -m tidegate_operator.crd

resources: $(VENV)/.dev ## The table of what GPU kernels take, by compiling them for every architecture
	@$(BIN)/python -m tidegate_kernels.aot

clean: ## Remove the virtual environment (the cluster's caches: tidegate-local clean)
	@rm -rf $(VENV)

# `.local` holds what the cluster and the demo need, `.dev` the tests' dependencies as well (torch among them).
$(VENV)/.local $(VENV)/.dev: $(VENV)/.%: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) 2>/dev/null || { \
	  echo "Installing python3-venv"; rm -rf $(VENV); \
	  { apt-get update -qq && apt-get install -qq -y python3-venv; } >/dev/null \
	  || { echo "python3-venv is missing: install it, or run as root on Debian 12."; exit 1; }; \
	  $(PYTHON) -m venv $(VENV); }
	@echo "Installing Python packages into $(VENV) ($*)"
	@$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@$(BIN)/python kernels/build_native.py
	@touch $@
