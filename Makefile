# All targets use the environment .venv in this folder, and create it first if it is missing.
PYTHON ?= python3
BIN := .venv/bin

FLOWER := .venv-flower/bin

.PHONY: setup setup-flower demo test test-all golden golden-cuda test-gpu test-flower test-flower-faults fuzz check format bench clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

setup-flower: .venv-flower/ready  ## an own environment, because Flower needs older versions of some tools

.venv-flower/ready: pyproject.toml constraints.txt constraints-flower.txt
	$(PYTHON) -m venv .venv-flower
	$(FLOWER)/python -m pip install --quiet --disable-pip-version-check --upgrade pip setuptools
	$(FLOWER)/python -m pip install --quiet --disable-pip-version-check --constraint constraints-flower.txt \
	  --editable '.[dev,flower]'
	touch $@

demo: setup  ## five papers put to the test, each with the command that does it: four minutes on two cores
	$(BIN)/fedloom demo

test: setup  ## all tests but the exhaustive ones; FEDLOOM_DATA names the folder of real data sets
	$(BIN)/python -m pytest -q -n auto --dist worksteal -m 'not exhaustive'

test-all: test  ## all tests: every method, network and option
	$(BIN)/python -m pytest -q -n auto --dist worksteal -m exhaustive

golden: setup  ## compare about 290 small runs with those of an old commit
	$(BIN)/python -m tests.golden
	@if [ -e .venv-flower/ready ]; then $(FLOWER)/python -m tests.golden '*/flower'; \
	  else echo 'scaffold/flower: skipped, there is no .venv-flower (make setup-flower)'; fi

test-flower: setup-flower  ## tests with real Flower processes on this machine
	$(FLOWER)/python -m pytest -q -m flower tests/flower

test-flower-faults: setup-flower  ## inject faults: killed and frozen processes, dishonest nodes (15 minutes)
	$(FLOWER)/python -m pytest -q -m faults tests/flower/faults

test-gpu: setup  ## compare the CUDA engine with a plain loop and the sequential engine
	$(BIN)/python -m pytest -q -m gpu tests/engines/cuda/test_gpu.py tests/devices/test_precision.py \
	  tests/utils/test_storage.py tests/runs/test_background_writer.py tests/runs/test_out_of_memory.py \
	  tests/methods/test_partial_results.py tests/methods/test_fedcross_precision.py tests/models

golden-cuda: setup  ## store the results of the CUDA engine on fake graphs again
	$(BIN)/python -m tests.golden.cuda

fuzz: setup  ## the property tests with fresh random inputs; `make fuzz TESTS=tests/data` for some
	HYPOTHESIS_PROFILE=search $(BIN)/python -m pytest -q -n auto -p no:cacheprovider $(TESTS)

check: setup  ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup  ## measure rounds against a plain PyTorch loop
	$(BIN)/python -m benchmarks rounds --out results/rounds.json

clean:
	rm -rf .venv .venv-flower .venv-peers .golden .pytest_cache .mypy_cache .ruff_cache .hypothesis
