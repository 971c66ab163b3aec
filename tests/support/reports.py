"""What a report is asked in tests: its blocks, tables and texts as a `Document`, and how each medium renders it."""

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any, TypeVar

from rich.console import Console

from gpubench import __version__
from gpubench.compare.evidence import Side
from gpubench.compare.result import Comparisons
from gpubench.report import comparison, markdown, page, perfetto, terminal
from gpubench.report.document import (
    Block,
    Command,
    Document,
    Figures,
    FindingBlock,
    FindingList,
    Folded,
    Heading,
    Medium,
    NestedDocument,
    Paragraph,
    Table,
)

HOSTILE = "</title></style><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7 * 7 }}"
ESCAPED = markdown.escape(HOSTILE)

Report = Document | NestedDocument | Iterable[Block]
UNSEEN = {"on", "anchor", "drawing", "letter", "shape", "style", "target", "tone", "words", "expendable", "last"}
"""Fields of blocks that are not shown as they are."""
Kind = TypeVar("Kind", bound=Block)


def flat(report: Report, on: Medium | None = None) -> list[Block]:
    """All blocks in order, with those of sections, of folded parts and of grids in their place.

    `on` leaves out what is not shown there.
    """
    blocks = report.blocks if isinstance(report, Document | NestedDocument) else report
    return [block for block in _flat(blocks) if on is None or on & block.on]


def _flat(blocks: Iterable[Block]) -> Iterator[Block]:
    for block in blocks:
        yield block
        match block:
            case Folded(blocks=inner) | NestedDocument(blocks=inner):
                yield from _flat(inner)
            case Figures(figures=figures):
                yield from figures


def only(report: Report, kind: type[Kind]) -> list[Kind]:
    """The blocks of a kind."""
    return [block for block in flat(report) if isinstance(block, kind)]


def find(report: Report, kind: type[Kind], title: str) -> Kind:
    """The block of that kind with that title; a table is also found by the name of its first column."""
    for block in only(report, kind):
        named = getattr(block, "title", "")
        if title == named or (isinstance(block, Table) and title in block.columns[:1]):
            return block
    raise AssertionError(f"no {kind.__name__} {title!r}: there are {titles(report)}")


def titles(report: Report) -> list[str]:
    """The titles of headings, tables, breakdowns and figures that are not empty, in order."""
    named = (getattr(block, "text" if isinstance(block, Heading) else "title", "") for block in flat(report))
    return [title for title in named if title]


def rows(table: Table) -> list[dict[str, str]]:
    """The rows of a table: texts by column, without empty cells."""
    return [{name: cell.text for name, cell in zip(table.columns, row, strict=True) if cell.text} for row in table.rows]


def row(report: Report, title: str, name: str) -> dict[str, str]:
    """The row that begins with `name`, in the table with that title or first column."""
    table = find(report, Table, title)
    return next(one for one in rows(table) if one.get(table.columns[0]) == name)


def paragraphs(report: Report, tone: str | None = None) -> list[str]:
    """The lines of all paragraphs, or of those with a tone, each with its label."""
    found = (block for block in only(report, Paragraph) if tone in (None, block.tone))
    return [f"{block.label}{line}" for block in found for line in block.texts]


def commands(report: Report) -> dict[str, str]:
    """What there is to copy, by its label."""
    return {block.label: block.text for block in only(report, Command)}


def findings(report: Report) -> list[FindingBlock]:
    return [finding for block in only(report, FindingList) for finding in block.findings]


def lines_of(finding: FindingBlock) -> dict[str, str]:
    """The lines of a finding by their labels."""
    return {line.label: line.text for line in finding.lines}


def texts(report: Report) -> list[str]:
    """Every text of a report, apart from those in drawings, with labels and texts apart."""
    return list(_texts(report if isinstance(report, Document | NestedDocument) else list(report)))


def _texts(value: Any) -> Iterator[str]:
    if is_dataclass(value):
        for name, inner in vars(value).items():
            if name not in UNSEEN:
                yield from _texts(inner)
    elif isinstance(value, str):
        yield from filter(None, [value])
    elif isinstance(value, Mapping):
        yield from _texts([*value.items()])
    elif isinstance(value, Iterable):
        for inner in value:
            yield from _texts(inner)


def text(report: Report) -> str:
    return "\n".join(texts(report))


