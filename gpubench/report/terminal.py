"""The two output streams: results on stdout, everything else on stderr, at the verbosity that the user chose."""

import io
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from gpubench.logs import MODIFIABLE, NOTIMPORTANT
from gpubench.text import spelled_out

if TYPE_CHECKING:
    from gpubench.host.live import Drawing, View

_LEVELS = (MODIFIABLE, logging.INFO, NOTIMPORTANT)
PIPE_COLUMNS = 120
_STYLES = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red", "MODIFIABLE": "cyan"}


class Stream(Console):
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
        self._out = Console(highlight=False)
        if not self._out.is_terminal and not os.environ.get("COLUMNS"):
            self._out.width = PIPE_COLUMNS  # rich would cut a piped table to 80 columns
        self.err = Stream(stderr=True, highlight=False)
        self._quiet = quiet
        root = logging.getLogger("gpubench")
        root.setLevel(1)  # run.log filters by itself
        root.propagate = False
        root.addHandler(_OnConsole(self.err, logging.WARNING if quiet else _LEVELS[min(verbosity, 2)]))

    def render(self, show: Callable[..., None], *what: object) -> str:
        """Return what `show(*what, console)` prints on a console formatted as stdout, without printing it."""
        text = io.StringIO()
        colours: Any = self._out.color_system  # rich returns a str here and takes a Literal
        show(
            *what,
            Console(
                file=text,
                width=self._out.width,
                color_system=colours,
                force_terminal=self._out.is_terminal,
                no_color=self._out.no_color,
                highlight=False,
            ),
        )
        return text.getvalue()

    def view(self, drawing: "Drawing[Any]") -> "View":
        """Return the live view: a table on a terminal, lines in a pipe, nothing with -q."""
        from gpubench.host.live import Lines, LiveTable, Silence  # imported late: only a running benchmark needs it

        if self._quiet:
            return Silence()
        if self.err.is_terminal and not self.err.is_dumb_terminal:
            return LiveTable(self.err, drawing)
        return Lines(self.err, drawing)


class _OnConsole(logging.Handler):
    def __init__(self, console: Console, level: int) -> None:
        super().__init__(level)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        name = record.levelname.lower()
        style = _STYLES.get(record.levelname, "dim")
        self._console.print(f"[{style}]{name}:[/] {escape(record.getMessage())}", soft_wrap=True)
