# `make train` and `make test` set up what they need in .venv first; later calls skip that.
# TORCH=2.14.1 takes that version of torch, in a .venv of its own, and PYTHON=python3.12 sets it up
# with that interpreter; VENV=folder says where.
PYTHON ?= python3
VENV := .venv$(TORCH:%=-torch%)
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SITE_READY := $(VENV)/.ready-site
ALL_READY := $(VENV)/.ready-all
# Two test processes take files in this order, so that neither is left with a long file at the end.
# (Of folders that contain each other, pytest would take the files by name.)
SLOW := tests/newcomer/ tests/parity/ tests/mutants/
SLOWEST_FIRST := $(SLOW) $(filter-out $(SLOW),$(wildcard tests/*/))

# Python's compiled files let the many processes of a run or a test start faster.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test pytest test-all test-versions fake-cuda check docs site serve clean

train: $(READY)
	$(BIN)/torchrun train.py --job.config_file=configs/tp2_fsdp2.toml

# mypy is checked beside the first tests, since it takes one core for a minute.
test: $(READY)
	$(MAKE) --jobs 2 check pytest

pytest: $(READY)
	$(BIN)/pytest -q -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder $(SLOWEST_FIRST)

test-all: $(ALL_READY) check
	$(BIN)/pytest -q -m "not alone" -n 2 --dist loadfile --no-loadscope-reorder $(SLOWEST_FIRST)
	$(BIN)/pytest -q -m alone

# On the oldest and the newest torch. For Linux, PyPI has them as CUDA builds of several GB each.
test-versions:
	$(MAKE) test TORCH=2.11.0
	$(MAKE) test TORCH=2.14.1

# Every configuration and feature on fake CUDA tensors, without a GPU; needs a C++ compiler.
fake-cuda: $(READY) check
	$(BIN)/pytest -q tests/unit/test_fake_cuda.py

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)
	$(BIN)/python docs/make_configuration.py
	$(BIN)/python docs/make_api.py
	$(BIN)/python docs/make_commands.py
	$(BIN)/python docs/make_pictures.py

# The documentation as a site that needs no network, in build/site.
site: $(SITE_READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

serve: $(SITE_READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

clean:
	rm -rf .venv* build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml .ci/constraints.txt
	$(PYTHON) -m venv $(VENV)
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' .ci/constraints.txt > $(VENV)/constraints.txt
	$(BIN)/pip install --quiet --no-compile -c $(VENV)/constraints.txt -e '.[dev]'
	touch $(READY)

$(SITE_READY): $(READY)
	$(BIN)/pip install --quiet --no-compile -c $(VENV)/constraints.txt -e '.[docs]'
	touch $(SITE_READY)

$(ALL_READY): $(SITE_READY)
	$(BIN)/pip install --quiet --no-compile -c $(VENV)/constraints.txt -e '.[torchtitan]'
	touch $(ALL_READY)
