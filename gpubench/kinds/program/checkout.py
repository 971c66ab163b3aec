"""Checks out the commit of a program that is to be measured."""

import os
import shlex
from pathlib import Path

from gpubench import git
from gpubench.errors import UsageError
from gpubench.settings.programs import CommandSettings


def check_out(ref: str, program: CommandSettings, folder: str) -> tuple[CommandSettings, Path]:
    """Makes a copy of the repository of the program in `folder`, at the commit `ref`.

    Returns the program and its directory in the copy. Raises UsageError with git's reason, or for an absolute path to a
    file that the copy has too.
    """
    directory = program.directory or Path()
    top, there = git.check_out(ref, directory, Path(folder))
    for word in filter(os.path.isabs, program.words):
        path = Path(word).resolve()
        if path.is_relative_to(top.resolve()) and path.is_file() and git.is_tracked(top, path):
            relative = os.path.relpath(path, directory.resolve())
            words = [relative if each == word else each for each in program.words]
            raise UsageError(
                f"{word} names the file in your directory, not the one of commit {ref}",
                f"give its path relative to the directory: -- {shlex.join(words)}",
            )
    name, *arguments = program.words
    if os.sep in name and not (there / name).exists():  # such as .venv/bin/python, which git does not track
        name = str(directory.absolute() / name)
    return program.model_copy(update={"command": shlex.join([name, *arguments])}), there
