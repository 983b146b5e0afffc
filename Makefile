# Every target creates .venv/ when it is missing and uses it; `make help` lists them.

# Which torch to install. Another build is chosen on the command line: make venv TORCH="torch==2.8.0".
TORCH ?= torch==2.13.0
# Which interpreter .venv/ is made of: python3.11 where there is one.
PYTHON ?= $(shell command -v python3.11 2>/dev/null || command -v python3)
# More options for pytest: make test PYTEST_ARGS="-k boundaries".
PYTEST_ARGS ?=
# Where `make gpu` keeps its log and results, and what it may take.
GPU_OUT ?= build/gpu
GPU_MINUTES ?= 9.5
# Test processes at once, one a core: make test WORKERS=0 runs all in one, as a debugger needs it.
WORKERS ?= logical
# Tests that start processes wait for some of their time: two more than there are cores, unless WORKERS says otherwise.
SLOW_WORKERS ?= $(if $(filter logical,$(WORKERS)),$(shell expr $$(getconf _NPROCESSORS_ONLN) + 2),$(WORKERS))

VENV := .venv
BIN := $(VENV)/bin
# The oldest torch that is supported. PyPI has it for x86 with CUDA only, about 3 GB with the libraries that it needs.
TORCH_OLDEST_VENV := .venv-torch-oldest
TORCH_OLDEST ?= torch==2.6.0
# The oldest and the newest Python that are supported, each with an environment of its own.
PYTHON_OLDEST_VENV := .venv-python-oldest
PYTHON_OLDEST ?= python3.10
PYTHON_NEWEST_VENV := .venv-python-newest
PYTHON_NEWEST ?= python3.13
# The oldest transformers that is supported, with the accelerate of its time.
HF4 := .venv-hf4
HF4_CONSTRAINTS := transformers==4.56.* accelerate==1.11.*
# The oldest DeepSpeed that is supported; PyPI has its source only, which builds without torch.
DEEPSPEED_OLDEST_VENV := .venv-deepspeed-oldest
DEEPSPEED_OLDEST ?= deepspeed==0.19.0
# What builds the documentation site; it reads the package's sources and imports nothing of them.
DOCS_VENV := .venv-docs
DOCS_TOOLS := "zensical>=0.0.70,<1" "mkdocstrings-python>=2,<3"
# All loggers. The last wandb whose package reads what it has written is 0.29; the newest one: LOGGERS_CONSTRAINTS=.
LOGGERS_VENV := .venv-loggers
LOGGERS_CONSTRAINTS ?= wandb==0.29.*
DEEPSPEED_TESTS := tests/engine tests/loop tests/config tests/trainer tests/ranks
# The tiers of CONTRIBUTING.md, and how pytest is started by every target.
QUICK := not process and not ranks and not gpu and not loggers
# What `make coverage` runs; what subprocesses and ranks execute is not counted.
COVERED ?= $(QUICK)
SLOW := (process or ranks) and not gpu
# Clusters have deadlines of their own, which a busy machine does not keep: nothing else beside them, and one process less.
HOSTS_TESTS := tests/hosts
HOSTS_WORKERS ?= $(if $(filter logical,$(WORKERS)),$(shell expr $$(getconf _NPROCESSORS_ONLN) + 1),$(WORKERS))
# What `make test` leaves out: more sizes and kinds, for which others stand, and programs that use the package.
REST := exhaustive or program
# With PYTEST_ARGS="-k …" a tier may have no such test.
or-none = $(if $(PYTEST_ARGS),|| [ $$? -eq 5 ])
# Files go to workers in the order that tests/conftest.py gives them: the longest first.
pytest = -m pytest -m "$(1)" --numprocesses $(or $(2),$(if $(findstring not process,$(1)),$(WORKERS),$(SLOW_WORKERS))) --dist loadfile --no-loadscope-reorder --instafail $(PYTEST_ARGS)
HF_TESTS := tests/integrations tests/examples/test_hf_examples.py tests/examples/test_clm_examples.py \
	$(wildcard tests/launch/test_accelerate_*.py)

.DEFAULT_GOAL := help
.PHONY: help venv run test test-all test-quick test-slow test-rest test-hosts test-hf4 test-torch-oldest test-deepspeed-oldest test-python-oldest test-python-newest test-loggers coverage gpu check docs format pictures bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-22s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(VENV)/.package $(VENV)/.page ## create .venv/ with torch and this package, editable, and the libraries of the page

