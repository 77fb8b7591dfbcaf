# Requirements: Linux, root, python3 (3.11 or newer). The targets install everything else: uv and the Python packages from PyPI, a
# few Debian packages, Kubernetes built from its Go modules. Downloads and builds are in $(CACHE), the Python environment in .venv.
#
# KUBE=1.35.4 selects the Kubernetes version of every target that runs a cluster; tests/harness/versions.py names the known ones.

CACHE ?= $(HOME)/.cache/tessera
UV ?= $(shell command -v uv || echo $(CACHE)/uv/bin/uv)
PYTHON ?= python3
CLUSTER_NAME = $(if $(NAME),--name $(NAME))
VENV := .venv
RUN := $(VENV)/bin
export UV_PYTHON_DOWNLOADS := never
export UV_LINK_MODE := copy

# Test runs start a thousand processes. Compile their modules once, outside the checkout.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CACHE)/bytecode

# Simulated nodes are thousands of small files: use memory if 1 GB is free, else the default directory of pytest.
MEMORY = $(shell test "$$(df -k --output=avail /dev/shm 2>/dev/null | tail -1)" -gt 1000000 2>/dev/null && echo /dev/shm)
# Audit logs of the API servers of the cluster tests.
AUDIT := $(CURDIR)/.audit
WORKERS = $(shell echo $$(($$(nproc) + 1)))
ON_CLUSTERS = $(RUN)/pytest -n 3 --dist loadscope --no-loadscope-reorder
WITHOUT_CLUSTER = TESSERA_EXAMPLES=fast PYTEST_DEBUG_TEMPROOT=$(MEMORY) $(RUN)/pytest -n $(WORKERS)

.DEFAULT_GOAL := help
.PHONY: help demo demo-54 demo-curation demo-usage demo-preempt demo-helm image release test test-all test-fast test-core test-unit test-cluster test-smoke test-versions lint format size bench trace-prepare trace-decision bench-placement bench-refresh bench-fleet bench-trace bench-scale bench-versions bench-preempt integration fuzz soak \
	conformance conformance-allocator conformance-reasons conformance-upstream manifests cluster-up cluster-down binaries env lock protocol clean

help: ## show this list
	@echo "Tessera: NVIDIA GPUs for Kubernetes, partitioned on demand"
	@echo
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-21s %s\n", $$1, $$2}' Makefile

demo: env ## demonstrate the main use on a real local cluster, step by step (KEEP=1 leaves it running; NAME=mine: a second one on the machine; KUBE=1.35.4: other version)
	@$(RUN)/python -m tests.demo $(CLUSTER_NAME) $(if $(KEEP),--keep)

demo-usage: env ## measure what 30 pods use of 10 GPUs, and draw it (KEEP=, NAME=, KUBE= as above, SVG=demo-usage.svg)
	@$(RUN)/python -m tests.demo.usage $(CLUSTER_NAME) $(if $(KEEP),--keep) $(if $(SVG),--svg $(SVG))

demo-54: env ## place 54 workloads on 10 GPUs and draw the result (NOTEBOOKS=memory: they ask for memory; KEEP=, NAME=, KUBE= as above, SVG=FILE)
	@$(RUN)/python -m tests.demo.fifty_four $(CLUSTER_NAME) $(if $(NOTEBOOKS),--notebooks $(NOTEBOOKS)) $(if $(KEEP),--keep) $(if $(SVG),--svg $(SVG))

demo-curation: binaries ## place the same 40 claims with and without the controller and draw both results (NAME=, KUBE=)
	@$(RUN)/python -m tests.demo.curation $(CLUSTER_NAME)

demo-preempt: env ## evict a notebook for a pod of higher priority, as a GpuPolicy allows it (KEEP=, NAME=, KUBE= as above)
	@$(RUN)/python -m tests.demo.preempt $(CLUSTER_NAME) $(if $(KEEP),--keep)

demo-helm: env ## run the chart and the image in pods on a real two-node cluster (KEEP=, NAME=, KUBE= as above)
	@$(RUN)/python -m tests.demo.helm $(CLUSTER_NAME) $(if $(KEEP),--keep)

image: ## build the container image as an OCI archive in the cache, without a Docker engine (root, Debian 12)
	@$(MAKE) -s env >&2
	@$(RUN)/python -m tests.image --cache $(CACHE)

release: ## build a release in dist: wheel, images for amd64 and arm64, chart, SBOMs, checksums (REPOSITORY=registry/name; 1 minute, root, Debian 12)
	@$(MAKE) -s env >&2
	@rm -rf dist
	@$(RUN)/python -m tests.release --cache $(CACHE) $(if $(REPOSITORY),--repository $(REPOSITORY))

test: lint test-fast test-core test-smoke ## run lint, the quick tests and the core of the cluster tests (15 minutes on 2 cores with a warm cache, root)

