"""Records the machine, the libraries and the process settings of a measurement for environment.json.

`compare` uses these facts to decide whether two runs are comparable. A fact that cannot be read is left out without an
error.
"""

from typing import Any

import torch

from gpubench import machine
from gpubench.probe.facts import facts


def capture_env_metadata() -> dict[str, Any]:
    """Collects the facts as a dict that can be written as JSON; sizes are in bytes, clocks in MHz and power in watts.

    Threads, math settings and GPUs are those of this process now. The function does not initialise CUDA; the number of
    multiprocessors is included only if CUDA is already initialised.
    """
    found, built = machine.facts(), torch.backends.cpu
    if hasattr(built, "get_cpu_capability"):
        found["cpu"]["capability"] = built.get_cpu_capability()
    properties = _properties()
    if torch.version.hip and properties:
        found["gpus"] = [_from_torch(each) for each in properties]
    else:
        for gpu, each in zip(found["gpus"], properties, strict=False):
            gpu["multiprocessors"] = each.multi_processor_count
    return found | facts()


def _properties() -> list[Any]:
    if not torch.cuda.is_initialized():
        return []
    return [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]


def _from_torch(found: Any) -> dict[str, Any]:
    """The facts of an AMD GPU, which NVIDIA's libraries do not know."""
    facts = {
        "name": found.name,
        "uuid": str(found.uuid) if hasattr(found, "uuid") else None,
        "memory_bytes": found.total_memory,
        "architecture": getattr(found, "gcnArchName", None),
        "multiprocessors": found.multi_processor_count,
    }
    return {name: fact for name, fact in facts.items() if fact is not None}
