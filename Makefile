# Everything runs from the project's own environment in .venv; `make help` lists what there is.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
export TORCH_EXTENSIONS_DIR := $(CURDIR)/.torch_extensions
unexport PYTHONDONTWRITEBYTECODE
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help venv venv-hybrids lock site state-passing demo shakespeare scaling-demo forecasts compare-variants check test test-transformers test-oldest test-slurm fuzz histories crash-states power-real golden mutants coverage chaos bench dist gpu gpu-bundle test-gpu

help:  ## what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

venv: $(STAMP)  ## the environment in .venv, from requirements.lock

$(STAMP): requirements.lock requirements-uv.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "error: $(PYTHON) is older than Python 3.10; say which one to use: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes -r requirements-uv.lock
	$(BIN)/uv pip install --python $(BIN)/python --require-hashes -r requirements.lock
	$(BIN)/uv pip install --python $(BIN)/python --no-deps --no-build-isolation -e .
	@echo "compiling bytecode once, so that every later start is quick"
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib > /dev/null 2>&1 || true
	@touch $@

# What checks and tests need besides: a superset of requirements.lock.
$(DEV_STAMP): requirements-dev.lock $(STAMP)
	$(BIN)/uv pip install --python $(BIN)/python --require-hashes -r requirements-dev.lock
	@touch $@

# Universal: one lock for every supported Python and platform. Versions stay unless pyproject.toml or
# UPGRADE=--upgrade asks for others.
COMPILE = $(BIN)/uv pip compile --universal --python-version 3.10 --generate-hashes \
	--no-header --no-annotate --quiet $(UPGRADE)

lock: $(STAMP)  ## pin the versions and hashes of the four lock files again
	$(COMPILE) pyproject.toml --extra parquet -o requirements.lock
	$(COMPILE) pyproject.toml --extra dev --constraint requirements.lock -o requirements-dev.lock
	echo uv | $(COMPILE) - -o requirements-uv.lock
	printf "transformers==5.24.*\nnumpy<2.2\n" | $(subst 3.10,3.11,$(COMPILE)) - -o requirements-hybrids.lock

# Stories to read, and to run by hand line by line: settings such as CORPUS=DIR reach them through the environment.
EXAMPLE = bash -ex examples/$@.sh

demo: $(STAMP)  ## the whole story in minutes: build, train, kill, resume, compare, evaluate, sample, report
	$(EXAMPLE)

shakespeare: $(STAMP)  ## what memory is worth, next to a published result; TEXT=input.txt (tinyshakespeare) THREADS=2 STEPS=2000
	$(EXAMPLE)

scaling-demo: $(STAMP)  ## scaling laws from rate to report on two cores: 24 small runs, and one that they forecast, docs/scaling-example.md
	$(EXAMPLE)

forecasts: $(STAMP)  ## forecasts of runs on code, and with BOOKS=FILE_OR_DIR on books, signed, trained and graded: docs/forecasts.md
	$(EXAMPLE)

compare-variants: $(STAMP)  ## members of the family at equal training FLOPs; QUICK=1 CORPUS=DIR MEMBERS=FILE JOBS=N CLUSTER=FILE
	$(EXAMPLE)

state-passing: $(STAMP) venv-hybrids  ## a hybrid of transformers before and after 500 steps with carried state; TEXT=FILE SEEDS="0 1" STEPS=3000 PASSED=500
	PYTHONPATH=$(abspath $(HYBRIDS)) $(EXAMPLE)

check: $(DEV_STAMP)  ## format, lint, types, structure, size of the packages, static costs on a GPU
	ruff format --check .
	ruff check .
	pyright
	python -m pytest -q tests/unit/test_architecture.py
	python -m tests.budget
	OMP_NUM_THREADS=1 python -m benchmarks static --check

# In the order of collection: the integration tests, whose files take longest, start first. By default
# xdist starts the files with the most tests first, and these have few. Tests of runs often wait for
# their ranks to start, so there is a worker more than cores, and at most four.
WORKERS = $(shell $(BIN)/python -c 'import os; print(min(4, (os.cpu_count() or 1) + 1))')
test: $(DEV_STAMP)  ## the whole suite, but for what needs a GPU or a Slurm of its own
	python -m pytest -q -m "not gpu and not slurm and not transformers5" -n $(WORKERS) --dist loadfile \
		--no-loadscope-reorder --durations=10

HYBRIDS := build/transformers-hybrids
venv-hybrids: $(STAMP)  ## transformers 5 for models of others, in build/transformers-hybrids, to be set as PYTHONPATH
	uv pip install -q --python $(BIN)/python --no-deps --require-hashes --target $(HYBRIDS) -r requirements-hybrids.lock
	@echo 'export PYTHONPATH=$(CURDIR)/$(HYBRIDS)'

NEWER := build/transformers-5
test-transformers: $(DEV_STAMP) venv-hybrids  ## exports and models of others with transformers 5.23 and 5.24 in place of 4.57
	uv pip install -q --target $(NEWER) 'transformers==5.23.*' 'numpy<2.2'
	PYTHONPATH=$(abspath $(NEWER)) python -m pytest -q tests/integration/test_huggingface.py tests/integration/test_hybrids.py
	PYTHONPATH=$(abspath $(HYBRIDS)) python -m pytest -q tests/integration/test_hybrids.py

