# `make run` and `make test` do all the set-up on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
RUN := .venv/.run
READY := .venv/.ready

.PHONY: run test coverage slow other-flower docs reference format clean

SYSTEMS := fednca-ml,fedlgt,fedmlp,private-fedavg:loss=sigmoid,fedharmony

run: $(RUN)  ## compare the five systems with their baselines on the embedded digits; one or two minutes
	$(BIN)/fedmll compare examples/digits.toml --methods local-only,fedavg,$(SYSTEMS),fed-ridge,fed-logistic,centralized \
		--rounds 10 --seeds 0 --metrics macro_auc,map,macro_f1_tuned,description

# Coverage costs little with sys.monitoring (Python 3.12 and newer). The older tracer nearly doubles the time of the tests, so
# with Python 3.11 `make test` leaves it out; `make coverage` measures it with any version.
MONITORING := $(shell $(PYTHON) -c 'import sys; print("yes" if sys.version_info >= (3, 12) else "")')
COVERAGE := --cov=fedmll --cov-report=term:skip-covered

test: $(READY)  ## lint, types and every fast test; with Python 3.12 also the lines that no test reaches
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(if $(MONITORING),COVERAGE_CORE=sysmon) $(BIN)/pytest -n 2 -m "not slow" $(if $(MONITORING),$(COVERAGE))

coverage: $(READY)  ## the fast tests, and the lines that no test reaches
	$(if $(MONITORING),COVERAGE_CORE=sysmon) $(BIN)/pytest -n 2 -m "not slow" $(COVERAGE)

slow: $(READY)  ## tests with real servers, browsers and killed processes
	$(BIN)/pytest -m slow

other-flower: $(READY)  ## the Flower engine on the other supported version of Flower, where it can be installed
	.ci/other-flower

docs: reference  ## the documentation site, in site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

reference: .venv/.docs  ## docs/reference/settings.md and commands.md, from the code
	$(BIN)/python docs/generate_reference.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv site .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage

$(RUN): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -e '.[hf]'
	touch $@

$(READY): $(RUN)
	$(BIN)/pip install --quiet -e '.[dev,flower,ray,hf,track,export,tables,hdf5,dicom]'
	touch $@

.venv/.docs: $(READY)
	$(BIN)/pip install --quiet -e '.[docs]'
	touch $@
