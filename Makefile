# Two commands do everything: `make demo` and `make test`. Each sets up what it needs; downloads and
# builds are cached outside the checkout (ROSE_CACHE, default ~/.cache/rose).
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
export ROSE_CACHE ?= $(HOME)/.cache/rose
PYTHON ?= python3.11
UV := $(ROSE_CACHE)/uv/bin/uv
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: help venv engine cluster demo test unit check format generate crds clean \
	bench-guard bench-weights bench-router bench-simulate gpu-check

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(UV):
	@echo "[set-up] installing uv into $(ROSE_CACHE)/uv"
	@$(PYTHON) -m venv $(ROSE_CACHE)/uv
	@$(ROSE_CACHE)/uv/bin/pip install -q -c constraints.txt uv

$(VENV)/.stamp: pyproject.toml constraints.txt | $(UV)
	@echo "[set-up] Python environment in $(VENV) (the first time downloads PyTorch)"
	@test -x $(BIN)/python || $(UV) venv -q -p $(PYTHON) $(VENV)
	@VIRTUAL_ENV=$(abspath $(VENV)) $(UV) pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

venv: $(VENV)/.stamp  ## the Python environment everything else runs in

engine: venv  ## the environment of the real SGLang engine (cached)
	@$(BIN)/python -m rose_dev.engine_environment

cluster: venv  ## the parts of the one-node Kubernetes (cached; about 9 minutes the first time)
	@$(BIN)/rose dev build

demo: engine cluster  ## the main job on real parts; ARGS=--help lists the knobs
	@$(BIN)/rose demo $(ARGS)

test: check unit engine cluster  ## everything that CI runs
	$(BIN)/pytest -m "engine or cluster" --reruns 1 --only-rerun ".*" $(ARGS)

unit: venv  ## what needs neither engine nor cluster
	$(BIN)/pytest -n 2 --dist loadfile -m "not engine and not cluster" $(ARGS)

check: venv  ## lint, types, layers, spelling, drift of generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy .
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python -m rose_dev.generate --check

format: venv  ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generate: venv  ## crds/, docs/api.md and docs/metrics.md from the code
	$(BIN)/python -m rose_dev.generate

crds: generate  ## the kinds as CustomResourceDefinitions

bench-guard: engine  ## serving beside rollouts: figures of the guard
	$(BIN)/python -m bench.guard $(ARGS)

bench-weights: venv  ## wire bytes and speed of the weight plane, peers side by side
	$(BIN)/python -m bench.weights $(ARGS)

bench-router: venv  ## turns per second and added latency of the router
	$(BIN)/python -m bench.router $(ARGS)

bench-simulate: venv  ## figures of the simulator: studies, speed, determinism
	$(BIN)/python -m bench.simulate $(ARGS)

clean:  ## what make made in the checkout (caches outside stay)
	rm -rf $(VENV) out .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
