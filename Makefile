# `make help` lists the targets.

PYTHON ?= python3
STAMP := .venv/.installed

export PATH := $(CURDIR)/.venv/bin:$(PATH)
export VIRTUAL_ENV := $(CURDIR)/.venv

.DEFAULT_GOAL := help
.PHONY: help setup demo test fuzz zoo aot lint format gpu bench clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile

setup: $(STAMP) ## create .venv with the versions of constraints.txt

$(STAMP): pyproject.toml constraints.txt | .venv/bin/python
	.venv/bin/python -m pip install --quiet -c constraints.txt -e '.[dev,examples]'
	touch $@

.venv/bin/python:
	$(PYTHON) -m venv .venv

demo: setup ## run the example from a model to a training run
	examples/demo.sh

test: lint ## everything that has to pass
	pytest -n auto --maxprocesses 4 --dist loadfile
	# All of them have run inside pytest; those that import torch in every process are not worth it again.
	lit -sv test --filter-out from_torch

fuzz: setup ## random wrong inputs for every tool, for an hour; those that end as none may are kept in out/fuzz
	python test/fuzz/fuzz.py --seconds 3600 --seed "$$(date +%s)" --save out/fuzz

zoo: setup ## programs of every model of the zoo on 2, 4 and 8 ranks, and every move of some done wrong
	ZOO=all pytest -n 2 test/programs/test_zoo.py test/programs/test_every_collective.py

aot: setup ## compile every kernel of the zoo at full size for three GPUs, which need not be there
	python -m unity_ir.tools.unity_aot --json bench/results/aot.json

lint: setup ## style and types
	ruff check
	ruff format --check
	basedpyright

format: setup ## fix what ruff can fix
	ruff check --fix
	ruff format

gpu: setup ## check and time emitted programs over NCCL, on a machine with a GPU
	python bench/gpu.py --json bench/results/gpu.json

bench: setup ## time building and reading the models of the zoo
	python bench/models.py --json bench/results/models.json

clean: ## remove what builds and tests left, except .venv
	rm -rf build dist out *.egg-info .hypothesis .pytest_cache .ruff_cache
	find unity_ir test -name __pycache__ -prune -exec rm -rf {} +
