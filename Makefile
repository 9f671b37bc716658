# One readable recipe per target; `make help` lists them.

PYTHON ?= $(shell for p in /usr/bin/python3 python3 python3.14 python3.13 python3.12 python3.11; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
TORCH ?= requirements
PREFIX ?= /opt/elastic
PYTEST_ARGS ?=

VENV := .venv
READY := $(VENV)/.ready
PROGRAMS := $(wildcard bin/*)
DATA := $(wildcard lib/elastic/*.py sbatch/* etc/*.* etc/sandbox/*) Makefile requirements.txt

.PHONY: help venv demo demo-slurm test lint bench validate matrix soak gpu-check install uninstall
.DELETE_ON_ERROR:

help:  ## This list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14
	@echo
	@echo 'Variables: PYTHON=$(PYTHON) TORCH=requirements|site PREFIX=$(PREFIX) PYTEST_ARGS='

venv: $(READY)  ## Make .venv with what requirements.txt pins (TORCH=site: keep the site's torch)

# The last line marks the venv as whole; one that broke off half-way, or whose Python is gone (an
# upgrade, a moved folder), is made again.
$(shell test -x $(VENV)/bin/python || rm -f $(READY))
$(READY): requirements.txt
	@test -n '$(PYTHON)' || { echo 'error: no Python >= 3.11; set PYTHON=' >&2; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(if $(filter site,$(TORCH)),--system-site-packages) $(VENV)
	grep -vE '$(if $(filter site,$(TORCH)),^(torch|numpy)==,^$$)' requirements.txt > $(VENV)/wanted.txt
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $(VENV)/wanted.txt
	$(VENV)/bin/python -c 'import torch, numpy, safetensors, xxhash, redis, click, rich' || \
	    { echo 'error: TORCH=site needs a PYTHON that has torch and numpy' >&2; exit 1; }
	touch $@

demo: $(READY)  ## A minute of training on this machine while its workers are killed
	bin/elastic-demo

demo-slurm: $(READY)  ## The same on a private Slurm of several nodes
	bin/elastic-demo --slurm

test: $(READY)  ## All tests; PYTEST_ARGS='-k name' for some
	$(VENV)/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

lint: $(READY)  ## ruff and shellcheck
	$(VENV)/bin/ruff check lib tests
	shellcheck $(PROGRAMS) $(wildcard sbatch/*) .ci/run

bench: $(READY)  ## Stall of a round, memory, load of the master, restarts; writes build/bench.jsonl
	rm -f build/bench.jsonl
	$(VENV)/bin/python tests/bench/bench_round.py
	$(VENV)/bin/python tests/bench/bench_master.py
	$(VENV)/bin/python tests/bench/bench_restart.py
	$(VENV)/bin/python tests/bench/bench_codec.py

validate: $(READY)  ## Local mode against a synchronous baseline at equal tokens (minutes)
	cd tests && PYTHONPATH=../lib:. ../$(VENV)/bin/python -m validate.rig

matrix: $(READY)  ## What a preemption costs, for all 72 ways to announce it (minutes)
	ELASTIC_FULL_MATRIX=1 $(VENV)/bin/python -m pytest -s tests/test_notice_matrix.py

soak: $(READY)  ## Chaos on a private Slurm with 16 workers; what it cost (three quarters of an hour)
	cd tests && PYTHONPATH=../lib:. ../$(VENV)/bin/python soak.py $(SOAK_ARGS)

gpu-check: $(READY)  ## What runs only where there is a GPU
	$(VENV)/bin/python tests/gpu_check.py

# PREFIX is a folder of its own; link PREFIX/bin/elastic* into a PATH. A site file stays as it is.
install:  ## Copy bin, lib, sbatch and etc into PREFIX
	for f in $(PROGRAMS); do install -D -m 0755 $$f $(DESTDIR)$(PREFIX)/$$f || exit 1; done
	for f in $(filter-out etc/site.toml,$(DATA)); do \
	    mode=0644; test ! -x $$f || mode=0755; \
	    install -D -m $$mode $$f $(DESTDIR)$(PREFIX)/$$f || exit 1; done
	test -e $(DESTDIR)$(PREFIX)/etc/site.toml || \
	    install -D -m 0644 etc/site.toml $(DESTDIR)$(PREFIX)/etc/site.toml
	@echo 'next: make -C $(PREFIX) venv'

uninstall:  ## Remove exactly what install copied (an edited site file stays)
	cmp -s etc/site.toml $(DESTDIR)$(PREFIX)/etc/site.toml && \
	    rm -f $(DESTDIR)$(PREFIX)/etc/site.toml || true
	for f in $(PROGRAMS) $(filter-out etc/site.toml,$(DATA)); do \
	    rm -f $(DESTDIR)$(PREFIX)/$$f || exit 1; done
	rm -rf $(DESTDIR)$(PREFIX)/lib/elastic/__pycache__
	for d in bin lib/elastic lib sbatch etc/sandbox etc ""; do \
	    rmdir --ignore-fail-on-non-empty $(DESTDIR)$(PREFIX)/$$d 2>/dev/null || true; done