test-all: lint binaries ## run lint and all tests, including the slow ones
	@$(RUN)/python -m tests.harness preflight --mend
	PYTEST_DEBUG_TEMPROOT=$(MEMORY) $(RUN)/pytest -n $(WORKERS) -m "not cluster and not integration"
	@rm -rf $(AUDIT) && mkdir -m 700 $(AUDIT)
	TESSERA_AUDIT_DIR=$(AUDIT) $(ON_CLUSTERS) -m cluster
	@$(RUN)/python -m tests.audit $(AUDIT)
	$(RUN)/pytest -m integration

test-fast: env ## run the quick tests that need no cluster (4 minutes on 2 cores)
	$(WITHOUT_CLUSTER) -m "not cluster and not slow and not long"

test-unit: env ## run all tests that need no cluster, except the slow ones (7 minutes on 2 cores)
	$(WITHOUT_CLUSTER) -m "not cluster and not slow"

test-core: binaries ## run the core of the tests on the real local cluster (10 minutes on 2 cores, root)
	@$(RUN)/python -m tests.harness preflight --mend
	$(ON_CLUSTERS) -m "core and not slow"

test-cluster: binaries ## run the tests on the real local cluster, except the slow ones, and check that no process has unused permissions (35 minutes on 2 cores, root)
	@$(RUN)/python -m tests.harness preflight --mend
	@rm -rf $(AUDIT) && mkdir -m 700 $(AUDIT)
	TESSERA_AUDIT_DIR=$(AUDIT) $(ON_CLUSTERS) -m "cluster and not slow"
	@$(RUN)/python -m tests.audit $(AUDIT)

test-smoke: env ## run 12 of the cluster tests on Kubernetes 1.35.4, if it is built (2 minutes, root)
	@$(RUN)/python -m tests.versions --smoke

test-versions: env ## run the cluster tests on Kubernetes 1.34.4, 1.35.4 and 1.36.3; build what is missing (KUBE is ignored; root)
	@$(RUN)/python -m tests.harness preflight --mend
	@$(RUN)/python -m tests.versions

lint: env ## run ruff, mypy --strict and import-linter
	$(RUN)/ruff check
	$(RUN)/ruff format --check
	$(RUN)/mypy
	$(RUN)/lint-imports

format: env ## fix and format the code with ruff
	$(RUN)/ruff check --fix-only --quiet
	$(RUN)/ruff format

size: ## count lines and modules by area; list folders with more than 12 modules (JSON: python -m tests.size -o json)
	@$(MAKE) -s env >&2
	@$(RUN)/python -m tests.size

bench: env ## run the benchmarks, print a table, write bench-results.json
	@$(RUN)/python -m tests.bench

trace-prepare: env ## print which functions and NVML calls a prepare passes (full GPU, partition, the repeat of each)
	@$(RUN)/python -m tests.trace.prepare

trace-decision: env ## print which functions the controller's decision about one new claim passes, in a recorded cluster
	@$(RUN)/python -m tests.trace.decision

MIX ?= uniform
ARRIVALS ?= 3000
bench-placement: binaries ## compare ways to offer devices on the real scheduler (MIX=, ARRIVALS=; 5 minutes per 1,000, root)
	@$(RUN)/python -m tests.bench.placement.real --mix $(MIX) --arrivals $(ARRIVALS) --plot docs/placement-$(MIX)

bench-refresh: binaries ## measure how soon allocated offers are replaced on 100 nodes (5 minutes, root)
	@$(RUN)/python -m tests.bench.placement.refresh

SEEDS ?= 5
bench-trace: binaries ## replay tasks of a public trace in the simulation and on the real scheduler (SEEDS=; 45 minutes, root)
	@$(RUN)/python -m tests.bench.public_trace --seeds $(SEEDS) --plot docs/trace

bench-fleet: binaries ## measure the controller with 1,000 simulated nodes, and a full resync of 5,000 (8 minutes, 8 GB, root)
	@$(RUN)/python -m tests.bench.fleet --plot docs/fleet

bench-scale: binaries ## compare the scheduler's cost with NVIDIA's device layout on 200 and 1,000 nodes (KUBE=; 25 minutes, root)
	@$(RUN)/python -m tests.bench.scale --plot docs/scale

bench-versions: env ## measure how soon pods are bound on Kubernetes 1.34 to 1.37 (30 minutes with binaries in the cache, root)
	@$(RUN)/python -m tests.bench.versions

CASES ?= 150
PARTS ?=
bench-preempt: binaries ## measure how devices are taken back for pods of higher priority (CASES=; PARTS="optimum binding mix decision"; 15 minutes, root)
	@$(RUN)/python -m tests.bench.preempt --cases $(CASES) $(addprefix --part ,$(PARTS))

