"""Sentences and tables about a footprint, for the terminal, the page and --json."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpubench import units
from gpubench.findings import Findings
from gpubench.memory.analysis import OTHERS
from gpubench.memory.footprint import (
    CATEGORIES,
    Amounts,
    Correction,
    Footprint,
    Footprints,
    Holder,
    ModuleFootprint,
    Peak,
    PhaseFootprint,
    Source,
    Stage,
)
from gpubench.memory.history import PLACES
from gpubench.report import profile, sheets
from gpubench.report.sheets import GAP, Sheet, sheet
from gpubench.runs.directory import SCHEMA_VERSION
from gpubench.text import clean, plain_table, say, say_unbroken, words

TOLD = 0.05  # of the peak: the headline leaves out smaller parts
PARTS = 4  # parts that a headline names

NAMES = {"before": "there before", "other": "context"}
"""Display names of categories whose own names are unclear."""
STAGES: dict[Stage, str] = {"setup": "set-up", "first": "first step", "steady": "steady step"}
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
    """State the peak, its phase and its largest parts; a prediction also says whether it fits."""
    peak = footprint.peak
    said = [f"peak {units.size(peak.level.total)}", _place(footprint), _beside(footprint)]
    told = " ".join(filter(None, said))
    if parts := _parts(peak):
        told = f"{told}: {parts}"
    fitting = fits(footprint) if footprint.source == "predicted" and footprint.capacity else ""
    return "; ".join(filter(None, [told, _later(footprint), fitting]))


def fits(footprint: Footprint) -> str:
    """Say whether the footprint fits the device's memory, and by how much; an empty string if that is unknown.

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
    """Say where the figures come from. `label` is the file, or what ran."""
    said = SOURCES[footprint.source]
    if footprint.device:
        said += f"{', for' if footprint.source == 'predicted' else ' on'} {clean(footprint.device)}"
    if footprint.capacity:
        said += f" with {units.size(footprint.capacity)}"
    if footprint.rank:
        said += f", rank {footprint.rank}"
    return f"{clean(label)}: {said}" if label else said


def beginning(footprint: Footprint) -> str:
    """Say what a history without its beginning means for the figures; an empty string for a complete one."""
    if footprint.truncated and not footprint.truncation_proven:
        return "history probably truncated: if events before its first one were lost, the true peak may be among them"
    if footprint.truncated:
        return "history truncated: events before its first one were lost, and the true peak may be among them"
    if footprint.late:
        return "recording began late: earlier allocations are one sum, and an earlier peak is not included"
    return ""


def allocator(footprint: Footprint) -> str:
    """Describe the allocator's activity as far as it is known; an empty string for files of an earlier version."""
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
    """Return (category, bytes) of non-zero categories in the order of CATEGORIES, unknown categories last."""
    names = [*CATEGORIES, *(name for name in amounts if name not in CATEGORIES)]
    return [(name, amounts[name]) for name in names if amounts.get(name)]


def largest_first(found: Iterable[Amounts]) -> list[str]:
    """Return the categories that occur, ordered by their sum over all."""
    sums: Amounts = {}
    for amounts in found:
        for name, size in amounts.items():
            sums[name] = sums.get(name, 0) + size
    return [name for name, size in sorted(sums.items(), key=lambda item: -item[1]) if size]


def counts(peak: Peak) -> list[Count]:
    """Return the counts of the peak, without those that add nothing; an empty list if fewer than two are left."""
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
    """Return the corrections, largest first; those of unknown effect come last."""
    return sorted(found, key=lambda one: (one.size is None, -abs(one.size or 0)))


def added(size: int | None) -> str:
    """Return a signed size; an empty string if it is unknown."""
    if size is None:
        return ""
    return f"{'-' if size < 0 else '+'}{units.size(abs(size))}"


def share(part: float, whole: float) -> str:
    """Return a share in whole percent, or with two digits if it is small."""
    fraction = part / whole if whole else 0.0
    return units.whole_percent(fraction) if abs(fraction) >= 0.0995 or not fraction else units.percent(fraction)


def _place(footprint: Footprint) -> str:
    return PLACES[footprint.peak.phase].format("first " if _beside(footprint) else "")


def _beside(footprint: Footprint) -> str:
    """Return what a steady step needs, if the first step needs more."""
    peak = footprint.peak
    steady = max((one.level.allocated for one in footprint.phases if one.stage == "steady"), default=None)
    if peak.stage != "first" or steady is None or steady >= peak.level.allocated:
        return ""
    return f"({units.size(steady)} allocated in a steady step)"


