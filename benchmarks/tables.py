"""Rows as a Markdown table whose columns also align as plain text."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return the table; the first row is the head. A "|" inside a cell, which would end it, becomes a slash."""
    clean = [[" ".join(cell.replace("|", "/").split()) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in clean) for column in range(len(clean[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in clean
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join((lines[0], rule, *lines[1:]))
