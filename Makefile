# fastload: `make sweep` and `make test` need nothing but Python, a C compiler and make.

PYTHON ?= python3
VENV := .venv
# What the installed package is made of; a folder in the list notices files that come and go.
SOURCES := $(shell find fastload ! -path '*/__pycache__*' ! -name '*.so' \( -type f -o -type d \)) \
           pyproject.toml setup.py MANIFEST.in README.md LICENSE
INSTALL := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check
# Arguments for `make sweep`, `make test` and `make bench`, e.g. make test ARGS='-k sim'
ARGS ?=
# Quick ones first; each is a claim of bench/README.md.
BENCHES ?= clock histogram wire trace analysis pacing saturate stamps churn peers

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help sweep test bench fuzz dist clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

sweep: $(VENV)/installed ## the main job on a simulated engine (4 minutes), into results/
	$(VENV)/bin/fastload sweep --target sim:vllm-direct --levels 1,2,4,8,16,32,64 --output results $(ARGS)

test: $(VENV)/installed-test ## ruff, mypy, pytest
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy --strict fastload
	$(VENV)/bin/pytest -n 4 --dist worksteal $(ARGS)

bench: $(VENV)/installed-bench ## the programs in bench/, one after the other (half an hour)
	@set -e; for program in $(BENCHES); do \
		echo "== bench/$$program.py"; $(VENV)/bin/python "bench/$$program.py" $(ARGS); \
	done

fuzz: $(VENV)/installed-fuzz ## the byte machine under sanitizers: at random, then guided by coverage (needs clang; ten minutes)
	$(VENV)/bin/python bench/fuzz.py asan $(ARGS)
	$(VENV)/bin/python bench/fuzz.py guided $(ARGS)

dist: $(VENV)/bin/python ## sdist and wheel, into dist/
	$(INSTALL) build
	rm -rf build dist
	$(VENV)/bin/python -m build

clean: ## remove .venv, build folders and caches; results/ stays
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find fastload tests \( -name __pycache__ -o -name '*.so' \) -prune -exec rm -rf {} +

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# build/lib* goes first: setuptools would put files there into the wheel that are gone from the source.
$(VENV)/installed: $(SOURCES) | $(VENV)/bin/python
	rm -rf build/lib* build/bdist*
	$(INSTALL) .
	@touch $@

$(VENV)/installed-test: $(SOURCES) | $(VENV)/bin/python
	rm -rf build/lib* build/bdist*
	$(INSTALL) '.[test]'
	@touch $(VENV)/installed $@

$(VENV)/installed-bench: $(SOURCES) | $(VENV)/bin/python
	rm -rf build/lib* build/bdist*
	$(INSTALL) '.[bench]'
	@touch $(VENV)/installed $@

$(VENV)/installed-fuzz: $(SOURCES) | $(VENV)/bin/python
	rm -rf build/lib* build/bdist*
	$(INSTALL) '.[test,fuzz]'
	@touch $(VENV)/installed $@
