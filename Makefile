# The entry point of this repository. `make help` lists the targets; continuous integration runs `make test`.

PYTHON ?=
ARGS ?=
WEFT_CHAOS_ROUNDS ?= 25
# All of them where CI is set, as services for continuous integration set it: they take five minutes of CPU time.
WEFT_SIMULATION_HISTORIES ?= $(if $(CI),10000,3000)
WEFT_CHAOS_TASKS ?= 3000
WEFT_CHAOS_CONVERSATIONS ?= 500
DEPTH ?= 2
ONLY ?=

VENV := .venv
RUN = $(VENV)/bin/python -m
# AutoGen has a separate environment: docs/decisions/0014-autogen-has-its-own-environment.md.
AUTOGEN := $(VENV)-autogen
# So do Ray and Spark, which are large: docs/decisions/0017-engines-have-their-own-environment.md.
ENGINES := $(VENV)-engines
AUDIT := $(VENV)-audit
# Schemathesis needs an older jsonschema-rs than Weft.
SCHEMATHESIS := $(VENV)-schemathesis
DOCS_SITE := $(VENV)-docs
# Files by name: mypy's settings exclude these folders, since AutoGen is not installed in the main environment.
AUTOGEN_CODE = $(shell find libs/runtime_core/src/runtime_core/integrations/autogen \
	libs/runtime_core/src/weft/autogen.py tests/autogen examples/autogen_team -name '*.py')
# --only-binary: a package without a wheel fails here in one line, not later in a compiler.
INSTALL = $(RUN) pip --disable-pip-version-check --no-input install --quiet
LOCKED = $(INSTALL) --require-hashes --only-binary :all: --requirement
# Without isolation: an isolated build would fetch its backend without the hashes of the lock.
EDITABLE = $(INSTALL) --no-deps --no-build-isolation --editable .

# Four test files at a time, since tests wait more than they compute: with the other lanes they use two cores fully.
# A file stays in one process, as it was written to run; tests/conftest.py puts those that take longest first.
TOGETHER = --numprocesses=4 --dist=loadfile --no-loadscope-reorder

RAY_TESTS = $(wildcard tests/engines/test_*ray*.py)

COMPILE = $(RUN) uv --quiet pip compile pyproject.toml --universal --python-version 3.11 \
	--generate-hashes --no-header --no-annotate

# The folders that contain Python: the checkers refuse a folder without any.
CODE = $(shell for folder in libs services tests examples benchmarks docs deploy; do \
	[ -n "$$(find $$folder -name '*.py' 2>/dev/null | head -n 1)" ] && echo $$folder; done)

# Raw values, so that `$$`, quotes and spaces in them reach the program unchanged.
export RUN_DOCS := $(value DOCS)
export RUN_TOPIC := $(value TOPIC)
unexport DOCS TOPIC

# Tests start hundreds of processes, and each would compile every module again if the environment kept Python from caching.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup setup-run lock format check test test-unit test-main test-simulation test-autogen test-engines test-ray test-spark test-matrix run bench ledger chaos simulate model mutants audit docs screenshots dist ci clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.setup ## Create .venv with everything that development needs (a second call does nothing)

setup-run: $(VENV)/.setup-run

