"""The facts about this machine for environment.json, as far as they are known without PyTorch."""

import os
import platform
import socket
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from gpubench.devices import (
    Gpu,
    allowed_cpus,
    ask,
    cpu_quota,
    cuda_gpus,
    is_rocm,
    memory_limit,
    open_nvml,
    physical_cores,
    read_text,
    visible_gpus,
)


def facts() -> dict[str, Any]:
    """Collects the facts about the machine (`host`), CPU, memory, driver and GPUs.

    Sizes are in bytes, clocks in MHz and power in watts. A fact that cannot be read is left out without an error.
    """
    return {
        "host": _host(),
        "cpu": _cpu(),
        "memory": _known(total_bytes=psutil.virtual_memory().total, limit_bytes=memory_limit()),
        "driver": _driver(),
        "gpus": _gpus(),
    }


def _known(**facts: Any) -> dict[str, Any]:
    """The facts that are not None."""
    return {name: fact for name, fact in facts.items() if fact is not None}


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
    """Whether this is a virtual machine, according to the flags of an x86 CPU; None on other CPUs."""
    flags = _cpuinfo("flags")
    return None if flags is None else "hypervisor" in flags.split()


def _cpuinfo(field: str) -> str | None:
    """The `field` of the first CPU in /proc/cpuinfo; None if it is missing."""
    for line in (read_text(Path("/proc/cpuinfo")) or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return None


_FLAGS = {
    "bf16": frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"}),
    "fp16": frozenset({"avx512_fp16", "amx_fp16", "asimdhp", "fphp"}),
}
"""The flags in /proc/cpuinfo of arithmetic in a type of 16 bits: on x86 "flags", and on Arm "Features"."""


def _reduced_types(flags: Iterable[str]) -> list[str]:
    """Returns the types of 16 bits that a CPU with these flags computes in."""
    return [name for name, of_type in _FLAGS.items() if not of_type.isdisjoint(flags)]


def _cpu() -> dict[str, Any]:
    flags = _cpuinfo("flags") or _cpuinfo("Features")
    return _known(
        model=_cpuinfo("model name"),
        physical_cores=psutil.cpu_count(logical=False),
        logical_cores=psutil.cpu_count(),
        allowed_cpus=len(allowed_cpus()),
        usable_cores=physical_cores(),
        quota=cpu_quota(),
        reduced_types=_reduced_types(flags.split()) if flags else None,
        governor=read_text(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
    )


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
    """The facts of the visible GPUs in the order of CUDA or HIP, from the driver and NVML."""
    if is_rocm():
        return [_identity(gpu) for gpu in visible_gpus()]
    nvml = open_nvml()
    try:
        return [
            _identity(gpu) | (_from_nvml(nvml, handle) if nvml and handle is not None else {})
            for gpu, handle in cuda_gpus(nvml)
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
    """Whether a mode is on. NVML gives some modes as [current, after the next reset]."""
    current = mode[0] if isinstance(mode, list) else mode
    return None if current is None else bool(current)
