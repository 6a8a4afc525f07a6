# `make run` and `make test` do all the set-up on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: run test slow other-flower docs format clean

SYSTEMS := fednca-ml,fedlgt,fedmlp,private-fedavg:loss=sigmoid,fedharmony

run: $(READY)  ## the five systems beside what they are measured against, on the embedded digits; a minute or two
	$(BIN)/fedmll compare examples/digits.toml --methods local-only,fedavg,$(SYSTEMS),fed-ridge,centralized \
		--rounds 10 --seeds 0 --metrics macro_auc,map,macro_f1_tuned,what

test: $(READY)  ## lint, types and every fast test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 -m "not slow"

slow: $(READY)  ## real servers, kills
	$(BIN)/pytest -m slow

other-flower: $(READY)  ## the engine on the other version of Flower that is allowed, where it can be installed
	.ci/other-flower

docs: .venv/.docs  ## the site, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv site .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(READY): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -e '.[dev,flower,cluster,hf,track,export,tables,hdf5,dicom]'
	touch $@

.venv/.docs: $(READY)
	$(BIN)/pip install --quiet -e '.[docs]'
	touch $@
