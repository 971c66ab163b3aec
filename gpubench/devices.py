"""What this machine can run: its GPUs, the kind of PyTorch installed, and the CPU and memory it may use.

The command line needs these facts to fill in defaults and to refuse what cannot work, and it never imports torch: GPUs
are asked through NVML, PyTorch is read as text, and the CPU from the kernel's own files.

AMD GPUs are not looked for: with a ROCm build, `device=cuda` works where it is given, and nothing here is asked.
"""

import ast
import importlib.util
import os
import re
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
CPU_ROOT = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU, or one MIG instance of it.

    `index` is NVML's number, in PCI bus order (of a MIG instance, its parent's); it is not the CUDA ordinal.
    `memory_bytes` is None where the GPU shares the machine's memory and NVML cannot say.
    """

    index: int
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
    """The GPUs a CUDA process started now would see, in its order: position i is its `cuda:i`.

    Where GPUs of several models share a machine, CUDA numbers them like this only under CUDA_DEVICE_ORDER=PCI_BUS_ID.
    """
    nvml = open_nvml()
    if nvml is None:
        return []
    try:
        every = [
            ask(nvml, "nvmlDeviceGetHandleByIndex", index) for index in range(ask(nvml, "nvmlDeviceGetCount") or 0)
        ]
        uuids = [ask(nvml, "nvmlDeviceGetUUID", handle) for handle in every if handle is not None]
        chosen = _chosen(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids)
        handles = ((uuid, ask(nvml, "nvmlDeviceGetHandleByUUID", uuid)) for uuid in chosen)
        return [_describe(nvml, uuid, handle) for uuid, handle in takewhile(lambda pair: pair[1] is not None, handles)]
    finally:
        nvml.nvmlShutdown()


def _chosen(wanted: str | None, uuids: list[str]) -> list[str]:
    """The uuids that CUDA_VISIBLE_DEVICES=`wanted` names among all GPUs' `uuids`, read as torch.cuda reads it.

    Every entry has the form of the first: an index, a unique prefix of a GPU's uuid, or a MIG instance's uuid. The
    first invalid entry ends the list; a device named twice empties it.
    """
    if wanted is None:
        return uuids
    chosen: list[str] = []
    for entry in wanted.split(","):
        if wanted.startswith("MIG-"):
            matches = [entry] if entry.startswith("MIG-") else []
        elif wanted.startswith("GPU-"):
            matches = [uuid for uuid in uuids if entry.startswith("GPU-") and uuid.startswith(entry)]
        else:
            number = re.match(r"\s*\+?(\d+)", entry)  # like strtoul: "1gpu" is 1, and "-1" is no device
            matches = uuids[int(number[1]) :][:1] if number else []
        if len(matches) != 1:
            break
        if matches[0] in chosen:
            return []
        chosen += matches
    return chosen


def _describe(nvml: ModuleType, uuid: str, handle: Any) -> Gpu:
    memory = ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    parent = ask(nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle) if uuid.startswith("MIG-") else handle
    return Gpu(
        index=nvml.nvmlDeviceGetIndex(parent),
        name=nvml.nvmlDeviceGetName(handle),
        uuid=uuid,
        memory_bytes=memory.total if memory else None,
        compute_capability=ask(nvml, "nvmlDeviceGetCudaComputeCapability", parent),
    )


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
