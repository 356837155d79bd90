# make train runs the main job, make test the tests. Both first set up what they need.
SHELL := /bin/bash
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup train test bench lint docs

help: ## list these targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 10

setup: ## make a virtual environment and install everything into it (VENV=.venv, PYTHON=python3.11)
	@scripts/setup "$(VENV)"

train: setup ## train a GPT on eight ranks through three tiers, with preset topo (ARGS="train.steps=50")
	@"$(BIN)/hzero" train zero=topo $(ARGS)

# One process more than there are cores: ranks of a test often wait for each other.
test: setup ## run the tests (ARGS="tests/codecs -x")
	@"$(BIN)/python" -m pytest -n $$(($$(nproc) + 1)) --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

bench: setup ## compare hzero with other schemes on an emulated cluster; needs root (ARGS="suite=main", ARGS=--help)
	@"$(BIN)/python" -m benchmarks.compare $(ARGS)

docs: setup ## build the documentation as a site, strictly, into build/site (ARGS=serve: show it, and follow changes)
	@"$(BIN)/python" -m mkdocs $(if $(ARGS),$(ARGS),build --strict)

lint: setup ## run ruff, mypy, typos, clang-format and shellcheck
	@scripts/lint "$(BIN)"
