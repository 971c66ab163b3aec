"""Formats text for a terminal or a page: escapes control characters, draws tables and bars, wraps sentences."""

import re
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from gpubench import units

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def spelled_out(text: str) -> str:
    """Escapes control characters and lone surrogates; line ends and tabs stay."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


# Characters that Python calls printable, and that show nothing: fillers, joiners and selectors of variants.
_BLANK = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")


def clean(text: str) -> str:
    """Makes one line of `text`, with line ends, lone surrogates and what shows nothing as escapes, but for blanks."""
    shown = (char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
    return _BLANK.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), "".join(shown))


def cell(text: str) -> str:
    """Makes `text` safe for a cell of a CSV file, with an apostrophe before what a spreadsheet would run as a
    formula."""
    safe = clean(text)
    return f"'{safe}" if safe.startswith(("=", "+", "-", "@")) else safe


def words(name: str) -> str:
    return units.words(clean(name))


SAME_PART = {"data_loader": "data_wait"}
"""Parts of a profile that are a phase of a step under another name, and have its words and its colour."""


def step_part(name: str) -> str:
    """The name of a part of a step as words: of a phase, of a profile, or of what a timeline shows."""
    return words(SAME_PART.get(name, name))


def phase_name(name: str) -> str:
    """The name of a metric as words; that of a phase's time is the phase's."""
    return words(name.removeprefix("phase_"))


def shorten(text: str, limit: int) -> str:
    """Shortens `text` to `limit` characters by leaving out the middle, because names often differ at the end."""
    if len(text) <= limit:
        return text
    kept = limit - 1
    return f"{text[: kept - kept // 2]}…{text[len(text) - kept // 2 :]}"


MINUS = "\u2212"
PLUS_MINUS = "\u00b1"


def typeset(text: str) -> str:
    """Uses typographic signs, and no line break between a number and its sign or unit."""
    signed = re.sub(r"(?<![\w-])-(?=\d)", MINUS, text.replace("+- ", f"{PLUS_MINUS}\u00a0"))
    return re.sub(r"(?<=\d) (?=%|x\b|[mun]?s\b)", "\u00a0", signed)


BAR = 24  # length of a bar in characters
COLOURS = {
    "data_wait": "red",
    "host_to_device": "yellow",
    "forward": "green",
    "backward": "blue",
    "exposed_communication": "magenta",
    "optimizer": "cyan",
    "other": "bright_black",
    "compute": "blue",
    "communication": "magenta",
    "copies": "yellow",
    "data_loader": "red",
    "operators": "green",
}
"""The colours of the phases of a step and of the parts of a profile. All other parts are white."""


def plain_table() -> Table:
    """An empty table without borders."""
    return Table(box=None, pad_edge=False, header_style="dim")


class Fitting:
    """Renders the first of several tables that fits the terminal without truncation, or else the last one."""

    def __init__(self, tables: Iterable[Table]) -> None:
        self._tables = list(tables)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unbounded = options.update(max_width=10_000)
        fit = (
            table for table in self._tables if console.measure(table, options=unbounded).maximum <= options.max_width
        )
        yield next(fit, self._tables[-1])


def bar(share: float, part: str, length: int = BAR) -> Text:
    """A bar of `length` characters, of which `share` is filled in the colour of the phase or part."""
    filled = round(share * length)
    return Text.assemble(("█" * filled, COLOURS.get(part, "white")), ("░" * (length - filled), "bright_black"))
