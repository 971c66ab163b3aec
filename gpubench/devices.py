"""Finds the GPUs of this machine, the build of PyTorch, and the CPU and memory that this process may use.

The command line needs these facts to choose defaults and to reject settings that cannot work, without importing torch.
The CUDA driver lists the GPUs that a CUDA process sees; NVML, which containers and Jetsons may lack, only adds
telemetry. AMD GPUs and the CPU are read from the kernel's files, and the version of PyTorch from its source.
"""

import ast
import ctypes
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
CPU_ROOT = Path("/sys/devices/system/cpu")
KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of cuda.h


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG instance of a GPU, that a new process would see.

    `index` is NVML's index (for a MIG instance, that of its GPU) in PCI bus order. It is not the CUDA ordinal, and None
    if NVML does not know the GPU, which then has no telemetry. `memory_bytes` is None if unknown.
    `compute_capability` is None for GPUs of other vendors than NVIDIA.
    """

    index: int | None
    name: str
    uuid: str
    memory_bytes: int | None
    compute_capability: tuple[int, int] | None


def open_nvml() -> ModuleType | None:
    """Returns the initialised pynvml module, or None without a working NVIDIA driver.

    NVML counts its users, so the caller must call `nvmlShutdown()` once for each success.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    module: ModuleType = pynvml
    return module


def ask(nvml: ModuleType, query: str, *arguments: Any) -> Any:
    """Returns the answer to an NVML query, or None if this device, driver or version of NVML does not support it."""
    try:
        return getattr(nvml, query)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def visible_gpus() -> list[Gpu]:
    """Returns the GPUs that a new process would see, in its order: position i is its `cuda:i`."""
    if (torch_build() or "").startswith("rocm"):
        return _amd_gpus()
    nvml = open_nvml()
    try:
        return [gpu for gpu, _ in cuda_gpus(nvml)]
    finally:
        if nvml:
            nvml.nvmlShutdown()


def cuda_gpus(nvml: ModuleType | None) -> list[tuple[Gpu, Any]]:
    """Returns the GPUs that a new CUDA process would see, in its order, each with its handle in `nvml`.

    The handle is None if NVML does not know the GPU, or if `nvml` is None.
    """
    driver = open_driver()
    if driver is None:
        return []
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    return [_describe(driver, nvml, ordinal) for ordinal in range(count.value)]


def open_driver() -> Any:
    """Returns the initialised library of the CUDA driver, or None if there is none. It creates no context."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return None if driver.cuInit(0) else driver


def _describe(driver: Any, nvml: ModuleType | None, ordinal: int) -> tuple[Gpu, Any]:
    device, memory, name, uuid = (
        ctypes.c_int(),
        ctypes.c_size_t(),
        ctypes.create_string_buffer(256),
        (ctypes.c_ubyte * 16)(),
    )
    driver.cuDeviceGet(ctypes.byref(device), ordinal)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    # The second version gives a MIG instance's own; drivers before CUDA 11.4 have the first alone.
    (getattr(driver, "cuDeviceGetUuid_v2", None) or driver.cuDeviceGetUuid)(uuid, device)
    major, minor = (_attribute(driver, which, device) for which in (_MAJOR, _MINOR))
    digits = bytes(uuid).hex()
    bare = "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
    known, index, handle = (_in_nvml(nvml, bare) if nvml else None) or (f"GPU-{bare}", None, None)
    gpu = Gpu(
        index=index,
        name=name.value.decode(errors="replace"),
        uuid=known,
        memory_bytes=memory.value or None,
        compute_capability=(major, minor),
    )
    return gpu, handle


def _attribute(driver: Any, which: int, device: Any) -> int:
    value = ctypes.c_int()
    driver.cuDeviceGetAttribute(ctypes.byref(value), which, device)
    return value.value


def _in_nvml(nvml: ModuleType, bare: str) -> tuple[str, int | None, Any] | None:
    """Returns (uuid, index, handle) of the GPU or MIG instance with the uuid `bare` without prefix; None if unknown."""
    for uuid in (f"GPU-{bare}", f"MIG-{bare}"):
        handle = ask(nvml, "nvmlDeviceGetHandleByUUID", uuid)
        if handle is not None:
            mig = uuid.startswith("MIG-")
            parent = ask(nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle) if mig else handle
            return uuid, ask(nvml, "nvmlDeviceGetIndex", parent), handle
    return None


def _amd_gpus() -> list[Gpu]:
    """Returns the AMD GPUs in the topology of the kernel's driver that HIP_VISIBLE_DEVICES and similar ones select."""
    gpus = []
    for node in sorted(KFD_NODES.glob("[0-9]*"), key=lambda path: int(path.name)):
        lines = (line.partition(" ") for line in (read_text(node / "properties") or "").splitlines())
        facts = {name: value.strip() for name, _, value in lines}
        if not int(facts.get("simd_count", 0)):
            continue  # a CPU
        version = int(facts.get("gfx_target_version", 0))
        architecture = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
        gpus.append(Gpu(None, f"AMD {architecture}", facts.get("unique_id", ""), None, None))
    for variable in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        if (wanted := os.environ.get(variable)) is not None:
            numbers = [int(entry) for entry in wanted.split(",") if entry.strip().isdigit()]
            gpus = [gpus[number] for number in numbers if number < len(gpus)]
    return gpus


