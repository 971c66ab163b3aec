"""What a comparison has to say, in the terminal: at any width, by leaving out columns and never parts of a number."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpubench.comparison.result import (
    Causes,
    Comparison,
    Comparisons,
    Difference,
    GateResult,
    Memory,
    Verdict,
    Waterfall,
)
from gpubench.comparison.verdicts import leading
from gpubench.report import causing, comparing_memory, phrases, plain, profiling, sheets
from gpubench.report.headline import headline
from gpubench.screen import Fitting, plain_table, say

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
VERDICTS = (  # from the widest table to the narrowest; what a column shows is in _cells
    ("metric", "baseline", "candidate", "change", "verdict"),
    ("metric", "change", "verdict"),
    ("metric", "ratio", "verdict"),
)
BARE = ("metric", "verdict")
NAME = 10  # characters in which the name of a metric can be folded and still be read


def show(comparisons: Comparisons, console: Console, *, everything: bool = False) -> None:
    """`everything` puts into the table of verdicts what has no news there, as when somebody asked for it by name."""
    for line in comparisons.left_out:
        say(console, plain.clean(phrases.omission(line)), "yellow")
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
        say(console, plain.clean(reason))
    if comparison.comparability.differences:
        _show_differences(comparison.comparability.differences, console)
    if verdicts := phrases.shown(comparison.verdicts, everything):
        _show_verdicts(verdicts, console)
    if waterfall := comparison.explanation.waterfall:
        _show_waterfall(waterfall, console)
    for note in comparison.explanation.notes:
        say(console, plain.clean(note))
    if comparison.memory:
        _show_memory(comparison.memory, console)
    if comparison.causes:
        _show_causes(comparison.causes, console)
    for warning in comparison.warnings:
        say(console, f"warning: {plain.clean(warning)}", "yellow")


def _show_differences(differences: Sequence[Difference], console: Console) -> None:
    listed, rest = phrases.listed(differences)
    key_width = min(max(len(plain.clean(one.key)) for one in listed), console.width * 2 // 5)
    value_width = max(4, (console.width - key_width - 4) // 2)
    table = plain_table()
    for column in ("differs", "baseline", "candidate"):
        table.add_column(column, no_wrap=True)
    for one in listed:
        values = (plain.shorten(phrases.cell(value), value_width) for value in (one.baseline, one.candidate))
        table.add_row(*map(Text, (plain.shorten(plain.clean(one.key), key_width), *values)))
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
    """Characters that the narrowest table with a change leaves for the metrics."""
    unbounded = console.options.update(max_width=10_000)
    return console.width - console.measure(_verdict_table(verdicts, VERDICTS[-1][1:]), options=unbounded).maximum - 2


def _cells(verdict: Verdict) -> dict[str, Text]:
    baseline, candidate = phrases.values(verdict)
    return {
        "metric": Text(plain.words(verdict.metric)),
        "baseline": Text(baseline),
        "candidate": Text(candidate),
        "change": Text(phrases.change(verdict)),
        "ratio": Text(phrases.change(verdict, interval=False)),
        "verdict": Text(verdict.verdict, style=_style(verdict)),
    }


def _style(verdict: Verdict) -> str:
    """More of what should be low is as bad as slower."""
    if verdict.verdict in ("more", "less") and verdict.better:
        return STYLES["faster" if (verdict.verdict == "more") == (verdict.better == "higher") else "slower"]
    return STYLES.get(verdict.verdict, "default")


def _show_waterfall(waterfall: Waterfall, console: Console) -> None:
    layouts = (("bar", "interval"), ("bar",), ("interval",), ())
    console.print()
    console.print(Fitting(_waterfall_table(waterfall, extras) for extras in layouts))


def _show_causes(causes: Causes, console: Console) -> None:
    console.print()
    for line in causing.bottlenecks(causes):
        say(console, line)
    profiling.show_fates(causes.findings, console, alike=not causes.obstacle)
    if work := causing.work(causes):
        sheets.show([work], console)
    for note in causing.notes(causes):
        say(console, note, "dim")


def _show_memory(memory: Memory, console: Console) -> None:
    console.print()
    say(console, comparing_memory.sentence(memory))
    for line in comparing_memory.peaks(memory):
        say(console, line, "dim")
    sheets.show(comparing_memory.tables(memory), console)


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
    """A bar to the left of its axis for -1 to 0, to the right for 0 to 1."""
    filled = round(abs(share) * HALF_BAR)
    blocks, space = "█" * filled, " " * HALF_BAR
    if share < 0:
        return Text.assemble(" " * (HALF_BAR - filled), (blocks, "green"), ("│", "bright_black"), space)
    return Text.assemble(space, ("│", "bright_black"), (blocks, "red"), " " * (HALF_BAR - filled))


def _say_gate(console: Console, result: GateResult) -> None:
    style = STYLES.get(result.outcome, "yellow")
    console.print(Text.assemble((f"{result.outcome}: ", style), phrases.gate(result)), soft_wrap=True)
