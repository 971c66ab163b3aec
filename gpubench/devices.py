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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
CPU_ROOT = Path("/sys/devices/system/cpu")
KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")

AMD_NAMES: Mapping[int, str] = {
    0x7408: "AMD Instinct MI250X",
    0x740F: "AMD Instinct MI210",
    0x74A0: "AMD Instinct MI300A",
    0x74A1: "AMD Instinct MI300X",
    0x74A5: "AMD Instinct MI325X",
    0x74B5: "AMD Instinct MI300X VF",
    0x75A0: "AMD Instinct MI350X",
    0x75A3: "AMD Instinct MI355X",
}
"""The names of accelerators by their PCI device ids, as in data/amdgpu.ids of libdrm, from which HIP takes its names.

The kernel gives the architecture alone, which an MI300A, an MI300X and an MI325X share. An id that several devices
share ("AMD Instinct MI250X / MI250", the Radeon RX 7900 series) is left out.
"""

_FRAME_BUFFERS = (1, 2)  # HSA_HEAPTYPE_FRAME_BUFFER_PUBLIC and _PRIVATE of hsakmttypes.h
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

    @property
    def digits(self) -> str:
        """The digits of the uuid, without "GPU-" or "MIG-", as a process that uses the GPU reports them."""
        return digits(self.uuid)


def digits(uuid: str) -> str:
    """The hexadecimal digits of a uuid of the form "GPU-" or "MIG-" and digits in groups."""
    return uuid.partition("-")[2].replace("-", "").lower()


def open_nvml() -> ModuleType | None:
    """The initialised pynvml module, or None without a working NVIDIA driver.

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
    """The answer to an NVML query, or None if this device, driver or version of NVML does not support it."""
    try:
        return getattr(nvml, query)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def visible_gpus() -> list[Gpu]:
    """The GPUs that a new process would see, in its order: position i is its `cuda:i`."""
    if is_rocm():
        return _amd_gpus()
    nvml = open_nvml()
    try:
        return [gpu for gpu, _ in cuda_gpus(nvml)]
    finally:
        if nvml:
            nvml.nvmlShutdown()


def cuda_gpus(nvml: ModuleType | None) -> list[tuple[Gpu, Any]]:
    """The GPUs that a new CUDA process would see, in its order, each with its handle in `nvml`.

    The handle is None if NVML does not know the GPU, or if `nvml` is None.
    """
    driver = open_driver()
    if driver is None:
        return []
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    return [_describe(driver, nvml, ordinal) for ordinal in range(count.value)]


def machine_gpus() -> list[Gpu]:
    """All GPUs that NVML lists, also those that CUDA_VISIBLE_DEVICES hides, in the order of its numbers."""
    nvml = open_nvml()
    if nvml is None:
        return []
    try:
        found = []
        for index in range(ask(nvml, "nvmlDeviceGetCount") or 0):
            handle = ask(nvml, "nvmlDeviceGetHandleByIndex", index)
            name, uuid = (handle and ask(nvml, f"nvmlDeviceGet{fact}", handle) for fact in ("Name", "UUID"))
            if name and uuid:
                memory = ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
                capability = ask(nvml, "nvmlDeviceGetCudaComputeCapability", handle)
                found.append(Gpu(index, name, uuid, memory and memory.total, capability and tuple(capability)))
        return found
    finally:
        nvml.nvmlShutdown()


def open_driver() -> Any:
    """The initialised library of the CUDA driver, or None if there is none. It creates no context."""
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
    """The (uuid, index, handle) of the GPU or MIG instance with the uuid `bare` without prefix; None if unknown."""
    for uuid in (f"GPU-{bare}", f"MIG-{bare}"):
        handle = ask(nvml, "nvmlDeviceGetHandleByUUID", uuid)
        if handle is not None:
            mig = uuid.startswith("MIG-")
            parent = ask(nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle) if mig else handle
            return uuid, ask(nvml, "nvmlDeviceGetIndex", parent), handle
    return None


def _amd_gpus() -> list[Gpu]:
    """The AMD GPUs in the topology of the kernel's driver that a new process would see, in its order.

    ROCr first applies ROCR_VISIBLE_DEVICES, where an empty list hides all. HIP then applies HIP_VISIBLE_DEVICES, or
    CUDA_VISIBLE_DEVICES if that is unset or empty; there an empty list hides nothing. Sources:
    `RvdFilter::BuildUsrDeviceList` in runtime/hsa-runtime/core/runtime/amd_filter_device.cpp of ROCm/ROCR-Runtime at
    c7785a6, and `Device::init` in rocclr/device/rocm/rocdevice.cpp of ROCm/clr at f9f995c.
    """
    gpus = [gpu for node in sorted(KFD_NODES.glob("[0-9]*"), key=lambda path: int(path.name)) if (gpu := _of_kfd(node))]
    if (wanted := os.environ.get("ROCR_VISIBLE_DEVICES")) is not None:
        gpus = _chosen_by_rocr(gpus, wanted)
    if wanted := os.environ.get("HIP_VISIBLE_DEVICES") or os.environ.get("CUDA_VISIBLE_DEVICES"):
        gpus = _chosen_by_hip(gpus, wanted)
    return gpus


def _of_kfd(node: Path) -> Gpu | None:
    """The GPU of a node of the kernel's topology; None if the node is a CPU."""
    facts = _properties(node / "properties")
    if not facts.get("simd_count"):
        return None
    version = facts.get("gfx_target_version", 0)
    architecture = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"
    name = AMD_NAMES.get(facts.get("device_id", 0), f"AMD {architecture}")
    banks = [_properties(bank) for bank in node.glob("mem_banks/*/properties")]
    memory = sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in _FRAME_BUFFERS)
    unique = facts.get("unique_id", 0)
    return Gpu(None, name, f"GPU-{unique:016x}" if unique else "", memory or None, None)


