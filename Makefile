# Two commands: "make train" and "make test". Both create a virtual environment first.
#
#   make train                          train on CartPole
#   make train PRESET=pendulum ARGS="--seed 1"
#   make test [PYTHON=python3.12] [ARGS="-k policy"]    the quick tests: under 8 minutes on two cores
#   make test-all                       every test: about half an hour
#   make test-faults                    the faults of tests/faults in their long counts: 50 minutes
#   make soak [MINUTES=20]              CartPole and Pong for so long each: memory and speed
#   make test-ns3                       ns-3's environments, the simulator compiled: 2 minutes
#   make ns3-parity                     the native network engine beside ns-3: 5 minutes
#   make ns3-limits                     how long a step of ns-3 lasts, and its memory: a minute
#   make ns3-speed                       the pool of ns-3's simulators, beside its adapter: 2 minutes
#   make ns3-baselines                  its AIMD, CUBIC and BBR beside those of ns-3: 5 minutes
#   make cluster-figures                what Inferencers in processes cost: 5 minutes
#   make gpu-figures                    speeds on a GPU beside the same machine's CPU: 9 minutes
#   make test-cluster                   Inferencers in actors of Ray: 2 minutes
#   make docs                           build the documentation into build/site
#   make dist                           build wheels and sdists, and check them
#   make lint
#   make clean                          remove what the other targets made

PYTHON ?= python3
PRESET ?= cartpole
ARGS ?=
MINUTES ?= 20

# Every interpreter has its own environment, so that they do not take turns to rebuild one.
VENV := $(if $(filter python3,$(PYTHON)),.venv,.venv-$(notdir $(PYTHON)))
BIN := $(VENV)/bin
PACKAGES := $(addprefix packages/sebulba-,networks external sweep league offline board pqn sets)
FAULTS := tests/faults/results
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
IN_PARALLEL := --numprocesses auto --maxprocesses 4 --dist worksteal
LONG_FAULTS := SEBULBA_LONG_FAULTS=1 $(BIN)/python -m pytest --timeout 14400

# How soon a process ends after a signal is measured: by itself.
SIGNALS := tests/faults/test_signals.py

