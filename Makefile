# make bench   set everything up and run the main job
# make test    set everything up and run every check but those of make stress: hosts killed, machines cut off, many ranks
# make test-cuda   the tests for GPUs that a simulated one can judge: PyTorch's CUDA build over the libraries of tests/fake_cuda
# make benchmarks   all benchmarks that this machine can run, and docs/benchmarks.md of what they show (about an hour)
# The environment is .venv, built once from pyproject.toml under constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CUDA_VENV := .venv-cuda
CUDA_HEADERS := nvidia-cuda-runtime==13.0.96 nvidia-cuda-cupti==13.0.85 nvidia-cuda-crt==13.0.88
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: bench test test-cuda stress benchmarks lint clean

bench: $(VENV)/ready
	$(BIN)/gpubench train-bench

test: $(VENV)/ready-for-development lint
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not stress and not alone"
	$(BIN)/python -m pytest -m alone

test-cuda: $(CUDA_VENV)/ready
	FAKECUDA_DEVICES=2 LD_LIBRARY_PATH=$(abspath $(CUDA_VENV)/fake_cuda) TORCH_CUDNN_V8_API_DISABLED=1 \
		TORCH_CUDNN_SDPA_DEPRIORITIZED=1 $(CUDA_VENV)/bin/python -m pytest -n 2 --dist loadfile -m "gpu and simulated"

stress: $(VENV)/ready-for-development
	$(BIN)/python -m pytest -m stress

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
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,wandb]'
	touch $@

# The same packages, but for PyTorch: its CUDA build, without the libraries of NVIDIA's that the simulated ones stand in for.
$(CUDA_VENV)/ready: $(VENV)/ready-for-development $(wildcard tests/fake_cuda/*)
	$(PYTHON) -m venv $(CUDA_VENV)
	$(BIN)/pip freeze --exclude-editable | grep -v '^torch==' > $(CUDA_VENV)/requirements.txt
	$(CUDA_VENV)/bin/pip install -q --no-deps -r $(CUDA_VENV)/requirements.txt
	$(CUDA_VENV)/bin/pip install -q --no-deps torch===$$($(BIN)/python -c "import torch; print(torch.__version__.partition('+')[0])")
	$(CUDA_VENV)/bin/pip install -q --no-deps -e .
	$(CUDA_VENV)/bin/pip install -q --no-deps --target $(CUDA_VENV)/headers $(CUDA_HEADERS)
	$(CUDA_VENV)/bin/python tests/fake_cuda/build.py $(CUDA_VENV)/headers/nvidia/cu13/include $(CUDA_VENV)/fake_cuda
	touch $@

clean:
	rm -rf $(VENV) $(CUDA_VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
