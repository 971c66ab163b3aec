"""Compares the memory of two sides that was followed, by category and by phase."""

from collections.abc import Iterable
from dataclasses import dataclass

from gpubench.compare.evidence import Side
from gpubench.compare.result import (
    Comparability,
    Memory,
    MemoryPeak,
    PhaseMemory,
    SizeChange,
)
from gpubench.memory.footprint import Amounts, Footprint, PhaseFootprint


@dataclass(frozen=True)
class Followed:
    run: str
    footprint: Footprint


def followed(side: Side) -> Followed | None:
    """Returns the rank with the highest peak in the side's first run whose memory was followed, or None."""
    for run in side.runs:
        if run.footprints:
            return Followed(run.label, max(run.footprints.ranks, key=lambda rank: rank.peak.level.total))
    return None


def find_memory(baseline: Side, candidate: Side, comparability: Comparability) -> Memory | None:
    """Compares the memory of both sides. Returns None unless both were followed and did the same work (or --force)."""
    ours, theirs = followed(baseline), followed(candidate)
    if ours is None or theirs is None or not (comparability.comparable or comparability.forced):
        return None
    return against(ours, theirs)


def against(ours: Followed, theirs: Followed) -> Memory:
    """Returns the change of memory from `ours` to `theirs`."""
    before, after = ours.footprint, theirs.footprint
    return Memory(
        baseline=_peak(ours),
        candidate=_peak(theirs),
        change=after.peak.level.total - before.peak.level.total,
        categories=size_changes(before.peak.amounts, after.peak.amounts),
        phases=phase_changes(before.phases, after.phases),
    )


def size_changes(before: Amounts, after: Amounts) -> list[SizeChange]:
    """Returns the changes of all categories of either side, the largest first."""
    changes = [
        SizeChange(name, before.get(name, 0), after.get(name, 0), after.get(name, 0) - before.get(name, 0))
        for name in before | after
    ]
    return sorted(changes, key=lambda one: -abs(one.change))


def phase_changes(before: Iterable[PhaseFootprint], after: Iterable[PhaseFootprint]) -> list[PhaseMemory]:
    """Returns the changes of all phases of either side, those with the largest change of the peak first."""
    ours, theirs = ({(one.stage, one.phase): one for one in side} for side in (before, after))
    changes = []
    for stage, phase in ours | theirs:
        old, new = ours.get((stage, phase)), theirs.get((stage, phase))
        changes.append(
            PhaseMemory(
                stage=stage,
                phase=phase,
                baseline=old.level.total if old else None,
                candidate=new.level.total if new else None,
                change=(new.level.total if new else 0) - (old.level.total if old else 0),
                categories=size_changes(old.peak if old else {}, new.peak if new else {}),
            )
        )
    return sorted(changes, key=lambda one: -abs(one.change))


def _peak(side: Followed) -> MemoryPeak:
    found = side.footprint
    return MemoryPeak(
        run=side.run,
        rank=found.rank,
        source=found.source,
        device=found.device,
        stage=found.peak.stage,
        phase=found.peak.phase,
        level=found.peak.level,
    )
