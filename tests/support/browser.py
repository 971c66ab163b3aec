"""A real browser, where one is installed: what it makes of a page."""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--enable-logging=stderr", "--v=0",
)  # fmt: skip
PHONE = 380  # pixels
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome is installed")


def probed(source: str, script: str) -> str:
    """The page with a script that looks at what the browser made of it, which the page's own policy would refuse."""
    allowed = re.sub(r"script-src '[^']*'", "script-src 'unsafe-inline'", source)
    return f"{allowed}<script>{script}</script>"


def browse(page: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    """Opens the file once, with a fresh profile beside it."""
    command = [str(BROWSER), *QUIET, f"--user-data-dir={page.parent / 'profile'}", *options, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)


def width_on_a_phone(source: str, folder: Path) -> int:
    """Pixels across that the page takes on a screen of PHONE: no more, or it has to be scrolled sideways."""
    return int(_measured(source, folder, PHONE, "document.documentElement.scrollWidth"))


def wide_tables(source: str, folder: Path, width: int) -> int:
    """How many of the page's tables have to be scrolled sideways on a screen of `width` pixels."""
    tables = "[...document.querySelectorAll('.table')]"
    return int(_measured(source, folder, width, f"{tables}.filter(one => one.scrollWidth > one.clientWidth).length"))


def _measured(source: str, folder: Path, width: int, expression: str) -> str:
    """A number that a script finds in the page."""
    page = folder / "inner.html"
    page.write_text(source)
    return str(found_in([page], width, expression)[page])


def found_in(pages: Sequence[Path], width: int, expression: str) -> dict[Path, Any]:
    """What a script finds in each of the pages on a screen of `width` pixels, all in one start of the browser.

    A copy of each page is opened beside it, so that its links and pictures are its own. Asserts that no page asked for
    anything that its policy refuses.
    """
    copies = [page.with_name(f"{page.stem}-probed.html") for page in pages]
    # A window of the browser is never narrower than 500 pixels; a frame is.
    style = f"width:{width}px;height:900px;border:0"
    frames = [f'<iframe src="{copy.as_uri()}" style="{style}"></iframe>' for copy in copies]
    for number, (page, copy) in enumerate(zip(pages, copies, strict=True)):
        keep = f"parent.document.body.dataset.found{number} = JSON.stringify({expression})"
        copy.write_text(probed(page.read_text(), keep))
    outer = pages[0].with_name("outer.html")
    outer.write_text(f"<body>{''.join(frames)}")
    try:
        done = browse(outer, "--allow-file-access-from-files", "--virtual-time-budget=3000", "--dump-dom")
    finally:
        for path in (*copies, outer):
            path.unlink()
    assert not [line for line in done.stderr.splitlines() if "Content Security Policy" in line]
    found = dict(re.findall(r' data-found(\d+)="([^"]*)"', done.stdout))
    return {page: json.loads(html.unescape(found[str(number)])) for number, page in enumerate(pages)}