def _later(footprint: Footprint) -> str:
    """Return what the allocator reserves later, if that is notably more than at the peak."""
    most = footprint.most
    return f"{units.size(most)} are held later" if most > footprint.peak.level.total * (1 + LATER) else ""


def _parts(peak: Peak) -> str:
    """Return the largest parts, as "49 % optimizer state, 25 % parameters"."""
    parts = sorted(ordered(peak.amounts), key=lambda part: -part[1])
    told = [part for place, part in enumerate(parts[:PARTS]) if not place or part[1] >= TOLD * peak.level.total]
    return ", ".join(f"{share(size, peak.level.total)} {category(name)}" for name, size in told)


HOLDERS = 8
MODULES = 8
BAR = 44  # characters
SMALLEST_BAR = 6
NOTABLE = 0.01  # of the largest peak: categories that never reach it share a column
EXPLAINED = 60  # characters: from this width on, explanations stand beside their figures
BLOCKS = {
    "parameters": ("P", "blue"),
    "buffers": ("B", "bright_blue"),
    "gradients": ("G", "magenta"),
    "optimizer_state": ("O", "green"),
    "activations": ("A", "yellow"),
    "inputs": ("I", "bright_green"),
    "temporaries": ("T", "red"),
    "workspaces": ("W", "cyan"),
    "before": ("E", "bright_yellow"),
    "unknown": ("?", "bright_black"),
    "fragmentation": ("F", "bright_magenta"),
    "other": ("C", "bright_cyan"),
}
"""Letter and colour of each category. A block is the letter on a background of the same colour, so that a terminal
without colours shows the letters."""
UNKNOWN = ("?", "bright_black")


def show(
    footprint: Footprint, findings: Findings | None, console: Console, label: str = "", files: Sequence[str] = ()
) -> None:
    """Print a footprint with its findings: headline first. `label`: the file, or what ran; `files`: files kept."""
    say(console, headline(footprint), "bold")
    if findings and findings.headline:
        say(console, clean(findings.headline), "bold")
    say(console, about(footprint, label), "dim")
    if said := beginning(footprint):
        say(console, said, "bold yellow")
    console.print()
    console.print(_phases(footprint, console.width))
    console.print()
    console.print(_legend(footprint))
    _show_explained("The peak by count", _counts(footprint), console)
    if said := allocator(footprint):
        console.print()
        say(console, said, "dim")
    _show_explained("What corrects the prediction", _corrections(footprint), console)
    sheets.show([holders(footprint), modules(footprint)], console)
    if findings:
        profile.show_findings(findings, console, "peak")
    for note in footprint.notes:
        say(console, f"note: {clean(note)}", "yellow")
    for file in files:
        say_unbroken(console, f"kept: {clean(file)}")


def to_document(footprint: Footprint, findings: Findings | None) -> dict[str, Any]:
    """Return the document for --json: memory.json as it is, and the findings if there are any."""
    document = {"schema_version": SCHEMA_VERSION, "memory": Footprints([footprint])}
    return document | ({"findings": findings} if findings else {})


def phases(footprint: Footprint) -> Sheet:
    """Return the figures behind the bars: a row for each phase, and a column for each category, largest first.

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
    return sheet("Phases by category", rows, note=" ".join(f"{head}: {', '.join(of)}." for head, of in notes if of))


def holders(footprint: Footprint) -> Sheet:
    """Return the allocations at the peak; equal ones share a row."""
    named = [holder for holder in footprint.holders if holder.category]
    shown = named[:HOLDERS]
    others = [*named[HOLDERS:], *(holder for holder in footprint.holders if not holder.category)]
    whole = footprint.peak.level.total
    rest = f"{units.counted(sum(one.count for one in others), 'other piece')}, {_sum(others)} in all" if others else ""
    return sheet("What holds the peak", [_holder(one, whole) for one in shown], rest)


def modules(footprint: Footprint) -> Sheet:
    """Return what belongs to each module at the peak, without its submodules."""
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
    return sheet("Modules, by memory outside their submodules", rows, rest)


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


def _sum(found: Iterable[Holder]) -> str:
    return units.size(sum(holder.size for holder in found))


def _total(module: ModuleFootprint) -> int:
    return sum(module.amounts.values())


def _phases(footprint: Footprint, width: int) -> Table:
    """Return a bar for each phase's peak, on the scale of the overall peak; figures only in a narrow terminal."""
    heads = ["phase", "peak", "end"]
    if footprint.peak.level.reserved is not None and width >= EXPLAINED:
        heads.insert(1, "allocated")
    rows = [(phase, [_cells(phase)[head] for head in heads]) for phase in footprint.phases]
    stages = [[STAGES[phase.stage], *[""] * (len(heads) - 1)] for phase in footprint.phases]
    longest = [max(map(len, column)) for column in zip(heads, *(cells for _, cells in rows), *stages, strict=True)]
    room = min(BAR, width - sum(longest) - GAP * len(longest))
    table = plain_table()
    for head in [*heads[:-1], *[""] * (room >= SMALLEST_BAR), heads[-1]]:
        table.add_column(head, justify="left" if head in ("phase", "") else "right", no_wrap=True)
    for stage, group in groupby(rows, key=lambda row: row[0].stage):
        table.add_row(Text(STAGES[stage], "dim"))
        for phase, (*cells, end) in group:
            style = "bold" if _is_peak(phase, footprint) else ""
            bars = [bar(phase.peak, footprint.most, room)] if room >= SMALLEST_BAR else []
            table.add_row(*(Text(cell, style) for cell in cells), *bars, Text(end))
    return table


