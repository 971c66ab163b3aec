"""The report of memory: footprints, batch sizes, and settings that trade memory for speed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpubench import units
from gpubench.findings import Findings
from gpubench.memory.allocation_log import PLACES
from gpubench.memory.footprint import (
    OTHERS,
    Amounts,
    Footprint,
    FootprintPeak,
    Footprints,
    Holder,
    ModuleFootprint,
    PhaseFootprint,
    Source,
)
from gpubench.report import findings
from gpubench.report import memory_figures as figures
from gpubench.report.document import (
    UNASKED,
    Block,
    Breakdown,
    Command,
    Document,
    Medium,
    Paragraph,
    Part,
    StackedBar,
    StackedBars,
    Table,
    raised,
    table,
)
from gpubench.report.memory_figures import STAGES, added, category, ordered, share, style
from gpubench.runs.directory import SCHEMA_VERSION
from gpubench.text import words

LEAST_DRAWN = 0.02  # of the peak: a terminal leaves out smaller parts without -v
TOLD = 0.05  # of the peak: the headline leaves out smaller parts
PARTS = 4  # parts that a headline names

SOURCES: dict[Source, str] = {
    "measured": "measured",
    "predicted": "predicted, not measured",
    "snapshot": "from a CUDA memory snapshot",
    "trace": "from the memory events of a trace",
}


@dataclass(frozen=True)
class Count:
    """One way to count the bytes of a moment, and what it adds to the previous one."""

    name: str
    size: int
    adds: int | None
    """None for the first count."""
    what: str


LATER = 0.005
"""A fraction of the peak: the headline reports what the allocator reserves later if it is more than that."""


def headline(footprint: Footprint) -> str:
    """States the peak, its phase and its largest parts, and whether a prediction or a run fits in the memory asked for.

    A measured run is known to fit in the memory of its device, so that it is said only of a CPU, and of what does not.
    """
    peak = footprint.peak
    what = "holds" if footprint.is_state else "peak"
    said = [f"{what} {units.size(peak.level.total)}", _place(footprint), _beside(footprint)]
    told = " ".join(filter(None, said))
    if parts := _parts(peak):
        told = f"{told}: {parts}"
    asked = footprint.source == "predicted" or footprint.device == "cpu" or footprint.most > (footprint.capacity or 0)
    fitting = fits(footprint) if asked else ""
    return "; ".join(filter(None, [_out_of_memory(footprint), told, _later(footprint), fitting]))


def _out_of_memory(footprint: Footprint) -> str:
    """Says which request failed; an empty string if none did."""
    short = footprint.out_of_memory
    if short is None:
        return ""
    where = f" at {short.where}" if short.where else ""
    return f"out of memory at a request of {units.size(short.requested)}{where}"


def fits(footprint: Footprint) -> str:
    """Says whether the footprint fits the device's memory, and by how much; an empty string if that is unknown.

    Before it fails, an allocator at the limit frees what it holds unused, so that only allocated memory and the context
    have to fit.
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
    """Says where the figures come from. `label` is the file, or what ran."""
    said = SOURCES[footprint.source]
    if footprint.device:
        said += f"{', for' if footprint.source == 'predicted' else ' on'} {footprint.device}"
    if footprint.capacity:
        said += f" with {units.size(footprint.capacity)}"
    if footprint.rank:
        said += f", rank {footprint.rank}"
    if footprint.device == "cpu" and footprint.source == "measured":
        said += "; tensors only, without Python and its libraries"
    return f"{label}: {said}" if label else said


def beginning(footprint: Footprint) -> str:
    """Says what missing allocations at the beginning mean for the figures; an empty string if none are missing."""
    if footprint.truncated and not footprint.truncation_proven:
        return "history probably truncated: if events before its first one were lost, the true peak may be among them"
    if footprint.truncated:
        return "history truncated: events before its first one were lost, and the true peak may be among them"
    if footprint.late:
        return "recording began late: earlier allocations are one sum, and an earlier peak is not included"
    return ""


