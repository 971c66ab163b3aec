"""A page beside a trace that opens it in Perfetto by one click.

A page that was opened from a disk may not read the files beside it, so that the trace is in the page itself. The page
hands it to the viewer in another tab of the browser, by the messages that Perfetto documents; nothing is uploaded.
"""

import base64
import logging
from collections.abc import Iterable
from pathlib import Path

from gpubench import foreign_files
from gpubench.runs.directory import REPORT, write_document

VIEWER = "https://ui.perfetto.dev"
SUFFIX = ".html"
LARGEST = 64 * 2**20
"""The bytes of the largest trace that gets a page, which is a third larger and is kept beside the trace."""

log = logging.getLogger("gpubench.report.perfetto")


def write_pages(traces: Iterable[Path]) -> None:
    """Writes the page of each trace that is not too large. Errors are logged, because the traces are safe."""
    for trace in traces:
        try:
            if trace.stat().st_size <= LARGEST:
                content = foreign_files.content(trace)
                write_document(page_of(trace), render(trace.name, content))
        except OSError as error:
            log.warning("no page for Perfetto of %s: %s", trace, error)


def page_of(trace: Path) -> Path:
    return trace.with_name(trace.name + SUFFIX)


def render(name: str, content: bytes) -> str:
    from gpubench.report import page  # with jinja2, which the terminal does without

    held = base64.b64encode(content).decode()
    links = [("Run", f"../{REPORT}")]
    return page.rendered("perfetto.html", ["perfetto.js"], links, name=name, viewer=VIEWER, content=held)
