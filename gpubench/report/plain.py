"""Text of others, made fit for one line of a terminal or a page."""

from gpubench import units


def clean(text: str) -> str:
    """One line in which control characters, line ends and lone surrogates are spelled out."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def cell(text: str) -> str:
    """The same for a cell of a CSV: what a spreadsheet would run as a formula has an apostrophe in front."""
    safe = clean(text)
    return f"'{safe}" if safe.startswith(("=", "+", "-", "@")) else safe


def words(name: str) -> str:
    """A name, of a metric or phase, as people write it."""
    return units.words(clean(name))


def shorten(text: str, limit: int) -> str:
    """At most `limit` characters, by leaving out the middle: names and versions differ at their ends."""
    if len(text) <= limit:
        return text
    kept = limit - 1
    return f"{text[: kept - kept // 2]}…{text[len(text) - kept // 2 :]}"
