# Everything goes through one virtual environment, made on first use with plain pip.
PYTHON ?= python3
VENV ?= .venv
NEWEST_PYTHON ?= python3.12
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO := $(VENV)/.demo
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo demo-layout serve test test-all test-newest lint format lock bench clean

help:
	@echo "make demo         train a small model on 8 simulated devices, resume on another mesh, generate"
	@echo "make serve        serve the model of the demo, with a chat page, at http://127.0.0.1:8000/"
	@echo "make demo-layout  the layout demo, in the terminal and as demo.html"
	@echo "make test         lint, types and the tests that take seconds"
	@echo "make test-all     the slow tests too"
	@echo "make test-newest  the tests on the newest jax (needs python3.12)"
	@echo "make bench        the benchmarks behind benchmarks/RESULTS.md"
	@echo "make lint format lock clean"

# what tests and checks need: PyTorch, transformers, mypy and more
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[dev]'
	touch $@ $(DEMO)

# what training and serving in JAX need
$(DEMO): pyproject.toml constraints.txt
	@echo "installing jax and what else the demo needs in $(VENV) (about 190 MB to download)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[serve]'
	touch $@

demo: $(DEMO)
	rm -rf demo-run
	$(BIN)/python examples/train_demo.py --run demo-run

serve: $(DEMO)
	test -d demo-run/checkpoints || $(MAKE) demo
	$(BIN)/meshwright serve demo-run

demo-layout: $(DEMO)
	$(BIN)/python examples/layout_demo.py --html demo.html

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint
	$(BIN)/pytest -n auto --dist worksteal -m "not slow"

# the slow ones one at a time: some of them measure
test-all: test
	$(BIN)/pytest -m slow

# a second environment: newest of everything that pyproject.toml allows, on a newer Python
test-newest:
	$(NEWEST_PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --upgrade -e '.[dev]' torch==2.13.0
	.venv-newest/bin/pytest -n auto --dist worksteal -m "not slow"

bench: $(INSTALLED)
	$(BIN)/python benchmarks/placement.py
	$(BIN)/python benchmarks/compile_time.py
	$(BIN)/python benchmarks/kill_during_save.py

# write constraints.txt anew from the newest versions that pyproject.toml allows, every extra;
# nothing is installed
lock: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --dry-run --ignore-installed --report lock.json \
	  '.[dev,torch,track,tpu,cuda]'
	$(BIN)/python tools/write_constraints.py lock.json constraints.txt
	rm lock.json

clean:
	rm -rf $(VENV) .venv-newest .venv-lock build dist demo.html demo-run .pytest_cache .mypy_cache .ruff_cache .hypothesis
