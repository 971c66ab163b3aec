"""A program of the user, given after `--` on the command line of train-bench, profile, memory and tune."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gpubench import git
from gpubench.commands import options, program_words
from gpubench.configs import presets
from gpubench.errors import UsageError
from gpubench.ranks import launched_by_torchrun
from gpubench.registry import NOT_OF_PROGRAMS, OF_PROGRAMS, RunKind, kind_of
from gpubench.settings.options import options as of_settings

if TYPE_CHECKING:
    from gpubench.settings.loading import Configuration
    from gpubench.settings.programs import CommandSettings


def is_given(ctx: typer.Context, config: str | None) -> bool:
    """Tells whether there is a program after `--`, or `config` is a file that names one."""
    if options.program(ctx) is not None:
        return True

    from gpubench.settings.loading import find_config, read_settings, writer_of

    if config is None or config in presets():  # a preset is not read only to see that it names none
        return False
    path = find_config(config, str(ctx.info_name))
    return writer_of(path) in OF_PROGRAMS or "program.command" in read_settings(path)


def _refusal(name: str, kind: RunKind) -> tuple[str, str]:
    """Why a program does not take an option of a model, and what to do instead."""
    option = f"--{name.replace('_', '-')}"
    if name == "inference":  # of memory alone
        return (
            f"{option}: memory follows a program from one optimizer step to the next, and inference has none",
            f"gpubench {kind_of(kind.work).run_by} {option} -- PROGRAM measures the peak memory of its inference",
        )
    if name == "device":
        return f"{option}: a program chooses its device itself", "choose it in the program, or by CUDA_VISIBLE_DEVICES"
    if name == "world_size":
        start = f"gpubench {kind.run_by} -- torchrun --nproc-per-node 2 train.py"
        return f"{option}: a program starts its ranks itself", start
    configures = f"{option} configures a model of gpubench, not a program"
    return configures, NOT_OF_PROGRAMS


def configuration(ctx: typer.Context, config: str | None, kind: RunKind) -> "Configuration[Any]":
    """The settings of a run of the program, from all sources.

    Raises UsageError or SettingsError for a program that cannot be started, and for settings that no program has.
    """
    from gpubench.settings.commands import COMMANDS
    from gpubench.settings.field import fields
    from gpubench.settings.loading import canonical, load

    if launched_by_torchrun():
        command = f"gpubench {ctx.info_name} -- torchrun train.py"
        raise UsageError("torchrun started gpubench, and the program is started by gpubench", command)
    words = options.program(ctx)
    cls, of_models = COMMANDS[kind.command], COMMANDS[kind.run_by]
    others = fields(of_models).keys() - fields(cls)
    if foreign := [name for name in options.given(ctx) if canonical(of_models, name) in others]:
        raise UsageError(*_refusal(foreign[0], kind))
    refused = [name for name in of_settings(str(ctx.info_name)) if canonical(of_models, name) in others]
    given = options.overrides(ctx, cls, {name: _refusal(name, kind)[1] for name in refused})
    if words is None:
        return load(cls, config, given)
    name, own = str(ctx.info_name), options.own_words(ctx)
    program_words.refuse(name, own, words)
    base = load(cls, config, given | {"program.command": shlex.join(words)})
    program: CommandSettings = base.settings.program  # type: ignore[attr-defined]  # of every `cls` here
    given_words = program_words.ProgramWords(name, own, words, program.directory or Path())
    program_words.refuse_unstartable(given_words, at_commit=bool(program.ref))
    if program.ref:
        git.commit(given_words.directory, program.ref)
    return base
