# Every target first brings the virtual environments in .venvs/ up to date; where they are, that takes a blink.

BIN := .venvs/base/bin
# Many machines set this; here it would compile every imported module from source at every start of every service.
unexport PYTHONDONTWRITEBYTECODE
ARGS ?=
OUT ?= dist

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-long check docs build audit format fuzz bench lower recipes chaos soak sizes clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## */|/' | awk -F'|' '{printf "make %-11s %s\n", $$1, $$2}'

install:  ## find a Python, get uv, make the three environments
	@for python in python3 python3.13 python3.12 python /usr/bin/python3 "$$HOME"/.pyenv/versions/3.*/bin/python3; do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null; then exec "$$python" volley/bootstrap.py; fi; \
	done; echo "volley: no Python 3.8 or newer on PATH; install Python 3.12" >&2; exit 1

quickstart: install  ## train a tiny model through all the services, under two minutes on two idle cores
	@$(BIN)/volley quickstart $(ARGS)

test: install  ## units, components and systems in all three virtual environments
	@$(BIN)/python -m tools.testing $(ARGS)

test-long: install  ## 300 kills, three minutes of real chaos, ten of soak, a run extended, more fuzz
	@$(BIN)/python -m tools.testing --long $(ARGS)

check: install  ## formatting, lint, types, import contracts
	@$(BIN)/ruff format --check --output-format concise . || { echo "run: make format" >&2; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/pyrefly check --summary=none
	@# Folders that need JAX, each in its own environment.
	@$(BIN)/pyrefly check --summary=none --python-interpreter-path .venvs/trainer/bin/python \
	  services/trainer/models packages/convert/volley_convert packages/families/volley_families/trainer
	@$(BIN)/pyrefly check --summary=none --python-interpreter-path .venvs/rollout/bin/python \
	  services/rollout/engines/sglang_jax packages/engines/volley_engines/gpu packages/serving/volley_serving/constraints \
	  packages/families/volley_families/engine
	@$(BIN)/lint-imports --cache-dir .cache/import-linter

fuzz: install  ## 5,000 generated requests to every service; ARGS go to pytest
	@VOLLEY_FUZZ_CASES=$${VOLLEY_FUZZ_CASES:-5000} $(BIN)/python -m pytest tests/fuzz $(ARGS)

docs: install  ## build the documentation site, with references made from the code, in .cache/docs/site
	@$(BIN)/python volley/bootstrap.py docs
	@$(BIN)/python -m tools.docs.reference .cache/docs/reference.json
	@NO_MKDOCS_2_WARNING=1 .venvs/docs/bin/mkdocs build --quiet --strict $(ARGS)
	@echo .cache/docs/site/index.html

build: install  ## sdist, wheel, and the client's wheel, in dist/
	@$(BIN)/uv build --no-build-isolation --python $(BIN)/python --out-dir $(OUT) $(ARGS)
	@$(BIN)/python -m tools.client_wheel $(OUT)

audit: install  ## known vulnerabilities in the locked dependencies; ARGS=--refresh renews the file that needs no network
	@$(BIN)/python -m tools.audit $(ARGS)

format: install  ## format, and mend what ruff can mend
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

chaos: install  ## kill, pause, wipe, cut everything of a run, and prove that nothing came of it
	@$(BIN)/python -m tools.chaos $(ARGS)

soak: install  ## run the whole stack for half an hour and see that nothing grows
	@$(BIN)/python -m tools.soak $(ARGS)

bench: install  ## measure; writes bench.json
	@$(BIN)/python -m tools.bench --json bench.json $(ARGS)

lower: install  ## compile a configuration's steps for TPUs that are not here; ARGS="FILE.yaml --tpu v5e"
	@$(BIN)/python -m tools.lower $(ARGS)

recipes: install  ## train a recipe's runs and compare them with its committed interval; ARGS="NAME --seeds 0"
	@$(BIN)/python -m tools.recipes $(ARGS)

sizes: install  ## lines of the core and of each package, and what one quickstart imports
	@$(BIN)/python -m tools.sizes $(ARGS)

clean:  ## remove environments, caches and tools, not runs/
	rm -rf .venvs .cache .tools .ruff_cache .pytest_cache .hypothesis bench.json
