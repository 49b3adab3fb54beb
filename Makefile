# Two commands do everything on a fresh machine with Python 3.11+: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
TEST_WORKERS ?= 2

.PHONY: setup demo test test-fast test-full lint format bench clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "FlowTrain needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	       "Name another one: make setup PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { \
	  echo "Could not make .venv (on Debian/Ubuntu: apt-get install python3-venv)." >&2; exit 1; }
	@echo "Installing into .venv (about 2 GB, a few minutes) ..."
	$(BIN)/python -m pip install --quiet -c constraints.txt --config-settings editable_mode=compat -e '.[dev]'
	@touch $@

demo: setup
	@bash scripts/demo.sh

# Two files at a time: tests wait for Ray most of their time, and a file's tests share what it starts. In the order that
# tests/conftest.py gives: files that start processes first.
IN_FILES := -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

test: setup
	$(BIN)/python -m pytest $(IN_FILES) --durations 40 --durations-min 10 $(PYTEST_ARGS)

# What needs no Ray cluster and no processes of its own.
test-fast: setup
	$(BIN)/python -m pytest $(IN_FILES) -m "not e2e and not processes and not slow and not nightly" $(PYTEST_ARGS)

# Every test, the long campaigns too, and ten times as many examples of hypothesis.
test-full: setup
	@echo "All of it runs only on Linux as root with iproute2, g++, Prometheus and Chromium (apt-get install iproute2 g++" \
	      "prometheus chromium), the extra browser (pip install -e '.[browser]') and a CUDA device;" \
	      "what is skipped says what it lacks."
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest $(IN_FILES) --timeout 3600 -m "" $(PYTEST_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	@for file in benchmarks/*.py; do \
	  case "$$file" in */_*|'benchmarks/*.py') continue ;; esac; \
	  echo "== $$file"; $(BIN)/python "$$file" $(BENCH_ARGS) || exit 1; done

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
