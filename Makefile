# Every target sets up what it needs in .venv: nothing but Python >= 3.11 and a C++ compiler is assumed.
PYTHON ?= python3
JOBS   ?= 2
VENV   := .venv
BIN    := $(VENV)/bin
NATIVE := $(wildcard $(foreach end,cpp hpp cu cuh,src/fluctua/*/native/*.$(end) src/fluctua/*/native/*/*.$(end)))

# Commands that the tests start import the same modules again and again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-long test-all test-lowest lint docs docs-links clean
help:
	@echo "make demo   train a noisy resonator network from its own fluctuations and draw what it learnt"
	@echo "make test   run the tests"
	@echo "make test-long   run what takes longer: studies, examples that train, whole commands, kills, limits of memory"
	@echo "make test-all    run both"
	@echo "make test-lowest run the tests with the oldest versions that pyproject.toml allows"
	@echo "make lint   ruff (lint and format), import-linter (layers, cycles), mypy and clang-format"
	@echo "make docs   build the documentation into docs/_build/html and open its pages in Chromium"
	@echo "make docs-links  try the addresses of other sites in it (needs a network)"
	@echo "make clean  remove the environment and everything built"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "fluctua needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Setting up $(VENV) ..."
	@$(PYTHON) -m venv $(VENV)

# One stamp per set of extras, so that `make demo` does not wait for the documentation tools. The packages of a set are
# installed by name: with fluctua itself its native core would be built again.
$(VENV)/.core: $(BIN)/python pyproject.toml CMakeLists.txt $(NATIVE)
	@echo "Installing fluctua and compiling its native core (a minute the first time) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.%: $(VENV)/.core
	@echo "Installing the $* tools ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $$($(BIN)/python -c "import tomllib; \
	  print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['$*'])")
	@touch $@

demo: $(VENV)/.core
	@$(BIN)/fluctua train demo --out demo --replace

PYTEST := $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal

test: $(VENV)/.test
	@$(PYTEST) -m "not long"

test-long: $(VENV)/.test
	@$(PYTEST) -m long

# Both in one: what they compile in common is compiled once.
test-all: $(VENV)/.test
	@$(PYTEST)

# In an environment of its own: uv resolves to the lower bounds.
LOWEST := .venv-lowest
$(LOWEST)/.test: pyproject.toml CMakeLists.txt $(NATIVE)
	@$(PYTHON) -m venv --clear $(LOWEST)
	@$(LOWEST)/bin/python -m pip install --quiet --disable-pip-version-check uv
	@$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct --editable '.[test]'
	@touch $@

test-lowest: $(LOWEST)/.test
	@$(LOWEST)/bin/python -m pytest -q -n $(JOBS) --dist worksteal -m "not long"

lint: $(VENV)/.lint
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/mypy
	@$(BIN)/clang-format --dry-run --Werror $(filter %.cpp %.hpp %.cu %.cuh,$(NATIVE))

docs: $(VENV)/.docs
	@$(BIN)/sphinx-build -q -W -b html docs docs/_build/html
	@$(BIN)/python docs/check_pages.py docs/_build/html
	@echo "Open docs/_build/html/index.html"

# Needs a network. Links within the repository are checked by `make docs` and by the tests.
docs-links: $(VENV)/.docs
	@$(BIN)/sphinx-build -q -b linkcheck -D nb_execution_mode=off docs docs/_build/links

clean:
	rm -rf $(VENV) $(LOWEST) build dist docs/_build demo
