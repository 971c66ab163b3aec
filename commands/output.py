"""Writes a complete result to stdout or to a file."""

import errno
import os
import sys
from pathlib import Path

from gpubench.errors import RunFailed, UsageError


def write(text: str, hint: str) -> None:
    """Writes the result to stdout. A closed pipe is not an error. A full disk is, and `hint` suggests another way."""
    if sys.stdout is None:  # closed before Python started
        raise RunFailed("cannot write to stdout: it is closed", hint)
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python fails again at exit
        if error.errno != errno.EPIPE:
            raise RunFailed(f"cannot write to stdout: {error.strerror}", hint) from None


def drop_unwritten() -> None:
    """Discards what stdout and stderr have not written.

    Python would otherwise fail to write it at exit, and exit with 120.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # closed before Python started
            continue
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def check_file(path: Path, option: str, *inputs: Path) -> None:
    """Raises UsageError if `path` cannot be written, or is one of `inputs`.

    Call it before the work, which would otherwise be lost.
    """
    for read in inputs:
        if path.exists() and read.exists() and path.samefile(read):
            raise UsageError(f"{option} {path} is an input of this command", "name another file")
    if path.is_dir():
        raise UsageError(f"{option} {path} is a directory", f"name a file in it: {path / 'page.html'}")
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}", f"mkdir -p {path.parent}")


def write_file(path: Path, text: str) -> None:
    """Writes a temporary file and renames it, so that readers never see an incomplete file. Raises RunFailed.

    If `path` is a link, its target is replaced. A pipe or a device is written to directly.
    """
    from gpubench import foreign_files  # imported here, because help does not need it
    from gpubench.runs.directory import write_document

    target = Path(os.path.realpath(path))
    try:
        if target.is_symlink() or (path.exists() and not target.is_file()):
            with foreign_files.written(path) as file:
                file.write(text.encode(errors="backslashreplace"))
        else:
            write_document(target, text)
    except OSError as error:
        raise RunFailed(
            f"cannot write {path}: {error.strerror}", "name a file in a folder that can be written"
        ) from None
