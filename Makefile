PYTHON ?= python3
VENV ?= .venv
# For two cores: tests wait four tenths of their time, for processes and for deadlines.
WORKERS ?= 3
# Each begins with a half of the files in order, which keeps what tests of one file share in one process.
IN_PROCESSES := -n $(WORKERS) --dist worksteal

# `make nightly` tries so many times the cases of `make test` in a round, and begins rounds for so long.
EFFORT ?= 5
MINUTES ?= 60
# `make fuzz` sends so many frames; about a thousand a second.
FRAMES ?= 1000000
ROLE ?= task

SERIES := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
PY := $(VENV)/bin/python
# One stamp a Python: asked for another one, make sets the environment up again.
comma := ,
PEERS := .venv-tensorflow
MLSERVER := .venv-mlserver
TRITON := .venv-triton
DEPENDENCIES := $(VENV)/.dependencies-$(SERIES)$(if $(INTEGRATIONS),-integrations)
STAMP := $(VENV)/.installed-$(SERIES)$(if $(INTEGRATIONS),-integrations)
# Ray's tests run on one Python, as its wheel is large and its start slow.
EXTRAS := dashboard,examples,metrics,models,orbax,security,serve,tensorboard,dev$(if $(filter 3.11,$(SERIES)),$(comma)ray)
# INTEGRATIONS=1 also installs the large programs that dflow works with; without them, their tests are skipped.
ifdef INTEGRATIONS
EXTRAS := $(EXTRAS),integrations,iree,keras
endif
# JAX ended its support of Python 3.11 at 0.10.2; every later Python takes the newer line.
PINS := constraints/python$(if $(filter 3.11,$(SERIES)),3.11,3.12).txt

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup dependencies demo test checks lint format types layers pytest nightly fuzz chaos golden composition dashboard array-api-suite jax-suite bench bench-tiny bench-peers bench-serving test-converters gpu-check wheel release pins site clean

help:  ## list the targets
	@echo 'make TARGET [PYTHON=python3] [VENV=.venv]; needs Python 3.11 or newer and pip; set-up is done on first use'
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP)  ## make the virtual environment with every pinned dependency and dflow in place

dependencies: $(DEPENDENCIES)  ## the pinned dependencies alone

demo: $(STAMP)  ## train a digit classifier on a cluster of 2 parameter servers and 3 workers on this machine
	$(VENV)/bin/dflow launch --ps 2 --workers 3 examples/digits.py
	@echo
	@echo 'Next: . $(VENV)/bin/activate, and see the same run in the browser, or start a project of your own:'
	@echo '      dflow launch --dashboard --ps 2 --workers 3 examples/digits.py --steps 20000'
	@echo '      dflow new my_project; docs/tutorial.md takes ten minutes'

test: checks pytest  ## run every check: lint, types, layers, wheel, pytest

checks: lint types layers wheel  ## all of them but the tests

lint: $(STAMP)  ## ruff: rules and format; codespell: spelling, except in tests, which misspell on purpose
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/codespell --skip '*/static,*/web' *.md docs examples benchmarks dflow tracing lowering distributed

format: $(STAMP)  ## rewrite the sources as lint wants them
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: $(STAMP)  ## mypy --strict on all four layers (tests/test_layers.py holds that it sees the linked ones), simulator, user code
	$(PY) -m mypy -p dflow -p tests.simulation -m tests.typing_sample

layers: $(STAMP)  ## import-linter: imports between layers go one way
	$(VENV)/bin/lint-imports

pytest: $(STAMP)  ## the tests alone
	$(PY) -m pytest $(IN_PROCESSES)

nightly: $(STAMP)  ## run the long tests, and the random ones for MINUTES=60 in rounds of EFFORT=5 times the cases, each from a new SEED=
	$(PY) -m tests.nightly --minutes $(MINUTES) --effort $(EFFORT) $(if $(SEED),--seed $(SEED)) -- $(IN_PROCESSES)

fuzz: $(STAMP)  ## send FRAMES=1000000 malformed and hostile frames to a live ROLE=task or coordinator, from a new SEED=
	$(PY) -m tests.fuzz --role $(ROLE) --frames $(FRAMES) $(if $(SEED),--seed $(SEED))

