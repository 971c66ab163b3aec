"""Show a comparison in the terminal: verdicts, causes and memory, at any width."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpubench import text, units
from gpubench.compare.result import (
    Bottleneck,
    Causes,
    Comparison,
    Comparisons,
    Difference,
    GateResult,
    Memory,
    MemoryPeak,
    PhaseMemory,
    SizeChange,
    Verdict,
    Waterfall,
)
from gpubench.compare.verdicts import leading
from gpubench.memory.history import PLACES
from gpubench.report import phrases, profile, sheets
from gpubench.report.finding_phrases import NOTHING
from gpubench.report.footprint import STAGES, added, category, share
from gpubench.report.phrases import headline
from gpubench.report.sheets import Sheet, sheet
from gpubench.text import Fitting, clean, plain_table, say, words

FOLDED = 0.001  # of the baseline's peak: smaller changes share one row
NAMED = 4  # categories in a sentence
WORTH_TELLING = 0.05  # of the sum of all absolute changes: a category with less explains nothing


def sentence(memory: Memory) -> str:
    """Return the change of the peak and its parts, as "peak 3.1 GiB lower (-42 %): activations -3.3 GiB"."""
    before, change = memory.baseline.level.total, memory.change
    said = f"peak {units.size(abs(change))} {'lower' if change < 0 else 'higher'} ({_of(change, before)})"
    if not change:
        said = f"the same peak of {units.size(before)}"
    parts = _parts(memory.categories)
    return f"{said}{_elsewhere(memory)}{': ' if parts else ''}{parts}"


def peaks(memory: Memory) -> list[str]:
    """Return a sentence about each side's peak."""
    return [f"memory of the {name}: {peak(side)}" for name, side in sides(memory)]


def sides(memory: Memory) -> list[tuple[str, MemoryPeak]]:
    return [("baseline", memory.baseline), ("candidate", memory.candidate)]


def peak(side: MemoryPeak) -> str:
    """Return one side's peak, as "peak 529 MiB in the first backward pass (run 1; measured on cpu)"."""
    place = PLACES[side.phase].format("first " if side.stage == "first" else "")
    return f"peak {units.size(side.level.total)} {place} ({clean(side.run)}; {_source(side)})".replace("  ", " ")


def tables(memory: Memory) -> list[Sheet]:
    """Return the tables of changes, largest change first; tables without rows are left out."""
    return [one for one in (categories(memory), phases(memory)) if one]


def categories(memory: Memory) -> Sheet:
    """Return the change of each category at the peak; the rows add up to the last row, the whole peak."""
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
    """Return the change of each phase's own peak; the rows do not add up."""
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
    """Return a clause that names both phases if the peak moved to another phase; else an empty string."""
    before, after = (PLACES[side.phase].format("") for side in (memory.baseline, memory.candidate))
    return f", {after} and no longer {before}" if before and after and before != after else ""


def _source(side: MemoryPeak) -> str:
    preposition = "for" if side.source == "predicted" else "on"
    device = f" {preposition} {clean(side.device)}" if side.device else ""
    return f"{side.source}{device}{f', rank {side.rank}' if side.rank else ''}"


def _is_folded(change: int, whole: int) -> bool:
    return not change or abs(change) < FOLDED * whole


def _of(change: int, whole: int) -> str:
    """Return the change as a signed share of the whole; an empty string if the whole is 0."""
    return f"{'-' if change < 0 else '+'}{share(abs(change), whole)}" if whole else ""


CAVEAT = "times of a profile are those of a step of the profiled repeat: they tell shares, not speed"


def bottlenecks(causes: Causes) -> list[str]:
    """Return a sentence about each side's profile."""
    sides = (("baseline", causes.baseline), ("candidate", causes.candidate))
    return [f"profile of the {name}: {bottleneck(found)}" for name, found in sides]


def bottleneck(found: Bottleneck | None) -> str:
    """Return a profile's headline and origin, as "GPU idle 43.5 % (run 1; 6 steps, 1.34 x as long as clean ones)"."""
    if found is None:
        return "not recorded"
    return f"{clean(found.headline).rstrip('.')} ({clean(found.run)}; {_recorded(found)})"


