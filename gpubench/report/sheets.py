"""Tables as text, shared by the terminal and the page; the terminal shows as many columns as fit."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from gpubench.text import bar, clean, plain_table, say, shorten

GAP = 2  # characters between columns
BAR = 12  # characters of the longest bar
WIDTH_FOR_BARS = 80  # characters of a terminal
READABLE = 24  # characters: names and places are not shortened further
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
"""Columns of words; all other columns hold figures."""


@dataclass(frozen=True)
class Sheet:
    """A table.

    `columns` are ordered by importance; `rest` says which rows are left out, and `note` which columns. `bars` has a
    length in [0, 1] for each row, drawn behind or below its name; it is empty if there is nothing to draw.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    rest: str = ""
    note: str = ""
    bars: tuple[float, ...] = ()

    @property
    def figures(self) -> tuple[bool, ...]:
        """Return for each column whether it holds figures: those are right-aligned, and words can be shortened."""
        return tuple(name not in TEXTS for name in self.columns)

    @property
    def brief(self) -> bool:
        """Say whether the rows' names are short, so that their column can be as narrow as the longest word."""
        return all(cell_len(row[0]) <= READABLE for row in self.rows)

    def __bool__(self) -> bool:
        return bool(self.rows)


def sheet(
    title: str, rows: Sequence[Mapping[str, str]], rest: str = "", note: str = "", sizes: Sequence[float] = ()
) -> Sheet:
    """Make a table of rows by column; columns without any content are left out.

    `sizes` has one value per row, which its bar shows; the largest value has the longest bar.
    """
    known = dict.fromkeys(name for row in rows for name in row)
    columns = tuple(name for name in known if any(row.get(name) for row in rows))
    cells = [tuple(clean(row.get(name, "")) for name in columns) for row in rows]
    most = max(sizes, default=0)
    bars = tuple(size / most for size in sizes) if most > 0 else ()
    return Sheet(title, columns, cells, rest, note, bars)


def show(shown: Iterable[Sheet | None], console: Console) -> None:
    """Print the tables that have rows, each after an empty line."""
    for one in filter(None, shown):
        console.print()
        console.print(table(one, console.width))
        if one.rest:
            say(console, f"and {one.rest}", "dim")
        if one.note:
            say(console, one.note, "dim")


def table(shown: Sheet, width: int) -> Table:
    """Return a table of at most `width` characters.

    Columns are left out from the right until words are readable; then words are shortened. Bars stand behind the names
    if both fit.
    """
    bars = shown.bars if width >= WIDTH_FOR_BARS else ()
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
    """Return the width of each column: figures get what they need, and words share the rest, shortest first."""
    limits = {place: _needed(shown, place) for place in kept}
    words = sorted((place for place in kept if not shown.figures[place]), key=limits.__getitem__)
    room = width - GAP * (len(kept) - 1) - sum(limits[place] for place in kept if place not in words)
    for number, place in enumerate(words):
        limits[place] = max(1, min(limits[place], room // (len(words) - number)))
        room -= limits[place]
    return limits


def _needed(shown: Sheet, place: int) -> int:
    return max(cell_len(text) for text in (shown.columns[place], *(row[place] for row in shown.rows)))
