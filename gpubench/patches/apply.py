"""Applies a patch to the files of a program: all of them or none, and only if they are as they were."""

import os
import shlex
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from gpubench import foreign_files
from gpubench.errors import RunFailed, UsageError
from gpubench.patches import diff
from gpubench.text import clean


def applied(patch: Path, directory: Path, content: bytes | None = None) -> dict[str, diff.Versions]:
    """The files of a directory that a patch changes, before and after it. Raises UsageError if it does not apply.

    `content` is that of the patch, if it has been read already.
    """
    try:
        content = foreign_files.content(patch) if content is None else content
        found = diff.applied(content, lambda name: foreign_files.content(directory / name))
    except OSError as error:
        raise UsageError(f"{error.filename or patch} cannot be read: {error.strerror}", "check the folder") from None
    except diff.NotApplicable as error:
        hint = "make a new patch: gpubench tune, or apply what still fits by patch -p1"
        if error.args[0] == diff.APPLIED:
            hint = f"git apply -R {shlex.quote(str(patch))} takes it back"
        raise UsageError(f"{patch} does not apply in {directory.absolute()}: {error}", hint) from None
    for name in found:
        path = directory / name
        if path.is_symlink() or not path.resolve().is_relative_to(directory.resolve()):
            raise UsageError(f"{patch} changes {path}, which is or is below a link", "apply it to what is linked")
    return found


def shown(files: Mapping[str, diff.Versions]) -> str:
    """The change of files as a diff for a terminal, in which every character that cannot be seen is an escape."""
    lines = diff.changes(files).decode(errors="backslashreplace").split("\n")
    return "\n".join("\t".join(map(clean, line.split("\t"))) for line in lines)


def apply(files: Mapping[str, diff.Versions], directory: Path) -> None:
    """Changes files in a directory. Raises RunFailed if one cannot be written; nothing is changed then."""
    done: list[str] = []
    try:
        for name, versions in files.items():
            _replace(directory / name, versions.after)
            done.append(name)
    except OSError as error:
        for name in done:
            with suppress(OSError):
                _replace(directory / name, files[name].before)
        named = Path(error.filename or directory).name.removeprefix(".").removesuffix(".tmp")
        raise RunFailed(f"cannot write {named}: {error.strerror}; nothing is changed", "check who owns it") from None


def replaced(path: Path, content: bytes) -> None:
    """Puts a new file in the place of one, with its permissions. Raises OSError if it cannot be written."""
    mode = stat.S_IMODE(path.stat().st_mode)
    foreign_files.replace(path, content)
    path.chmod(mode)


def _replace(path: Path, content: bytes) -> None:
    """Does the same with a file of the user's, and raises OSError also if that one is read-only."""
    if not os.access(path, os.W_OK):
        raise PermissionError(13, os.strerror(13), str(path))
    replaced(path, content)