# Unless the command line says otherwise: a round takes about half a minute.
chaos: MINUTES := 10
chaos: $(STAMP)  ## kill, pause and cut off processes of real clusters that train, for MINUTES=10, each round from a new SEED=
	$(PY) -m tests.chaos --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

golden: $(STAMP)  ## rewrite tests/**/*.graphs, outputs in docs and docs/environment.md with what the code gives now
	$(PY) -m pytest --update-golden tests

composition: $(STAMP)  ## use each kind of state in each use, and write docs/composition.md from the outcome
	DFLOW_TEST_EFFORT=2 $(PY) -m pytest --update-golden tests/composition

dashboard:  ## build the dashboard's page and the graphs of notebooks from dflow/dashboard/web, which needs npm
	cd dflow/dashboard/web && npm ci --ignore-scripts --no-audit --no-fund && node build.mjs

array-api-suite: $(STAMP)  ## run the array API standard's own tests on dflow.numpy: SUITE=a checkout of data-apis/array-api-tests
	@test -d "$(SUITE)/array_api_tests" || { \
	  echo 'SUITE=$(SUITE) has no array_api_tests; clone github.com/data-apis/array-api-tests and say SUITE=path,'; \
	  echo 'install what its requirements.txt lists into $(VENV), and pass its options as SUITE_OPTIONS='; exit 2; }
	cd "$(SUITE)" && JAX_ENABLE_X64=1 ARRAY_API_TESTS_MODULE=dflow.numpy \
	  $(abspath $(PY)) -m pytest array_api_tests $(SUITE_OPTIONS)

jax-suite: $(STAMP)  ## run JAX's own tests with jax.jit and with dflow.jit, and compare: SUITE=the tests of a checkout of JAX
	@test -d "$(SUITE)" || { \
	  echo 'SUITE=$(SUITE) is no folder; clone github.com/jax-ml/jax at the tag of the installed version, say SUITE=its tests,'; \
	  echo "install what they need by pip install -e '.[jax-suite]', and name files by FILES= for others than the default"; exit 2; }
	$(PY) -m tests.jax_suite "$(SUITE)" $(FILES) $(SUITE_OPTIONS)

bench: $(STAMP)  ## run each file of benchmarks/; each prints a table
	@set -e; for file in benchmarks/[!_]*.py; do \
	  name=$$(basename "$$file" .py); echo "== $$name"; $(PY) -m "benchmarks.$$name"; \
	done

bench-tiny: $(STAMP)  ## run one round of each with sizes so small that the figures mean nothing
	@set -e; for file in benchmarks/[!_]*.py; do \
	  name=$$(basename "$$file" .py); echo "== $$name"; $(PY) -m benchmarks._tiny "$$name"; \
	done

bench-peers: $(STAMP)  ## the null step beside TensorFlow's own runtime, which gets an environment of its own; PEERS_OPTIONS='--kind dense'
	@test -x $(PEERS)/bin/python || { $(call make-venv,$(PEERS)) && $(call pip,$(PEERS)) install -q 'tensorflow-cpu==2.21.*'; }
	$(PY) -m benchmarks.null_step --beside $(PEERS)/bin/python $(or $(PEERS_OPTIONS),--every)

bench-serving: $(STAMP)  ## requests with names, beside MLServer and Triton, which get environments of their own; PEERS_OPTIONS='--rounds 7'
	@test -x $(MLSERVER)/bin/mlserver || { $(call make-venv,$(MLSERVER)) && $(call pip,$(MLSERVER)) install -q 'mlserver==1.7.1' jax; }
	@test -d $(TRITON)/lib/python$(SERIES)/site-packages/pytriton || { \
	  $(call make-venv,$(TRITON)) && $(call pip,$(TRITON)) install -q nvidia-pytriton 'jax==0.4.38' 'numpy<2'; }
	$(PY) -m benchmarks.serving_names --mlserver $(MLSERVER)/bin/mlserver \
	  --triton $(TRITON)/lib/python$(SERIES)/site-packages $(PEERS_OPTIONS)

