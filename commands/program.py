"""Runs a program of the user, which stands behind `--` on the command line of train-bench and profile."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from gpubench.commands import options
from gpubench.commands.running import print_configurations, run_and_report
from gpubench.errors import UsageError
from gpubench.ranks import launched_by_torchrun


def is_given(ctx: typer.Context, config: str | None) -> bool:
    """Returns whether there is a program behind `--`, or `config` is the file of a run that measured one."""
    if options.program(ctx) is not None:
        return True

    from gpubench.settings.loading import find_config, writer_of
    from gpubench.settings.schema import PROGRAM

    return config is not None and writer_of(find_config(config)) == PROGRAM


def measure(
    ctx: typer.Context,
    config: str | None,
    shown: options.Shown,
    defaults: Mapping[str, Any] | None = None,
    *,
    print_config: bool,
    vs: Sequence[str] | None = None,
    vs_args: str | None = None,
    vs_ref: str | None = None,
) -> None:
    """Measures the program, or two versions of it interleaved. `defaults` are settings of the command by dot-key.

    Raises UsageError or SettingsError for a program that cannot be started, and settings that a program does not have.
    """
    from gpubench.host.program import ProgramRecorder, complete_program
    from gpubench.settings.field import fields
    from gpubench.settings.loading import canonical, completed, load, owners
    from gpubench.settings.schema import ProgramSettings

    known, words = fields(ProgramSettings), options.program(ctx)
    if launched_by_torchrun():
        command = f"gpubench {ctx.info_name} -- torchrun train.py"
        raise UsageError("torchrun started gpubench, and the program is started by gpubench", command)
    if vs:
        raise UsageError("--vs changes a setting of gpubench, and a program has its own", "use --vs-args or --vs-ref")
    if vs_args and vs_ref:
        raise UsageError("--vs-args and --vs-ref are two comparisons", "give one of them")
    foreign = [name for name in options.given(ctx) if owners(name) and canonical(ProgramSettings, name) not in known]
    if foreign:
        raise UsageError(
            f"--{foreign[0].replace('_', '-')} configures a model of gpubench, not a program",
            "leave it out, or give the program an argument of its own after --",
        )
    given = {**(defaults or {}), **options.overrides(ctx, ProgramSettings)}
    if words is not None:
        given["program.command"] = shlex.join(words)
    run = completed(load(ProgramSettings, config, given), complete_program)
    runs, labels = [run], []
    if vs_args:
        more = {"program.command": f"{run.settings.program.command} {vs_args}"}
        runs, labels = [run, run.with_overrides(more, "--vs-args")], ["as given", f"with {vs_args}"]
    elif vs_ref:
        runs, labels = [run.with_overrides({"program.ref": vs_ref}, "--vs-ref"), run], [vs_ref, "this directory"]
    if print_config:
        print_configurations(runs, ctx.info_name or "")
        return

    from gpubench.host import live

    run_and_report(runs, ProgramRecorder, live, labels=labels, **shown._asdict())
