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

# A test run starts a thousand processes: what they import is compiled once, and outside the checkout.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CACHE)/bytecode

# Simulated nodes are thousands of small files: in memory where there is a gigabyte, else where pytest puts them.
MEMORY = $(shell test "$$(df -k --output=avail /dev/shm 2>/dev/null | tail -1)" -gt 1000000 2>/dev/null && echo /dev/shm)
# What the processes asked of the API server while the cluster tests ran.
AUDIT := $(CURDIR)/.audit
WORKERS = $(shell echo $$(($$(nproc) + 1)))
WITHOUT_CLUSTER = TESSERA_EXAMPLES=fast PYTEST_DEBUG_TEMPROOT=$(MEMORY) $(RUN)/pytest -n $(WORKERS)

.DEFAULT_GOAL := help
.PHONY: help demo demo-54 demo-curation demo-helm image test test-all test-fast test-unit test-cluster lint format size bench bench-placement bench-refresh bench-fleet bench-scale fuzz soak \
	conformance manifests cluster-up cluster-down binaries env lock protocol clean

help: ## show this list
	@echo "Tessera: NVIDIA GPUs for Kubernetes, carved on demand"
	@echo
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

demo: env ## the main job on a real local cluster, told step by step (KEEP=1 leaves it running)
	@$(RUN)/python -m tests.demo $(if $(KEEP),--keep)

demo-54: env ## 54 workloads on 10 GPUs: training, inference and notebooks, as a picture (KEEP=1 as above, SVG=FILE)
	@$(RUN)/python -m tests.demo.fifty_four $(if $(KEEP),--keep) $(if $(SVG),--svg $(SVG))

demo-curation: binaries ## the same 40 claims with and without the controller, two pictures side by side
	@$(RUN)/python -m tests.demo.curation

demo-helm: env ## the chart and the image on a real two-node cluster: everything runs in pods (KEEP=1 as above)
	@$(RUN)/python -m tests.demo.helm $(if $(KEEP),--keep)

image: ## the container image as an OCI archive in the cache, without a Docker engine (root, Debian 12)
	@$(MAKE) -s env >&2
	@$(RUN)/python -m tests.image --cache $(CACHE)

test: lint test-unit test-cluster ## everything: lint, types, layers, all tests, the real cluster (10 minutes warm)

test-all: lint binaries ## everything, the slow tests too
	@rm -rf $(AUDIT) && mkdir -m 700 $(AUDIT)
	TESSERA_AUDIT_DIR=$(AUDIT) $(RUN)/pytest
	@$(RUN)/python -m tests.audit $(AUDIT)

test-fast: env ## the tests that need no cluster and little time (a minute)
	$(WITHOUT_CLUSTER) -m "not cluster and not slow and not long"

test-unit: env ## all tests that need no cluster (two minutes)
	$(WITHOUT_CLUSTER) -m "not cluster and not slow"

test-cluster: binaries ## the tests on the real local cluster (root), and whether the processes' rights are as few as needed
	@$(RUN)/python -m tests.harness preflight --mend
	@rm -rf $(AUDIT) && mkdir -m 700 $(AUDIT)
	TESSERA_AUDIT_DIR=$(AUDIT) $(RUN)/pytest -n 2 --dist loadscope -m "cluster and not slow"
	@$(RUN)/python -m tests.audit $(AUDIT)

lint: env ## ruff, mypy --strict, import-linter
	$(RUN)/ruff check
	$(RUN)/ruff format --check
	$(RUN)/mypy
	$(RUN)/lint-imports

format: env ## let ruff put the code in shape
	$(RUN)/ruff check --fix-only --quiet
	$(RUN)/ruff format

size: ## lines and modules by area, and folders with more than 12 modules (-o json: python -m tests.size -o json)
	@$(MAKE) -s env >&2
	@$(RUN)/python -m tests.size

bench: env ## measure, print a table, write bench-results.json
	@$(RUN)/python -m tests.bench

MIX ?= uniform
ARRIVALS ?= 3000
bench-placement: binaries ## the same claims on the real scheduler, by what is offered (MIX=, ARRIVALS=; 5 minutes per 1,000, root)
	@$(RUN)/python -m tests.bench.placement.real --mix $(MIX) --arrivals $(ARRIVALS) --plot docs/placement-$(MIX)

bench-refresh: binaries ## on 100 nodes, how soon an offer that was allocated is replaced (5 minutes, root)
	@$(RUN)/python -m tests.bench.placement.refresh

bench-fleet: binaries ## the controller at 1,000 simulated nodes, and a full resync of 5,000 (8 minutes, 8 GB, root)
	@$(RUN)/python -m tests.bench.fleet --plot docs/fleet

bench-scale: binaries ## what published devices cost the scheduler, against NVIDIA's layout: 200 and 1,000 nodes (20 minutes, root)
	@$(RUN)/python -m tests.bench.scale --plot docs/scale

OBJECTS ?= 1000000
fuzz: env ## hostile API objects against the controller's reading and deciding (OBJECTS=; half an hour per million)
	@$(RUN)/python -m tests.fuzz --objects $(OBJECTS)

DURATION ?= 600
RATE ?= 200
soak: binaries ## random claims come and go; fails if anything leaks (DURATION= seconds, RATE= claims a minute, root)
	@$(RUN)/python -m tests.soak --duration $(DURATION) --rate $(RATE)

conformance: binaries ## ask a real cluster for the verdicts that our CEL engine has to give (2 minutes, root)
	@$(RUN)/python -m tests.conformance

cluster-up: env ## a local cluster that stays; prints KUBECONFIG and its nodes (NAME=...)
	@$(RUN)/python -m tests.harness up --name $(NAME)

cluster-down: env ## end it (NAME=... as above); says which there are where that is none
	@$(RUN)/python -m tests.harness down --name $(NAME)

VALUES ?=
manifests: ## what the Helm chart installs, as YAML for kubectl apply where there is no helm (VALUES=FILE)
	@$(MAKE) -s env >&2
	@$(RUN)/python -m tests.support.chart $(VALUES)

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
	$(UV) pip compile --quiet --constraint requirements.lock --generate-hashes --no-header --no-emit-index-url \
		--no-annotate --python-version 3.11 --output-file deploy/image/requirements.lock pyproject.toml

PROTOCOL := kubelet_plugin/dra/protocol
protocol: env ## generate the kubelet's gRPC messages from the .proto files
	$(RUN)/python -m grpc_tools.protoc -I $(PROTOCOL) --python_out=$(PROTOCOL)/generated \
		--pyi_out=$(PROTOCOL)/generated $(wildcard $(PROTOCOL)/*.proto)

clean: ## remove what was made inside the checkout
	rm -rf $(VENV) $(AUDIT) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist bench-results.json placement-results.json refresh-results.json fleet-results.json scale-results.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
