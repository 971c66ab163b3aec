"""Where a result goes: to stdout whole, or into a file whole."""

import errno
import os
import sys
from pathlib import Path

from gpubench.errors import RunFailed, UsageError


def write(text: str, hint: str) -> None:
    """The result, on stdout. A reader that had enough is no error; a full disk is, and `hint` is the way round it."""
    if sys.stdout is None:  # closed before Python began
        raise RunFailed("cannot write to stdout: it is closed", hint)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.EPIPE:
            raise RunFailed(f"cannot write to stdout: {error.strerror}", hint) from None
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python fails once more as it exits


def check_file(path: Path, option: str, *inputs: Path) -> None:
    """Raises UsageError unless a file can be there, none of `inputs`; before the work, so that none is in vain."""
    for one in inputs:
        if path.exists() and one.exists() and path.samefile(one):
            raise UsageError(f"{option} {path} is what is to be read", "name another file")
    if path.is_dir():
        raise UsageError(f"{option} {path} is a directory", f"name a file in it: {path / 'page.html'}")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}", f"mkdir -p {path.parent}")


def write_file(path: Path, text: str) -> None:
    """Written aside and renamed, so that nobody ever reads half of it. Raises RunFailed if it cannot be.

    A link stays one: what it points at is replaced. A pipe or a device is written to and stays what it is.
    """
    from gpubench.runs import write_document  # here, as help needs nothing of it

    target = Path(os.path.realpath(path))
    try:
        if target.is_symlink() or (path.exists() and not target.is_file()):
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
        else:
            write_document(target, text)
    except OSError as error:
        raise RunFailed(
            f"cannot write {path}: {error.strerror}", "name a file in a folder that can be written"
        ) from None