def _properties(path: Path) -> dict[str, int]:
    """The numbers in a file of the kernel's topology by name; empty if it cannot be read."""
    lines = (line.partition(" ") for line in (read_text(path) or "").splitlines())
    return {name: int(value) for name, _, value in lines if value.strip().isdigit()}


def _chosen_by_rocr(gpus: list[Gpu], wanted: str) -> list[Gpu]:
    """The GPUs that the entries of ROCR_VISIBLE_DEVICES choose, up to the first invalid or repeated one.

    An entry is a number, or the beginning of one uuid.
    """
    chosen: list[Gpu] = []
    for entry in (entry.strip() for entry in wanted.split(",")):
        if entry[:1] in ("G", "g"):
            found = [gpu for gpu in gpus if len(entry) > len("GPU-") and gpu.uuid.upper().startswith(entry.upper())]
        else:
            found = gpus[int(entry) :][:1] if entry.isdigit() else []
        if len(found) != 1 or found[0] in chosen:
            break
        chosen += found
    return chosen


def _chosen_by_hip(gpus: list[Gpu], wanted: str) -> list[Gpu]:
    """The GPUs that the entries of HIP_VISIBLE_DEVICES choose, up to the first invalid one.

    An entry is a number without spaces, or a part of a uuid. A repeated one is skipped.
    """
    chosen: list[Gpu] = []
    for entry in wanted.split(","):
        if "GPU-" in entry:
            found = [gpu for gpu in gpus if entry in gpu.uuid][:1]
        else:
            found = gpus[int(entry) :][:1] if entry.isdigit() and entry == str(int(entry)) else []
        if not found:
            break
        chosen += [gpu for gpu in found if gpu not in chosen]
    return chosen


def torch_version() -> str | None:
    """The version of the installed PyTorch, such as "2.13.0+cpu", without importing it; None if missing."""
    return _torch_facts().get("__version__")


def torch_build() -> str | None:
    """What the installed PyTorch was built for: "cpu", "cuda 12.8", "rocm 6.3"; None if it is missing."""
    facts = _torch_facts()
    for kind, name in (("cuda", "cuda"), ("rocm", "hip"), ("xpu", "xpu")):
        if version := facts.get(name):
            return f"{kind} {'.'.join(version.split('.')[:2])}"
    return "cpu" if facts else None


def is_rocm() -> bool:
    """Whether the installed PyTorch was built for AMD GPUs."""
    return (torch_build() or "").startswith("rocm")


def _torch_facts() -> dict[str, str]:
    """The strings that torch/version.py assigns, without importing torch."""
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
    """The number of physical cores for this process, within its affinity and cgroup quota; at least 1."""
    cores = len({_siblings(cpu) for cpu in allowed_cpus()})
    quota = cpu_quota()
    return max(1, cores if quota is None else min(cores, int(quota)))


def allowed_cpus() -> set[int]:
    """The logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(psutil.cpu_count(logical=False) or 1))


def _siblings(cpu: int) -> str:
    """A key for the physical core of the logical CPU `cpu`."""
    return read_text(CPU_ROOT / f"cpu{cpu}" / "topology" / "thread_siblings_list") or f"cpu{cpu}"


def cpu_quota() -> float | None:
    """The CPU quota of the cgroup (version 2) in CPUs, such as 1.5; None without a limit."""
    quotas = [limit.split() for limit in _cgroup_limits("cpu.max")]
    return min((int(quota) / int(period) for quota, period in quotas if quota != "max"), default=None)


def memory_limit() -> int | None:
    """The memory limit of the cgroup (version 2) in bytes; None without a limit."""
    return min((int(limit) for limit in _cgroup_limits("memory.max") if limit != "max"), default=None)


def _cgroup_limits(name: str) -> list[str]:
    """The contents of the file `name` of this process's cgroup and its parents. The lowest limit applies."""
    own = re.search(r"^0::/(.*)$", read_text(OWN_CGROUPS) or "", re.MULTILINE)
    here = CGROUP_ROOT / (own[1] if own else "")
    levels = [level for level in (here, *here.parents) if level.is_relative_to(CGROUP_ROOT)]
    return [text for level in levels if (text := read_text(level / name))]


def read_text(path: Path) -> str | None:
    """The file's text without surrounding whitespace, or None if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