def torch_version() -> str | None:
    """Returns the version of the installed PyTorch, such as "2.13.0+cpu", without importing it; None if missing."""
    return _torch_facts().get("__version__")


def torch_build() -> str | None:
    """Returns what the installed PyTorch was built for: "cpu", "cuda 12.8", "rocm 6.3"; None if it is missing."""
    facts = _torch_facts()
    for kind, name in (("cuda", "cuda"), ("rocm", "hip"), ("xpu", "xpu")):
        if version := facts.get(name):
            return f"{kind} {'.'.join(version.split('.')[:2])}"
    return "cpu" if facts else None


def _torch_facts() -> dict[str, str]:
    """Returns the strings that torch/version.py assigns, without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    try:
        module = ast.parse(Path(spec.origin).with_name("version.py").read_text())
    except (OSError, SyntaxError):
        return {}
    facts = {}
    for node in module.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, str):
            facts[target.id] = value.value
    return facts


def physical_cores() -> int:
    """Returns the number of physical cores for this process, within its affinity and cgroup quota; at least 1."""
    cores = len({_siblings(cpu) for cpu in allowed_cpus()})
    quota = cpu_quota()
    return max(1, cores if quota is None else min(cores, int(quota)))


def allowed_cpus() -> set[int]:
    """Returns the logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(psutil.cpu_count(logical=False) or 1))


def _siblings(cpu: int) -> str:
    """Returns a key for the physical core of the logical CPU `cpu`."""
    return read_text(CPU_ROOT / f"cpu{cpu}" / "topology" / "thread_siblings_list") or f"cpu{cpu}"


def cpu_quota() -> float | None:
    """Returns the CPU quota of the cgroup (version 2) in CPUs, such as 1.5; None without a limit."""
    quotas = [limit.split() for limit in _cgroup_limits("cpu.max")]
    return min((int(quota) / int(period) for quota, period in quotas if quota != "max"), default=None)


def memory_limit() -> int | None:
    """Returns the memory limit of the cgroup (version 2) in bytes; None without a limit."""
    return min((int(limit) for limit in _cgroup_limits("memory.max") if limit != "max"), default=None)


def _cgroup_limits(name: str) -> list[str]:
    """Returns the contents of the file `name` of this process's cgroup and its parents. The lowest limit applies."""
    own = re.search(r"^0::/(.*)$", read_text(OWN_CGROUPS) or "", re.MULTILINE)
    here = CGROUP_ROOT / (own[1] if own else "")
    levels = [level for level in (here, *here.parents) if level.is_relative_to(CGROUP_ROOT)]
    return [text for level in levels if (text := read_text(level / name))]


def read_text(path: Path) -> str | None:
    """Returns the file's text without surrounding whitespace, or None if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
