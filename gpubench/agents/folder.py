"""The folder to which a server is limited: what lies below it, and which settings would lead out of it."""

import os
from collections.abc import Iterable
from pathlib import Path

from gpubench.errors import UsageError
from gpubench.registry import kind_of
from gpubench.settings.commands import COMMANDS
from gpubench.settings.field import declared_key, fields, stays_inside
from gpubench.settings.keys import COMMAND
from gpubench.settings.loading import canonical, refuse_unknown, variable_of

ELSEWHERE = "program.directory"
ARGUMENTS = {ELSEWHERE: "directory", COMMAND: "program"}
"""The arguments of a tool that say what a setting would."""


class Folder:
    """The folder that a server was started with."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError if `path` is not a folder, or if the environment sends programs to another one."""
        if not path.is_dir():
            raise UsageError(f"{path} is not a folder", "name the folder that has the programs to measure")
        if name := next((name for name in os.environ if name.upper() == variable_of(ELSEWHERE)), None):
            raise UsageError(f"{name} is set, and programs run only below {path}", f"unset {name}")
        self.path = path.resolve()

    def below(self, directory: str) -> Path:
        """Returns the path of a working directory, without links.

        Raises UsageError unless it is the folder or below.
        """
        path = Path(os.path.realpath(self.path / directory.replace("\0", "")))
        if not path.is_relative_to(self.path):
            raise UsageError(
                f"directory {directory!r} is outside of {self.path}, the folder that this server was started with",
                "name a directory below it, or have the user start the server with another folder",
            )
        if "\0" in directory or not os.path.isdir(path):  # noqa: PTH112 - Path's own raises for a name too long
            raise UsageError(
                f"directory {directory!r} does not exist in {self.path}", "name one that does, or . itself"
            )
        return path

    def file(self, name: str, directory: Path) -> str:
        """Returns the path of a file that a tool may write. Raises UsageError if it leads out of the folder."""
        path = Path(os.path.realpath(directory / name.replace("\0", "")))
        if "\0" in name or not path.is_relative_to(self.path):
            raise UsageError(f"file {name!r} is outside of {self.path}", "name a file below it")
        return str(path)

    def run(self, name: str, directory: Path) -> str:
        """Returns the name of a run. Raises UsageError for an option, and for a path that leads out of the folder."""
        if name.startswith("-"):
            raise UsageError(f"{name!r} is an option and not a run", "name a run: latest, latest~1, an id, or its path")
        path = Path(os.path.normpath(directory / name))
        if not path.is_relative_to(self.path):
            raise UsageError(f"run {name!r} is outside of {self.path}", "name a run that was made below it")
        return name


def refuse_settings(command: str, keys: Iterable[str]) -> None:
    """Raises an error for what is not a setting of the runs of `command`, and for one that can lead out of a folder."""
    cls = COMMANDS[command]
    for key in keys:
        known = canonical(cls, key)
        if declared_key(cls, known) is None:
            refuse_unknown(cls, {key: ""}, {})
            raise UsageError(f"{key!r} is not a setting of {kind_of(command).run_by}", "name it by its dotted name")
        if not stays_inside(fields(cls)[known]):
            argument = ARGUMENTS.get(known)
            hint = f"the argument {argument} says it" if argument else "leave it out; a user sets it on a terminal"
            message = f"the setting {key!r} can read, write or send outside of the folder, so a tool does not choose it"
            raise UsageError(message, hint)
