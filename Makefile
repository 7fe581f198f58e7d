# Everything that a fresh machine needs, in .venv: Python 3.10-3.13, a C compiler and make are enough.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2

.PHONY: help demo test faults test-all test-rest test-clusters test-products stress hour s3 clouds stores browser acceptance versions check format clean invariance exactness peers docs docs-build

help:
	@echo "make demo        train a small CLIP and see it work (about 5 minutes on 2 cores)"
	@echo "make test        what every change needs, in 15 to 22 minutes on 2 cores (WORKERS=1: one after the other)"
	@echo "make test-all    besides: real Slurm, two hosts, a browser, all faults of S3, full products, a third of the planted faults, make hour; 55 minutes"
	@echo "make faults      all planted faults: each must turn a test red (10 minutes)"
	@echo "make stress      the numerics tests as other processors round, and make test shuffled, with delays (an hour and a half)"
	@echo "make hour        what a newcomer types, from URLs to an export, on a fresh clone, by the pages (5 minutes)"
	@echo "make acceptance  all tests of stores: through s3fs, at Azure's, Google's and sftp servers, and S3's against Ceph's gateway (unpacks Debian packages in .ceph)"
	@echo "make versions    the tests with each supported torch, DeepSpeed and Python, into docs/versions.md (QUICK=1: fewer tests)"
	@echo "make check       lint, types, import contracts, private words"
	@echo "make invariance  every layout of InfoNCE against a float64 oracle: docs/numerics.md"
	@echo "make exactness   every objective against an oracle of its own: docs/numerics.md"
	@echo "make peers       the same weights in OpenCLIP (sets up .venv-peers)"
	@echo "make docs        the documentation at http://127.0.0.1:8000; make docs-build writes it to build/site"
	@echo "Set TORCH='torch==2.13.0 --index-url ...' for another build, PYTHON=python3.12 for another Python."

$(READY): setup.py pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 10) <= v <= (3, 13) else f"Python 3.10 to 3.13 is needed, this is {v[0]}.{v[1]}: run make PYTHON=python3.12")'
	@echo "== setting up $(VENV) (once; 2 to 5 minutes)"
	$(PYTHON) -m venv $(VENV)
	@echo "== 1/2: $(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	@echo "== 2/2: the project with its dependencies"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $(READY)

demo: $(READY)
	$(BIN)/clip-train demo

test: $(READY) stores
	@echo "== tests, but those of make test-all"
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not (full or acceptance or slurm or hosts or peer or browser)"

test-all: test test-rest hour

test-rest: $(READY) $(VENV)/.docs stores browser
	@$(MAKE) --no-print-directory -j 2 test-clusters test-products

test-clusters:
	@echo "== real Slurm and two hosts, which mostly wait: beside the other tests, what they print comes at their end"
	@mkdir -p build
	MAKEFLAGS= $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "slurm or hosts" \
		>build/clusters.log 2>&1; status=$$?; cat build/clusters.log; exit $$status

test-products:
	@echo "== the tests that make test leaves out: a browser, all faults of S3, full products"
	MAKEFLAGS= $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "(full or browser) and not (slurm or hosts or acceptance)"
	@echo "== planted faults: each turns a test red. A third of them, another one after each commit"
	MAKEFLAGS= $(BIN)/python scripts/mutations.py -j $$(($(WORKERS) + 1)) \
		--part $$(($$(git rev-list --count HEAD) % 3 + 1))/3 # -j: some only wait, until they are stopped

faults: $(READY)
	$(BIN)/python scripts/mutations.py -j $$(($(WORKERS) + 1))

stress: $(READY) stores
	$(BIN)/python scripts/stress.py numerics --workers $(WORKERS)
	$(BIN)/python scripts/stress.py suite --times 3 --workers $(WORKERS)

hour: $(READY)
	@echo "== a newcomer's hour: the pages' commands on a fresh clone, from URLs to open_clip and transformers"
	$(BIN)/python scripts/newcomers_hour.py

s3:
	@echo "== the S3 server for the tests marked s3, in .venv-s3 (once; half a minute)"
	@PYTHON=$(PYTHON) bash scripts/setup_s3.sh .venv-s3 || echo "== IT CANNOT BE SET UP: THE S3 TESTS WILL BE SKIPPED"

clouds:
	@echo "== Azurite for the tests marked clouds, in .clouds, from npm (once; half a minute)"
	@bash scripts/setup_clouds.sh .clouds || echo "== IT CANNOT BE SET UP: THE TESTS OF AZURE WILL BE SKIPPED"

stores: # they wait for downloads: both at once
	@MAKEFLAGS= $(MAKE) --no-print-directory -j 2 s3 clouds PYTHON=$(PYTHON)

browser:
	@echo "== a Chromium for the tests marked browser, by apt (once; a minute)"
	@bash scripts/setup_browser.sh || echo "== IT CANNOT BE SET UP: THE BROWSER TESTS WILL BE SKIPPED"

acceptance: $(READY) stores
	@echo "== through s3fs, and at Azure, Google Cloud and sftp"
	$(BIN)/python -m pytest -n $(WORKERS) -m acceptance tests/s3 tests/clouds
	@echo "== Ceph, in .ceph (once; half a minute)"
	@bash scripts/setup_ceph.sh .ceph
	@echo "== the S3 tests against it"
	CLIP_TRAIN_S3_SERVER=ceph $(BIN)/python -m pytest tests/s3

versions: $(READY)
	$(BIN)/python scripts/versions.py $(if $(QUICK),--quick)

check: $(READY)
	@echo "== ruff"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo "== mypy"
	$(BIN)/mypy
	@echo "== import contracts"
	$(BIN)/lint-imports --no-cache
	@echo "== circles of imports, private words"
	$(BIN)/python scripts/structure.py
	@echo "== figures, page of results"
	$(BIN)/python scripts/figures.py --check
	$(BIN)/python scripts/results.py --check

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

invariance: $(READY)
	$(BIN)/python benchmarks/invariance.py

exactness: $(READY)
	$(BIN)/python benchmarks/exactness.py

peers:
	PYTHON=$(PYTHON) bash scripts/setup_peers.sh .venv-peers
	.venv-peers/bin/python -m pytest -m peer tests/peers
	.venv-peers/bin/python -m pytest tests/test_examples.py -k another_library

$(VENV)/.docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	@touch $@

docs: $(VENV)/.docs
	$(BIN)/python -m mkdocs serve

docs-build: $(VENV)/.docs
	$(BIN)/python -m mkdocs build --strict
	@echo "== the pages are in build/site"

clean:
	rm -rf $(VENV) .venv-peers .venv-s3 .clouds .ceph build *.egg-info .pytest_cache .mypy_cache .ruff_cache