integration: env binaries ## test with the real Kueue, Volcano, cluster-autoscaler and Prometheus, built on the first run (CONTRIBUTING.md; root)
	@$(RUN)/python -m tests.integration

OBJECTS ?= 1000000
fuzz: env ## feed hostile API objects to the controller and commands (OBJECTS=; half an hour per million)
	@$(RUN)/python -m tests.fuzz --objects $(OBJECTS)

DURATION ?= 600
RATE ?= 200
FAILING ?= 0
soak: binaries ## create and delete random claims; fail if anything leaks (DURATION= seconds, RATE= claims per minute, FAILING= seconds in which a GPU refuses, root)
	@$(RUN)/python -m tests.soak --duration $(DURATION) --rate $(RATE) --failing $(FAILING)

EXPRESSIONS ?= 200
conformance: binaries ## record on a real cluster the results that the CEL engine must give (EXPRESSIONS=; 5 minutes, root)
	@$(RUN)/python -m tests.conformance --generated $(EXPRESSIONS)

SCENARIOS ?= 2000
SITUATIONS ?= 2000
conformance-allocator: binaries ## compare the allocator of `tessera simulate` with the real scheduler (SCENARIOS=; 4 minutes, root)
	@$(RUN)/python -m tests.conformance.allocator --scenarios $(SCENARIOS)

conformance-reasons: binaries ## check on the real scheduler what is said of pending claims and pods, by doing it (SITUATIONS=; 25 minutes, root)
	@$(RUN)/python -m tests.conformance.reasons --situations $(SITUATIONS)

conformance-upstream: binaries ## try Tessera with the scheduler as kubernetes#140806 would make it, and as it is (8 minutes, root)
	@$(RUN)/python -m tests.conformance.upstream

cluster-up: env ## start a local cluster and leave it running; print KUBECONFIG and how to start a node plugin on each node (NAME=tessera and NODES=1 by default, NODES up to 200, KUBE=)
	@$(RUN)/python -m tests.harness up $(CLUSTER_NAME) $(if $(NODES),--nodes $(NODES))

cluster-down: env ## stop a local cluster (NAME= as above, or that of a demo); list the clusters if NAME does not exist
	@$(RUN)/python -m tests.harness down $(CLUSTER_NAME)

VALUES ?=
manifests: ## print the objects of the Helm chart as YAML for kubectl apply (VALUES=FILE)
	@$(MAKE) -s env >&2
	@$(RUN)/python -m tests.support.chart $(VALUES)

binaries: env ## build Kubernetes, etcd and containerd in the cache (KUBE=; 15 minutes the first time)
	@test -n "$(TESSERA_BINARIES)$(KUBEBUILDER_ASSETS)" || $(RUN)/python -m tests.harness build

env: $(VENV)/.complete ## install the Python environment with the command .venv/bin/tessera

$(VENV)/.complete: requirements.lock pyproject.toml | $(UV)
	@echo "Python packages into $(VENV) ..."
	@test -x $(RUN)/python || $(UV) venv --quiet --python $(PYTHON) $(VENV)
	@$(UV) pip sync --quiet --require-hashes --python $(RUN)/python requirements.lock
	@$(UV) pip install --quiet --no-deps --no-build-isolation --python $(RUN)/python --editable .
	@touch $@

# Install uv from PyPI into a separate virtual environment. On Debian, venv is a separate package.
$(CACHE)/uv/bin/uv:
	@echo "uv into $(CACHE)/uv ..."
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "python3-venv from Debian ..."; \
		apt-get -qq update && apt-get -qq install -y python3-venv >/dev/null; }
	@$(PYTHON) -m venv $(CACHE)/uv
	@$(CACHE)/uv/bin/pip install --quiet --disable-pip-version-check uv==$(shell cat .uv-version)

lock: | $(UV) ## upgrade the Python packages and pin them by hash
	$(UV) pip compile --quiet --upgrade --group dev --generate-hashes --no-header --no-emit-index-url \
		--python-version 3.11 --output-file requirements.lock pyproject.toml
	$(UV) pip compile --quiet --constraint requirements.lock --generate-hashes --no-header --no-emit-index-url \
		--no-annotate --python-version 3.11 --output-file deploy/image/requirements.lock pyproject.toml

PROTOCOL := kubelet_plugin/dra/protocol
protocol: env ## generate the kubelet's gRPC messages from the .proto files
	$(RUN)/python -m grpc_tools.protoc -I $(PROTOCOL) --python_out=$(PROTOCOL)/generated \
		--pyi_out=$(PROTOCOL)/generated $(wildcard $(PROTOCOL)/*.proto)

clean: ## remove generated files from the checkout
	rm -rf $(VENV) $(AUDIT) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist demo-usage.svg bench-results.json placement-results.json refresh-results.json fleet-results.json scale-results.json versions-results.json preempt-results.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
