"""Every option of the command line, by any of its names."""

from collections.abc import Iterator
from typing import Any

import typer

from gpubench.commands import app
from gpubench.settings.commands import COMMANDS
from gpubench.settings.field import aliases, fields


def commands(command: Any) -> Iterator[Any]:
    yield command
    for inner in getattr(command, "commands", {}).values():
        yield from commands(inner)


def known() -> set[str]:
    everywhere = list(commands(typer.main.get_command(app)))
    named = {name for one in everywhere for option in one.params for name in (*option.opts, *option.secondary_opts)}
    keys = {key for cls in COMMANDS.values() for key in (*fields(cls), *aliases(cls))}
    return named | {f"--{key.replace('_', '-')}" for key in keys} | {f"--{key}" for key in keys} | {"--help"}