def _in_use(phase: PhaseFootprint) -> int:
    """Return the bytes in use at a phase's end, without memory that the allocator holds in reserve."""
    spare = 0 if phase.level.reserved is None else sum(phase.end.get(name, 0) for name in ("fragmentation", "other"))
    return sum(phase.end.values()) - spare


def _cells(phase: PhaseFootprint) -> dict[str, str]:
    return {
        "phase": f" {words(phase.phase)}",
        "allocated": units.size(phase.level.allocated),
        "peak": units.size(phase.level.total),
        "end": units.size(_in_use(phase)),
    }


def _is_peak(phase: PhaseFootprint, footprint: Footprint) -> bool:
    return (phase.stage, phase.phase) == (footprint.peak.stage, footprint.peak.phase)


def bar(amounts: Amounts, whole: int, room: int) -> Text:
    """Return a bar of blocks; borders are rounded instead of lengths, so that the bar's length is right."""
    bar, held, drawn = Text(), 0, 0
    for name, size in ordered(amounts):
        held += size
        border = min(room, round(held / max(1, whole) * room))
        bar.append(_block(name, border - drawn))
        drawn = border
    return bar.append("░" * (room - drawn), "bright_black")


def _block(name: str, length: int) -> Text:
    letter, colour = BLOCKS.get(name, UNKNOWN)
    return Text(letter * length, f"{colour} on {colour}")


def _legend(footprint: Footprint) -> Table:
    """Return the meaning of each block, and its size at the overall peak."""
    table = plain_table()
    table.add_column("")
    table.add_column("at the peak", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    whole = footprint.peak.level.total
    elsewhere = {name: 0 for phase in footprint.phases for name, size in phase.peak.items() if size}
    for name in [*dict(ordered(footprint.peak.amounts)), *(elsewhere.keys() - footprint.peak.amounts.keys())]:
        size = footprint.peak.amounts.get(name, 0)
        known = (units.size(size), share(size, whole)) if size else ("", "")
        table.add_row(_block(name, 1), Text(category(name)), *map(Text, known))
    return table


Explained = tuple[str, str, str]
"""(name, figure, explanation)"""


def _counts(footprint: Footprint) -> Iterator[Explained]:
    for count in counts(footprint.peak):
        adds = "" if count.adds is None else f"{added(count.adds)} "
        yield count.name, units.size(count.size), f"{adds}{count.what}"


def _corrections(footprint: Footprint) -> Iterator[Explained]:
    for one in corrections(footprint.corrections):
        yield words(one.name), added(one.size), clean(one.reason)


def _show_explained(title: str, rows: Iterable[Explained], console: Console) -> None:
    """Print explanations beside the figures, or below them in a narrow terminal."""
    told = list(rows)
    if not told:
        return
    console.print()
    say(console, title, "dim")
    longest = max(len(name) for name, _, _ in told)
    grid = Table.grid(padding=(0, GAP, 0, 0))
    for name, size, why in told:
        if console.width < EXPLAINED:
            say(console, f"{name:{longest}}  {size}".rstrip())
            say(console, f"   {why}", "dim")
        else:
            grid.add_row(Text(name), Text(size, justify="right"), Text(why))
    if grid.rows:
        console.print(grid)