def allocator(footprint: Footprint) -> str:
    """Describes the allocator's activity as far as it is known; an empty string for files of an earlier version."""
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


def largest_first(found: Iterable[Amounts]) -> list[str]:
    """The categories that occur, ordered by their sum over all."""
    sums: Amounts = {}
    for amounts in found:
        for name, size in amounts.items():
            sums[name] = sums.get(name, 0) + size
    return [name for name, size in sorted(sums.items(), key=lambda item: -item[1]) if size]


def counts(peak: FootprintPeak) -> list[Count]:
    """The counts of the peak, without those that add nothing; an empty list if fewer than two are left."""
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


def _place(footprint: Footprint) -> str:
    return PLACES[footprint.peak.phase].format("first " if _beside(footprint) else "")


def _beside(footprint: Footprint) -> str:
    """What a steady step needs, if the first step needs more."""
    peak = footprint.peak
    steady = max((one.level.allocated for one in footprint.phases if one.stage == "steady"), default=None)
    if peak.stage != "first" or steady is None or steady >= peak.level.allocated:
        return ""
    return f"({units.size(steady)} allocated in a steady step)"


def _later(footprint: Footprint) -> str:
    """What the allocator reserves later, if that is notably more than at the peak."""
    most = footprint.most
    return f"{units.size(most)} are held later" if most > footprint.peak.level.total * (1 + LATER) else ""


def _parts(peak: FootprintPeak) -> str:
    """The largest parts, as "49 % optimizer state, 25 % parameters"."""
    parts = sorted(ordered(peak.amounts), key=lambda part: -part[1])
    told = [part for place, part in enumerate(parts[:PARTS]) if not place or part[1] >= TOLD * peak.level.total]
    return ", ".join(f"{share(size, peak.level.total)} {category(name)}" for name, size in told)


HOLDERS = 8
MODULES = 8
NOTABLE = 0.01  # of the largest peak: categories that never reach it share a column
LETTERS = {
    "parameters": "P",
    "buffers": "B",
    "gradients": "G",
    "optimizer_state": "O",
    "activations": "A",
    "inputs": "I",
    "temporaries": "T",
    "workspaces": "W",
    "before": "E",
    "unknown": "?",
    "fragmentation": "F",
    "other": "C",
}
"""The letter of each category in the stacked bars of a terminal."""


def document(
    footprint: Footprint,
    found: Findings | None,
    label: str = "",
    files: Sequence[str] = (),
    beside: Sequence[Footprint] = (),
) -> Document:
    """The report of a footprint with its findings. `label`: the file, or what ran; `files`: files kept.

    `beside` has the footprints of all GPUs in the file, if there are several.
    """
    made = raised([*blocks(footprint, found, label, files), *([_devices(footprint, beside)] if beside else [])])
    return Document(headline(footprint), made, context=f"Memory{' of' if label else ''}", path=label)


def blocks(footprint: Footprint, found: Findings | None, label: str = "", files: Sequence[str] = ()) -> list[Block]:
    parts = [_part(name, size, footprint.peak.level.total) for name, size in _all(footprint)]
    return [
        Paragraph(found.headline.rstrip(".") if found else "", "strong"),
        Paragraph(about(footprint, label), "quiet"),
        Paragraph(beginning(footprint), "warning"),
        Paragraph(footprint.notes, "warning", "note: "),
        *figures.over_time(footprint),
        replace(_stacks(footprint), on=Medium.DETAILS),
        Breakdown("The peak", "category", "size", parts, on=UNASKED),
        table("The peak by count", _counts(footprint), ("includes",), on=UNASKED),
        Paragraph(allocator(footprint), "quiet", on=UNASKED),
        table("What corrects the prediction", _corrections(footprint), ("reason",), sentences=("reason",), on=UNASKED),
        *(findings.blocks(found, "peak") if found else []),
        Breakdown("", _when(footprint), "size", _largest(parts), on=Medium.BRIEF),
        *figures.phases(footprint, STAGES),
        phase_table(footprint),
        replace(holders(footprint), on=UNASKED),
        replace(modules(footprint), on=UNASKED),
        Paragraph(_more(footprint, found), "quiet", on=Medium.BRIEF),
        *(Command("kept", file) for file in files),
    ]


