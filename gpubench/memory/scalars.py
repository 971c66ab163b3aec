"""What fills the memory, as figures of a run and as curves in TensorBoard know it. Sizes are bytes."""

from collections.abc import Sequence

import msgspec

from gpubench.memory.footprint import Footprint


def peaks(ranks: Sequence[Footprint]) -> dict[str, float]:
    """The most by each count, the largest of the ranks, by the name of its metric."""
    found = {"peak_memory_allocated": max(rank.peak.level.allocated for rank in ranks)}
    kept_back = [rank for rank in ranks if rank.peak.level.reserved is not None]
    if kept_back:
        found["peak_memory_reserved"] = max(rank.most - rank.peak.amounts.get("other", 0) for rank in kept_back)
        found["peak_memory_total"] = max(rank.most for rank in kept_back)
    return {name: float(size) for name, size in found.items()}


def scalars(footprint: Footprint) -> dict[str, float]:
    """The peak by count and by category, and each phase's peak and end, all in bytes.

    Tags are "memory/peak/allocated", "memory/peak/optimizer_state", "memory/steady/forward/peak" and so on; a phase's
    are of all that the device has given out, as "memory/peak/total" is.
    """
    peak = footprint.peak
    levels = {name: size for name, size in msgspec.structs.asdict(peak.level).items() if size is not None}
    found = {f"peak/{name}": size for name, size in {**levels, **peak.amounts}.items()}
    for phase in footprint.phases:
        found[f"{phase.stage}/{phase.phase}/peak"] = phase.level.total
        found[f"{phase.stage}/{phase.phase}/end"] = sum(phase.end.values())
    return {f"memory/{tag}": float(size) for tag, size in found.items()}
