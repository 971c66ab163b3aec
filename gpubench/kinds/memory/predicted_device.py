"""The device for which memory is predicted, and what its allocator and context add to the allocations."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import psutil

from gpubench.errors import DeviceError
from gpubench.hardware import LISTED_BY, capability, find_by_key
from gpubench.kinds.memory.settings import FollowSettings
from gpubench.memory.allocation_log import AllocationLog
from gpubench.memory.allocator import Rules
from gpubench.memory.analysis import footprint
from gpubench.memory.footprint import Correction, Footprint
from gpubench.memory.libraries import CONTEXT
from gpubench.settings.keys import about
from gpubench.settings.schema import Device

UNKNOWN = (9, 0)
"""The compute capability assumed for an unknown GPU model: no other one takes larger workspaces."""


@dataclass(frozen=True)
class Target:
    name: str | None
    """The key in the hardware table."""
    capacity: int
    """The bytes of memory into which the run must fit."""
    capability: tuple[int, int] | None
    """The compute capability; None for a CPU and for GPUs other than NVIDIA's."""
    cuda: bool = True
    """Whether memory comes from CUDA's caching allocator; on a CPU, tensors take what they request."""
    context: int = CONTEXT
    """The bytes in use outside the allocator."""


def target_of(follow: FollowSettings, device: Device | None) -> Target:
    """Raises DeviceError if no target is named, and with the nearest name for an unknown one."""
    if device is Device.cpu:
        return Target("cpu", follow.device_memory or psutil.virtual_memory().total, None, cuda=False)
    if follow.device_model:
        with about("memory.device_model"):
            found = find_by_key(follow.device_model)
        return Target(found.key, follow.device_memory or found.memory_bytes, capability(found.key))
    if follow.device_memory:
        return Target(None, follow.device_memory, UNKNOWN)
    raise DeviceError("no GPU model is given", f"add --device-model h200, or --device-memory 80GiB; {LISTED_BY} models")


def predicted(
    log: AllocationLog,
    target: Target,
    *,
    expandable: bool,
    notes: Sequence[str] = (),
) -> Footprint:
    """The footprint of `log` on the target."""
    found = footprint(
        log,
        source="predicted",
        device=target.name,
        capacity=target.capacity,
        rules=Rules(expandable=expandable, capacity=target.capacity - target.context) if target.cuda else None,
        other=target.context if target.cuda else 0,
        notes=notes,
    )
    if not target.cuda:
        return found
    return msgspec.structs.replace(found, corrections=[*_below(found, target.context)])


def _below(found: Footprint, context: int) -> list[Correction]:
    """The corrections for memory outside tensors, each with what it adds to the peak."""
    level, amounts = found.peak.level, found.peak.amounts
    assert level.reserved is not None
    return [
        Correction(
            "workspaces",
            "cuBLAS takes one for each thread that computes products, and keeps it",
            amounts.get("workspaces", 0),
        ),
        Correction(
            "blocks",
            "the allocator rounds to 512 B, and leaves small remainders in a block",
            level.allocated - level.requested,
        ),
        Correction(
            "segments",
            "the allocator takes memory from the driver in larger segments, and keeps them",
            level.reserved - level.allocated,
        ),
        Correction("context", "CUDA and its libraries hold this much outside the allocator: an assumption", context),
    ]
