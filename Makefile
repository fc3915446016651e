# make train [ARGS="norm.impl=torch train.steps=200"]      installs once, then trains
# make test                                                installs once, then lints, type-checks and tests
# make api                                                 writes the API reference, api/index.html
# make records                                             on a GPU: measures all that README and docs show, and writes them

PYTHON ?= python3
ARGS ?=

.PHONY: train test records api
.DEFAULT_GOAL := train

train: .venv/installed
	.venv/bin/python train.py $(ARGS)

test: .venv/installed
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/pytest -n auto

records: .venv/installed
	.venv/bin/python -m benchmarks.records $(ARGS)

api: .venv/installed
	.venv/bin/pdoc prenorm --docformat google --output-directory api

.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "prenorm needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V). Name another: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --editable '.[dev]' --constraint constraints.txt
	touch .venv/installed
