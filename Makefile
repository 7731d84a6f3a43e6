# Everything goes through one virtual environment, made on first use with plain pip.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO := $(VENV)/.demo
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo finetune-demo demo-layout serve test test-all test-kernels test-newest test-clients docs wheel lint format lock bench clean

help:
	@echo "make demo         train a small model on 8 simulated devices, resume on another mesh, generate"
	@echo "make finetune-demo fine-tune the model of the demo on conversations, and talk to it"
	@echo "make serve        serve the model of the demo, with a chat page, at http://127.0.0.1:8000/"
	@echo "make demo-layout  the layout demo, in the terminal and as demo.html"
	@echo "make test         lint, types and the tests that take seconds"
	@echo "make test-all     the slow tests too"
	@echo "make test-kernels the GPU kernels' tests, and a sample of the others, on the newest jax"
	@echo "make test-newest  all of the tests that take seconds on the newest jax (Python 3.12 or newer)"
	@echo "make test-clients the tests with lm-eval, LiteLLM, bitsandbytes, trackers and the TPU's compiler"
	@echo "make docs         the documentation as a site, build/site/index.html, with every link checked"
	@echo "make wheel        build a wheel, and train with it on each Python from 3.11 that is here"
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

finetune-demo: $(DEMO)
	test -d demo-run/checkpoints || $(MAKE) demo
	rm -rf finetune-run
	$(BIN)/python examples/finetune_demo.py

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

test-all: test
	$(BIN)/pytest -n auto --dist worksteal -m slow

# a second environment: newest of everything that pyproject.toml allows, on a newer Python; without
# torch, whose newest wheel brings gigabytes of CUDA
NEWEST := .venv-newest
$(NEWEST)/.installed: pyproject.toml
	python=$${NEWEST_PYTHON:-$$($(PYTHON) tools/find_python.py 3.12)} && $$python -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade -e '.[test]'
	touch $@

# what jax 0.10 skips, and what a new jax broke before: kernels, the compiler's accounts and texts,
# jax's private store, explicit sharding, saving
SAMPLE := tests/ops/attention/hopper tests/ops/test_grouped.py tests/ops/test_hopper_grouped.py \
  tests/ops/test_triton_grouped.py \
  tests/ops/attention/test_paged.py tests/ops/test_experts_triton.py tests/training/test_flops.py \
  tests/audits/test_program.py tests/launch/test_coordinator.py tests/layouts/test_shard_in_context.py \
  tests/checkpoint/test_save_and_restore.py tests/serving/test_engine.py

test-kernels: $(NEWEST)/.installed
	$(NEWEST)/bin/pytest -n auto --dist worksteal -m "not slow" $(SAMPLE)

test-newest:
	rm -f $(NEWEST)/.installed
	$(MAKE) $(NEWEST)/.installed
	$(NEWEST)/bin/pytest -n auto --dist worksteal -m "not slow"

# a third one, with other people's clients and, where it can be installed, the TPU's compiler
CLIENTS := .venv-clients
LIBTPU := $(shell uname -sm | sed -n 's/^Linux x86_64$$/,tpu/p')
$(CLIENTS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  -e '.[clients$(LIBTPU)]'
	touch $@

test-clients: $(CLIENTS)/.installed
	$(CLIENTS)/bin/pytest tests/evaluate/test_tasks.py tests/serving/server/test_lm_eval.py \
	  tests/serving/server/test_litellm.py tests/training/run/test_trackers.py tests/ops/test_nf4.py \
	  tests/ops/attention/test_tpu_compiler.py tests/training/test_micro_batches_on_tpus.py \
	  tests/training/test_overlap.py tests/planner/test_tpu_compiler.py

# a fourth one, for the documentation: it reads the sources and asks the command line, without torch
DOCS := .venv-docs
$(DOCS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
	@echo "open build/site/index.html; with its search: python3 -m http.server --directory build/site"

wheel:
	$(PYTHON) tools/check_wheel.py

bench: $(INSTALLED)
	$(BIN)/python benchmarks/placement.py --check
	$(BIN)/python benchmarks/compile_time.py
	$(BIN)/python benchmarks/kill_during_save.py

# write constraints.txt anew from the newest versions that pyproject.toml allows, every extra;
# nothing is installed
lock: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --dry-run --ignore-installed --report lock.json \
	  '.[dev,clients,docs,tpu,cuda]'
	$(BIN)/python tools/write_constraints.py lock.json constraints.txt
	rm lock.json

clean:
	rm -rf $(VENV) $(NEWEST) $(CLIENTS) $(DOCS) build dist demo.html demo-run finetune-run .pytest_cache .mypy_cache .ruff_cache .hypothesis
