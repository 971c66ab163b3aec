"""Tables as text, for the terminal and the page alike; the terminal shows as much of one as it has room for."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from gpubench.report.plain import clean, shorten
from gpubench.screen import bar, plain_table, say

GAP = 2  # characters between columns
BAR = 12  # characters, of the longest row
ROOM_FOR_BARS = 80  # characters of a terminal
READABLE = 24  # characters into which a name or a place can be shortened and still be told
TEXTS = frozenset(
    {
        "rank",
        "phase",
        "module",
        "class",
        "operator",
        "shapes",
        "bound",
        "kernel",
        "kind",
        "collective",
        "copy",
        "of type",
    }
    | {
        "evaluations",
        "wait asked by",
        "where",
        "in phase",
        "launched by",
        "in call",
        "example",
        "part",
        "mostly idle for",
        "option",
    }
)
"""Columns of words; all others hold figures."""


@dataclass(frozen=True)
class Sheet:
    """`columns` from the one that matters most; `rest` says which rows are missing, `note` which columns. `bars` has a
    length for each row, from 0 to 1, drawn behind or below its name; empty where there is nothing to draw."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    rest: str = ""
    note: str = ""
    bars: tuple[float, ...] = ()

    @property
    def figures(self) -> tuple[bool, ...]:
        """Of each column, whether it holds figures, which stand right; words stand left and can be shortened."""
        return tuple(name not in TEXTS for name in self.columns)

    @property
    def brief(self) -> bool:
        """Whether what its rows are called is short: their column can be as narrow as their longest word."""
        return all(cell_len(row[0]) <= READABLE for row in self.rows)

    def __bool__(self) -> bool:
        return bool(self.rows)


def sheet(
    title: str, rows: Sequence[Mapping[str, str]], rest: str = "", note: str = "", sizes: Sequence[float] = ()
) -> Sheet:
    """Of rows by column; a column in which no row has anything is left out. sizes: of each row what its bar shows, the
    largest as the longest bar."""
    known = dict.fromkeys(name for row in rows for name in row)
    columns = tuple(name for name in known if any(row.get(name) for row in rows))
    cells = [tuple(clean(row.get(name, "")) for name in columns) for row in rows]
    most = max(sizes, default=0)
    bars = tuple(size / most for size in sizes) if most > 0 else ()
    return Sheet(title, columns, cells, rest, note, bars)


def show(shown: Iterable[Sheet | None], console: Console) -> None:
    """Those that have rows, each below an empty line."""
    for one in filter(None, shown):
        console.print()
        console.print(table(one, console.width))
        if one.rest:
            say(console, f"and {one.rest}", "dim")
        if one.note:
            say(console, one.note, "dim")


def table(shown: Sheet, width: int) -> Table:
    """In at most `width` characters: columns are left out from the right until words can be read, then shortened. Bars
    stand behind the names where there is room for both."""
    bars = shown.bars if width >= ROOM_FOR_BARS else ()
    if bars:
        width -= BAR + GAP
    kept = list(range(len(shown.columns)))
    while len(kept) > 2 and not _readable(shown, kept, width):
        kept.pop()
    limits = _limits(shown, kept, width)
    drawn = plain_table()
    for place in kept:
        justify: JustifyMethod = "right" if shown.figures[place] else "left"
        drawn.add_column(Text(shown.columns[place]), justify=justify, no_wrap=True)
        if bars and place == 0:
            drawn.add_column("", no_wrap=True)
    for number, row in enumerate(shown.rows):
        name, *cells = (Text(shorten(row[place], limits[place])) for place in kept)
        drawn.add_row(name, *([bar(bars[number], "compute", BAR)] if bars else []), *cells)
    return drawn


def _readable(shown: Sheet, kept: Sequence[int], width: int) -> bool:
    limits = _limits(shown, kept, width)
    return all(limits[place] >= min(_needed(shown, place), READABLE) for place in kept)


def _limits(shown: Sheet, kept: Sequence[int], width: int) -> dict[int, int]:
    """Characters for each column: figures get what they need, words share the rest, the short ones first."""
    limits = {place: _needed(shown, place) for place in kept}
    words = sorted((place for place in kept if not shown.figures[place]), key=limits.__getitem__)
    room = width - GAP * (len(kept) - 1) - sum(limits[place] for place in kept if place not in words)
    for number, place in enumerate(words):
        limits[place] = max(1, min(limits[place], room // (len(words) - number)))
        room -= limits[place]
    return limits


def _needed(shown: Sheet, place: int) -> int:
    return max(cell_len(text) for text in (shown.columns[place], *(row[place] for row in shown.rows)))
