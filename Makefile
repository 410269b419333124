.DEFAULT_GOAL := help
.PHONY: help serve test check check-native wheel clean

# MODEL, PORT, HOST, ARGS, VENV and PYTHON given on the command line reach the scripts as environment.

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' Makefile

serve: ## install and start the OpenAI server (MODEL=, PORT=8000, HOST=127.0.0.1, ARGS=)
	@scripts/serve

test: ## install with the dev tools and run the tests (ARGS="-m full")
	@scripts/test

check: ## linters, formatters, types
	@scripts/check

check-native: ## the kernel tests under sanitizers; the zen4 table in software where the CPU lacks it
	@scripts/check-native

wheel: ## a checked wheel in dist/
	@scripts/wheel

clean: ## remove what was built, but keep .venv
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
