# One set of commands for people, hooks and CI. Needs: make, git, Python >= 3.11 with venv, a C++20 compiler.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
NATIVE := CMakeLists.txt pyproject.toml $(wildcard native/*)

.DEFAULT_GOAL := help
.PHONY: help build demo test lint types bench soak clients e2e real-engine conformance format clean

help:  ## list the commands
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/.tools: requirements/build.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Headway needs Python 3.11 or newer; set PYTHON=..." >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -r requirements/build.txt
	@touch $@

$(VENV)/.built: $(VENV)/.tools requirements/base.txt $(NATIVE)
	$(PIP) -r requirements/base.txt
	$(PIP) --no-build-isolation --no-deps --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.built requirements/dev.txt
	$(PIP) -r requirements/dev.txt
	@touch $@

build: $(VENV)/.built  ## set up the environment and compile the core

demo: $(VENV)/.built  ## run the main job: a mixed pool, four policies, one table
	$(BIN)/headway demo

test: $(VENV)/.dev  ## run the tests, in two processes (WORKERS=2)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

lint: $(VENV)/.dev  ## check style and the import contracts
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/lint-imports

types: $(VENV)/.dev  ## check the types
	$(BIN)/mypy

bench: $(VENV)/.built  ## measure the core: instructions, microseconds
	$(BIN)/headway bench core

soak: $(VENV)/.built  ## half an hour of mixed load with kills and reloads; every answer compared (MINUTES=30)
	$(BIN)/python -m headway.bench.soak --minutes $(or $(MINUTES),30)

clients: $(VENV)/.dev  ## the official Node client against the gateway (needs node and npm; installs it once)
	@command -v npm >/dev/null || echo "npm is not installed: the tests of the Node client will be skipped"
	HEADWAY_CLIENTS=1 $(BIN)/python -m pytest tests/gateway/test_openai_node.py

e2e: $(VENV)/.dev  ## real vLLM servers, end to end (installs vLLM once, 2.2 GB; HEADWAY_VLLM names the model maker)
	$(BIN)/python tests/real_vllm_environment.py
	HEADWAY_E2E=1 $(BIN)/python -m pytest tests/e2e/test_publishing_vllm.py tests/e2e/test_real_vllm.py

real-engine: $(VENV)/.dev  ## predictions against a real vLLM (needs an idle machine; ARGS="--only passes"; docs/real-engine.md)
	$(BIN)/python tests/real_engine/run.py $(ARGS)

conformance: $(VENV)/.dev  ## compare the core with the real vLLM scheduler (installs it once, 1.8 GB)
	$(BIN)/python tests/conformance/run.py
	HEADWAY_CONFORMANCE=1 $(BIN)/python -m pytest tests/engines/test_vllm_scheduler.py

format: $(VENV)/.dev  ## rewrite the sources in the house style
	$(BIN)/ruff check --fix src tests
	$(BIN)/ruff format src tests

clean:  ## remove everything that was built
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