def _when(footprint: Footprint) -> str:
    return "when it was taken" if footprint.is_state else "at the peak"


def _devices(shown: Footprint, every: Sequence[Footprint]) -> Table:
    """The peak of each GPU in a file."""
    rows = [
        {
            "GPU": one.device or "",
            "held" if shown.is_state else "peak": units.size(one.peak.level.total),
            "largest parts": _parts(one.peak),
            "": "shown here" if one is shown else "",
        }
        for one in every
    ]
    return table("The GPUs of the file", rows, ("largest parts", ""), note="--gpu N shows another one")


def _all(footprint: Footprint) -> list[tuple[str, int]]:
    """The (category, bytes at the peak) of all categories that any phase holds."""
    held = dict(ordered(footprint.peak.amounts))
    elsewhere = {name for phase in footprint.phases for name, size in phase.peak.items() if size}
    return [*held.items(), *((name, 0) for name in sorted(elsewhere - held.keys()))]


def _part(name: str, size: int, whole: int) -> Part:
    letter = LETTERS.get(name, "?")
    percent = share(size, whole) if size else ""
    return Part(category(name), style(name), size / max(1, whole), _size(size) or "none", percent, letter)


def _more(footprint: Footprint, found: Findings | None) -> str:
    """What else the command can show and do."""
    said = "-v shows the memory of each phase and module, and the largest allocations"
    untried = (
        found
        and footprint.source == "measured"
        and not found.withheld
        and any(one.fix and one.measured is None for one in found.findings)
    )
    return f"{said}; --verify measures what each setting saves" if untried else said


def _largest(parts: Sequence[Part]) -> list[Part]:
    """The parts of which a few characters of a bar can be seen, without their letters."""
    return [replace(part, letter="") for part in parts if part.share >= LEAST_DRAWN]


def _counts(footprint: Footprint) -> list[dict[str, str]]:
    return [
        {"count": count.name, "size": units.size(count.size), "adds": added(count.adds), "includes": count.what}
        for count in counts(footprint.peak)
    ]


def _corrections(footprint: Footprint) -> list[dict[str, str]]:
    found = sorted(footprint.corrections, key=lambda one: (one.size is None, -abs(one.size or 0)))
    return [{"correction": words(one.name), "adds": added(one.size), "reason": one.reason} for one in found]


def _stacks(footprint: Footprint) -> StackedBars:
    """A bar for each phase's peak, on the scale of the overall peak."""
    reserved = footprint.peak.level.reserved is not None
    rows = []
    for phase in footprint.phases:
        sizes = {"allocated": units.size(phase.level.allocated)} if reserved else {}
        sizes |= {"peak": units.size(phase.level.total), "end": units.size(_in_use(phase))}
        parts = [_part(name, size, footprint.most) for name, size in ordered(phase.peak)]
        rows.append(StackedBar(words(phase.phase), STAGES[phase.stage], sizes, parts, _is_peak(phase, footprint)))
    return StackedBars("phase", rows, ("allocated",), "end")


def to_document(footprint: Footprint, findings: Findings | None) -> dict[str, Any]:
    """The document for --json: memory.json as it is, and the findings if there are any."""
    document = {"schema_version": SCHEMA_VERSION, "memory": Footprints([footprint])}
    return document | ({"findings": findings} if findings else {})