# A shim of pyenv is on the path for versions that are not selected, too, and fails: ask pyenv.
INTERPRETER = $(shell $(PYTHON) -c 'import sys; print(sys.executable)' 2>/dev/null || \
  ls -d "$$(pyenv root 2>/dev/null)"/versions/*/bin/$(notdir $(PYTHON)) 2>/dev/null | tail -n 1)

.PHONY: train test test-all test-cluster cluster-figures gpu-figures test-ns3 test-faults soak ns3-speed ns3-parity ns3-baselines ns3-limits docs dist lint clean find-python
.DEFAULT_GOAL := train

train: $(VENV)/.ready
	@$(BIN)/sebulba train $(PRESET) $(ARGS)

test: $(VENV)/.ready-test
	@$(BIN)/python -m pytest $(IN_PARALLEL) -m "not slow" $(ARGS)

test-all: $(VENV)/.ready-test
	@$(BIN)/python -m pytest $(IN_PARALLEL) $(ARGS)

test-cluster: $(VENV)/.ready-cluster
	@$(BIN)/python -m pytest tests/cluster/test_ray.py $(ARGS)

gpu-figures: $(VENV)/.ready-test
	@$(BIN)/python -m benchmarks.studies.gpu_figures $(ARGS)

cluster-figures: $(VENV)/.ready-test
	@$(BIN)/python -m benchmarks.studies.cluster_figures $(ARGS)

test-faults: $(VENV)/.ready-test
	@$(LONG_FAULTS) tests/faults --ignore $(SIGNALS) $(IN_PARALLEL) --faults-json $(FAULTS)/faults.json
	@$(LONG_FAULTS) $(SIGNALS) --faults-json $(FAULTS)/signals.json

soak: $(VENV)/.ready-test
	@$(BIN)/python -m tests.faults.soak --minutes $(MINUTES) --json $(FAULTS)/soak.json

test-ns3: $(VENV)/.ready-ns3
	@$(BIN)/python -m pytest tests/networks/test_ns3*.py $(ARGS)

ns3-parity: test-ns3
	@$(BIN)/python -m benchmarks.studies.ns3_parity --json packages/sebulba-ns3/results/parity.json

ns3-baselines: $(VENV)/.ready-ns3
	@$(BIN)/python -m benchmarks.studies.ns3_baselines --json packages/sebulba-ns3/results/baselines.json

ns3-speed: $(VENV)/.ready-ns3
	@$(BIN)/python -m benchmarks.studies.ns3_speed --json packages/sebulba-ns3/results/speed.json

ns3-limits: $(VENV)/.ready-ns3
	@$(BIN)/python -m benchmarks.studies.ns3_limits --json packages/sebulba-ns3/results/limits.json

docs: $(VENV)/.ready-docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "Open build/site/index.html, or run $(BIN)/mkdocs serve."

# The wheel is built from the sdist.
dist: $(VENV)/.ready-dev
	rm -rf dist
	$(BIN)/python -m build
	for package in $(PACKAGES); do $(BIN)/python -m build --outdir dist $$package || exit; done
	$(BIN)/twine check --strict dist/*

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv .venv-* build dist *.egg-info packages/*/build packages/*/*.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find sebulba benchmarks packages tests examples -name __pycache__ -prune -exec rm -rf {} +

# The stamps: older than pyproject.toml means install again. All packages of packages/ are installed
# but for sebulba-ns3, whose simulator is large.

$(VENV)/.ready: pyproject.toml $(PACKAGES:%=%/pyproject.toml) | $(BIN)/python
	@echo "Installing into $(VENV): about 1.5 GB, a few minutes, once"
	@$(PIP) install --editable . $(PACKAGES:%=--editable %)
	@touch $@

$(VENV)/.ready-test: pyproject.toml $(PACKAGES:%=%/pyproject.toml) | $(BIN)/python
	@echo "Installing into $(VENV) with what the tests need: about 2 GB, a few minutes, once"
	@$(PIP) install --editable '.[test]' $(PACKAGES:%=--editable %)
	@touch $(VENV)/.ready $@

$(VENV)/.ready-dev: $(VENV)/.ready-test
	@$(PIP) install --editable '.[dev]'
	@touch $@

$(VENV)/.ready-docs: pyproject.toml | $(VENV)/.ready-test
	@$(PIP) install --editable '.[docs]'
	@touch $@

$(VENV)/.ready-cluster: pyproject.toml | $(VENV)/.ready-test
	@$(PIP) install --editable '.[cluster]'
	@touch $@

$(VENV)/.wheel-ns3: packages/sebulba-ns3/pyproject.toml | $(VENV)/.ready-test
	@$(PIP) install --no-deps ns3==3.44.post0
	@touch $@

$(VENV)/.ready-ns3: packages/sebulba-ns3/pyproject.toml $(VENV)/.wheel-ns3 | $(VENV)/.ready-test
	@$(PIP) install --no-deps --editable packages/sebulba-ns3
	@touch $@

$(BIN)/python:
	@$(MAKE) --no-print-directory find-python
	@rm -rf $(VENV)
	@$(INTERPRETER) -m venv $(VENV)

# Prints the interpreter that $(PYTHON) names, or says why there is none that will do.
find-python:
	@test -n "$(INTERPRETER)" || \
	  { echo "$(PYTHON) is not installed; use PYTHON=... for Python 3.11 to 3.13" >&2; exit 1; }
	@$(INTERPRETER) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "$$($(INTERPRETER) --version) is not 3.11 to 3.13; use PYTHON=python3.12" >&2; exit 1; }
	@$(INTERPRETER) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "$(INTERPRETER) has no venv; install it (Debian: apt install python3-venv)" >&2; exit 1; }
	@echo "Python: $(INTERPRETER)"
