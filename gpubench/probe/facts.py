"""The facts about a process that has imported torch, for environment.json.

Only environment variables on an allow-list are recorded, so that results contain no secrets.
"""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, Mapping

import torch

from .quiet import ignored_warnings

PACKAGES = (
    "accelerate", "apex", "bitsandbytes", "diffusers", "flash-attn", "gpubench", "huggingface-hub", "msgspec", "numpy",
    "nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12", "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13", "nvidia-ml-py", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "pillow", "psutil", "pydantic",
    "safetensors", "scipy", "tensorboard", "tokenizers", "torch", "torchao", "torchvision", "transformer-engine",
    "transformers", "triton", "typer", "wandb", "xformers",
)  # fmt: skip

VARIABLES = frozenset({
    "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "LD_PRELOAD", "MALLOC_ARENA_MAX",
    "MALLOC_CONF", "NVIDIA_TF32_OVERRIDE", "PYTHONHASHSEED", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "ROCR_VISIBLE_DEVICES", "SLURM_CPUS_PER_TASK",
    "SLURM_GPUS_ON_NODE", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURM_NNODES", "SLURM_NTASKS",
    "TOKENIZERS_PARALLELISM", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT", "TORCH_COMPILE_DISABLE",
    "TORCH_CPP_LOG_LEVEL", "TORCH_CUDNN_SDPA_DEPRIORITIZED", "TORCH_CUDNN_SDPA_PREFERRED",
    "TORCH_CUDNN_V8_API_DISABLED", "TORCH_DISTRIBUTED_DEBUG", "TORCH_LOGS", "TORCH_SHOW_CPP_STACKTRACES",
})  # fmt: skip
PREFIXES = (
    "GLOO_", "GOMP_", "KMP_", "MKL_", "NCCL_", "OMP_", "ONEDNN_", "OPENBLAS_", "TORCHDYNAMO_", "TORCHINDUCTOR_",
    "TORCH_NCCL_",
)  # fmt: skip
SECRET_PARTS = ("API", "AUTH", "BEARER", "CERT", "COOKIE", "CRED", "KEY", "PASS", "PRIVATE", "PWD", "SECRET", "TOKEN")


def facts() -> dict[str, Any]:
    """Returns Python, torch, packages, math settings, threads and variables of this process now, without using CUDA.

    A fact that this build of PyTorch does not provide is left out.
    """
    with ignored_warnings():  # of deprecated names, which the program may turn into errors
        return _facts()


def _facts() -> dict[str, Any]:
    return {
        "python": {"version": platform.python_version(), "implementation": sys.implementation.name},
        "torch": _torch(),
        "packages": _packages(),
        "math": _math(),
        "threads": {"intra_op": torch.get_num_threads(), "inter_op": torch.get_num_interop_threads()},
        "variables": recordable(os.environ),
    }


def recordable(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables that configure the measured libraries and cannot contain a secret.

    A variable is returned if its name is in VARIABLES, or begins with one of PREFIXES and contains none of
    SECRET_PARTS. A value with a URL is never returned, because a URL can contain a password.
    """
    return {
        name: value
        for name, value in sorted(variables.items())
        if "://" not in value
        and (
            name in VARIABLES or (name.startswith(PREFIXES) and not any(word in name.upper() for word in SECRET_PARTS))
        )
    }


def peak_rss() -> int:
    """Returns the peak of the resident memory. getrusage would include that of the process that started this one."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:  # not Linux
        pass
    return 0


def _torch() -> dict[str, Any]:
    nccl = _try(torch.cuda.nccl.version) if torch.version.cuda or torch.version.hip else None
    return _known(
        version=str(torch.__version__),
        git_version=torch.version.git_version,
        debug=torch.version.debug,
        cuda=torch.version.cuda,
        rocm=torch.version.hip,
        cudnn=_try(cudnn_version),
        nccl=".".join(str(part) for part in nccl) if nccl else None,
    )


def cudnn_version() -> int | None:
    """Returns the version of cuDNN, such as 92000 for 9.20.0; None for a build of PyTorch without it.

    Unlike `torch.backends.cudnn.version()` it does not initialise CUDA. On ROCm it is the version of MIOpen.
    """
    if not torch.backends.cudnn.is_available():
        return None
    from torch._C import _cudnn

    return _cudnn.getVersionInt()


def _packages() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except Exception:  # not installed, or installed without readable metadata
            continue
    return versions


def _math() -> dict[str, Any]:
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    return _known(
        float32_matmul_precision=_try(torch.get_float32_matmul_precision),
        # Reading allow_tf32 raises once TF32 was set through the newer fp32_precision in a way that contradicts it.
        matmul_allow_tf32=_try(lambda: cuda.matmul.allow_tf32),
        cudnn_allow_tf32=_try(lambda: cudnn.allow_tf32),
        cudnn_benchmark=_try(lambda: cudnn.benchmark),
        cudnn_deterministic=_try(lambda: cudnn.deterministic),
        deterministic_algorithms=torch.are_deterministic_algorithms_enabled(),
        detect_anomaly=_try(torch.is_anomaly_enabled),
        cuda_sync_debug_mode=_try(_sync_debug_mode),
        profiler=_try(torch.autograd._profiler_enabled),  # type: ignore[attr-defined]
        flush_denormal=sys.float_info.min / 2 == 0,
        sdp_flash=_try(lambda: cuda.flash_sdp_enabled()),
        sdp_mem_efficient=_try(lambda: cuda.mem_efficient_sdp_enabled()),
        sdp_cudnn=_try(lambda: cuda.cudnn_sdp_enabled()),
        sdp_math=_try(lambda: cuda.math_sdp_enabled()),
    )


def _sync_debug_mode() -> int | None:
    """Returns the mode in which torch.cuda reports waits; None before CUDA is used, which asking would initialise."""
    return torch._C._cuda_get_sync_debug_mode() if torch.cuda.is_initialized() else None


def _known(**facts: Any) -> dict[str, Any]:
    """Returns the facts that are not None."""
    return {name: fact for name, fact in facts.items() if fact is not None}


def _try(fact: Callable[[], Any]) -> Any:
    """Returns the fact, or None if this build of PyTorch does not provide it."""
    try:
        return fact()
    except Exception:  # which one depends on the build
        return None


def place() -> tuple[int, int]:
    """Returns (rank, world size) of this process: of the process group, or according to torchrun's variables."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def open_store() -> Any:
    """Returns the store of the process group, through which its ranks have found each other."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
