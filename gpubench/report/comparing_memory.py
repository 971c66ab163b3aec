"""What fills the memory of two runs, in plain text: the sentences and tables that terminal, Markdown and page share."""

from collections.abc import Sequence

from gpubench import units
from gpubench.comparison.result import Memory, MemoryPeak, PhaseMemory, SizeChange
from gpubench.memory.history import PLACES
from gpubench.report.footprint_phrases import STAGES, added, category, share
from gpubench.report.plain import clean, words
from gpubench.report.sheets import Sheet, sheet

FOLDED = 0.001  # of the baseline's peak: what changed by less is told together
NAMED = 4  # categories in a sentence
WORTH_TELLING = 0.05  # of all that moved: a category that moved less is no explanation


def sentence(memory: Memory) -> str:
    """What became of the peak, and what that is made of: "peak 3.1 GiB lower (-42 %): activations -3.3 GiB"."""
    before, change = memory.baseline.level.total, memory.change
    said = f"peak {units.size(abs(change))} {'lower' if change < 0 else 'higher'} ({_of(change, before)})"
    if not change:
        said = f"the same peak of {units.size(before)}"
    parts = _parts(memory.categories)
    return f"{said}{_elsewhere(memory)}{': ' if parts else ''}{parts}"


def peaks(memory: Memory) -> list[str]:
    """A sentence for each side."""
    return [f"memory of the {name}: {peak(side)}" for name, side in sides(memory)]


def sides(memory: Memory) -> list[tuple[str, MemoryPeak]]:
    return [("baseline", memory.baseline), ("candidate", memory.candidate)]


def peak(side: MemoryPeak) -> str:
    """Such as "peak 529 MiB in the first backward pass (run 1; measured on cpu)"."""
    place = PLACES[side.phase].format("first " if side.stage == "first" else "")
    return f"peak {units.size(side.level.total)} {place} ({clean(side.run)}; {_source(side)})".replace("  ", " ")


def tables(memory: Memory) -> list[Sheet]:
    """What changed, the largest first; nothing where nothing did."""
    return [one for one in (categories(memory), phases(memory)) if one]


def categories(memory: Memory) -> Sheet:
    """Of the peak. The rows add up to the last, which is all of it."""
    whole = memory.baseline.level.total
    shown = [one for one in memory.categories if not _is_folded(one.change, whole)]
    folded = [one for one in memory.categories if _is_folded(one.change, whole)]
    rows = [_sizes(category(one.category), one, whole) for one in shown]
    if folded and rows:
        before, after = sum(one.baseline for one in folded), sum(one.candidate for one in folded)
        rows.append(_sizes("the rest", SizeChange("", before, after, after - before), whole))
    if rows:
        all_of_it = SizeChange("", whole, memory.candidate.level.total, memory.change)
        rows.append(_sizes("all of it", all_of_it, whole))
    return sheet("What holds the peak, before and after", rows)


def phases(memory: Memory) -> Sheet:
    """Each at its own peak, so that they do not add up."""
    whole = memory.baseline.level.total
    shown = [one for one in memory.phases if not _is_folded(one.change, whole)]
    others = len(memory.phases) - len(shown)
    rest = f"{units.counted(others, 'other')}, changed by less than {units.percent(FOLDED)} of the peak each"
    return sheet("Peak of each phase, before and after", list(map(_phase, shown)), rest if others else "")


def _phase(one: PhaseMemory) -> dict[str, str]:
    largest = next((part for part in one.categories if part.change), None)
    return {
        "phase": f"{STAGES[one.stage]}, {words(one.phase)}",
        "change": added(one.change),
        "before": "" if one.baseline is None else units.size(one.baseline),
        "after": "" if one.candidate is None else units.size(one.candidate),
        "of before": _of(one.change, one.baseline or 0),
        "mostly": _part(largest) if largest else "",
    }


def _sizes(name: str, one: SizeChange, whole: int) -> dict[str, str]:
    return {
        "kind": name,
        "change": added(one.change),
        "before": units.size(one.baseline),
        "after": units.size(one.candidate),
        "of the peak": _of(one.change, whole),
    }


def _parts(changes: Sequence[SizeChange]) -> str:
    moved = sum(abs(one.change) for one in changes)
    told = [one for one in changes[:NAMED] if one.change and abs(one.change) >= WORTH_TELLING * moved]
    return ", ".join(map(_part, told))


def _part(one: SizeChange) -> str:
    return f"{category(one.category)} {added(one.change)}"


def _elsewhere(memory: Memory) -> str:
    """Where the peak went, if it is in another phase."""
    before, after = (PLACES[side.phase].format("") for side in (memory.baseline, memory.candidate))
    return f", {after} and no longer {before}" if before and after and before != after else ""


def _source(side: MemoryPeak) -> str:
    preposition = "for" if side.source == "predicted" else "on"
    device = f" {preposition} {clean(side.device)}" if side.device else ""
    return f"{side.source}{device}{f', rank {side.rank}' if side.rank else ''}"


def _is_folded(change: int, whole: int) -> bool:
    return not change or abs(change) < FOLDED * whole


def _of(change: int, whole: int) -> str:
    """The change as a part of the whole, with its sign; nothing where there is no whole."""
    return f"{'-' if change < 0 else '+'}{share(abs(change), whole)}" if whole else ""
