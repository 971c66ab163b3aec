"""One call of the command line in a process forked for it: a hang, a crash and a bomb end with that process."""

import json
import os
import re
import resource
import signal
import sys
import time
import traceback
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import NoReturn

MEMORY = 3 << 30
"""Bytes of addresses that a case may have: ten times what an ordinary one takes."""
RESIDENT = 1 << 30
PATIENCE = 20.0
"""Seconds of its own processor time after which a case counts as hung; of the clock, four times as many."""
WRITTEN = 256 << 20

EXIT_CODES = (0, 1, 2, 3, 4)
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
_SCRIPT = re.compile(r"<\s*(script|iframe|object|img)\b|\son\w+\s*=\s*[\"']", re.IGNORECASE)


@dataclass(frozen=True)
class Ended:
    """How a call ended."""

    code: int
    """Of the exit; negative for a signal."""
    stdout: str
    stderr: str
    resident: int
    """Bytes, at the most."""
    hung: bool


def call(arguments: Sequence[str], here: Path, streams: Path) -> Ended:
    """`gpubench ARGUMENTS` in the folder `here`, what it says written to files in `streams`."""
    files = [streams / "stdout", streams / "stderr"]
    child = os.fork()
    if not child:
        _become(arguments, here, files)
    code, usage, hung = _wait(child)
    out, err = (file.read_bytes().decode(errors="replace") for file in files)
    return Ended(code, out, err, usage.ru_maxrss * 1024, hung)


def _become(arguments: Sequence[str], here: Path, files: Sequence[Path]) -> NoReturn:
    """Of the forked process: it never returns to the loop of its parent."""
    code = 70
    try:
        os.setsid()
        for number, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(here)
        for what, most in (
            (resource.RLIMIT_AS, MEMORY),
            (resource.RLIMIT_CPU, int(PATIENCE)),
            (resource.RLIMIT_FSIZE, WRITTEN),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(what, (most, most))
        sys.argv = ["gpubench", *arguments]
        from gpubench.commands import main

        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _wait(child: int) -> tuple[int, resource.struct_rusage, bool]:
    deadline, pause = time.monotonic() + 4 * PATIENCE, 0.001
    while True:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code, usage, code in (-signal.SIGXCPU, -signal.SIGKILL)
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            _, status, usage = os.wait4(child, 0)
            return os.waitstatus_to_exitcode(status), usage, True
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def complaint(ended: Ended, kind: str, pages: Sequence[Path]) -> str | None:
    """What is wrong with how it ended, and with what it wrote; None if nothing is.

    `kind` is what stdout should hold: text, json or html.
    """
    if ended.hung:
        return "hang"
    if ended.code not in EXIT_CODES:
        return f"exit code {ended.code}"
    if "Traceback (most recent call last)" in ended.stderr:
        return f"traceback: {ended.stderr.strip().splitlines()[-1][:120]}"
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error:")]
    if len(errors) != (ended.code in (1, 2)):
        return f"exit code {ended.code} with {len(errors)} lines of error"
    if ended.resident > RESIDENT:
        return f"{ended.resident >> 20} MiB of memory"
    if found := _CONTROL.search(ended.stdout + ended.stderr):
        return f"the control character {found[0]!r} in what it says"
    return _page_complaint(ended, kind, pages) if ended.code in (0, 3, 4) else None


def _page_complaint(ended: Ended, kind: str, pages: Sequence[Path]) -> str | None:
    if kind == "json":
        try:
            json.loads(ended.stdout, parse_constant=_refuse)
        except ValueError as error:
            return f"stdout is no JSON: {error}"
    sources = [page.read_text(errors="replace") for page in pages if page.is_file()]
    for source in [ended.stdout] * (kind == "html") + sources:
        source = _without_own_script(source)
        if found := _SCRIPT.search(source):
            return f"{found[0]!r} in a page"
        if found := _CONTROL.search(source):
            return f"the control character {found[0]!r} in a page"
    return None


def _without_own_script(page: str) -> str:
    """A page without the script at its end whose digest its policy names, which is of the templates."""
    start, end = page.rfind("<script>"), page.rfind("</script>")
    script = page[start + len("<script>") : end]
    digest = b64encode(sha256(script.encode(errors="replace")).digest()).decode()
    return page[:start] + page[end:] if f"'sha256-{digest}'" in page else page


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def tree(folder: Path) -> Mapping[str, tuple[int, ...]]:
    """What is under a folder: kind, size and time of change, by path."""
    found = {}
    for parent, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = os.path.join(parent, name)  # noqa: PTH118 - names that are no text
            about = os.lstat(path)
            found[path] = (about.st_mode, about.st_ino, about.st_size, about.st_mtime_ns)
    return found
