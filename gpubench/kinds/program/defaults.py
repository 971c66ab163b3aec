"""Completes the settings of a program, and refuses one that cannot be started."""

import os
import shutil
from pathlib import Path

from gpubench.errors import SettingsError
from gpubench.settings.defaults import Gaps
from gpubench.settings.programs import (
    CompletedProgramMemorySettings,
    CompletedProgramSettings,
    ProgramMemorySettings,
    ProgramSettings,
)


def complete_program(settings: ProgramSettings) -> tuple[CompletedProgramSettings, dict[str, str]]:
    """Completes the settings. Raises SettingsError if the program cannot be started."""
    _refuse_unstartable(settings)
    gaps = Gaps(settings)
    return gaps.filled(), gaps.reasons


def complete_program_memory(
    settings: ProgramMemorySettings,
) -> tuple[CompletedProgramMemorySettings, dict[str, str]]:
    """Completes the settings. Raises SettingsError if the program cannot be started."""
    _refuse_unstartable(settings)
    return CompletedProgramMemorySettings.model_validate(settings.model_dump()), {}


def _refuse_unstartable(settings: ProgramSettings) -> None:
    program = settings.program
    directory = program.directory or Path()
    if not directory.is_dir():
        message = f"program.directory: there is no directory {directory}"
        raise SettingsError(message, "give the directory to run the program in", keys=["program.directory"])
    name = program.words[0]
    if not shutil.which(name if os.sep not in name else str(directory.absolute() / name)):
        raise SettingsError(
            f"cannot start the program: {_why_not(directory / name, name)}",
            "write the command after -- as in a shell, for example: -- python train.py",
            keys=["program.command"],
        )


def _why_not(path: Path, name: str) -> str:
    if path.is_file():
        return f"{name} is not executable" + (f"; start it with python {name}" if path.suffix == ".py" else "")
    return f"there is no command {name!r}"
