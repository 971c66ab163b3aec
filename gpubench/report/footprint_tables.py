"""The tables of a footprint: as text for the terminal and the page alike, and as the terminal and --json show them."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpubench import units
from gpubench.findings import Findings
from gpubench.memory.analysis import OTHERS
from gpubench.memory.footprint import Amounts, Footprint, Footprints, Holder, ModuleFootprint, PhaseFootprint
from gpubench.report import footprint_phrases, profiling, sheets
from gpubench.report.footprint_phrases import category, ordered, share
from gpubench.report.plain import clean, words
from gpubench.report.sheets import GAP, Sheet, sheet
from gpubench.runs import SCHEMA_VERSION
from gpubench.screen import plain_table, say, say_unbroken

HOLDERS = 8
MODULES = 8
BAR = 44  # characters
SMALLEST_BAR = 6
NOTABLE = 0.01  # of the largest peak: a category that never comes to it shares a column
EXPLAINED = 60  # characters of width from which on a reason stands beside its figure
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
"""Letter and colour of a category. A block is the letter on a ground of its own colour, so that a terminal without
colours shows the letters."""
UNKNOWN = ("?", "bright_black")


def show(
    footprint: Footprint, findings: Findings | None, console: Console, label: str = "", files: Sequence[str] = ()
) -> None:
    """From the sentence that matters to what to do about it. label: the file, or what ran. files: what was kept."""
    say(console, footprint_phrases.headline(footprint), "bold")
    if findings and findings.headline:
        say(console, clean(findings.headline), "bold")
    say(console, footprint_phrases.about(footprint, label), "dim")
    if said := footprint_phrases.beginning(footprint):
        say(console, said, "bold yellow")
    console.print()
    console.print(_phases(footprint, console.width))
    console.print()
    console.print(_legend(footprint))
    _show_explained("The peak by count", _counts(footprint), console)
    if said := footprint_phrases.allocator(footprint):
        console.print()
        say(console, said, "dim")
    _show_explained("What corrects the prediction", _corrections(footprint), console)
    sheets.show([holders(footprint), modules(footprint)], console)
    if findings:
        profiling.show_findings(findings, console, "peak")
    for note in footprint.notes:
        say(console, f"note: {clean(note)}", "yellow")
    for file in files:
        say_unbroken(console, f"kept: {clean(file)}")


def to_document(footprint: Footprint, findings: Findings | None) -> dict[str, Any]:
    """For --json: memory.json as it is, and the findings where rules were asked."""
    document = {"schema_version": SCHEMA_VERSION, "memory": Footprints([footprint])}
    return document | ({"findings": findings} if findings else {})


def phases(footprint: Footprint) -> Sheet:
    """The figures behind the bars: a column for each category, the largest first.

    What is reserved is the peak less its context, and has none. What is the same throughout is told beneath, and small
    categories share a column, or the table would be wider than a page.
    """
    peaks = [phase.peak for phase in footprint.phases]
    names = footprint_phrases.largest_first(peaks)
    same = [name for name in names if len({peak.get(name, 0) for peak in peaks}) == 1 < len(peaks)]
    least = NOTABLE * footprint.most
    small = [name for name in names if name not in same and all(peak.get(name, 0) < least for peak in peaks)]
    together = small if len(small) > 1 else []
    rows = [
        {
            "phase": f"{footprint_phrases.STAGES[phase.stage]}, {words(phase.phase)}",
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
    """What was held at the peak, alike allocations in a row."""
    named = [holder for holder in footprint.holders if holder.category]
    shown = named[:HOLDERS]
    others = [*named[HOLDERS:], *(holder for holder in footprint.holders if not holder.category)]
    whole = footprint.peak.level.total
    rest = f"{units.counted(sum(one.count for one in others), 'other piece')}, {_sum(others)} in all" if others else ""
    return sheet("What holds the peak", [_holder(one, whole) for one in shown], rest)


def modules(footprint: Footprint) -> Sheet:
    """What belongs to each module without its children, at the peak."""
    named = [module for module in footprint.modules if module.path != OTHERS]
    shown = named[:MODULES]
    others = [*named[MODULES:], *(module for module in footprint.modules if module.path == OTHERS)]
    names = footprint_phrases.largest_first(module.amounts for module in shown)
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
    """A bar for each phase at its peak, beside that of all; where there is no room for bars, the figures."""
    heads = ["phase", "peak", "end"]
    if footprint.peak.level.reserved is not None and width >= EXPLAINED:
        heads.insert(1, "allocated")
    rows = [(phase, [_cells(phase)[head] for head in heads]) for phase in footprint.phases]
    stages = [[footprint_phrases.STAGES[phase.stage], *[""] * (len(heads) - 1)] for phase in footprint.phases]
    longest = [max(map(len, column)) for column in zip(heads, *(cells for _, cells in rows), *stages, strict=True)]
    room = min(BAR, width - sum(longest) - GAP * len(longest))
    table = plain_table()
    for head in [*heads[:-1], *[""] * (room >= SMALLEST_BAR), heads[-1]]:
        table.add_column(head, justify="left" if head in ("phase", "") else "right", no_wrap=True)
    for stage, group in groupby(rows, key=lambda row: row[0].stage):
        table.add_row(Text(footprint_phrases.STAGES[stage], "dim"))
        for phase, (*cells, end) in group:
            style = "bold" if _is_peak(phase, footprint) else ""
            bars = [bar(phase.peak, footprint.most, room)] if room >= SMALLEST_BAR else []
            table.add_row(*(Text(cell, style) for cell in cells), *bars, Text(end))
    return table


def _in_use(phase: PhaseFootprint) -> int:
    """When it ends: allocated, where the allocator keeps memory back; what it keeps says nothing of the phase."""
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
    """Borders are rounded, not lengths, so that the bar as a whole is as long as it should be."""
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
    """What each block stands for, and what it comes to at the overall peak."""
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
"""A name, what it adds, and why."""


def _counts(footprint: Footprint) -> Iterator[Explained]:
    for count in footprint_phrases.counts(footprint.peak):
        adds = "" if count.adds is None else f"{footprint_phrases.added(count.adds)} "
        yield count.name, units.size(count.size), f"{adds}{count.what}"


def _corrections(footprint: Footprint) -> Iterator[Explained]:
    for one in footprint_phrases.corrections(footprint.corrections):
        yield words(one.name), footprint_phrases.added(one.size), clean(one.reason)


def _show_explained(title: str, rows: Iterable[Explained], console: Console) -> None:
    """Reasons beside the figures, or beneath them where the terminal is narrow."""
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
