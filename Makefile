# `make train` and `make test` set up what they need in .venv first; later calls skip that.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: train test test-all check docs clean

train: $(READY)
	$(BIN)/torchrun train.py --job.config_file=configs/tp2_fsdp2.toml

test: $(READY) check
	$(BIN)/pytest -q -m "not slow"

test-all: $(READY) check
	$(BIN)/pytest -q

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)
	$(BIN)/python -m titanlite.config.document > docs/configuration.md
	$(BIN)/python docs/make_pictures.py

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -e '.[dev]'
	touch $(READY)
