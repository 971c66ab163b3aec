"""One look for all that the terminal shows: tables, bars and sentences."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

BAR = 24  # characters
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
"""Of the phases of a step, and of the parts of a profile; one that is not here is white."""


def plain_table() -> Table:
    return Table(box=None, pad_edge=False, header_style="dim")


class Fitting:
    """The first of some tables that fits without cutting anything, or the last. There is one at least."""

    def __init__(self, tables: Iterable[Table]) -> None:
        self._tables = list(tables)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unbounded = options.update(max_width=10_000)
        fit = (one for one in self._tables if console.measure(one, options=unbounded).maximum <= options.max_width)
        yield next(fit, self._tables[-1])


def bar(share: float, part: str, length: int = BAR) -> Text:
    """`share` of `length`, in the colour of the phase or part."""
    filled = round(share * length)
    return Text.assemble(("█" * filled, COLOURS.get(part, "white")), ("░" * (length - filled), "bright_black"))


def say(console: Console, line: str, style: str = "") -> None:
    """A sentence: broken between words on a terminal, and not at all in a file, where people search for it."""
    console.print(Text(line, style=style), soft_wrap=not console.is_terminal)


def say_unbroken(console: Console, line: str, style: str = "") -> None:
    """What is to be copied out of the terminal."""
    console.print(Text(line, style=style), soft_wrap=True)
