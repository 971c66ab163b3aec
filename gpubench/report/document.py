"""A report as data: its sentences, tables, figures and findings in order, before any of them is drawn.

`terminal.py`, `markdown.py` and `page.py` render a `Document`. A block names the media that show it; apart from that,
all media show the same words. Texts are plain: a sentence has no capital first letter and no full stop, which the page
adds, and no colours or escapes. Names in them are as they were recorded: each medium makes control characters visible,
so that no file can move the reader's cursor.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Flag, auto
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from markupsafe import Markup


class Medium(Flag):
    """Where a block is shown. A terminal shows BRIEF, or with -v DETAILS instead."""

    BRIEF = auto()
    DETAILS = auto()
    MARKDOWN = auto()
    PAGE = auto()
    TERMINAL = BRIEF | DETAILS


TEXT = Medium.TERMINAL | Medium.MARKDOWN
EVERYWHERE = Medium.TERMINAL | Medium.MARKDOWN | Medium.PAGE
UNASKED = Medium.DETAILS | Medium.MARKDOWN | Medium.PAGE
"""Everywhere but on a terminal without -v."""

Tone = Literal["plain", "strong", "quiet", "warning", "missing"]
"""How a text is meant: a result, an answer, an explanation, a doubt, or a note that something was not recorded."""
Style = Literal["", "established", "better", "worse", "equivalent", "inconclusive", "withheld", "rejected", "gone"]
"""The strength and direction of a verdict, or of another outcome."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of a document."""

    on: Medium = EVERYWHERE


@dataclass(frozen=True)
class Chip:
    """A verdict in one word; `sign` is drawn before it where there is room."""

    word: str
    style: Style
    sign: str = ""


@dataclass(frozen=True)
class Heading(Block):
    text: str
    level: Literal[2, 3] = 2
    anchor: str = ""
    link: str = ""
    """The last words of the text as a link, and where it leads."""
    target: str = ""
    on: Medium = field(default=Medium.PAGE, kw_only=True)


def raised(blocks: Iterable[Block]) -> list[Block]:
    """Returns blocks whose headings of level 3 are of level 2, for a report that has them as its sections."""
    return [replace(block, level=2) if isinstance(block, Heading) else block for block in blocks]


@dataclass(frozen=True)
class Paragraph(Block):
    """One sentence, or several lines that belong together.

    `label` stands before each line, as in "next: ...". A page leaves out that of a warning, which it draws as one.
    """

    lines: str | Sequence[str]
    tone: Tone = "plain"
    label: str = ""
    listed: bool = False
    """Whether the page shows the lines as a list even if there is only one."""
    anchor: str = ""
    """The anchor of the section that says more, which a page links to after a single line."""

    @property
    def texts(self) -> list[str]:
        """The lines that are not empty."""
        return [line for line in ([self.lines] if isinstance(self.lines, str) else self.lines) if line]


@dataclass(frozen=True)
class Command(Block):
    """Something to copy: options, or the path of a file. It is never wrapped."""

    label: str
    text: str
    tone: Tone = "plain"
    after: str = ""
    """What follows it in the sentence."""
    link: str = ""
    """An address at the end of the sentence."""


@dataclass(frozen=True)
class Cell:
    """A cell of a table that needs more than its text."""

    text: str
    brief: str | None = None
    """A shorter text for a narrow terminal."""
    style: Style = ""
    sign: str = ""
    chip: bool = False
    note: str = ""
    """A sentence below the cell on a page."""
    code: bool = False
    link: str = ""
    """Where the cell leads on a page."""


