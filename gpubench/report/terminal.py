"""Renders a report for a terminal of any width, and decides what is printed on which stream.

Results go to stdout, everything else to stderr, at the verbosity that the user chose.
"""

import io
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import singledispatch
from itertools import groupby
from typing import Any

from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from gpubench import units
from gpubench.logs import CHOICES, MODIFIABLE, NOTIMPORTANT, PROGRAM_OUTPUT
from gpubench.report.document import (
    Block,
    Breakdown,
    Cell,
    Command,
    Document,
    FindingList,
    Folded,
    Heading,
    Medium,
    NestedDocument,
    Paragraph,
    Part,
    Sides,
    StackedBars,
    Style,
    Table,
    Tone,
)
from gpubench.text import bar, clean, plain_table, shorten, spelled_out

_LEVELS = (MODIFIABLE, logging.INFO, NOTIMPORTANT)
PIPE_COLUMNS = 120
_STYLES = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}


class SilencedConsole(Console):
    """A console that goes silent when its reader closes the pipe, so that the run continues.

    Control characters in its input, which includes names and messages from elsewhere, are spelled out.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(spelled_out(one) if isinstance(one, str) else one for one in objects), **options)

    def on_broken_pipe(self) -> None:
        self.quiet = True

    def _write_buffer(self) -> None:
        try:
            super()._write_buffer()
        except OSError:
            self.quiet = True


class Terminal:
    """Decides once what is printed on which stream."""

    def __init__(self, quiet: bool, verbosity: int) -> None:
        self._out = Console(highlight=False, emoji=False)
        if not self._out.is_terminal and not os.environ.get("COLUMNS"):
            self._out.width = PIPE_COLUMNS  # rich would cut a piped table to 80 columns
        self.err = SilencedConsole(stderr=True, highlight=False, emoji=False)
        self.quiet = quiet
        self._verbosity = verbosity
        root = logging.getLogger("gpubench")
        root.setLevel(1)  # run.log filters by itself
        root.propagate = False
        level = logging.WARNING if quiet else _LEVELS[min(verbosity, 2)]
        for former in [one for one in root.handlers if isinstance(one, _OnConsole)]:
            root.removeHandler(former)  # a line is printed once, whatever terminals the process had before
        self._handler = _OnConsole(self.err, level)
        root.addHandler(self._handler)
        logging.getLogger(PROGRAM_OUTPUT).setLevel(level)  # there may be millions of lines

    def say(self, line: str) -> None:
        """Prints a line about the progress on stderr, unless the terminal is quiet."""
        if not self.quiet:
            self.err.print(line, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def errors_only(self) -> Iterator[None]:
        """A context in which no log line below an error is printed, for many runs whose own logs have them.

        The settings that were chosen for the first of them are printed nevertheless.
        """
        before = self._handler.least
        self._handler.least = logging.ERROR
        try:
            yield
        finally:
            self._handler.least = before

    def render(self, document: Document) -> str:
        """Returns the document as it is printed on stdout, without printing it."""
        text = io.StringIO()
        colours: Any = self._out.color_system  # rich returns a str here and takes a Literal
        console = Console(
            file=text,
            width=self._out.width,
            color_system=colours,
            force_terminal=self._out.is_terminal,
            no_color=self._out.no_color,
            highlight=False,
        )
        show(document, console, details=self._verbosity > 0)
        return text.getvalue()


class _OnConsole(logging.Handler):
    def __init__(self, console: Console, level: int) -> None:
        super().__init__(level)
        self.least = level
        """The least level of a line that is printed, unless it names settings that were chosen."""
        self._console = console
        self._named_choices = False

    def emit(self, record: logging.LogRecord) -> None:
        message = escape(record.getMessage())
        if record.name == CHOICES:
            if self._named_choices:
                return
            self._named_choices = True
        elif record.levelno < self.least:
            return
        if record.levelno == MODIFIABLE:
            line = f"[dim]{message}[/]"
        else:
            line = f"[{_STYLES.get(record.levelname, 'dim')}]{record.levelname.lower()}:[/] {message}"
        self._console.print(line, soft_wrap=not self._console.is_terminal)


GAP = 2  # characters between columns
BAR = 24  # characters of a bar for a share of the whole
SIZE_BAR = 12  # characters of the longest bar beside the names of a table
SIGNED_BAR = 12  # characters on each side of the axis
STACK = 44  # characters of the longest row of stacked bars
SMALLEST_BAR = 6
WIDTH_FOR_BARS = 80  # characters of a terminal
READABLE = 24  # characters: words are not shortened further
WORD = 10  # characters: a column of short names is not made narrower
WRAPPED = 40  # characters: longer names are shortened instead of wrapped
BRIEF = 16  # characters: words of this length are not shortened
IN_BRIEF = 3  # findings that are shown without -v

_TONES: dict[Tone, str] = {"plain": "", "strong": "bold", "quiet": "dim", "warning": "yellow", "missing": "dim"}
_COLOURS: dict[Style, str] = {
    "better": "green",
    "worse": "red",
    "gone": "green",
    "equivalent": "cyan",
    "inconclusive": "yellow",
    "withheld": "magenta",
    "rejected": "magenta",
}
_SEVERITIES = {"high": "red", "medium": "yellow", "low": "cyan"}
LETTER_COLOURS = {
    "P": "blue",
    "B": "bright_blue",
    "G": "magenta",
    "O": "green",
    "A": "yellow",
    "I": "bright_green",
    "T": "red",
    "W": "cyan",
    "E": "bright_yellow",
    "F": "bright_magenta",
    "C": "bright_cyan",
}
"""The colours of the letters in stacked bars. Each block is the letter on its own colour, so that a terminal without
colours shows the letters. Others are grey."""


def show(document: Document, console: Console, *, details: bool = False) -> None:
    """Prints the document; `details` is -v. Blocks are separated by one empty line at most."""
    with console.capture() as captured:
        if document.headline:
            _say(console, document.headline, "bold")
        _show(document.blocks, console, Medium.DETAILS if details else Medium.BRIEF)
    text = re.sub(r" +$", "", captured.get(), flags=re.MULTILINE)  # rich fills the cells of a table with spaces
    console.file.write(re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n")


def _show(blocks: Iterable[Block], console: Console, media: Medium) -> None:
    for block in blocks:
        if block.on & media:
            _show_block(block, console, media)


@singledispatch
def _show_block(_block: Block, _console: Console, _media: Medium) -> None:
    """Prints a block; those that only a page can show, such as figures, print nothing."""


@_show_block.register
def _(block: Heading, console: Console, _media: Medium) -> None:
    console.print()
    _say(console, block.text, "bold" if block.level == 2 else "dim")


@_show_block.register
def _(block: Paragraph, console: Console, _media: Medium) -> None:
    for text in block.texts:
        _say(console, block.label + text, _TONES[block.tone])


@_show_block.register
def _(block: Command, console: Console, _media: Medium) -> None:
    console.print(_safe(f"{block.label}: {block.text}{block.after}{block.link}", _TONES[block.tone]), soft_wrap=True)


@_show_block.register
def _(block: Table, console: Console, _media: Medium) -> None:
    if block:
        _title(block.title, console)
        console.print(_table(block, console.width))
        for line in (block.rest and f"and {block.rest}", block.note):
            if line:
                _say(console, line, "dim")


@_show_block.register
def _(block: Breakdown, console: Console, _media: Medium) -> None:
    if block.parts:
        _title(block.title, console)
        console.print(_breakdown(block, console.width))


@_show_block.register
def _(block: StackedBars, console: Console, _media: Medium) -> None:
    if block.rows:
        console.print()
        console.print(_stacks(block, console.width))


@_show_block.register
def _(block: Sides, console: Console, _media: Medium) -> None:
    for side in (block.baseline, block.candidate):
        _say(console, f"{side.role:<9}  {side.line}", "dim")


@_show_block.register
def _(block: Folded, console: Console, media: Medium) -> None:
    _show(block.blocks, console, media)


@_show_block.register
def _(block: NestedDocument, console: Console, media: Medium) -> None:
    if block.name:
        console.print()
    _say(console, block.headline, "bold")
    _show(block.blocks, console, media)


def _say(console: Console, line: str, style: str = "") -> None:
    """Prints a line, wrapped between words on a terminal and unwrapped in a file."""
    console.print(_safe(line, style), soft_wrap=not console.is_terminal)


def _safe(text: str, style: str = "") -> Text:
    """Returns text on one line, with control characters as escapes, because names can come from a foreign file."""
    return Text(clean(text), style)


def _title(title: str, console: Console) -> None:
    console.print()
    if title:
        _say(console, title, "dim")


def _table(block: Table, width: int) -> RichTable:
    """Returns a table of at most `width` characters.

    Columns are left out, or shown in a brief form, until words are readable; then words are shortened. Bars stand
    behind the names if all columns fit beside them; they go before columns that are not expendable.
    """
    signed = min(block.bars, default=0) < 0
    bar_width = 2 * SIGNED_BAR + 1 if signed else SIZE_BAR
    bars = block.bars if signed or width >= WIDTH_FOR_BARS else ()
    for kept in _layouts(block):
        all_gone = block.expendable and not any(block.columns[place] in block.expendable for place in kept)
        for drawn in (bars, ()) if signed or all_gone else (bars,):
            room = width - (bar_width + GAP if drawn else 0)
            limits = _limits(block, kept, room)
            least = {place: _longest_word(block, place) if _wraps(block, place) else READABLE for place in kept}
            if all(limits[place] >= min(_needed(block, kept, place), least[place]) for place in kept):
                return _drawn(block, kept, limits, drawn)
    return _drawn(block, kept, limits, ())


def _layouts(block: Table) -> Iterator[dict[int, bool]]:
    """Yields which columns to show, and which of them in their brief form, from the widest layout to the narrowest."""
    places = list(range(len(block.columns)))
    if block.complete:
        yield dict.fromkeys(places, False)
        return
    first = [block.columns.index(name) for name in block.expendable if name in block.columns]
    kept = dict.fromkeys(places, False)
    yield dict(kept)
    for place in [*first, *(place for place in reversed(places) if place not in first)]:
        if place == 0 or len(kept) <= 2:
            continue
        if any(row[place].brief is not None for row in block.rows):
            kept[place] = True
            yield dict(kept)
        if block.columns[place] not in block.kept:
            del kept[place]
            yield dict(kept)
    if any(row[0].brief is not None for row in block.rows):
        yield kept | {0: True}


def _wraps(block: Table, place: int) -> bool:
    """Says whether a column holds sentences or short names of several words: they are wrapped instead of shortened."""
    if block.columns[place] in block.sentences:
        return True
    names = [row[place].text for row in block.rows]
    short = all(len(name) <= WRAPPED and len(word) <= READABLE for name in names for word in name.split())
    return place == 0 and short and any(" " in name for name in names)


def _longest_word(block: Table, place: int) -> int:
    """Returns the least width of a wrapped column that breaks none of its words, at most READABLE."""
    words = [word for row in block.rows for word in row[place].text.split()]
    return min(READABLE, max([WORD, *map(cell_len, words)]))


def _shrinks(block: Table, kept: dict[int, bool], place: int) -> bool:
    return place == 0 or (block.is_words(place) and _needed(block, kept, place) > BRIEF)


def _text(cell: Cell, brief: bool) -> str:
    return clean(cell.brief if brief and cell.brief is not None else cell.text)


def _needed(block: Table, kept: dict[int, bool], place: int) -> int:
    return max(map(cell_len, [clean(block.columns[place]), *(_text(row[place], kept[place]) for row in block.rows)]))


def _limits(block: Table, kept: dict[int, bool], width: int) -> dict[int, int]:
    """Returns the width of each column: figures get what they need, and words share the rest, shortest first."""
    limits = {place: _needed(block, kept, place) for place in kept}
    words = sorted((place for place in kept if _shrinks(block, kept, place)), key=limits.__getitem__)
    room = width - GAP * (len(kept) - 1) - sum(limits[place] for place in kept if place not in words)
    for number, place in enumerate(words):
        limits[place] = max(1, min(limits[place], room // (len(words) - number)))
        room -= limits[place]
    return limits


def _drawn(block: Table, kept: dict[int, bool], limits: dict[int, int], bars: Sequence[float]) -> RichTable:
    drawn = plain_table()
    for place in kept:
        name, texts = block.columns[place], [row[place].text for row in block.rows]
        left = block.is_words(place) and not all(map(str.isdigit, texts))  # numbers can also name rows
        wraps = _wraps(block, place)
        width = limits[place] if name in block.sentences else None
        justify: JustifyMethod = "left" if left else "right"
        drawn.add_column(_safe(name), justify=justify, no_wrap=not wraps, overflow="fold", width=width)
        if bars and place == 0:
            drawn.add_column("less · more" if min(bars) < 0 else "", no_wrap=True)
    for number, row in enumerate(block.rows):
        cells = [
            _cell(row[place], brief, None if _wraps(block, place) else limits[place]) for place, brief in kept.items()
        ]
        drawn.add_row(cells[0], *([_size_bar(bars, number)] if bars else []), *cells[1:])
    return drawn


def _cell(cell: Cell, brief: bool, limit: int | None) -> Text:
    """Returns a cell that fits into `limit` cells of the terminal, of which wide letters take two."""
    text, style = _text(cell, brief), _COLOURS.get(cell.style, "")
    if limit is None:
        return _safe(text, style)
    length = max(1, limit)
    while length > 1 and cell_len(shorten(text, length)) > limit:
        length -= 1
    return _safe(shorten(text, length), style)


def _size_bar(bars: Sequence[float], number: int) -> Text:
    if number >= len(bars):
        return Text()
    return signed_bar(bars[number]) if min(bars) < 0 else bar(bars[number], "compute", SIZE_BAR)


def signed_bar(share: float) -> Text:
    """Returns a bar to the left of the axis for a share in [-1, 0], and to the right for one in [0, 1]."""
    filled = round(abs(share) * SIGNED_BAR)
    blocks, space = "█" * filled, " " * SIGNED_BAR
    if share < 0:
        return Text.assemble(" " * (SIGNED_BAR - filled), (blocks, "green"), ("│", "bright_black"), space)
    return Text.assemble(space, ("│", "bright_black"), (blocks, "red"), " " * (SIGNED_BAR - filled))


def _breakdown(block: Breakdown, width: int) -> RichTable:
    """Returns a row for each part, with a bar of its share, or with its letter in stacked bars."""
    drawn, lettered = plain_table(), any(part.letter for part in block.parts)
    columns = zip(*((part.name, part.percent, part.size) for part in block.parts), strict=True)
    room = min(BAR, width - sum(max(map(cell_len, column)) + GAP for column in columns))
    barred = room >= SMALLEST_BAR and not lettered
    if lettered:
        drawn.add_column("")
    drawn.add_column(_safe(block.of), no_wrap=barred, overflow="fold")
    if barred:
        drawn.add_column("", no_wrap=True)
    drawn.add_column("share", justify="right", no_wrap=True)
    drawn.add_column(_safe(block.size), justify="right", no_wrap=True)
    for part in block.parts:
        letter = [_stacked(part, 1)] if lettered else []
        drawing = [bar(part.share, part.style, room)] if barred else []
        drawn.add_row(*letter, _safe(part.name), *drawing, _safe(part.percent), _safe(part.size))
    return drawn


def _stacks(block: StackedBars, width: int) -> RichTable:
    """Returns a bar for each row; figures only where the terminal is too narrow for bars."""
    heads = list(block.rows[0].figures)
    for name in ("", *block.expendable):
        heads = [head for head in heads if head != name]
        columns = [[block.head, *(row.name for row in block.rows), *(row.group for row in block.rows)]]
        columns += [[head, *(row.figures[head] for row in block.rows)] for head in heads]
        room = min(STACK, width - sum(max(map(len, column)) + GAP for column in columns))
        if room >= SMALLEST_BAR:
            break
    drawn, barred = plain_table(), room >= SMALLEST_BAR
    before, after = [head for head in heads if head != block.last], [head for head in heads if head == block.last]
    for head in (block.head, *before, *[""] * barred, *after):
        drawn.add_column(_safe(head), justify="left" if head in (block.head, "") else "right", no_wrap=True)
    for group, rows in groupby(block.rows, key=lambda row: row.group):
        drawn.add_row(_safe(group, "dim"))
        for row in rows:
            style = "bold" if row.strong else ""
            cells = [_safe(f" {row.name}", style), *(_safe(row.figures[head], style) for head in before)]
            bars = [_stack(row.parts, room)] if barred else []
            drawn.add_row(*cells, *bars, *(_safe(row.figures[head]) for head in after))
    return drawn


def _stack(parts: Sequence[Part], room: int) -> Text:
    """Returns stacked blocks, of which borders are rounded and not lengths, so that the whole has the right length."""
    drawn, end, share = Text(), 0, 0.0
    for part in parts:
        share += part.share
        border = min(room, round(share * room))
        drawn.append(_stacked(part, border - end))
        end = border
    return drawn.append("░" * (room - end), "bright_black")


def _stacked(part: Part, length: int) -> Text:
    colour = LETTER_COLOURS.get(part.letter, "bright_black")
    return _safe(part.letter * length, f"{colour} on {colour}")


@_show_block.register
def _(block: FindingList, console: Console, media: Medium) -> None:
    is_brief = Medium.BRIEF in media
    shown = block.findings[:IN_BRIEF] if is_brief else block.findings
    for number, finding in enumerate(shown, 1):
        console.print()
        severity = _safe(f"  {finding.severity}", _SEVERITIES[finding.severity])
        console.print(_safe(f"{number}. {finding.title}", "bold").append_text(severity))
        grid = RichTable.grid(padding=(0, GAP, 0, 0))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        for place, text in enumerate(finding.evidence[:1] if is_brief else finding.evidence):
            grid.add_row(_safe("   evidence" if not place else "", "dim"), _safe(text))
        for line in finding.lines:
            if line.brief or not is_brief:
                grid.add_row(_safe(f"   {line.label}", "dim"), _safe(line.text, _COLOURS.get(line.style, "")))
        console.print(grid)
    if rest := len(block.findings) - len(shown):
        _say(console, f"and {units.counted(rest, 'more finding')} with -v", "dim")
    if not block.findings:
        _say(console, f"no finding: {block.nothing}")
    console.print()
