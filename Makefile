# Two commands matter: `make lab` opens the chapters, `make test` proves them.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/ready
FIRST  := $(firstword $(wildcard notebooks/00_*.ipynb notebooks/01_*.ipynb))
EXTRAS ?= lab,test
CHAPTERS := $(wildcard notebooks/[0-9]*.ipynb)
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q install

.DEFAULT_GOAL := help
.PHONY: help lab test notebooks bench clean

help:
	@echo "make lab        install into $(VENV) and open the chapters in JupyterLab"
	@echo "make test       lint, unit tests, doctests, every chapter, the browser (if Chromium is found)"
	@echo "make notebooks  rebuild notebooks/*.ipynb from notebooks/src/*.py"
	@echo "make bench      measure speed as ratios, on this machine, in one run"
	@echo "make clean      remove $(VENV) and caches"

# The stamp is written last: an interrupted install starts over, a finished one costs nothing.
$(READY): pyproject.toml
	@echo "1/3 creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed. Use: make lab PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@echo "2/3 installing JupyterLab, NumPy, ipywidgets, matplotlib and the test tools"
	@$(PIP) -e '.[$(EXTRAS)]'
	@echo "3/3 checking the installation"
	@$(BIN)/python -c 'import kvlib.figures, kvlib.panel, jupyterlab'
	@touch $(READY)

# The settings hide the light for a busy kernel, which at every step of a drag redraws the page twice,
# and save the widgets' state, so that a saved chapter shows its pictures without a kernel.
lab: $(READY)
	$(BIN)/jupyter lab --LabApp.app_settings_dir=$(CURDIR)/notebooks/lab \
	  --LabApp.default_url=/doc/tree/$(FIRST) $(LAB_FLAGS)

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/numpydoc lint kvlib/[a-z]*.py kvlib/figures/[a-z]*.py
	$(BIN)/python notebooks/build.py --check
	$(BIN)/python -m pytest -n 2 --dist loadfile -p no:cacheprovider \
	  --nbval --nbval-sanitize-with tests/nbval.cfg tests kvlib $(CHAPTERS)

notebooks: $(READY)
	$(BIN)/python notebooks/build.py

bench: $(READY)
	@for script in tests/bench/bench_*.py; do $(BIN)/python $$script || exit 1; done

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis tests/browser/shots
	find . -name __pycache__ -prune -exec rm -rf {} +