@dataclass(frozen=True)
class Table(Block):
    """A table whose first column names its rows.

    `words` are the columns of words: all others hold figures, which are right-aligned and never shortened. In a narrow
    terminal the columns in `expendable` are dropped first, in this order, and then others from the right.
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]
    words: frozenset[str] = frozenset()
    sentences: tuple[str, ...] = ()
    """Columns of words that a narrow terminal wraps instead of shortening them."""
    expendable: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    """Columns that are never left out."""
    complete: bool = False
    """Whether a narrow terminal shortens words instead of leaving out columns."""
    rest: str = ""
    """Which rows are left out."""
    note: str = ""
    bars: Sequence[float] = ()
    """A length in [-1, 1] for each row, drawn beside or below its name; empty if there is nothing to draw."""

    def __bool__(self) -> bool:
        return bool(self.rows)

    def is_words(self, place: int) -> bool:
        """Says whether a column holds words, as the first one always does, because it names the rows."""
        return place == 0 or self.columns[place] in self.words


def table(
    title: str,
    rows: Sequence[Mapping[str, str | Cell]],
    words: Iterable[str] = (),
    *,
    sizes: Sequence[float] = (),
    **options: Any,
) -> Table:
    """Makes a table of rows by column; columns without any content are left out.

    `sizes` has one value per row, which its bar shows; the largest value has the longest bar. `options` are those of
    `Table`.
    """
    cells = [{name: cell if isinstance(cell, Cell) else Cell(cell) for name, cell in row.items()} for row in rows]
    known = dict.fromkeys(name for row in cells for name in row)
    columns = tuple(name for name in known if any(name in row and row[name].text for row in cells))
    most = max(map(abs, sizes), default=0)
    return Table(
        title,
        columns,
        [tuple(row.get(name, Cell("")) for name in columns) for row in cells],
        frozenset(words),
        bars=[size / most for size in sizes] if most > 0 else [],
        **options,
    )


@dataclass(frozen=True)
class Part:
    """A part of a whole. `style` names its colour; `share` is a fraction of the whole."""

    name: str
    style: str
    share: float
    size: str
    percent: str
    letter: str = ""
    """The letter that stands for it in stacked bars of a terminal; without one it has a bar of its own."""


@dataclass(frozen=True)
class Breakdown(Block):
    """The parts that a whole is made of, as a table with colours. `of` and `size` head the columns."""

    title: str
    of: str
    size: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class Figure(Block):
    """A drawing, which only a page shows. `legends` are (head, [(class, name)])."""

    title: str
    drawing: "Markup"
    note: str = ""
    shape: Literal["", "rows", "lanes", "wide", "image"] = ""
    keys: bool = False
    """Whether the title is followed by the colours of the baseline and the candidate."""
    legends: Sequence[tuple[str, Sequence[tuple[str, str]]]] = ()
    on: Medium = field(default=Medium.PAGE, kw_only=True)


@dataclass(frozen=True)
class Figures(Block):
    """Small drawings side by side."""

    figures: Sequence[Figure]
    on: Medium = field(default=Medium.PAGE, kw_only=True)


@dataclass(frozen=True)
class StackedBar:
    """A row of stacked bars: its name, further figures, and its parts with their shares of the longest row."""

    name: str
    group: str
    figures: Mapping[str, str]
    parts: Sequence[Part]
    strong: bool = False


@dataclass(frozen=True)
class StackedBars(Block):
    """Stacked bars for a terminal; a `Figure` shows them on a page. Figures in `last` stand behind the bar."""

    head: str
    rows: Sequence[StackedBar]
    expendable: tuple[str, ...] = ()
    last: str = ""
    on: Medium = field(default=Medium.TERMINAL, kw_only=True)


@dataclass(frozen=True)
class Line:
    """A labelled sentence of a finding.

    With `figures` its hyphens before digits are set as minus signs. With `brief` a terminal also shows it without -v.
    """

    label: str
    text: str
    style: Style = ""
    code: bool = False
    figures: bool = False
    brief: bool = True


@dataclass(frozen=True)
class FindingBlock:
    title: str
    severity: Literal["high", "medium", "low"]
    evidence: Sequence[str]
    lines: Sequence[Line]
    threshold: str


@dataclass(frozen=True)
class FindingList(Block):
    """Problems with their evidence and fixes, the most severe first. `nothing` is said if there are none.

    A terminal without -v shows the first ones, each in a few lines.
    """

    findings: Sequence[FindingBlock]
    nothing: str


@dataclass(frozen=True)
class Sided:
    """One side of a comparison: what ran, and lines about it."""

    role: Literal["baseline", "candidate"]
    name: str
    path: str
    lines: Sequence[str]

    @property
    def line(self) -> str:
        """All of it in one line."""
        names = [name for name in (self.name, f"({self.path})" if self.path else "") if name and name != self.role]
        return f"{' '.join(names) or self.name}: {'; '.join(self.lines)}"


@dataclass(frozen=True)
class Sides(Block):
    baseline: Sided
    candidate: Sided


@dataclass(frozen=True)
class Facts(Block):
    """Names and values in groups; the group without a name has no heading."""

    groups: Mapping[str, Mapping[str, str]]
    on: Medium = field(default=Medium.PAGE, kw_only=True)


@dataclass(frozen=True)
class Folded(Block):
    """Blocks that a page shows on request; other media show them as if they were not folded."""

    summary: str
    blocks: Sequence[Block]
    opened: bool = False


@dataclass(frozen=True)
class NestedDocument(Block):
    """A document inside a document: one of several comparisons."""

    headline: str
    blocks: Sequence[Block]
    name: str
    anchor: str
    chip: Chip | None = None


@dataclass(frozen=True)
class Document:
    """A report: the answer, and the blocks that support it."""

    headline: str
    """The answer in one sentence; empty if each section has its own."""
    blocks: Sequence[Block]
    title: str = ""
    """The title of the page; by default the headline."""
    context: str = ""
    """A line above the headline of a page, such as the command."""
    path: str = ""
    """A path at the end of the context."""
    about: str = ""
    """A line below the headline of a page."""
    chips: Sequence[Chip] = ()
    names: Sequence[str] = ()
    """What the user calls the sides: names that keep their case also where a sentence begins with one."""
    links: Sequence[tuple[str, str]] = ()
    """Other pages that a page leads to: what each shows, and its address."""
    footer: Sequence[tuple[Sequence[str], Sequence[str]]] = ()
    """Lines at the end of a page, each made of paths and facts."""
