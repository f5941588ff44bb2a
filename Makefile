# Every target sets up what it needs: a virtual environment in .venv, and on Linux a fast BLAS for MLX.
# PYTHON chooses the interpreter (3.11 or later).

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
# Tools that read the tree need the package under its name; the root folder of a clone may have any.
TYPING := $(VENV)/typing
FOLDERS := memvid snapshot daemon socket_api cli

# A virtual environment knows its own path: one that was moved, copied, half made, or made by another Python is made anew.
HOME_OF_VENV := $(CURDIR) $(PYTHON)
ifneq ($(shell cat "$(VENV)/.installed" 2>/dev/null),$(HOME_OF_VENV))
.PHONY: $(VENV)/.installed
endif

# A program that starts compiles what it imports only once: where this is set, hundreds of them did so anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-quick test-all clients remote cluster check bench cache-kinds reference install blas clean help

help: ## say what the targets are
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-11s %s\n", $$1, $$2}'

demo: install ## an agent reads, sleeps, loses its process to SIGKILL, wakes, and goes on
	@$(BIN)/torpor demo

# Half of what the tests wait for is programs that start: three files at a time are ready sooner, on two cores too. Each
# of the three computes on one thread of the BLAS, for threads that wait for each other took a third of the time; and
# where memory has room, temporary files lie in it, for a store flushes each of its steps. `make demo` and
# `make test-all` use all threads and the disk. The sweeps in full take memory and cores of their own, and run alone.
MEMORY := $(shell df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 > 4000000 {print "TMPDIR=/dev/shm"}')
PYTEST := OPENBLAS_NUM_THREADS=1 $(MEMORY) $(BIN)/python -m pytest -q -m "not heavy" --numprocesses 3

test: install ## style, types and the tests, with a bounded share of each heavy sweep
	@$(MAKE) --no-print-directory -j 2 check compiled
	@$(PYTEST) --dist loadfile --no-loadscope-reorder --durations 20 --durations-min 4

# Three workers that collect a fresh clone's tests would each compile all of them. What fails here the tests tell.
.PHONY: compiled
compiled: install
	@$(BIN)/python -m pytest -q --collect-only >/dev/null 2>&1 || true

# What starts programs with models, sweeps, or waits for the clock is left out: for every edit.
QUICK := tests/memvid tests/socket_api/wire tests/socket_api/test_imports.py tests/socket_api/test_protocol_doc.py \
	tests/cli/view tests/cli/reach tests/cli/commands tests/cli/test_main.py tests/cli/test_commands_doc.py \
	tests/cli/test_exit_codes.py tests/cli/test_hygiene.py tests/test_layers.py tests/test_errors.py
NOT_QUICK := faults fuzz test_exhaustive_damage.py test_state_machine.py test_concurrency.py \
	test_fuzz.py test_moments.py test_full_disk.py

test-quick: install ## the tests of the store, the wire and the commands that take little, for every edit
	@$(PYTEST) $(addprefix --ignore=tests/memvid/,$(NOT_QUICK)) $(QUICK)

test-all: install check clients remote cluster ## the tests with every heavy sweep in full
	@$(BIN)/python -m pytest -q

# Agent frameworks and coding agents as people install them, in folders of their own, and without a network but loopback.
CLIENTS := .venv-clients
OFFLINE := $(shell unshare --net true 2>/dev/null && echo unshare --net || \
	{ unshare --net --map-root-user true 2>/dev/null && echo unshare --net --map-root-user; })

clients: install $(CLIENTS)/.installed ## agent frameworks and coding agents against a daemon, ten turns and a kill each
	@$(OFFLINE) $(CLIENTS)/bin/python $(if $(OFFLINE),tests/clients/offline.py $(CLIENTS)/bin/python) \
		-m pytest -q -c tests/clients/pytest.ini --confcutdir tests/clients tests/clients

$(CLIENTS)/.installed: tests/clients/requirements.txt tests/clients/requirements-older.txt tests/clients/package.json
	@echo "installing agent frameworks and coding agents into $(CLIENTS) ..."
	@for each in $(CLIENTS):requirements.txt $(CLIENTS)/older:requirements-older.txt; do \
		test -x $${each%:*}/bin/python || $(PYTHON) -m venv $${each%:*} || exit 1; \
		$${each%:*}/bin/python -m pip install --quiet --disable-pip-version-check -r tests/clients/$${each#*:} || exit 1; \
	done
	@cp tests/clients/package.json $(CLIENTS)/
	@cd $(CLIENTS) && PATH="$$PWD/bin:$$PATH" npm install --silent --no-audit --no-fund
	@touch $@

# Servers of S3 as people install them: each pins what it needs, so each has an environment of its own.
SERVERS := .venv-remote

remote: install $(SERVERS)/.installed ## what a remote needs of an object store, with moto and ministack, and faults between
	@TORPOR_SERVERS="moto ministack" $(BIN)/python -m pytest -q tests/memvid/remote

$(SERVERS)/.installed: Makefile
	@echo "installing servers of S3 into $(SERVERS) ..."
	@for each in 'moto:moto[server]>=5.2' 'ministack:ministack>=1.5'; do \
		at=$(SERVERS)/$${each%%:*}; \
		test -x $$at/bin/python || $(PYTHON) -m venv $$at || exit 1; \
		$$at/bin/python -m pip install --quiet --disable-pip-version-check "$${each#*:}" || exit 1; \
	done
	@touch $@

# Ray is large, and the tests of everything else run without it: it has an environment of its own.
CLUSTER := .venv-cluster

cluster: install $(CLUSTER)/.installed ## several daemons under Ray Serve, with kills, an upgrade and clients. Minutes
	@$(CLUSTER)/bin/python -m pytest -q tests/socket_api/cluster

$(CLUSTER)/.installed: pyproject.toml
	@echo "installing Ray into $(CLUSTER) ..."
	@test -x $(CLUSTER)/bin/python || $(PYTHON) -m venv $(CLUSTER)
	@$(CLUSTER)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,ray]'
	@touch $@

check: install ## style and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@MYPYPATH=$(TYPING) $(BIN)/mypy -m torpor -m torpor.errors -m torpor.places -m torpor.records -m torpor.spellings -m torpor.tokenizer_files $(addprefix -p torpor.,$(FOLDERS))

bench: install $(SERVERS)/.installed ## measure what the documents claim, with the figures of the peers beside them
	@$(BIN)/python bench/run.py

cache-kinds: install ## sleep and wake every architecture of mlx-lm, and write docs/reference/cache-kinds.md
	@$(BIN)/python tests/snapshot/matrix/run.py --document docs/reference/cache-kinds.md

reference: install ## write the tables of docs/reference from the code
	@$(BIN)/python scripts/reference.py

install: $(VENV)/.installed blas ## the virtual environment

$(VENV)/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "torpor needs Python 3.11 or later with its venv module (Debian: apt-get install python3-venv)."; \
		echo "None was found; name one with make PYTHON=..."; exit 1; }
	@test "$$(cat $(VENV)/.installed 2>/dev/null)" = "$(HOME_OF_VENV)" || rm -rf $(VENV)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ rm -rf $(VENV); echo "$(PYTHON) -m venv failed; on Debian: apt-get install python3-venv"; exit 1; }
	@echo "installing torpor and its tools into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[dev]'
	@mkdir -p $(TYPING) && ln -sfn "$(CURDIR)" $(TYPING)/torpor
	@printf '%s' "$(HOME_OF_VENV)" > $@

blas: ## a fast BLAS for MLX on Linux, from the system's package manager
	@sh scripts/install-blas

clean: ## remove what make has built
	rm -rf $(VENV) $(CLIENTS) $(SERVERS) $(CLUSTER) build dist *.egg-info