def finding_changes(causes: Causes) -> list[tuple[str, str]]:
    """Return (what became of the finding, title and severity of the finding) for each finding."""
    return [(profile.outcome(change, not causes.obstacle), profile.about(change)) for change in causes.findings]


def work_done(causes: Causes) -> Sheet | None:
    """Return the work that changed most; None if the two profiles cannot be compared."""
    return profile.work_changes(causes.of, causes.work, causes.others) if causes.of and causes.work else None


def notes(causes: Causes) -> list[str]:
    """Return caveats about the figures, and reasons for missing ones."""
    found = [] if causes.findings else [NOTHING]
    found.append(CAVEAT)
    if causes.obstacle:
        found.append(f"kernels and operators are not compared: {clean(causes.obstacle)}")
    return found


def _recorded(found: Bottleneck) -> str:
    steps = units.counted(found.steps, "step") if found.steps else "no steps marked"
    if found.overhead is None or found.overhead <= 0:
        return steps
    return f"{steps}, {units.digits(1 + found.overhead)} x as long as clean ones"


HALF_BAR = 12  # characters on each side of the waterfall's axis
STYLES = {
    "faster": "green",
    "slower": "red",
    "equivalent": "cyan",
    "inconclusive": "yellow",
    "rejected": "magenta",
    "withheld": "magenta",
    "regressed": "red",
    "passed": "green",
}
VERDICTS = (  # columns, from the widest table to the narrowest; _cells has the contents
    ("metric", "baseline", "candidate", "change", "verdict"),
    ("metric", "change", "verdict"),
    ("metric", "ratio", "verdict"),
)
BARE = ("metric", "verdict")
NAME = 10  # characters: the width at which a folded name of a metric is still readable


def show(comparisons: Comparisons, console: Console, *, everything: bool = False) -> None:
    """Print the comparisons. `everything` adds verdicts without news, for a user who asked for them by name."""
    for line in comparisons.left_out:
        say(console, text.clean(phrases.omission(line)), "yellow")
    for number, comparison in enumerate(comparisons.comparisons):
        if number:
            console.print()
        _show_comparison(comparison, console, everything)
    if comparisons.gate:
        console.print()
    for result in comparisons.gate:
        _say_gate(console, result)


def _show_comparison(comparison: Comparison, console: Console, everything: bool) -> None:
    say(console, headline(comparison), "bold")
    say(console, f"baseline   {phrases.side(comparison.baseline)}", "dim")
    say(console, f"candidate  {phrases.side(comparison.candidate)}", "dim")
    for reason in comparison.comparability.reasons:
        say(console, text.clean(reason))
    if comparison.comparability.differences:
        _show_differences(comparison.comparability.differences, console)
    if verdicts := phrases.shown(comparison.verdicts, everything):
        _show_verdicts(verdicts, console)
    if waterfall := comparison.explanation.waterfall:
        _show_waterfall(waterfall, console)
    for note in comparison.explanation.notes:
        say(console, text.clean(note))
    if comparison.memory:
        _show_memory(comparison.memory, console)
    if comparison.causes:
        _show_causes(comparison.causes, console)
    for warning in comparison.warnings:
        say(console, f"warning: {text.clean(warning)}", "yellow")


