# Everything is done in .venv in this folder; each target makes it first where it is missing.
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

setup-flower: .venv-flower/ready  ## Flower wants older versions of some tools, so it has an environment of its own

.venv-flower/ready: pyproject.toml constraints.txt constraints-flower.txt
	$(PYTHON) -m venv .venv-flower
	$(FLOWER)/python -m pip install --quiet --disable-pip-version-check --upgrade pip setuptools
	$(FLOWER)/python -m pip install --quiet --disable-pip-version-check --constraint constraints-flower.txt \
	  --editable '.[dev,flower]'
	touch $@

demo: setup  ## five methods on the embedded digits: a table and a report
	$(BIN)/fedloom compare fedavg scaffold fedcross fedmr fedcda --seeds 3 --partition dirichlet:0.1 --rounds 60 \
	  --set fedcda.warmup=20

test: setup  ## the tests; those that want real data sets are skipped where FEDLOOM_DATA does not name their folder
	$(BIN)/python -m pytest -q -n auto --dist worksteal -m 'not exhaustive'

test-all: test  ## and the exhaustive ones: every method, network and option in turn
	$(BIN)/python -m pytest -q -n auto --dist worksteal -m exhaustive

golden: setup  ## about 290 small runs: the working tree writes what the old commit writes, and draws what it draws
	$(BIN)/python -m tests.golden
	@if [ -e .venv-flower/ready ]; then $(FLOWER)/python -m tests.golden '*/flower'; \
	  else echo 'scaffold/flower: skipped, there is no .venv-flower (make setup-flower)'; fi

test-flower: setup-flower  ## federations of real Flower processes on this machine
	$(FLOWER)/python -m pytest -q -m flower tests/flower

test-flower-faults: setup-flower  ## the same with faults: processes killed and frozen, nodes that lie (a quarter of an hour)
	$(FLOWER)/python -m pytest -q -m faults tests/flower/faults

test-gpu: setup  ## the engine on a GPU, held against a plain loop and the sequential engine
	$(BIN)/python -m pytest -q -m gpu tests/engines/cuda/test_gpu.py tests/devices/test_precision.py \
	  tests/utils/test_storage.py tests/runs/test_background_writer.py tests/runs/test_out_of_memory.py \
	  tests/methods/test_partial_results.py tests/methods/test_fedcross_precision.py tests/models

golden-cuda: setup  ## store anew what runs of the CUDA engine on fake graphs come to
	$(BIN)/python -m tests.golden.cuda

fuzz: setup  ## the property tests again with inputs drawn anew; `make fuzz TESTS=tests/data` for some
	HYPOTHESIS_PROFILE=search $(BIN)/python -m pytest -q -n auto -p no:cacheprovider $(TESTS)

check: setup  ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup  ## against a plain PyTorch loop, as ratios
	$(BIN)/python -m benchmarks rounds --out results/rounds.json

clean:
	rm -rf .venv .venv-flower .venv-peers .golden .pytest_cache .mypy_cache .ruff_cache .hypothesis