def phase_table(footprint: Footprint) -> Table:
    """The figures behind the bars: a row for each phase, and a column for each category, largest first.

    Reserved memory has no column: it is the peak less the context. Categories with the same size in all phases are in
    the note, and small categories share a column, to fit the width of a page.
    """
    peaks = [phase.peak for phase in footprint.phases]
    names = largest_first(peaks)
    same = [name for name in names if len({peak.get(name, 0) for peak in peaks}) == 1 < len(peaks)]
    least = NOTABLE * footprint.most
    small = [name for name in names if name not in same and all(peak.get(name, 0) < least for peak in peaks)]
    together = small if len(small) > 1 else []
    rows = [
        {
            "phase": f"{STAGES[phase.stage]}, {words(phase.phase)}",
            "peak": units.size(phase.level.total),
            "at its end": units.size(_in_use(phase)),
            "allocated": "" if phase.level.reserved is None else units.size(phase.level.allocated),
            **_by_category(phase.peak, [name for name in names if name not in (*same, *together)]),
            "others": _size(sum(phase.peak.get(name, 0) for name in together)),
        }
        for phase in footprint.phases
    ]
    notes = [("Throughout", [f"{category(name)} {units.size(peaks[0][name])}" for name in same])]
    notes += [("Others", [category(name) for name in together])]
    note = " ".join(f"{head}: {', '.join(of)}." for head, of in notes if of)
    return table("Phases by category", rows, note=note, on=Medium.PAGE | Medium.DETAILS)


def holders(footprint: Footprint) -> Table:
    """The allocations at the peak; equal ones share a row."""
    named = [holder for holder in footprint.holders if holder.category]
    shown = named[:HOLDERS]
    others = [*named[HOLDERS:], *(holder for holder in footprint.holders if not holder.category)]
    whole = footprint.peak.level.total
    size = units.size(sum(one.size for one in others))
    rest = f"{units.counted(sum(one.count for one in others), 'other piece')}, {size} in all" if others else ""
    words_of = ("module", "where", "shapes", "operator")
    return table("What holds the peak", [_holder(one, whole) for one in shown], words_of, rest=rest)


def modules(footprint: Footprint) -> Table:
    """What belongs to each module at the peak, without its submodules."""
    named = [module for module in footprint.modules if module.path != OTHERS]
    shown = named[:MODULES]
    others = [*named[MODULES:], *(module for module in footprint.modules if module.path == OTHERS)]
    names = largest_first(module.amounts for module in shown)
    rows = [
        {
            "module": module.path or "(no module)",
            "in all": units.size(_total(module)),
            **_by_category(module.amounts, names),
        }
        for module in shown
    ]
    rest = f"the others, {units.size(sum(map(_total, others)))} in all" if others else ""
    return table("Modules, by memory outside their submodules", rows, rest=rest)


def _by_category(amounts: Amounts, names: Iterable[str]) -> dict[str, str]:
    return {category(name): _size(amounts.get(name, 0)) for name in names}


def _size(size: int) -> str:
    return units.size(size) if size else ""


def _holder(holder: Holder, whole: int) -> dict[str, str]:
    return {
        "kind": category(holder.category),
        "size": units.size(holder.size),
        "share": share(holder.size, whole),
        "pieces": str(holder.count),
        "module": holder.module,
        "where": holder.where,
        "shapes": holder.shape,
        "operator": holder.operator,
    }


def _total(module: ModuleFootprint) -> int:
    return sum(module.amounts.values())


def _in_use(phase: PhaseFootprint) -> int:
    """The bytes in use at a phase's end, without memory that the allocator holds in reserve."""
    spare = 0 if phase.level.reserved is None else sum(phase.end.get(name, 0) for name in ("fragmentation", "other"))
    return sum(phase.end.values()) - spare


def _is_peak(phase: PhaseFootprint, footprint: Footprint) -> bool:
    return (phase.stage, phase.phase) == (footprint.peak.stage, footprint.peak.phase)