run: $(VENV)/.runtime ## train the main example (digits) and show its result
	$(BIN)/dstrial run experiment_configs/digits.yaml model_defs/digits

test: test-quick test-slow ## run the tests of a change: each behaviour of the package once, on this machine

test-all: test test-hosts test-rest ## run every test that needs no accelerator, also hosts, Slurm and Ray: an hour on two cores

test-quick: venv ## run the tests that start no process and use no network: a minute on two cores
	$(BIN)/python $(call pytest,$(QUICK)) $(or-none)

test-slow: venv ## run the tests that start processes or ranks on this machine, each behaviour once
	$(BIN)/python $(call pytest,$(SLOW) and not ($(REST))) --ignore=$(HOSTS_TESTS) $(or-none)

test-rest: venv ## run what `make test` leaves out on this machine: examples, benchmarks, more sizes and kinds
	$(BIN)/python $(call pytest,$(SLOW) and ($(REST))) --ignore=$(HOSTS_TESTS) $(or-none)

test-hosts: venv ## run the tests over several hosts, in jobs of Slurm and on Ray, on machines made of namespaces
	$(BIN)/python $(call pytest,$(SLOW),$(HOSTS_WORKERS)) $(HOSTS_TESTS) $(or-none)

coverage: venv ## print which branches the quick tests take; all tests: COVERED="not gpu"
	$(BIN)/python $(call pytest,$(COVERED)) --cov --cov-report=term

test-hf4: $(HF4)/.package ## run the tests that train with transformers or accelerate with 4.56 and 1.11, in .venv-hf4/
	$(HF4)/bin/python $(call pytest,not gpu) $(HF_TESTS)

test-loggers: $(LOGGERS_VENV)/.loggers ## run the tests that log to W&B and MLflow, offline, in .venv-loggers/
# Where MLflow is installed DeepSpeed imports it, and with it a library that starts a thread: nothing can be forked then.
	DS_ACCELERATOR=cpu TEST_FORKS=0 $(LOGGERS_VENV)/bin/python $(call pytest,loggers) tests/loggers

test-torch-oldest: ## run every test that needs no accelerator with the oldest torch, in .venv-torch-oldest/
	$(MAKE) $(TORCH_OLDEST_VENV)/.package $(TORCH_OLDEST_VENV)/.page TORCH="$(TORCH_OLDEST)"
# Its compiler starts workers at import, which tests would take for forgotten processes.
	DS_ACCELERATOR=cpu TORCHINDUCTOR_COMPILE_THREADS=1 $(TORCH_OLDEST_VENV)/bin/python $(call pytest,not gpu)

test-deepspeed-oldest: $(DEEPSPEED_OLDEST_VENV)/.package ## run the tests of engines and configs with the oldest DeepSpeed, in .venv-deepspeed-oldest/
	DS_ACCELERATOR=cpu $(DEEPSPEED_OLDEST_VENV)/bin/python $(call pytest,not gpu) $(DEEPSPEED_TESTS)

# PyPI's torch is built for CUDA; tests train on the CPU. Another interpreter: PYTHON_OLDEST=/path/to/python3.10.
test-python-oldest: ## run every test that needs no accelerator with the oldest Python, in .venv-python-oldest/
	$(MAKE) $(PYTHON_OLDEST_VENV)/.package $(PYTHON_OLDEST_VENV)/.page PYTHON="$(PYTHON_OLDEST)"
	DS_ACCELERATOR=cpu $(PYTHON_OLDEST_VENV)/bin/python $(call pytest,not gpu)

test-python-newest: ## run every test that needs no accelerator with the newest Python, in .venv-python-newest/
	$(MAKE) $(PYTHON_NEWEST_VENV)/.package $(PYTHON_NEWEST_VENV)/.page PYTHON="$(PYTHON_NEWEST)"
	DS_ACCELERATOR=cpu $(PYTHON_NEWEST_VENV)/bin/python $(call pytest,not gpu)

# A bare GPU machine has its own torch: an interpreter that is named is taken as it is, and nothing is installed.
ifeq ($(origin PYTHON),command line)
gpu: ## on a GPU: the tests marked gpu and dstrial doctor --train, without a network, within 10 minutes; PYTHON=python3 takes that one
	tools/prove_on_gpu.sh "$(PYTHON)" "$(GPU_OUT)" "$(GPU_MINUTES)"
