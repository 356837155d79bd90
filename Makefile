# make train: the main job. make test: the tests. Both set up what they need first; nothing else has to be installed.
SHELL := /bin/bash
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup train test bench lint

help: ## what there is
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 10

setup: ## a virtual environment with everything in it (VENV=.venv, PYTHON=python3.11)
	@scripts/setup "$(VENV)"

train: setup ## train a GPT on eight ranks through three tiers (ARGS="zero=mild train.steps=50")
	@"$(BIN)/hzero" train $(ARGS)

test: setup ## run the tests (ARGS="tests/codecs -x")
	@"$(BIN)/python" -m pytest $(ARGS)

bench: setup ## compare hzero with its peers on an emulated cluster; needs root (ARGS="suite=main", ARGS=--help)
	@"$(BIN)/python" -m benchmarks.compare $(ARGS)

lint: setup ## ruff, mypy, typos, clang-format
	@scripts/lint "$(BIN)"
