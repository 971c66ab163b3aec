"""Renders a report as GitHub-flavoured Markdown, for a pull request or a job summary."""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import singledispatch

from gpubench.report.document import (
    Block,
    Breakdown,
    Command,
    Document,
    FindingList,
    Folded,
    Heading,
    Medium,
    NestedDocument,
    Paragraph,
    Sides,
    Table,
)
from gpubench.text import clean

_SPECIAL = re.compile(r"([\\`*\[\]|~#$])|(?<![^\W_])(_)|(_)(?![^\W_])")  # an underscore inside a word needs no escape


def render(document: Document) -> str:
    """Returns the document as Markdown that ends with one newline."""
    lines = [f"### {escape(document.headline)}", ""] if document.headline else []
    lines += _blocks(document.blocks)
    text = "\n".join(lines).strip("\n")
    return re.sub(r"\n{3,}", "\n\n", text) + "\n"


def escape(text: str) -> str:
    """Returns text that Markdown renders literally in a cell, a list or a heading."""
    safe = clean(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(lambda found: f"\\{found[0]}", safe)


def _blocks(blocks: Iterable[Block]) -> Iterator[str]:
    for block in blocks:
        if Medium.MARKDOWN in block.on:
            yield from _block(block)


@singledispatch
def _block(_block: Block) -> Iterator[str]:
    """Yields the lines of a block; those without text, such as figures, have none."""
    return iter(())


@_block.register
def _(block: Heading) -> Iterator[str]:
    yield from ("", f"{'#' * (block.level + 2)} {escape(block.text)}", "")


@_block.register
def _(block: Paragraph) -> Iterator[str]:
    yield from (f"- {escape(block.label + text)}" for text in block.texts)


@_block.register
def _(block: Command) -> Iterator[str]:
    yield f"- {escape(block.label)}: {escape(block.text)}{escape(block.after)}{block.link}"


@_block.register
def _(block: Table) -> Iterator[str]:
    if block:
        yield from _table(block.title, block.columns, [[cell.text for cell in row] for row in block.rows])
        yield from (escape(line) for line in (block.rest and f"and {block.rest}", block.note) if line)
        yield ""


@_block.register
def _(block: Breakdown) -> Iterator[str]:
    if block.parts:
        rows = [[part.name, part.size, part.percent] for part in block.parts]
        yield from _table(block.title, (block.of, block.size, "share"), rows)


@_block.register
def _(block: FindingList) -> Iterator[str]:
    for number, finding in enumerate(block.findings, 1):
        yield from ("", f"{number}. **{escape(finding.title)}** ({finding.severity})")
        lines = [
            *(("evidence", text) for text in finding.evidence),
            *((line.label, line.text) for line in finding.lines),
        ]
        yield from (f"   - {escape(label)}: {escape(text)}" for label, text in lines)
    yield "" if block.findings else f"- no finding: {escape(block.nothing)}"


@_block.register
def _(block: Sides) -> Iterator[str]:
    for side in (block.baseline, block.candidate):
        yield f"- {side.role} {escape(side.line)}"


@_block.register
def _(block: Folded) -> Iterator[str]:
    return _blocks(block.blocks)


@_block.register
def _(block: NestedDocument) -> Iterator[str]:
    yield from ("", f"### {escape(block.headline)}", "")
    yield from _blocks(block.blocks)


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yields a table between two blank lines; this function escapes the cells."""
    lines = [f"| {' | '.join(map(escape, row))} |" for row in (head, *rows)]
    yield from ("", *([f"**{escape(title)}**", ""] if title else []))
    yield from (lines[0], "|" + "---|" * len(head), *lines[1:], "")
