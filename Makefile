# make quickstart: set up and train. make test: set up and check everything.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
WORKERS ?= 2

.PHONY: quickstart test test-newest lint types unit clean

quickstart: $(VENV)/run.stamp
	$(BIN)/python -m curax.train $(if $(wildcard runs/quickstart/config.json),--resume)

test: lint types unit

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev.stamp
	$(BIN)/basedpyright --pythonpath $(BIN)/python

unit: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# The same tests on the newest JAX, where a Python 3.12 or later is found.
FIND = import sys; print(sys.executable)
NEWEST ?= $(firstword $(foreach v,3.13 3.12,$(shell python$(v) -c '$(FIND)' 2>/dev/null)))
test-newest:
	@test -n "$(NEWEST)" || { echo "No python3.13 or python3.12 runs here; name one: NEWEST=PATH."; exit 2; }
	$(MAKE) unit VENV=.venv-newest PYTHON=$(NEWEST)

$(VENV)/run.stamp: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "curax needs Python 3.11 or later; set PYTHON=path.")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .venv-newest runs
