"""A footprint in plain text: the names and sentences that the terminal and the page share."""

from collections.abc import Iterable
from dataclasses import dataclass

from gpubench import units
from gpubench.memory.footprint import CATEGORIES, Amounts, Correction, Footprint, Peak, Source, Stage
from gpubench.memory.history import PLACES
from gpubench.report.plain import clean, words

TOLD = 0.05  # of the peak: a smaller part is no news in a headline
PARTS = 4  # that a headline names

NAMES = {"before": "there before", "other": "context"}
"""Of categories whose own word does not explain itself."""
STAGES: dict[Stage, str] = {"setup": "set-up", "first": "first step", "steady": "steady step"}
SOURCES: dict[Source, str] = {
    "measured": "measured",
    "predicted": "predicted, not measured",
    "snapshot": "from a CUDA memory snapshot",
    "trace": "from the memory events of a trace",
}


@dataclass(frozen=True)
class Count:
    """One of the ways in which the bytes of a moment are counted, and what it has beyond the one before it."""

    name: str
    size: int
    adds: int | None
    """None of the first."""
    what: str


LATER = 0.005
"""Of the peak: what the allocator takes more afterwards is told from there."""


def headline(footprint: Footprint) -> str:
    """The peak, when it is reached and what fills it; of a prediction whether it fits."""
    peak = footprint.peak
    said = [f"peak {units.size(peak.level.total)}", _place(footprint), _beside(footprint)]
    told = " ".join(filter(None, said))
    if parts := _parts(peak):
        told = f"{told}: {parts}"
    fitting = fits(footprint) if footprint.source == "predicted" and footprint.capacity else ""
    return "; ".join(filter(None, [told, _later(footprint), fitting]))


def fits(footprint: Footprint) -> str:
    """Whether all that is held is ever within the device's memory, and by how much; nothing where that is not known.

    An allocator that reaches the end of the memory gives back what it keeps unused before it gives up, so that only
    what is allocated has to fit beside the context.
    """
    capacity, total, level = footprint.capacity, footprint.most, footprint.peak.level
    if not capacity:
        return ""
    if total <= capacity:
        return f"fits in {units.size(capacity)} with {share(capacity - total, capacity)} to spare"
    unused = 0 if level.reserved is None else level.reserved - level.allocated
    if level.total - unused <= capacity:
        return f"fits in {units.size(capacity)} only if the allocator gives back what it keeps unused"
    return f"does not fit in {units.size(capacity)}: {units.size(total - capacity)} too much"


def about(footprint: Footprint, label: str = "") -> str:
    """Where the figures come from. label: the file, or what ran."""
    said = SOURCES[footprint.source]
    if footprint.device:
        said += f"{', for' if footprint.source == 'predicted' else ' on'} {clean(footprint.device)}"
    if footprint.capacity:
        said += f" with {units.size(footprint.capacity)}"
    if footprint.rank:
        said += f", rank {footprint.rank}"
    return f"{clean(label)}: {said}" if label else said


def beginning(footprint: Footprint) -> str:
    """What it means for the figures that the history lacks its beginning; nothing where it is whole."""
    if footprint.truncated and not footprint.truncation_proven:
        return "history probably truncated: where events before its first were lost, the true peak may lie among them"
    if footprint.truncated:
        return "history truncated: events before its first were lost, and the true peak may lie among them"
    if footprint.late:
        return "recording began late: what was allocated before it is one sum, and an earlier peak is not in it"
    return ""


def allocator(footprint: Footprint) -> str:
    """What the allocator did, as far as it is known; nothing of a file of an earlier version."""
    found = footprint.allocator
    if not found:
        return ""
    counts = {
        "allocations": found.allocations,
        "frees": found.frees,
        "cudaMalloc retries": found.retries,
        "out-of-memory errors": found.ooms,
    }
    said = [f"{name} {count:,}" for name, count in counts.items() if count is not None]
    if found.largest_free is not None:
        said.append(f"largest free block at the end {units.size(found.largest_free)}")
    return f"{'tensors' if footprint.peak.level.reserved is None else 'allocator'}: {', '.join(said)}"


def category(name: str) -> str:
    return NAMES.get(name) or words(name)


def ordered(amounts: Amounts) -> list[tuple[str, int]]:
    """(category, bytes) of those that are not zero, as CATEGORIES has them; those that it does not know come last."""
    names = [*CATEGORIES, *(name for name in amounts if name not in CATEGORIES)]
    return [(name, amounts[name]) for name in names if amounts.get(name)]


def largest_first(found: Iterable[Amounts]) -> list[str]:
    """The categories that occur, by what they come to over all."""
    sums: Amounts = {}
    for amounts in found:
        for name, size in amounts.items():
            sums[name] = sums.get(name, 0) + size
    return [name for name, size in sorted(sums.items(), key=lambda item: -item[1]) if size]


def counts(peak: Peak) -> list[Count]:
    """The four counts of the peak, of those that are equal the first; nothing where all are, as on a CPU."""
    level = peak.level
    found = [
        Count("requested", level.requested, None, "what tensors asked for"),
        Count("allocated", level.allocated, level.allocated - level.requested, "rounding to the allocator's blocks"),
    ]
    held = level.allocated
    if level.reserved is not None:
        held = level.reserved
        found.append(Count("reserved", held, held - level.allocated, "held by the allocator, not in use"))
    found.append(Count("total", level.total, level.total - held, "context and libraries of the device"))
    told = [count for count in found if count.adds != 0]
    return told if len(told) > 1 else []


def corrections(found: Iterable[Correction]) -> list[Correction]:
    """The largest first; those whose effect was not looked at come last."""
    return sorted(found, key=lambda one: (one.size is None, -abs(one.size or 0)))


def added(size: int | None) -> str:
    """What something adds, with its sign; nothing where that is not known."""
    if size is None:
        return ""
    return f"{'-' if size < 0 else '+'}{units.size(abs(size))}"


def share(part: float, whole: float) -> str:
    """In whole percent; the small ones to two digits."""
    fraction = part / whole if whole else 0.0
    return units.whole_percent(fraction) if abs(fraction) >= 0.0995 or not fraction else units.percent(fraction)


def _place(footprint: Footprint) -> str:
    return PLACES[footprint.peak.phase].format("first " if _beside(footprint) else "")


def _beside(footprint: Footprint) -> str:
    """What a steady step needs, where the first needs more."""
    peak = footprint.peak
    steady = max((one.level.allocated for one in footprint.phases if one.stage == "steady"), default=None)
    if peak.stage != "first" or steady is None or steady >= peak.level.allocated:
        return ""
    return f"({units.size(steady)} allocated in a steady step)"


def _later(footprint: Footprint) -> str:
    """What the allocator comes to hold, where that is notably more than at the peak."""
    most = footprint.most
    return f"{units.size(most)} are held later" if most > footprint.peak.level.total * (1 + LATER) else ""


def _parts(peak: Peak) -> str:
    """ "49 % optimizer state, 25 % parameters": the largest, as far as they are worth naming."""
    parts = sorted(ordered(peak.amounts), key=lambda part: -part[1])
    told = [part for place, part in enumerate(parts[:PARTS]) if not place or part[1] >= TOLD * peak.level.total]
    return ", ".join(f"{share(size, peak.level.total)} {category(name)}" for name, size in told)