else
gpu: venv
	tools/prove_on_gpu.sh $(BIN)/python "$(GPU_OUT)" "$(GPU_MINUTES)"
endif

check: venv ## lint, formatting, types of Python and of the page, import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	PATH="$(CURDIR)/$(BIN):$$PATH" node_modules/.bin/tsc -p jsconfig.json

docs: $(DOCS_VENV)/.docs ## build the documentation site into build/site/; a link that leads nowhere fails
	$(DOCS_VENV)/bin/zensical build --strict

format: venv ## let ruff rewrite what `make check` would complain about
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

pictures: venv ## take pictures of every view of the page into build/page_pictures/, and those of the documents anew
	PAGE_PICTURES=build/page_pictures $(BIN)/python -m pytest tests/master/web/test_page_views.py
	cp build/page_pictures/documents/*.png docs/pictures/
	$(BIN)/python tools/search_pictures.py docs/pictures

bench: venv ## measure what the loop adds to bare DeepSpeed
	$(BIN)/python benchmarks/loop_overhead.py

clean: ## remove all environments, caches and build outputs; runs/ stays
	rm -rf $(VENV) $(HF4) $(TORCH_OLDEST_VENV) $(DEEPSPEED_OLDEST_VENV) $(PYTHON_OLDEST_VENV) $(PYTHON_NEWEST_VENV) $(LOGGERS_VENV) $(DOCS_VENV) .cache build dist node_modules dstrial/master/web/vendor *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find dstrial tests model_defs benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# These rules make the environments; % is the directory. tools/phase.sh prints a line for each step, and the output of one that fails.
%/.python:
	@test -n "$(PYTHON)" || { echo "No python3 is on PATH; expected Python 3.10 or later. Install python3.11." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "$(PYTHON) is too old or cannot be run; expected Python 3.10 or later. Set PYTHON=/path/to/python3.11." >&2; exit 1; }
	@tools/phase.sh "making $* with $(PYTHON)" $(PYTHON) -m venv $*
	@touch $@

# The stamp's content is the request, so that another TORCH installs another torch.
%/.torch: %/.python FORCE
	@if [ "$$(cat $@ 2>/dev/null)" != "$(TORCH)" ]; then \
		tools/phase.sh "installing $(TORCH)" $*/bin/python -m pip install "$(TORCH)" && echo "$(TORCH)" > $@; \
	fi

$(LOGGERS_VENV)/.package: CONSTRAINTS := $(LOGGERS_CONSTRAINTS)
$(HF4)/.package: CONSTRAINTS := $(HF4_CONSTRAINTS)
$(DEEPSPEED_OLDEST_VENV)/.package: CONSTRAINTS := $(DEEPSPEED_OLDEST)

# The installed torch becomes a constraint, so that no dependency replaces it by another build.
%/.runtime: %/.torch pyproject.toml
	@$*/bin/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $*/constraints.txt
	@printf '%s\n' $(CONSTRAINTS) >> $*/constraints.txt
	@tools/phase.sh "installing dstrial and what the main example needs" \
		$*/bin/python -m pip install --constraint $*/constraints.txt --editable ".[digits]"
	$(require-same-torch)
	@touch $@

%/.package: %/.runtime
	@tools/phase.sh "installing the tools of development and what all examples need" \
		$*/bin/python -m pip install --constraint $*/constraints.txt --editable ".[dev,examples]"
	$(require-same-torch)
	@touch $@

%/.docs: %/.python Makefile
	@tools/phase.sh "installing what builds the documentation" $*/bin/python -m pip install $(DOCS_TOOLS)
	@touch $@

%/.loggers: %/.package
	@tools/phase.sh "installing wandb and mlflow" \
		$*/bin/python -m pip install --constraint $*/constraints.txt --editable ".[wandb,mlflow]"
	$(require-same-torch)
	@touch $@

# The page's libraries are copied into the package; what makes them is in node_modules/.
%/.page: %/.python $(wildcard package.json package-lock.json tools/page_libraries.sh)
	@tools/phase.sh "fetching the libraries of the page" tools/page_libraries.sh $*/bin/python
	@touch $@

define require-same-torch
@test "torch==$$($*/bin/python -c 'from importlib.metadata import version; print(version("torch"))')" \
	= "$$(head -n 1 $*/constraints.txt)" || { echo "torch was replaced while installing; see above." >&2; exit 1; }
endef

.PHONY: FORCE
FORCE:

# Stamps are kept, although only rules name them.
.SECONDARY:
