# Needs only make and Python 3.11 or later: everything else is installed into .venv.

VENV := .venv
BIN := $(VENV)/bin

# Let Python keep compiled files, whatever the environment says; otherwise every process compiles them again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo install check coverage matrix wheel test chaos hostile sanitize fuzz conformance bench scale house lint compiled-1 compiled-2 publishable programs redis-server nginx chromium screenshots clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.installed ## run the whole of Waymark on this machine, with simulated engines; on a terminal it stays until Ctrl-C
	@$(BIN)/waymark demo

install: ## put the command waymark on the PATH of this user, in an environment of its own; needs uv or pipx
	@sh scripts/install.sh

check: lint ## check style and types, and run the tests that need only Python, in two minutes
	@$(BIN)/python -m pytest --unit --quiet --numprocesses 2 --dist loadfile

test: ## run all tests, also those of style and types, on a real Redis
	@$(MAKE) --no-print-directory --jobs 2 $(VENV)/.installed-dev programs
	@$(MAKE) --no-print-directory --jobs 2 compiled-1 compiled-2
	@$(BIN)/python -m pytest --numprocesses auto --dist worksteal --rerun-show-tracebacks tests

chaos: $(VENV)/.installed-dev redis-server ## run random sessions in which processes and connections fail; SEED=1 SECONDS=75 CHAOS='--cluster --seeds 10'
	@$(BIN)/python -m tools.chaos $(if $(SEED),--seed $(SEED)) $(if $(SECONDS),--seconds $(SECONDS)) $(CHAOS)

hostile: $(VENV)/.installed-dev redis-server ## send invalid and hostile input to every port, next to honest clients; SEED=1 SECONDS=120 HOSTILE='--only page'
	@$(BIN)/python -m tests.hostile $(if $(SEED),--seed $(SEED)) $(if $(SECONDS),--seconds $(SECONDS)) $(HOSTILE)

sanitize: $(VENV)/.installed-dev redis-server ## run the tests of the C module with the address and undefined-behaviour sanitizers (gcc)
	@$(BIN)/python -m tools.sanitize

fuzz: $(VENV)/.installed-dev ## change the inputs of each function of the C module, with sanitizers; SECONDS=60 SEED=1 FUZZ='--only cut'
	@$(BIN)/python -m tools.sanitize.fuzz $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED)) $(FUZZ)

coverage: $(VENV)/.installed-dev programs ## run the tests, and show how much of the code they run; TESTS='tests/domain'
	@rm -f .coverage .coverage.*
	@COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml $(BIN)/python -m coverage run -m pytest $(TESTS)
	@$(BIN)/python -m coverage combine --quiet
	@$(BIN)/python -m coverage report $(if $(TESTS),--fail-under=0)

matrix: programs ## run the tests in one row of the matrix: ROW=python3.13, redis6.2, valkey9, pure, lowest...; TESTS='tests/store'
	@sh scripts/matrix.sh '$(ROW)' $(TESTS)

wheel: $(VENV)/.installed-dev ## build a wheel and an sdist into dist/, install the wheel into an environment of its own, and try it
	@rm -rf dist
	@$(BIN)/python -m build --quiet --outdir dist
	@WAYMARK_TEST_DIST=$(CURDIR)/dist $(BIN)/python -m pytest --quiet tests/test_package.py
	@ls dist

publishable: ## fail if a release must not be published, because pyproject.toml has no public address of the repository
	@python="$$(sh scripts/python.sh)" && "$$python" scripts/publishable.py

conformance: $(VENV)-conformance/.installed redis-server ## compare with dynamo.indexer and its selector, which are downloaded; writes docs/conformance.md
	@$(VENV)-conformance/bin/python -m tools.conformance.compare --output docs/conformance.md
	@$(VENV)-conformance/bin/python -m tools.conformance.differences --page docs/conformance.md
	@$(VENV)-conformance/bin/python -m tools.conformance.selector

bench: $(VENV)-conformance/.installed redis-server ## measure every figure that the pages claim, next to dynamo.indexer; BENCH='--only P1 --trace FILE'
	@$(VENV)-conformance/bin/python -m tools.benchmarks $(BENCH)

scale: $(VENV)/.installed-dev redis-server ## run a thousand engines on a Redis Cluster, and compare the costs with docs/capacity.md; ENGINES=1000 SCALE='--share 0.1'
	@$(BIN)/python -m tools.benchmarks.scale $(if $(ENGINES),--engines $(ENGINES)) $(SCALE)

house: $(VENV)/.installed-dev ## count rooms, arrows, files, functions and words of the source; TREES='. ../other' HOUSE=--crumbs
	@$(BIN)/python -m tools.house $(TREES) $(HOUSE)

lint: $(VENV)/.installed-dev ## check style and types only
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

# Compile the tests once. Otherwise each test process compiles all tests of a fresh clone. If a test cannot be
# collected, the run itself reports that.
compiled-1: PART := tests/[a-d]*
compiled-2: PART := tests/[e-z]*
compiled-1 compiled-2: $(VENV)/.installed-dev
	@test -e $(VENV)/.$@ && test -z "$$(find $(PART) -name '*.py' -newer $(VENV)/.$@)" || { \
	  $(BIN)/python -m pytest --collect-only --quiet $(PART) >/dev/null 2>&1; touch $(VENV)/.$@; }

clean: ## remove the environment, builds and caches
	rm -rf $(VENV) $(VENV)-conformance .matrix .coverage build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache

# Install programs one after the other, even with make -j, because a second apt-get fails while the first one runs.
programs: redis-server nginx chromium
nginx: | redis-server
chromium: | nginx

redis-server:
	@sh scripts/redis-server.sh

nginx:
	@sh scripts/package.sh nginx 'behind which a test runs replicas'

chromium:
	@sh scripts/package.sh chromium-headless-shell 'in which tests look at the page' chromium google-chrome "$$CHROMIUM"

screenshots: $(VENV)/.installed-dev redis-server chromium ## take the pictures of the page in docs/images again
	@$(BIN)/python -m tests.ui.screenshots

# The sources of the C module, and its build hook. The directory is included, because it becomes newer if a file is
# deleted.
NATIVE := $(wildcard native/*.c native/*.h) native hatch_build.py

# The install is editable, so that a change of Python code needs no new install; a change of pyproject.toml or of C
# does.
$(VENV)/.installed: pyproject.toml $(NATIVE) | $(VENV)/.made
	@echo 'installing Waymark into $(VENV)'
	@$(BIN)/python -m pip install --quiet --editable '.[demo]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(NATIVE) | $(VENV)/.made
	@echo 'installing Waymark and what its tests need into $(VENV)'
	@$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	@$(BIN)/python -m pip install --quiet --editable '.[demo]' --group dev
	@touch $@ $(VENV)/.installed

$(VENV)-conformance/.installed: pyproject.toml $(NATIVE)
	@echo 'making an environment in $(VENV)-conformance'
	@python="$$(sh scripts/python.sh)" && "$$python" -m venv --clear $(VENV)-conformance
	@echo '*' >$(VENV)-conformance/.gitignore
	@echo 'installing Waymark and dynamo.indexer into $(VENV)-conformance'
	@$(VENV)-conformance/bin/python -m pip install --quiet --editable '.[demo,epp]' 'ai-dynamo-runtime==1.6.1'
	@touch $@

# The marker file is made last, so that an incomplete environment is made again.
$(VENV)/.made:
	@echo 'making an environment in $(VENV)'
	@python="$$(sh scripts/python.sh)" && "$$python" -m venv --clear $(VENV)
	@touch $@
