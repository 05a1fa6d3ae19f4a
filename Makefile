# Every command makes .venv when it is missing or older than its requirements; after that it starts at once.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
# Each process of the tests keeps neighbours in a file together, and computes with one thread.
PARALLEL := --numprocesses=auto --maxprocesses=8 --dist=worksteal

help: ## show this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/make \1\t\2/'

demo: $(READY) ## train FedSpa on images of digits, in under two minutes on two cores
	$(RUN) src/train.py mask=dst sparsity=0.5

test: $(READY) ## run the tests of numbers, methods, config, runs and resuming, in under five minutes on two cores
	$(RUN) -m pytest $(PARALLEL) -m "not thorough and not slow"

test-rest: $(READY) ## run the tests that `make test` leaves out, but for the slow ones
	$(RUN) -m pytest $(PARALLEL) -m "thorough and not slow"

test-all: test test-rest ## run all tests but the slow ones

slow: $(READY) ## run the tests that are too slow for every change, in about ten minutes
	$(RUN) -m pytest -m slow

coverage: $(READY) ## run the tests, and say which lines of src/ they reach
	$(RUN) -m pytest $(PARALLEL) --cov --cov-report=term:skip-covered

check: $(READY) ## look for mistakes without running: ruff, mypy and import-linter
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check --quiet .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports --no-logo

docs: $(READY) ## build the documentation into outputs/site, and fail on a broken link
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet

bench: $(READY) ## measure speed on this CPU and write docs/performance.md, in about ten minutes
	$(RUN) benchmarks/all.py

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedspa needs Python 3.11 or newer: make PYTHON=python3.11")'
	@echo "Making $(VENV): a few minutes, once."
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	$(RUN) -m pip install --quiet --constraint constraints.txt --no-deps timm  # without torchvision, which it does not need here
	touch $(READY)

.PHONY: help demo test test-rest test-all slow coverage check docs bench