OLDEST := .venv-oldest
test-oldest: $(STAMP)  ## worlds and ZeRO stages in turn on the oldest torch that pyproject.toml takes, in .venv-oldest
	test -x $(OLDEST)/bin/python || uv venv -q --python $(BIN)/python $(OLDEST)
	uv pip install -q --python $(OLDEST)/bin/python -e '.[dev]' 'torch==2.8.*'
	PATH=$(CURDIR)/$(OLDEST)/bin:$$PATH python -m pytest -q -k chain_of_world_sizes tests/integration/test_elastic.py

test-slurm: $(DEV_STAMP)  ## runs on a real Slurm of four nodes on this machine (docs/reliability.md says what it needs)
	python -m pytest -q -m slurm -p no:xdist --durations=10

site: $(DEV_STAMP)  ## the pages as a site in runs/site (Python 3.11+); a link that leads nowhere fails
	sphinx-build -q -W --keep-going -c docs -b html . runs/site
	@echo "Open runs/site/README.html"

RELEASED := build/released
dist: $(STAMP)  ## a release in dist/: the sdist, and the wheel built from it, installed into an empty environment
	uv build -q --offline --no-build-isolation --python $(BIN)/python --clear
	uv venv -q --clear --python $(BIN)/python $(RELEASED)
	uv pip install -q --python $(RELEASED)/bin/python --constraint requirements.lock dist/*.whl
	cd / && $(CURDIR)/$(RELEASED)/bin/pretrain --version

mutants: $(DEV_STAMP)  ## break the code in each place of tests/mutants, run its tests: hours; SAMPLE=6 SEED=N takes six
	python -m tests.mutants --sample $(or $(SAMPLE),0) --seed $(or $(SEED),0)

coverage: $(DEV_STAMP)  ## how often the intervals of scaling fits hold the truth, on simulated sweeps
	python -m tests.interval_coverage

chaos: $(DEV_STAMP)  ## a two-rank run disturbed and killed at 30 random moments, compared bitwise with the undisturbed one
	OMP_NUM_THREADS=1 python -m tests.helpers.chaos --kills 30

MINUTES := 60
fuzz: $(DEV_STAMP)  ## hostile files for MINUTES minutes (60) on two cores; findings with their inputs in fuzz-findings/
	OMP_NUM_THREADS=1 python -m tests.fuzz --minutes $(MINUTES)

crash-states: $(DEV_STAMP)  ## start from every state that a power failure can leave of a run and of builds
	OMP_NUM_THREADS=1 python -m tests.crash_states --all

histories: $(DEV_STAMP) crash-states  ## crash states, then random histories of checkpoints and supervisors for MINUTES minutes (60), from SEED
	python -m tests.histories --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

power-real: $(DEV_STAMP)  ## crash states of real ext4 and XFS: images copied after fsyncs, then mounted; as root
	OMP_NUM_THREADS=1 python -m tests.crash_states.real_disks

golden: $(DEV_STAMP)  ## compare the model with recorded results: those in tests/golden and, if present, ../shared/golden
	python -m tests.golden tests/golden/*.npz $(wildcard ../shared/golden/*.npz)

bench: $(DEV_STAMP)  ## the promised speeds, as ratios measured in one run
	OMP_NUM_THREADS=2 python -m benchmarks model
	OMP_NUM_THREADS=1 python -m benchmarks data
	python -m benchmarks kernels

OUT := build/gpu
BUNDLE := build/gpu-bundle
GPU_OPTIONS = $(if $(STEPS),--steps $(STEPS)) $(if $(AGAIN),--again $(AGAIN)) $(if $(WITHIN),--minutes $(WITHIN)) \
	$(if $(RESULTS),--results $(RESULTS)) $(if $(CORPUS),--corpus $(CORPUS)) $(if $(NVIDIA),--nvidia $(NVIDIA)) \
	$(if $(DRY_RUN),--dry-run,$(if $(wildcard $(BUNDLE)),--bundle $(BUNDLE)))

# Without prerequisites: the machine may have no network to install from.
gpu:  ## what an NVIDIA GPU has not shown yet; STEPS=a,b AGAIN=a,b WITHIN=minutes RESULTS=FILE CORPUS=DIR NVIDIA=DIR DRY_RUN=1
	$(PYTHON) -m benchmarks gpu --out $(OUT) $(GPU_OPTIONS)

gpu-bundle: $(DEV_STAMP)  ## what a GPU machine without a network needs besides a checkout, in BUNDLE; CORPUS=DIR to carry
	python -m benchmarks gpu-bundle --out $(BUNDLE) $(if $(CORPUS),--corpus $(CORPUS))

test-gpu:  ## the tests that need an NVIDIA GPU
	GPU_CORPUS=$(wildcard $(BUNDLE)/corpus) $(PYTHON) -m pytest -q -m gpu tests/gpu tests/unit/pretrain/model/test_dropout.py
	@if command -v compute-sanitizer > /dev/null; then \
		compute-sanitizer --error-exitcode 1 $(PYTHON) -m pytest -q -m gpu tests/gpu -k fused; \
	else echo "compute-sanitizer is not installed: memory accesses are not checked"; fi
