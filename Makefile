# Two commands for a fresh machine: `make demo` and `make test`. Both set up first; that is quick the second time.
# PYTHON chooses the interpreter of the virtual environment, VENV where it is.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.lockstep-setup
C_SOURCES := $(wildcard workers/kernels/csrc/*.[ch] parallel/include/*.h parallel/collectives/*.c)
SOURCES := lockstep.py launch runtime workers parallel benchmarks tests tools examples

.PHONY: help setup demo test check format clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    set up, then generate with the demo model over Ray on two ranks"
	@echo "make test    set up, then run the tests"
	@echo "make check   set up, then format, lint, types and import rules"
	@echo "make format  let ruff and clang-format rewrite what they can"
	@echo "make setup   only set up ($(VENV))"
	@echo "make clean   remove $(VENV) and what tools left behind"

setup: $(STAMP)
	@:

# The stamp is written last, so an interrupted set-up is taken up again.
$(STAMP): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "error: no '$(PYTHON)': install Python 3.11 or later (Debian: apt-get install python3), or say make PYTHON=..." >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $(PYTHON) is $$("$(PYTHON)" --version 2>&1); Python 3.11 or later is needed: say make PYTHON=python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: $(PYTHON) has no venv module: on Debian, apt-get install python3-venv" >&2; exit 1; }
	@command -v cc >/dev/null || command -v gcc >/dev/null || { \
	  echo "error: no C compiler, which the ranks' shared-memory exchange needs: on Debian, apt-get install gcc" >&2; exit 1; }
	@echo "setting up $(VENV): some minutes the first time"
	@"$(BIN)/python" -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear "$(VENV)"
	"$(BIN)/python" -m pip install --disable-pip-version-check -c constraints.txt -e ".[ray,demo,serve,plot,test,dev]"
	@touch "$@"

demo: setup
	"$(BIN)/lockstep" generate demo --tensor-parallel-size 2 --distributed-executor-backend ray --chat \
	  --prompt "What is the capital of France?" --temperature 0 --max-tokens 32

test: setup
	"$(BIN)/python" -m pytest

check: setup
	"$(BIN)/ruff" format --check $(SOURCES)
	"$(BIN)/clang-format" --dry-run --Werror $(C_SOURCES)
	"$(BIN)/ruff" check $(SOURCES)
	"$(BIN)/pyright"
	"$(BIN)/lint-imports"
	"$(BIN)/python" tools/check_house.py

format: setup
	"$(BIN)/ruff" format $(SOURCES)
	"$(BIN)/clang-format" -i $(C_SOURCES)
	"$(BIN)/ruff" check --fix $(SOURCES)

clean:
	rm -rf "$(VENV)" build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
