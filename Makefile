# make bench   set everything up and run the main job
# make test    set everything up and run every check but those of make stress
# make test-cuda   the GPU tests that a simulated GPU can run: PyTorch's CUDA build over the libraries of tests/fake_cuda
# make test-torch VERSION=2.6.0   each command, and the tests closest to PyTorch, with another release of it
# make cuda-coverage   make test-cuda and the quicker tests under coverage; lists the lines that mention CUDA and that none runs
# make stress   tests with killed hosts, machines that lose the network and many ranks; ten times the examples of each property
# make test-frameworks   the programs of examples/programs, which train with Hugging Face's libraries and with Lightning
# make benchmarks   run all benchmarks that this machine can run, and write their results to docs/benchmarks.md (about an hour)
# The environment is .venv, built once from pyproject.toml under constraints.txt; each CUDA build of PyTorch has one of its own.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VERSION := $(shell sed -n 's/^torch==//p' constraints.txt)
FRAMEWORKS := .venv-frameworks
CUDA_VENV = .venv-torch-$(VERSION)
# One at a time: all processes share the memory of the simulated GPU, and some tests fill it.
SIMULATED = LD_LIBRARY_PATH=$(abspath $(CUDA_VENV)/fake_cuda) TORCH_CUDNN_V8_API_DISABLED=1 TORCH_CUDNN_SDPA_DEPRIORITIZED=1 \
	$(CUDA_VENV)/bin/python -m pytest -n 1 --dist loadfile
GPU = -m "gpu and simulated"
CPU = -m "not gpu and not stress and not alone and not frameworks"
# The tests of the code that imitates or extends PyTorch, which are the first to fail with another release.
TORCH_TESTS := tests/every_command.py $(addprefix tests/kinds/memory/, test_tracker.py test_tracker_as_cuda.py test_tracker_building.py \
	test_tracker_sharding.py) $(addprefix tests/worker/, test_distributed.py test_environment.py test_flops.py test_precision.py \
	test_profiler.py test_timing.py)
TORCH_GPU_TESTS := tests/every_command.py tests/memory/test_gpu_memory.py
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Compiled modules are kept whatever the environment asks for: hundreds of processes of the tests load the same ones.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: bench test lint-and-tests most-tests test-cuda test-torch cuda-download cuda-coverage stress test-frameworks benchmarks lint clean

bench: $(VENV)/ready
	$(BIN)/gpubench train-bench

# What all tests import is imported once, by the servers of tests/support/forked.py.
test: $(VENV)/ready-for-development
	+$(BIN)/python tests/support/forked.py during $(MAKE) --no-print-directory lint-and-tests

# Lint and the tests side by side: mypy takes half a minute of one core, and many tests wait.
lint-and-tests: $(VENV)/ready-for-development
	+$(MAKE) --no-print-directory -j 2 lint most-tests
	$(BIN)/python -m pytest -m alone $$(grep -rl --include='test_*.py' mark.alone tests)

most-tests: $(VENV)/ready-for-development
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(FEWER) -m "not stress and not alone and not frameworks"

test-cuda: $(CUDA_VENV)/ready
	FAKECUDA_DEVICES=2 $(SIMULATED) $(GPU)

# The tests of the probe have a process of their own: they fork it, and others start threads of autograd in it.
test-torch: $(CUDA_VENV)/ready
	FAKECUDA_DEVICES=0 $(SIMULATED) $(CPU) $(TORCH_TESTS)
	FAKECUDA_DEVICES=0 $(SIMULATED) $(CPU) tests/probe
	FAKECUDA_DEVICES=2 $(SIMULATED) $(GPU) $(TORCH_GPU_TESTS)

cuda-download: $(CUDA_VENV)/downloaded

# The report comes also if a test fails, whose lines have run too: a limit of time may be too short under a tracer.
cuda-coverage: export COVERAGE_PROCESS_START := $(abspath pyproject.toml)
cuda-coverage: export COVERAGE_FILE := $(abspath .coverage)
cuda-coverage: $(CUDA_VENV)/ready
	rm -f .coverage .coverage.*
	-+$(MAKE) --no-print-directory -j 2 -k test-cuda most-tests FEWER=--without-longest
	$(BIN)/coverage combine -q
	$(BIN)/python tests/cuda_coverage.py

stress: $(VENV)/ready-for-development
	$(BIN)/python -m pytest -m stress
	$(BIN)/python -m pytest -m "hypothesis and not stress" --hypothesis-profile thorough

test-frameworks: $(VENV)/ready-for-development $(FRAMEWORKS)/ready
	$(BIN)/python -m pytest -m frameworks

benchmarks: $(VENV)/ready-for-development
	$(BIN)/python benchmarks/suite.py

lint: $(VENV)/ready-for-development
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e .
	touch $@

$(VENV)/ready-for-development: $(VENV)/ready
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,mcp,wandb]'
	touch $@

# Where programs of users run: the versions are those of tests/frameworks.txt, and gpubench is not installed.
$(FRAMEWORKS)/ready: tests/frameworks.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -q -c tests/frameworks.txt torch
	$(@D)/bin/pip install -q -c tests/frameworks.txt accelerate lightning transformers
	touch $@

# The same packages but for PyTorch: a CUDA build of it, and the headers of the CUDA that it was built for, without the
# libraries that the simulated ones stand in for.
.venv-torch-%/downloaded: $(VENV)/ready-for-development
	$(PYTHON) -m venv $(@D)
	$(BIN)/pip freeze --exclude-editable | grep -v '^torch==' > $(@D)/requirements.txt
	$(@D)/bin/pip install -q --no-deps -r $(@D)/requirements.txt
	$(@D)/bin/pip install -q --no-deps torch===$*
	$(@D)/bin/pip install -q --no-deps -e .
	cuda=$$(sed -n "s/^cuda.*'\([0-9]*\.[0-9]*\).*/\1/p" $(@D)/lib/python3*/site-packages/torch/version.py) && \
	case $$cuda in 12.*) names="runtime-cu12 cupti-cu12 nvcc-cu12" ;; *) names="runtime cupti crt" ;; esac && \
	rm -rf $(@D)/headers && \
	$(@D)/bin/pip install -q --no-deps --target $(@D)/headers $$(for name in $$names; do echo "nvidia-cuda-$$name==$$cuda.*"; done)
	touch $@

.venv-torch-%/ready: .venv-torch-%/downloaded $(wildcard tests/fake_cuda/*)
	rm -rf $(@D)/fake_cuda
	$(@D)/bin/python tests/fake_cuda/build.py $(@D)/headers/nvidia/*/include $(@D)/fake_cuda
	touch $@

clean:
	rm -rf $(VENV) $(FRAMEWORKS) .venv-torch-* build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .coverage .coverage.*