test-converters: $(STAMP)  ## conversions of exports to ONNX, LiteRT and TensorFlow, in environments of their own, .venv-onnx and .venv-litert
	@set -e; for extra in onnx litert; do \
	  test -x .venv-$$extra/bin/pytest || { $(call make-venv,.venv-$$extra) && .venv-$$extra/bin/python -m pip install -q \
	    -e ".[$$extra]" hypothesis pytest pytest-timeout pytest-xdist; }; \
	  .venv-$$extra/bin/python -m pytest -q -n 0 tests/dflow/exporting/test_conversion.py; \
	done

gpu-check: $(STAMP)  ## on a GPU, run the tests that are worth it there and the benchmarks; ON=cpu tries the way itself, in little
	$(PY) -m tests.gpu_check $(if $(ON),--on $(ON))

wheel: $(STAMP)  ## build sdist and wheel, look inside, and try the wheel in a clean environment
	rm -rf build dist
	$(PY) -m build --no-isolation --outdir dist . > $(VENV)/build.log 2>&1 || { cat $(VENV)/build.log; exit 1; }
	$(PY) tests/check_wheel.py dist --constraints $(PINS)

release: wheel  ## the same on each Python from 3.11 on that is on this machine, with the newest packages
	$(PY) tests/check_wheel.py dist --every

pins:  ## resolve the newest dependencies anew and write constraints/ for this PYTHON
	rm -rf $(VENV)-pins
	$(call make-venv,$(VENV)-pins)
	$(call pip,$(VENV)-pins) install -q -U pip setuptools
	$(call pip,$(VENV)-pins) install -q --no-build-isolation -e '.[$(EXTRAS),integrations,iree,keras,site]'
	$(call pip,$(VENV)-pins) install -q --no-deps tritonclient
	$(call pip,$(VENV)-pins) freeze --all --exclude-editable > $(PINS)
	rm -rf $(VENV)-pins

site: $(STAMP)  ## build the documentation as a site in build/site, with warnings as errors
	@$(PY) -c 'import furo, myst_nb' 2> /dev/null || $(call pip,$(VENV)) install -q -c $(PINS) --no-build-isolation -e '.[site]'
	$(PY) -m sphinx -b html -W --keep-going -q docs build/site
	@echo 'build/site/index.html'

clean:  ## remove the environment, build results and caches
	rm -rf $(VENV) build dist *.egg-info .*_cache .hypothesis

# With the pinned pip, which reads the pages of an index in a third of the time that the pip of an older Python takes.
# Debian's python3 has no ensurepip without a further package, so pip comes from outside.
make-venv = $(PYTHON) -m venv --without-pip $(1) && $(PYTHON) -m pip --python $(1)/bin/python install -q \
  --no-compile --no-deps $$(grep '^pip==' $(PINS))
pip = $(1)/bin/python -m pip

# What pyproject.toml asks for, one requirement a line.
requirements = $(PYTHON) -c 'import sys, tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
  print(*project["dependencies"], *(one for extra in sys.argv[1].split(",") \
  for one in project["optional-dependencies"][extra]), sep="\n")' $(EXTRAS)

# Two Pythons may do this at a time; the next rule writes into this folder what setuptools knows of it. Python compiles a
# module when it is first imported, in half the time of compiling all that is installed.
$(DEPENDENCIES): pyproject.toml constraints/python3.11.txt constraints/python3.12.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("dflow needs Python 3.11 or newer; set PYTHON")'
	@echo 'setting up $(VENV) from $(PINS), about a minute the first time'
	@$(call make-venv,$(VENV))
	@$(requirements) | $(call pip,$(VENV)) install -q --no-compile -c $(PINS) -r /dev/stdin
	@$(if $(INTEGRATIONS),$(call pip,$(VENV)) install -q --no-compile --no-deps -c $(PINS) tritonclient)
	@rm -f $(VENV)/.dependencies-* && touch $@

$(STAMP): $(DEPENDENCIES)
	@PYTHONWARNINGS=ignore $(call pip,$(VENV)) install -q --no-deps --no-build-isolation -e .
	@$(PY) -c 'import dflow; dflow.jit'
	@rm -f $(VENV)/.installed-* && touch $@
