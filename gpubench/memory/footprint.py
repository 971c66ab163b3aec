"""The types of a memory footprint: bytes by category, phase, module and holder."""

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from gpubench.memory.allocation_log import Counts, Phase

Source = Literal["measured", "predicted", "snapshot", "trace"]
Stage = Literal["setup", "first", "steady"]
"""`setup` is the time before the first step, `first` the first step, in which the optimizer creates its state, and
`steady` the last step, which represents all others."""

CATEGORIES = (
    "parameters", "buffers", "gradients", "optimizer_state", "activations", "inputs", "temporaries", "workspaces",
    "before", "unknown", "fragmentation", "other",
)  # fmt: skip
"""The categories in the order in which they are shown: those of an allocation, then what the allocator holds without
using it (`fragmentation`: reserved but not allocated), and what the device holds besides it (`other`: context and
libraries)."""

OTHERS = "(others)"
"""The path under which the modules that a footprint does not list are summed."""

Amounts = dict[str, int]
"""The bytes by category, without zeros. They sum to the total of the device, as far as that is known."""


class Level(Struct, frozen=True):
    """The memory in use at a moment, by four counts, each of which includes the one before it."""

    requested: int
    """The bytes that tensors requested."""
    allocated: int
    """The bytes of the allocator's blocks for these tensors."""
    reserved: int | None
    """The bytes that the allocator has from the driver; None without an allocator that keeps memory for reuse."""
    total: int
    """The bytes in use on the device, including `other`."""


class PhaseFootprint(Struct, frozen=True):
    stage: Stage
    phase: Phase
    peak: Amounts
    """The memory held at the moment of the phase at which most is allocated."""
    level: Level
    """The counts at the same moment."""
    end: Amounts
    """The memory held when the phase ends."""


class FootprintPeak(Struct, frozen=True):
    stage: Stage
    phase: Phase
    amounts: Amounts
    level: Level
    position: int
    """The index of the peak in the timeline's series."""


class ModuleFootprint(Struct, frozen=True):
    """The memory of a module without its children: its parameters, buffers, gradients and optimizer state, and the
    activations and temporaries that it held at the peak."""

    path: str
    amounts: Amounts


class Holder(Struct, frozen=True):
    """Allocations that are alike and were held at the peak."""

    category: str
    module: str
    operator: str
    shape: str
    where: str
    count: int
    size: int
    """The bytes of all of them together."""


class MemoryShortage(Struct, frozen=True):
    """A request that failed because memory was short, with what was held then."""

    requested: int
    left: int | None
    """The bytes that the driver had left; None if they are unknown."""
    operator: str
    where: str
    level: Level
    largest_free: int | None
    """The bytes of the allocator's largest unused block; None unless the log ends with the request."""
    holders: list[Holder]
    """What held most, the largest first."""


class Correction(Struct, frozen=True):
    """Memory that tensors without memory do not show, and that a rule adds to a prediction."""

    name: str
    reason: str
    size: int | None
    """The bytes that it adds at the peak if all other corrections apply: to what is allocated, or to the count that it
    affects. None if that was not computed."""


class TimelineMark(Struct, frozen=True):
    at: int
    """The index of the mark in the timeline's series."""
    phase: Phase
    step: int | None


class MemoryTimeline(Struct, frozen=True):
    """The memory held over time, reduced to some points for drawing, among which are all peaks."""

    amounts: dict[str, list[int]]
    """The bytes by category, for the categories that ever hold anything; all lists have the same length."""
    reserved: list[int] | None
    marks: list[TimelineMark]


class Footprint(Struct, frozen=True, kw_only=True):
    source: Source
    device: str | None
    """The name that the driver reports, or the key of the hardware table, or "cpu"; None if a file does not have it."""
    capacity: int | None
    """The bytes of the device's memory."""
    rank: int = 0
    phases: list[PhaseFootprint]
    """The phases in order: those of the set-up, of the first step and of a steady step."""
    peak: FootprintPeak
    modules: list[ModuleFootprint]
    """The modules, the largest first."""
    holders: list[Holder]
    """The holders, the largest first; beyond a limit, the last one sums the rest under the category ""."""
    corrections: list[Correction] = []
    timeline: MemoryTimeline
    allocator: Counts | None = None
    """The counts of the allocator; None only in files of older versions."""
    late: bool = False
    """Whether memory was held when the recording began, and no event is known to be lost."""
    truncated: bool = False
    """Whether events before the first recorded one were lost."""
    truncation_proven: bool = False
    """Whether the file proves the loss; otherwise the number of events suggests it."""
    kept: list[int] = []
    """The bytes that each step allocated and that are still held at the end of the second step after it. The first
    step, which also allocates what is kept on purpose, and the last two have no number."""
    keepers: list[Holder] = []
    """What these bytes are, the largest first; some of them."""
    notes: list[str] = []
    out_of_memory: MemoryShortage | None = None
    """The last request that failed; None if none did."""
    is_state: bool = False
    """Whether only what was held at one moment is known, so that the peak is that of this moment."""

    @property
    def most(self) -> int:
        """The bytes that the device must have. The reserved memory can still grow after the peak."""
        held = [self.peak.level.total, *(phase.level.total for phase in self.phases)]
        if self.timeline.reserved:
            held.append(max(self.timeline.reserved) + self.peak.amounts.get("other", 0))
        return max(held)


class Footprints(Struct, frozen=True):
    """The content of memory.json."""

    ranks: list[Footprint]
    """The footprints in order of rank."""


def peaks(ranks: Sequence[Footprint]) -> dict[str, float]:
    """The largest value of each count over the ranks, by the name of its metric."""
    found = {"peak_memory_allocated": max(rank.peak.level.allocated for rank in ranks)}
    kept_back = [rank for rank in ranks if rank.peak.level.reserved is not None]
    if kept_back:
        found["peak_memory_reserved"] = max(rank.most - rank.peak.amounts.get("other", 0) for rank in kept_back)
        found["peak_memory_total"] = max(rank.most for rank in kept_back)
    return {name: float(size) for name, size in found.items()}


def scalars(footprint: Footprint) -> dict[str, float]:
    """The peak by count and by category, and each phase's peak and end, all in bytes.

    Tags are "memory/peak/allocated", "memory/peak/optimizer_state", "memory/steady/forward/peak" and so on. A phase's
    values count all that is in use on the device, as "memory/peak/total" does.
    """
    peak = footprint.peak
    levels = {name: size for name, size in msgspec.structs.asdict(peak.level).items() if size is not None}
    found = {f"peak/{name}": size for name, size in {**levels, **peak.amounts}.items()}
    for phase in footprint.phases:
        found[f"{phase.stage}/{phase.phase}/peak"] = phase.level.total
        found[f"{phase.stage}/{phase.phase}/end"] = sum(phase.end.values())
    return {f"memory/{tag}": float(size) for tag, size in found.items()}
