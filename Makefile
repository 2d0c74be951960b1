# `make help` lists the targets.

PYTHON ?= python3
STAMP := .venv/.installed
WORKERS ?= 3

export PATH := $(CURDIR)/.venv/bin:$(PATH)
export VIRTUAL_ENV := $(CURDIR)/.venv
# With it every worker and every process of a test compiles all modules again, pytest its tests as well.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test quick pytest fast fuzz random zoo aot lint format gpu bench clean

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

# The workers take all cores: threads of each would only wait for each other.
pytest fast random zoo: export OMP_NUM_THREADS ?= 1

# Types are checked on one core, beside the tests. Three workers: those that wait for ranks leave cores idle, and each
# imports PyTorch, collects all tests and starts ranks of its own.
test: setup ## everything that has to pass
	$(MAKE) --no-print-directory -j2 lint pytest

quick: setup ## style, types and the tests that are fast, over all floors: between edits
	$(MAKE) --no-print-directory -j2 lint fast

pytest: setup
	pytest -n $(WORKERS) --dist worksteal

fast: setup
	pytest -n 2 --dist worksteal -m "not slow" --ignore test/unit/ops/test_opinfo.py --ignore test/unit/ops/test_opinfo_windows.py

fuzz: setup ## random wrong inputs for every tool, for an hour; those that end as none may are kept in out/fuzz
	python test/fuzz/fuzz.py --seconds 3600 --seed "$$(date +%s)" --save out/fuzz

random: setup ## the properties of random graphs, plans and texts, on examples drawn anew
	EXAMPLES=random ZOO=all pytest -n $(WORKERS) --dist worksteal -m hypothesis

# The families of which `make test` runs a sample.
ZOO := test/programs/test_aot.py test/programs/test_check_rounding.py test/programs/test_checkpoints.py \
	test/programs/test_counts.py test/programs/test_devices.py test/programs/test_dtensor.py test/programs/test_every_collective.py test/programs/test_getting_started.py test/programs/test_hanging.py \
	test/programs/test_mutations.py test/programs/test_optimizer_mutants.py test/programs/test_own_loop.py test/programs/test_pipelines.py test/programs/test_programs.py \
	test/programs/test_recompute.py test/programs/test_zoo.py \
	test/unit/interop/test_placements.py test/unit/lowering/test_aot.py test/unit/lowering/test_calls.py test/unit/kernels/test_kernels.py test/unit/lowering/test_lines.py \
	test/unit/lowering/test_same_text.py test/unit/kernels/test_scatter.py test/unit/ops/test_operators.py \
	test/unit/plan/test_buckets.py test/unit/rules/proof/test_library.py test/unit/search/test_branches.py test/unit/search/test_brute.py \
	test/unit/search/test_brute_step.py test/unit/search/test_budget.py test/unit/search/test_counted.py \
	test/unit/search/test_memory.py test/unit/search/test_recompute.py test/unit/simulate/test_replay.py

zoo: setup ## programs of every model of the zoo on 2, 4 and 8 ranks, and every move of some done wrong
	ZOO=all pytest -n $(WORKERS) --dist worksteal $(ZOO)

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
	python bench/gpu_prepare.py
	python bench/gpu_run.py

bench: setup ## time building and reading the models of the zoo
	python bench/models.py --json bench/results/models.json

clean: ## remove what builds and tests left, except .venv
	rm -rf build dist out *.egg-info .hypothesis .pytest_cache .ruff_cache
	find unity_ir test -name __pycache__ -prune -exec rm -rf {} +