def on_terminal(document: Document, width: int = 120, *, details: bool = False, colour: bool = False) -> str:
    """What a terminal of that width shows."""
    console = Console(
        file=io.StringIO(), width=width, force_terminal=True, color_system="standard" if colour else None,
        no_color=False, highlight=False,
    )  # fmt: skip
    terminal.show(document, console, details=details)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(shown, str)
    return shown


class Page(HTMLParser):
    """Reads a page and insists on what a browser forgives: every tag closed, in order."""

    VOID = {"meta", "link", "br", "wbr", "hr", "img", "input"}
    BLOCKS = {"div", "table", "ul", "ol", "p", "figure", "section", "h1", "h2", "h3", "dl", "details"}
    LINES = {"p", "li", "h1", "h2", "h3", "h4", "tr", "figcaption", "caption", "summary", "dt", "svg"}
    CELLS = {"th", "td", "dd"}

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []
        self.seen: list[str] = []
        self.feed(source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not (tag in self.BLOCKS and "p" in self.open), f"<{tag}> within a paragraph"
        self.handle_startendtag(tag, attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if "svg" not in self.open:
            self.seen.append("\n" if tag in self.LINES else " | " if tag in self.CELLS else "")
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"style", "script", "nav"} & {*self.open}:
            return
        self.text.append(data)
        if "svg" not in self.open:
            self.seen.append(data.replace("\n", " "))
        elif self.open[-2:] == ["svg", "title"]:
            self.seen.append(f"[{data}]")

    @property
    def words(self) -> str:
        return " ".join("".join(self.text).replace("\u00a0", " ").split())

    @property
    def lines(self) -> list[str]:
        """What a reader sees, a row of a table a line, with the names of drawings in brackets."""
        lines = (re.sub(" +", " ", line).strip(" |") for line in "".join(self.seen).split("\n"))
        return [line for line in lines if line]


def sound(source: str) -> Page:
    """Asserts what holds for every page, and returns it.

    It loads nothing and lets no script run but its own, its headings skip no level, each anchor is there once and is
    where a link leads to, a chart has two bars or more, and each image and control has a name.
    """
    page = Page(source)
    addresses = [value for name, value in page.attributes if name in ("href", "src", "xlink:href", "action", "data")]
    assert not [one for one in addresses if one.startswith(("//", "http")) and one != perfetto.VIEWER]
    assert not re.search(r"url\(|@import", source)
    policy = next(value for name, value in page.attributes if name == "content" and "default-src" in value)
    assert policy.startswith("default-src 'none'")
    assert page.tags.count("script") - source.count('type="application/json"') == 1
    levels = [int(tag[1]) for tag in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels)), levels
    names = [value for name, value in page.attributes if name == "id"]
    assert len(set(names)) == len(names)
    assert {one[1:] for one in addresses if one.startswith("#")} <= set(names)
    assert source.count('role="img"') == source.count("<desc>")
    for rows in re.findall(r'<svg class="drawing".*?</svg>\n', source, re.DOTALL):
        assert rows.count('class="row-name"') != 1 or "whisker" in rows or 'class="error"' in rows, "one bar"
    return page


def harmless(document: Document, at_least: int = 1) -> None:
    """Asserts that no medium obeys a text that contains HOSTILE and an escape, and that all show it."""
    on_wide_terminal, source = on_terminal(document, 1000, details=True), page.render(document)
    shown, written = Page(source), markdown.render(document)
    assert not [text for text in (on_wide_terminal, source, written) if "\x1b" in text]
    assert {"img", "iframe", "object"}.isdisjoint(shown.tags)
    assert shown.tags.count("script") == 1  # its own
    assert not [name for name, _ in shown.attributes if name.startswith("on")]
    assert "<script" not in written
    assert min(on_wide_terminal.count(HOSTILE), shown.words.count(HOSTILE), written.count(ESCAPED)) >= at_least


def everywhere(document: Document) -> str:
    """What every medium shows, for a golden file; of a page its visible text without the drawings."""
    shown = {
        "terminal, 80 columns": on_terminal(document, 80),
        "terminal, 120 columns, -v": on_terminal(document, 120, details=True),
        "Markdown": markdown.render(document),
        "page": "\n".join(Page(page.render(document)).lines).replace(f"gpubench {__version__}", "gpubench VERSION"),
    }
    parts = [f"======== {medium} ========\n{text.rstrip()}\n" for medium, text in shown.items()]
    return re.sub(r"[ \t]+$", "", "\n".join(parts), flags=re.MULTILINE)


def compare_page(found: Comparisons, sides: Sequence[Side]) -> str:
    return page.render(comparison.document(found, sides))
