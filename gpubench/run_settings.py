"""What a command takes of a file of settings, which may be a finished run's, and another command's."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpubench import foreign_files
from gpubench.errors import SettingsError
from gpubench.run_names import RUN, TRIALS
from gpubench.setting_keys import COMMANDS, alike, canonical, command_of, fields, owners, section
from gpubench.settings import RunSettings


def is_of_a_run(path: Path) -> bool:
    return path.with_name(RUN).exists()


def writer_of(path: Path) -> str | None:
    """The command whose run a file lies in; None for a file of no run, or of one that does not tell."""
    try:
        record = json.loads(foreign_files.content(path.with_name(RUN)))
    except (OSError, ValueError, RecursionError):
        return None
    written = record.get("command") if isinstance(record, dict) else None
    return written if isinstance(written, str) and written in COMMANDS else None


def repeats(cls: type[RunSettings], path: Path) -> bool:
    """Whether the command of `cls` would run again what the file is of: a run of its own, or of one not told."""
    mine = command_of(cls)
    return is_of_a_run(path) and (writer_of(path) or mine) == mine


def taken(cls: type[RunSettings], values: Mapping[str, Any], name: str, path: Path) -> dict[str, Any]:
    """The settings in the file `path`, called `name` by the user, that concern the command of `cls`.

    Those that only a command alike has are left aside; so is what a run of another command has only because it is that
    command's default, where this one's differs. Raises SettingsError for a run that this command cannot run.
    """
    mine = command_of(cls)
    writer = writer_of(path) or mine
    if not alike(cls, COMMANDS[writer]):
        said = f"{name} is of a run of {writer}, which {mine} cannot run"
        raise SettingsError(said, f"gpubench {writer} --config {name}")
    own = {key: value for key, value in values.items() if not _of_another(cls, key, value)}
    if writer == mine:
        return own
    if "experiment" in own:
        own["experiment"] = _tried(writer, str(own["experiment"]))
    return {key: value for key, value in own.items() if not _default_of(COMMANDS[writer], cls, key, value)}


def _tried(writer: str, experiment: str) -> str:
    """The experiment whose fixes were tried in this one; the writer's default where that was a command's."""
    base = experiment.removesuffix(TRIALS) or experiment
    defaults = {command: fields(cls)["experiment"].get_default() for command, cls in COMMANDS.items()}
    return str(defaults[writer]) if base != experiment and base in defaults.values() else base


def _of_another(cls: type[RunSettings], key: str, value: Any) -> bool:
    """Whether a command alike has it, and this one has not: a setting, or a section with nothing in it."""
    empty = value is None and not section(cls, key)
    having = owners(key) or [command for command, other in COMMANDS.items() if empty and section(other, key)]
    return command_of(cls) not in having and any(alike(cls, COMMANDS[command]) for command in having)


def _default_of(writer: type[RunSettings], reader: type[RunSettings], key: str, value: Any) -> bool:
    theirs, ours = (fields(cls).get(canonical(cls, key)) for cls in (writer, reader))
    if theirs is None or ours is None:
        return False
    return bool(value == theirs.get_default() != ours.get_default())
