"""Records the machine, the libraries and the process settings of a measurement for environment.json.

`compare` uses these facts to decide whether two runs are comparable. A fact that cannot be read is left out without an
error. Only environment variables on an allow-list are recorded, so that results contain no secrets.
"""

import os
import platform
import socket
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import torch

from gpubench.devices import (
    Gpu,
    allowed_cpus,
    ask,
    cpu_quota,
    cuda_gpus,
    memory_limit,
    open_nvml,
    physical_cores,
    read_text,
)

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


def capture_env_metadata() -> dict[str, Any]:
    """Returns the facts as a dict that can be written as JSON; sizes are in bytes, clocks in MHz and power in watts.

    Threads, math settings and GPUs are those of this process now. The function does not initialise CUDA; the number of
    multiprocessors is included only if CUDA is already initialised.
    """
    return {
        "host": _host(),
        "cpu": _cpu(),
        "memory": _known(total_bytes=psutil.virtual_memory().total, limit_bytes=memory_limit()),
        "python": {"version": platform.python_version(), "implementation": sys.implementation.name},
        "torch": _torch(),
        "driver": _driver(),
        "gpus": _gpus(),
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


def _known(**facts: Any) -> dict[str, Any]:
    """Returns the facts that are not None."""
    return {name: fact for name, fact in facts.items() if fact is not None}


def _try(fact: Callable[[], Any]) -> Any:
    """Returns the fact, or None if this build of PyTorch does not provide it."""
    try:
        return fact()
    except (AttributeError, RuntimeError, OSError):
        return None


def _host() -> dict[str, Any]:
    dmi = Path("/sys/class/dmi/id")
    product = " ".join(filter(None, (read_text(dmi / "sys_vendor"), read_text(dmi / "product_name"))))
    return _known(
        name=socket.gethostname(),
        os=_os_name(),
        kernel=platform.release(),
        architecture=platform.machine(),
        product=product or None,
        container=_container(),
        virtual=_virtual(),
    )


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _container() -> str | None:
    if Path("/.dockerenv").exists():
        return "docker"
    if Path("/run/.containerenv").exists():
        return "podman"
    if "APPTAINER_CONTAINER" in os.environ or "SINGULARITY_CONTAINER" in os.environ:
        return "apptainer"
    return "kubernetes" if "KUBERNETES_SERVICE_HOST" in os.environ else None


def _virtual() -> bool | None:
    """Returns whether this is a virtual machine, according to the flags of an x86 CPU; None on other CPUs."""
    flags = _cpuinfo("flags")
    return None if flags is None else "hypervisor" in flags.split()


def _cpuinfo(field: str) -> str | None:
    """Returns the `field` of the first CPU in /proc/cpuinfo; None if it is missing."""
    for line in (read_text(Path("/proc/cpuinfo")) or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return None


def _cpu() -> dict[str, Any]:
    return _known(
        model=_cpuinfo("model name"),
        physical_cores=psutil.cpu_count(logical=False),
        logical_cores=psutil.cpu_count(),
        allowed_cpus=len(allowed_cpus()),
        usable_cores=physical_cores(),
        quota=cpu_quota(),
        governor=read_text(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
        capability=_try(torch.backends.cpu.get_cpu_capability),
    )


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


def _driver() -> dict[str, Any]:
    nvml = open_nvml()
    if nvml is None:
        return {}
    try:
        cuda = ask(nvml, "nvmlSystemGetCudaDriverVersion_v2")
        return _known(
            version=ask(nvml, "nvmlSystemGetDriverVersion"),
            cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        )
    finally:
        nvml.nvmlShutdown()


def _gpus() -> list[dict[str, Any]]:
    """Returns the facts of the visible GPUs in CUDA's order, from CUDA and NVML."""
    if torch.version.hip:
        return [_from_torch(found) for found in _properties()]
    nvml = open_nvml()
    multiprocessors = [found.multi_processor_count for found in _properties()]
    try:
        return [
            _identity(gpu)
            | _known(multiprocessors=multiprocessors[ordinal] if ordinal < len(multiprocessors) else None)
            | (_from_nvml(nvml, handle) if nvml and handle is not None else {})
            for ordinal, (gpu, handle) in enumerate(cuda_gpus(nvml))
        ]
    finally:
        if nvml:
            nvml.nvmlShutdown()


def _identity(gpu: Gpu) -> dict[str, Any]:
    capability = gpu.compute_capability
    return _known(
        index=gpu.index,
        name=gpu.name,
        uuid=gpu.uuid,
        memory_bytes=gpu.memory_bytes,
        compute_capability=None if capability is None else f"{capability[0]}.{capability[1]}",
    )


def _properties() -> list[Any]:
    if not torch.cuda.is_initialized():
        return []
    return [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]


def _from_torch(found: Any) -> dict[str, Any]:
    return _known(
        name=found.name,
        uuid=str(found.uuid) if hasattr(found, "uuid") else None,
        memory_bytes=found.total_memory,
        architecture=getattr(found, "gcnArchName", None),
        multiprocessors=found.multi_processor_count,
    )


def _from_nvml(nvml: ModuleType, handle: Any) -> dict[str, Any]:
    return _known(
        sm_clock_mhz=ask(nvml, "nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
        sm_clock_max_mhz=ask(nvml, "nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM),
        memory_clock_mhz=ask(nvml, "nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_MEM),
        memory_clock_max_mhz=ask(nvml, "nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_MEM),
        power_cap_w=_watts(ask(nvml, "nvmlDeviceGetEnforcedPowerLimit", handle)),
        power_cap_default_w=_watts(ask(nvml, "nvmlDeviceGetPowerManagementDefaultLimit", handle)),
        ecc=_switch(ask(nvml, "nvmlDeviceGetEccMode", handle)),
        persistence_mode=_switch(ask(nvml, "nvmlDeviceGetPersistenceMode", handle)),
        mig_mode=_switch(ask(nvml, "nvmlDeviceGetMigMode", handle)),
    )


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1e3


def _switch(mode: int | list[int] | None) -> bool | None:
    """Returns whether a mode is on. NVML gives some modes as [current, after the next reset]."""
    current = mode[0] if isinstance(mode, list) else mode
    return None if current is None else bool(current)


def _packages() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
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
        sdp_flash=_try(cuda.flash_sdp_enabled),
        sdp_mem_efficient=_try(cuda.mem_efficient_sdp_enabled),
        sdp_cudnn=_try(cuda.cudnn_sdp_enabled),
        sdp_math=_try(cuda.math_sdp_enabled),
    )
