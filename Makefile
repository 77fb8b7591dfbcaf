# Everything starts here. Needs: Linux, root, python3 (3.11 or newer). What else is missing gets installed:
# uv and the Python packages from PyPI, a few Debian packages, Kubernetes built from its Go modules.
# Nothing is kept in the checkout but .venv; downloads and builds live in $(CACHE).

CACHE ?= $(HOME)/.cache/tessera
UV ?= $(shell command -v uv || echo $(CACHE)/uv/bin/uv)
PYTHON ?= python3
NAME ?= tessera
VENV := .venv
RUN := $(VENV)/bin
export UV_PYTHON_DOWNLOADS := never
export UV_LINK_MODE := copy

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-fast test-cluster lint format bench cluster-up cluster-down binaries env lock protocol clean

help: ## show this list
	@echo "Tessera: NVIDIA GPUs for Kubernetes, carved on demand"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

demo: env ## the main job on a real local cluster, told step by step (KEEP=1 leaves it running)
	@$(RUN)/python -m tests.demo $(if $(KEEP),--keep)

test: lint test-fast test-cluster ## everything: lint, types, layers, all tests, the real cluster (10 minutes warm)

test-all: lint binaries ## everything, the slow tests too
	$(RUN)/pytest

test-fast: env ## the tests that need no cluster (under a minute)
	$(RUN)/pytest -n auto -m "not cluster and not slow"

test-cluster: binaries ## the tests on the real local cluster (root)
	$(RUN)/pytest -m "cluster and not slow"

lint: env ## ruff, mypy --strict, import-linter
	$(RUN)/ruff check
	$(RUN)/ruff format --check
	$(RUN)/mypy
	$(RUN)/lint-imports

format: env ## let ruff put the code in shape
	$(RUN)/ruff check --fix-only --quiet
	$(RUN)/ruff format

bench: env ## measure, print a table, write bench-results.json
	@$(RUN)/python -m tests.bench

cluster-up: env ## a local cluster that stays; prints KUBECONFIG and its nodes (NAME=...)
	@$(RUN)/python -m tests.harness up --name $(NAME)

cluster-down: env ## end it
	@$(RUN)/python -m tests.harness down --name $(NAME)

binaries: env ## Kubernetes, etcd and containerd in the cache; built the first time, about 15 minutes
	@test -n "$(TESSERA_BINARIES)$(KUBEBUILDER_ASSETS)" || $(RUN)/python -m tests.harness build

env: $(VENV)/.complete ## the Python environment alone, with the command .venv/bin/tessera

$(VENV)/.complete: requirements.lock pyproject.toml | $(UV)
	@echo "Python packages into $(VENV) ..."
	@test -x $(RUN)/python || $(UV) venv --quiet --python $(PYTHON) $(VENV)
	@$(UV) pip sync --quiet --require-hashes --python $(RUN)/python requirements.lock
	@$(UV) pip install --quiet --no-deps --no-build-isolation --python $(RUN)/python --editable .
	@touch $@

# uv comes from PyPI into a virtual environment of its own; Debian ships venv as a package apart from python3.
$(CACHE)/uv/bin/uv:
	@echo "uv into $(CACHE)/uv ..."
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "python3-venv from Debian ..."; \
		apt-get -qq update && apt-get -qq install -y python3-venv >/dev/null; }
	@$(PYTHON) -m venv $(CACHE)/uv
	@$(CACHE)/uv/bin/pip install --quiet --disable-pip-version-check uv==$(shell cat .uv-version)

lock: | $(UV) ## find newer versions of the Python packages and pin them by hash
	$(UV) pip compile --quiet --upgrade --group dev --generate-hashes --no-header --no-emit-index-url \
		--python-version 3.11 --output-file requirements.lock pyproject.toml

PROTOCOL := kubelet_plugin/protocol
protocol: env ## generate the kubelet's gRPC messages from the .proto files
	$(RUN)/python -m grpc_tools.protoc -I $(PROTOCOL) --python_out=$(PROTOCOL)/generated \
		--pyi_out=$(PROTOCOL)/generated $(wildcard $(PROTOCOL)/*.proto)

clean: ## remove what was made inside the checkout
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist bench-results.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