def _show_differences(differences: Sequence[Difference], console: Console) -> None:
    listed, rest = phrases.listed(differences)
    key_width = min(max(len(text.clean(one.key)) for one in listed), console.width * 2 // 5)
    value_width = max(4, (console.width - key_width - 4) // 2)
    table = plain_table()
    for column in ("differs", "baseline", "candidate"):
        table.add_column(column, no_wrap=True)
    for one in listed:
        values = (text.shorten(phrases.cell(value), value_width) for value in (one.baseline, one.candidate))
        table.add_row(*map(Text, (text.shorten(text.clean(one.key), key_width), *values)))
    console.print()
    console.print(table)
    if rest:
        say(console, rest, "dim")
    for line in phrases.consequences(differences):
        say(console, line, "dim")


def _show_verdicts(verdicts: Sequence[Verdict], console: Console) -> None:
    console.print()
    narrowest = VERDICTS[-1] if _room_for_names(verdicts, console) >= NAME else BARE
    console.print(Fitting(_verdict_table(verdicts, columns) for columns in (*VERDICTS, narrowest)))
    for note in phrases.notes(verdicts):
        say(console, note, "dim")
    if lead := leading(verdicts):
        say(console, phrases.method(lead), "dim")


def _verdict_table(verdicts: Sequence[Verdict], columns: Sequence[str]) -> Table:
    table = plain_table()
    for column in columns:
        numeric = column in ("baseline", "candidate", "ratio")
        table.add_column(column, justify="right" if numeric else "left", no_wrap=column != "metric", overflow="fold")
    for verdict in verdicts:
        cells = _cells(verdict)
        table.add_row(*(cells[column] for column in columns))
    return table


def _room_for_names(verdicts: Sequence[Verdict], console: Console) -> int:
    """Return the characters that the narrowest table with a change leaves for the metrics' names."""
    unbounded = console.options.update(max_width=10_000)
    return console.width - console.measure(_verdict_table(verdicts, VERDICTS[-1][1:]), options=unbounded).maximum - 2


def _cells(verdict: Verdict) -> dict[str, Text]:
    baseline, candidate = phrases.values(verdict)
    return {
        "metric": Text(text.words(verdict.metric)),
        "baseline": Text(baseline),
        "candidate": Text(candidate),
        "change": Text(phrases.change(verdict)),
        "ratio": Text(phrases.change(verdict, interval=False)),
        "verdict": Text(verdict.verdict, style=_style(verdict)),
    }


def _style(verdict: Verdict) -> str:
    """Return the colour; "more" of a metric that should be low is coloured like "slower"."""
    if verdict.verdict in ("more", "less") and verdict.better:
        return STYLES["faster" if (verdict.verdict == "more") == (verdict.better == "higher") else "slower"]
    return STYLES.get(verdict.verdict, "default")


def _show_waterfall(waterfall: Waterfall, console: Console) -> None:
    layouts = (("bar", "interval"), ("bar",), ("interval",), ())
    console.print()
    console.print(Fitting(_waterfall_table(waterfall, extras) for extras in layouts))


def _show_causes(causes: Causes, console: Console) -> None:
    console.print()
    for line in bottlenecks(causes):
        say(console, line)
    profile.show_finding_changes(causes.findings, console, alike=not causes.obstacle)
    if work := work_done(causes):
        sheets.show([work], console)
    for note in notes(causes):
        say(console, note, "dim")


def _show_memory(memory: Memory, console: Console) -> None:
    console.print()
    say(console, sentence(memory))
    for line in peaks(memory):
        say(console, line, "dim")
    sheets.show(tables(memory), console)


def _waterfall_table(waterfall: Waterfall, extras: Sequence[str]) -> Table:
    table = plain_table()
    table.add_column("phase", overflow="fold")
    if "bar" in extras:
        table.add_column("less · more time", no_wrap=True)
    table.add_column("change", justify="right", no_wrap=True)
    table.add_column("of the whole", justify="right", no_wrap=True)
    if "interval" in extras:
        table.add_column("95 % interval", no_wrap=True)
    largest = max((abs(phase.change) for phase in waterfall.phases), default=0.0)
    bars = [signed_bar(phase.change / largest if largest else 0.0) for phase in waterfall.phases]
    moves = [*phrases.moves(waterfall), phrases.total(waterfall)]
    for move, bar in zip(moves, [*bars, Text(phrases.span(waterfall))], strict=True):
        row = [Text(move.phase), *([bar] if "bar" in extras else []), Text(move.change), Text(move.share)]
        table.add_row(*row, *([Text(move.interval)] if "interval" in extras else []))
    return table


def signed_bar(share: float) -> Text:
    """Return a bar to the left of the axis for a share in [-1, 0], and to the right for one in [0, 1]."""
    filled = round(abs(share) * HALF_BAR)
    blocks, space = "█" * filled, " " * HALF_BAR
    if share < 0:
        return Text.assemble(" " * (HALF_BAR - filled), (blocks, "green"), ("│", "bright_black"), space)
    return Text.assemble(space, ("│", "bright_black"), (blocks, "red"), " " * (HALF_BAR - filled))


def _say_gate(console: Console, result: GateResult) -> None:
    style = STYLES.get(result.outcome, "yellow")
    console.print(Text.assemble((f"{result.outcome}: ", style), phrases.gate(result)), soft_wrap=True)
