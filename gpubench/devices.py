"""What this machine can run: its GPUs, the kind of PyTorch installed, and the CPU and memory it may use.

The command line needs these facts to fill in defaults and to refuse what cannot work, and it never imports torch. The
CUDA driver says which GPUs a CUDA process sees; NVML, which containers and Jetsons may lack, only adds telemetry. AMD
GPUs are read from the kernel's files, PyTorch is read as text, and the CPU from the kernel's files too.
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
    """One GPU that a process started now would see, or one MIG instance of a GPU.

    `index` is NVML's number of it (of a MIG instance, its parent's), in PCI bus order; it is not the CUDA ordinal, and
    None where NVML does not know the GPU, which then has no telemetry. `memory_bytes` is None where nothing says.
    `compute_capability` is None for what is not NVIDIA's.
    """

    index: int | None
    name: str
    uuid: str
    memory_bytes: int | None
    compute_capability: tuple[int, int] | None


def open_nvml() -> ModuleType | None:
    """The pynvml module, initialised, or None where there is no working NVIDIA driver.

    NVML counts its users: each success is owed one `nvmlShutdown()`.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    module: ModuleType = pynvml
    return module


def ask(nvml: ModuleType, query: str, *arguments: Any) -> Any:
    """The answer to one NVML query, or None where this device, driver or version of NVML has none."""
    try:
        return getattr(nvml, query)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def visible_gpus() -> list[Gpu]:
    """The GPUs a process started now would see, in its order: position i is its `cuda:i`."""
    if (torch_build() or "").startswith("rocm"):
        return _amd_gpus()
    driver = open_driver()
    if driver is None:
        return []
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    nvml = open_nvml()
    try:
        return [_describe(driver, nvml, ordinal) for ordinal in range(count.value)]
    finally:
        if nvml:
            nvml.nvmlShutdown()


def open_driver() -> Any:
    """The CUDA driver's library, initialised, or None where there is none that works. No context is made."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return None if driver.cuInit(0) else driver


def _describe(driver: Any, nvml: ModuleType | None, ordinal: int) -> Gpu:
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
    found = nvml_handle(nvml, bare) if nvml else None
    return Gpu(
        index=found[1] if found else None,
        name=name.value.decode(errors="replace"),
        uuid=found[0] if found else f"GPU-{bare}",
        memory_bytes=memory.value or None,
        compute_capability=(major, minor),
    )


def _attribute(driver: Any, which: int, device: Any) -> int:
    value = ctypes.c_int()
    driver.cuDeviceGetAttribute(ctypes.byref(value), which, device)
    return value.value


def nvml_handle(nvml: ModuleType, bare: str) -> tuple[str, int | None, Any] | None:
    """(uuid, index, handle) of the GPU or MIG instance with the uuid `bare`, a prefix apart; None if NVML has none."""
    for uuid in (f"GPU-{bare}", f"MIG-{bare}"):
        handle = ask(nvml, "nvmlDeviceGetHandleByUUID", uuid)
        if handle is not None:
            mig = uuid.startswith("MIG-")
            parent = ask(nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle) if mig else handle
            return uuid, ask(nvml, "nvmlDeviceGetIndex", parent), handle
    return None


def _amd_gpus() -> list[Gpu]:
    """From the topology of the kernel's driver, of which HIP_VISIBLE_DEVICES and its like choose by number."""
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
    """The installed PyTorch's version, such as "2.13.0+cpu"; None if there is none. Does not import it."""
    return _torch_facts().get("__version__")


def torch_build() -> str | None:
    """What the installed PyTorch was built for: "cpu", "cuda 12.8", "rocm 6.3"; None if there is none."""
    facts = _torch_facts()
    for kind, name in (("cuda", "cuda"), ("rocm", "hip"), ("xpu", "xpu")):
        if version := facts.get(name):
            return f"{kind} {'.'.join(version.split('.')[:2])}"
    return "cpu" if facts else None


def _torch_facts() -> dict[str, str]:
    """The strings that torch/version.py assigns. Finding a top-level package does not import it."""
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
    """Cores this process may keep busy, at least 1: hyper-threads count once, affinity and the cgroup's quota bind."""
    cores = len({_siblings(cpu) for cpu in allowed_cpus()})
    quota = cpu_quota()
    return max(1, cores if quota is None else min(cores, int(quota)))


def allowed_cpus() -> set[int]:
    """Logical CPUs the scheduler may put this process on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(psutil.cpu_count(logical=False) or 1))


def _siblings(cpu: int) -> str:
    """A name for the physical core that logical CPU `cpu` belongs to."""
    return read_text(CPU_ROOT / f"cpu{cpu}" / "topology" / "thread_siblings_list") or f"cpu{cpu}"


def cpu_quota() -> float | None:
    """CPUs' worth of time the cgroup (version 2) grants, such as 1.5; None if it sets no limit."""
    quotas = [limit.split() for limit in _cgroup_limits("cpu.max")]
    return min((int(quota) / int(period) for quota, period in quotas if quota != "max"), default=None)


def memory_limit() -> int | None:
    """Bytes of memory the cgroup (version 2) grants; None if it sets no limit."""
    return min((int(limit) for limit in _cgroup_limits("memory.max") if limit != "max"), default=None)


def _cgroup_limits(name: str) -> list[str]:
    """The file `name` at this process's cgroup and at each one above it: the tightest of them binds."""
    own = re.search(r"^0::/(.*)$", read_text(OWN_CGROUPS) or "", re.MULTILINE)
    here = CGROUP_ROOT / (own[1] if own else "")
    levels = [level for level in (here, *here.parents) if level.is_relative_to(CGROUP_ROOT)]
    return [text for level in levels if (text := read_text(level / name))]


def read_text(path: Path) -> str | None:
    """The file's text without surrounding blanks, or None if it cannot be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
