# What to do with a checkout. Everything is set up on the way.
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run check test bench docs lint setup dev tools seccomp clean

run: setup  ## run examples/hello.py in a sandbox
	$(BIN)/paracle template build default --if-missing
	$(BIN)/paracle sandbox execute examples/hello.py

test: dev tools lint  ## everything, on real kernels, engines and limits
	scripts/engines.sh run scripts/run_tests.sh $(BIN)/python

check: lint  ## lint, types and the tests that need no engine: 3 to 4 minutes
	$(BIN)/python -m pytest -q -m 'not clock' tests/unit tests/guest tests/conformance/test_fake.py \
		tests/conformance/test_native.py

bench: dev  ## the budget, ours beside the alternatives, in one run
	-$(BIN)/paracle template build default --if-missing
	-$(BIN)/paracle template build ml --if-missing
	scripts/engines.sh run $(BIN)/python -m benchmarks

docs:  ## the documentation site, in build/site
	@scripts/setup.sh $(VENV) docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "To read it: $(BIN)/python -m http.server -d build/site"

lint: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/architecture

setup:
	@scripts/setup.sh $(VENV)

dev:
	@scripts/setup.sh $(VENV) dev

tools:
	@scripts/test_tools.sh

seccomp: dev  ## the filter as container engines want it, after a change of the table
	$(BIN)/python -m paracle_sandbox.jail.filters.engine_profile | tee tests/golden/seccomp_oci.json \
		> src/paracle_sandbox/backends/docker/seccomp.json
	$(BIN)/python -m paracle_sandbox.jail.filters.container_profile | tee deploy/containers/paracle-seccomp.json \
		> src/paracle_sandbox/backends/native/container_seccomp.json

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