lock: setup ## Regenerate requirements/*.txt from pyproject.toml (ARGS=--upgrade for newer versions)
	$(COMPILE) --extra postgres --extra parquet --extra llm --extra mcp --extra gateway --extra otel --group dev --output-file requirements/dev.txt $(ARGS)
	$(RUN) uv --quiet pip compile --group audit --universal --python-version 3.11 \
		--generate-hashes --no-header --no-annotate --output-file requirements/audit.txt $(ARGS)
	$(RUN) uv --quiet pip compile --group schemathesis --universal --python-version 3.11 \
		--generate-hashes --no-header --no-annotate --output-file requirements/schemathesis.txt $(ARGS)
	$(RUN) uv --quiet pip compile --group docs --universal --python-version 3.11 \
		--generate-hashes --no-header --no-annotate --output-file requirements/docs.txt $(ARGS)
	@# AutoGen needs an older protobuf; in its own environment nothing else needs protobuf.
	sed '/^protobuf==/,/[^\\]$$/d' requirements/dev.txt >$(VENV)/constraints.txt
	$(COMPILE) --extra autogen --group autogen --constraint $(VENV)/constraints.txt --output-file requirements/autogen.txt $(ARGS)
	$(COMPILE) --group build --constraint requirements/dev.txt --output-file requirements/run.txt
	$(COMPILE) --extra postgres --extra llm --extra mcp --extra gateway --extra otel --group build --constraint requirements/dev.txt --output-file requirements/image.txt
	$(RUN) uv --quiet pip compile --group engines-build --universal --python-version 3.11 \
		--generate-hashes --no-header --no-annotate --output-file requirements/engines-build.txt $(ARGS)
	$(COMPILE) --extra ray --extra spark --extra parquet --extra otel --group engines --constraint requirements/dev.txt \
		--constraint requirements/engines-build.txt --output-file requirements/engines.txt $(ARGS)
	$(COMPILE) --extra postgres --extra llm --extra mcp --extra gateway --extra otel --extra parquet --extra ray --group build \
		--constraint requirements/dev.txt --constraint requirements/engines.txt --output-file requirements/image-ray.txt
	$(COMPILE) --extra postgres --extra llm --extra mcp --extra gateway --extra otel --extra parquet --extra spark --group build \
		--constraint requirements/dev.txt --constraint requirements/engines.txt --output-file requirements/image-spark.txt
	for system in benchmarks/comparison/requirements/*.in; do \
		$(RUN) uv --quiet pip compile $$system --universal --python-version 3.11 --generate-hashes --no-header \
			--no-annotate --output-file $${system%.in}.txt $(ARGS) || exit; done
	cd benchmarks/comparison/restate && npm install --package-lock-only --omit-lockfile-registry-resolved --silent

format: setup ## Format the code, apply automatic fixes, regenerate documents
	$(RUN) ruff format $(CODE)
	$(RUN) ruff check --fix $(CODE)
	$(RUN) docs.generate_events
	$(RUN) docs.generate_metrics
	$(RUN) docs.generate_acl
	$(RUN) docs.generate_command
	$(RUN) docs.generate_api
	$(RUN) deploy.observability.dashboards
	@# The chart needs kubectl; tests/deploy/test_helm.py says when it is stale.
	@if command -v kubectl >/dev/null; then $(RUN) deploy.helm.render; fi

check: setup ## Check format, lint, types and the import rule
	$(RUN) ruff format --check $(CODE)
	$(RUN) ruff check $(CODE)
	$(RUN) mypy $(CODE)
	$(VENV)/bin/lint-imports --no-logo

# Every environment is created first: an installation during the tests would slow them down. The checks use one core for
# a minute, so they run beside the tests.
test: setup $(AUTOGEN)/.setup $(ENGINES)/.setup $(SCHEMATHESIS)/.setup ## Run the checks and all tests on one server (ARGS for pytest)
	$(RUN) tests.lanes test-main -- check test-spark -- test-autogen test-ray -- test-simulation

test-unit: setup ## Run the tests that need no server (ARGS for pytest)
	$(RUN) pytest --numprocesses=3 --dist=loadfile tests/unit tests/architecture $(ARGS)

# It computes all the time, so it gives way to the tests beside it, which would be late.
test-simulation: setup ## Run the simulated histories of continuous integration
	$(RUN) tests.simulation --seed 0 --histories $(WEFT_SIMULATION_HISTORIES) --background

test-main: setup ## Run all tests except those of AutoGen, the engines and the simulation (ARGS for pytest)
	$(RUN) tests.rerun_failed $(TOGETHER) $(ARGS)

test-autogen: $(AUTOGEN)/.setup ## Run AutoGen's own tests, and our tests that need AutoGen (ARGS for pytest)
	$(AUTOGEN)/bin/python -m mypy $(AUTOGEN_CODE)
	$(AUTOGEN)/bin/python -m tests.rerun_failed tests/autogen $(ARGS)

test-engines: test-ray test-spark ## Run the tests that need Ray and Spark (ARGS for pytest)

test-ray: $(ENGINES)/.setup ## Run the tests that need Ray (ARGS for pytest)
	$(ENGINES)/bin/python -m tests.rerun_failed $(RAY_TESTS) $(ARGS)

test-spark: $(ENGINES)/.setup ## Run the tests of tests/engines that need no Ray (ARGS for pytest)
	$(ENGINES)/bin/python -m tests.rerun_failed $(filter-out $(RAY_TESTS),$(wildcard tests/engines/test_*.py)) $(ARGS)

test-matrix: ## Run what `test` runs on every server of the matrix and in memory (ARGS for pytest)
	WEFT_TEST_SERVERS=all $(MAKE) --no-print-directory test

run: setup-run ## Run the example until it ends (DOCS=folder, TOPIC="what to research")
	@set -- ; \
	if [ -n "$$RUN_DOCS" ]; then set -- "$$@" --docs "$$RUN_DOCS"; fi; \
	if [ -n "$$RUN_TOPIC" ]; then set -- "$$@" --topic "$$RUN_TOPIC"; fi; \
	exec $(RUN) examples.research_desk "$$@"

bench: setup ## Run the benchmarks, in comparison with other systems (ARGS for the benchmarks)
	$(RUN) benchmarks $(ARGS)

ledger: setup ## Count the cost of one task and compare it with its bounds (ARGS=agent_handler lists what that process calls)
	$(RUN) benchmarks.cost_ledger $(ARGS)

chaos: setup ## Kill, stop and replace processes at random for many rounds (WEFT_CHAOS_ROUNDS, _TASKS, _CONVERSATIONS, _SEED)
	WEFT_TEST_SERVERS=all WEFT_CHAOS_ROUNDS=$(WEFT_CHAOS_ROUNDS) WEFT_CHAOS_TASKS=$(WEFT_CHAOS_TASKS) \
		WEFT_CHAOS_CONVERSATIONS=$(WEFT_CHAOS_CONVERSATIONS) $(RUN) pytest -m chaos --timeout=3600 $(ARGS)

simulate: setup ## Simulate histories by seed (MINUTES, HISTORIES), or replay one (SEED; MINIMISE=1 makes it small)
	$(RUN) tests.simulation $(if $(SEED),--seed $(SEED)) $(if $(HISTORIES),--histories $(HISTORIES)) \
		$(if $(MINUTES),--minutes $(MINUTES)) $(if $(MINIMISE),--minimise) $(ARGS)

model: setup ## Search the explicit-state model, with up to DEPTH faults in each history (2)
	$(RUN) tests.model --depth $(DEPTH) $(ARGS)

mutants: setup ## Remove guards one at a time and run the tests that must fail (ONLY=id,… for some)
	$(RUN) tests.mutants --only "$(ONLY)" $(ARGS)

audit: ## Look up known vulnerabilities of all locked packages; a package that cannot be looked up is listed and fails nothing
	@$(MAKE) --no-print-directory $(AUDIT)/.setup || echo "NOT AUDITED: pip-audit cannot be installed here"
	@if [ -e $(AUDIT)/.setup ]; then $(AUDIT)/bin/python -m tests.dependency_audit $(ARGS); fi

docs: $(DOCS_SITE)/.setup $(DOCS_SITE)/.mermaid ## Build the documents as a site in .cache/site, searchable offline; a wrong link fails
	NO_MKDOCS_2_WARNING=1 $(DOCS_SITE)/bin/python -m mkdocs build --strict --quiet
	@echo "open .cache/site/index.html"

screenshots: setup ## Take the screenshots of docs/console.md again, in an installed Chromium
	$(RUN) docs.console_images

dist: setup ## Build the wheel and the source distribution in dist/, and check them
	rm -rf dist
	$(RUN) hatchling build --directory dist
	$(RUN) twine check --strict dist/*

ci: ## Run what continuous integration runs
	./.ci/run

clean: ## Remove everything that these targets create: .venv, caches and fetched servers
	rm -rf $(VENV) $(AUTOGEN) $(ENGINES) $(AUDIT) $(SCHEMATHESIS) $(DOCS_SITE) .cache .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Each stamp is newer than its sources, so that a second call has nothing to do.
$(VENV)/.setup: requirements/dev.txt pyproject.toml | $(VENV)/bin/python
	@echo "Installing what development needs into $(VENV) …"
	@$(LOCKED) requirements/dev.txt
	@$(EDITABLE)
	@touch $@ $(VENV)/.setup-run

$(VENV)/.setup-run: requirements/run.txt pyproject.toml | $(VENV)/bin/python
	@echo "Installing what running needs into $(VENV) …"
	@$(LOCKED) requirements/run.txt
	@$(EDITABLE)
	@touch $@

$(AUTOGEN)/.setup: VENV := $(AUTOGEN)
$(AUTOGEN)/.setup: requirements/autogen.txt pyproject.toml | $(AUTOGEN)/bin/python
	@echo "Installing what AutoGen's tests need into $(AUTOGEN) …"
	@$(LOCKED) requirements/autogen.txt
	@$(EDITABLE)
	@touch $@

$(ENGINES)/.setup: VENV := $(ENGINES)
$(ENGINES)/.setup: requirements/engines.txt requirements/engines-build.txt pyproject.toml | $(ENGINES)/bin/python
	@echo "Installing what the tests of Ray and Spark need into $(ENGINES), 1.5 GB …"
	@$(LOCKED) requirements/engines-build.txt
	@$(LOCKED) requirements/engines.txt --no-binary pyspark --no-build-isolation
	@$(EDITABLE)
	@touch $@

# Draws the diagrams in the reader's browser, without a server. Without npm they stay text.
MERMAID := 11.17.2
MERMAID_SHA256 := 6ad2f42c3fc26bbf9e45cbb6d11898972573ea52b33a5f4ff51952899f950ffd
$(DOCS_SITE)/.mermaid: $(DOCS_SITE)/.setup
	@if command -v npm >/dev/null && cd $(DOCS_SITE) && npm pack --silent mermaid@$(MERMAID) >/dev/null; then \
		echo "$(MERMAID_SHA256)  mermaid-$(MERMAID).tgz" | sha256sum --check --quiet \
		&& tar -xzf mermaid-$(MERMAID).tgz --strip-components=2 package/dist/mermaid.min.js && rm mermaid-$(MERMAID).tgz; \
	else echo "NOT DRAWN: diagrams stay text, since mermaid cannot be fetched by npm"; fi
	@touch $@

$(SCHEMATHESIS)/.setup: VENV := $(SCHEMATHESIS)
$(SCHEMATHESIS)/.setup: requirements/schemathesis.txt | $(SCHEMATHESIS)/bin/python
	@echo "Installing what tries the OpenAPI document into $(SCHEMATHESIS) …"
	@$(LOCKED) requirements/schemathesis.txt
	@touch $@

$(AUDIT)/.setup: VENV := $(AUDIT)
$(AUDIT)/.setup: requirements/audit.txt | $(AUDIT)/bin/python
	@echo "Installing what looks up vulnerabilities into $(AUDIT) …"
	@$(LOCKED) requirements/audit.txt
	@touch $@

$(DOCS_SITE)/.setup: VENV := $(DOCS_SITE)
$(DOCS_SITE)/.setup: requirements/docs.txt | $(DOCS_SITE)/bin/python
	@echo "Installing what builds the documents into $(DOCS_SITE) …"
	@$(LOCKED) requirements/docs.txt
	@touch $@

# The first Python that is new enough, unless PYTHON names one.
$(VENV)/bin/python $(AUTOGEN)/bin/python $(ENGINES)/bin/python $(AUDIT)/bin/python $(SCHEMATHESIS)/bin/python $(DOCS_SITE)/bin/python:
	@for name in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.14); do \
		"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
		echo "Making $(@:/bin/python=) with $$("$$name" --version) …"; \
		"$$name" -m venv --clear $(@:/bin/python=) && exit 0; \
		rm -rf $(@:/bin/python=); \
		echo "$$name cannot make a virtual environment: install its venv package (on Debian: python3-venv)" >&2; \
		exit 1; \
	done; \
	echo "No $(or $(PYTHON),Python) of version 3.11 or newer was found: install one, or name it: make setup PYTHON=…" >&2; \
	exit 1
