"""Runs a program of the user, which stands behind `--` on the command line of train-bench, profile and memory."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from gpubench import git
from gpubench.commands import options, program_words, running
from gpubench.configs import presets
from gpubench.errors import GpubenchError, UsageError
from gpubench.ranks import launched_by_torchrun

if TYPE_CHECKING:
    from gpubench.report.profile_tables import Arrangement
    from gpubench.settings.loading import Configuration
    from gpubench.settings.schema import CommandSettings, RunSettings


def is_given(ctx: typer.Context, config: str | None) -> bool:
    """Returns whether there is a program behind `--`, or `config` is a file that names one."""
    if options.program(ctx) is not None:
        return True

    from gpubench.kinds import OF_PROGRAMS
    from gpubench.settings.loading import find_config, read_settings, writer_of

    if config is None or config in presets():  # a preset is not read only to see that it names none
        return False
    path = find_config(config, str(ctx.info_name))
    return writer_of(path) in OF_PROGRAMS or "program.command" in read_settings(path)


class Versus(NamedTuple):
    """The version to compare with: other settings, more arguments, or another commit."""

    settings: list[str] | None
    arguments: str | None
    ref: str | None

    def refuse_without_program(self, ctx: typer.Context) -> None:
        """Raises UsageError for what only a program has."""
        if self.arguments or self.ref:
            name = "--vs-args" if self.arguments else "--vs-ref"
            value = shlex.quote(self.arguments or self.ref or "")
            command = f"gpubench {ctx.info_name} {name} {value} -- python train.py"
            raise UsageError(f"{name} needs a program", command)


def measure(
    ctx: typer.Context, config: str | None, shown: options.Shown, versus: Versus, *, print_config: bool
) -> None:
    """Measures the program, or two versions of it interleaved.

    Raises UsageError or SettingsError for a program that cannot be started, and settings that a program does not have.
    """
    from gpubench.host.program_recorder import ProgramRecorder, complete_program
    from gpubench.settings.schema import ProgramSettings, TrainSettings

    base = configuration(ctx, config, ProgramSettings, TrainSettings)
    runs, labels = _versions(base, versus, complete_program)
    runs = options.labelled(ctx, runs, own=1 if versus.ref else 0)
    if print_config:
        running.print_configurations(runs, "train-bench")
        return

    from gpubench.host import live

    running.run_and_report(runs, ProgramRecorder, live, labels=labels, **shown._asdict())


def _versions(
    base: "Configuration[Any]", versus: Versus, complete: "Callable[[Any], tuple[Any, dict[str, str]]]"
) -> "tuple[list[Configuration[Any]], list[str]]":
    """Returns the complete configurations, one or two, and what to call two of them.

    Raises UsageError for a commit that does not exist.
    """
    from gpubench.settings.loading import complete_all

    if sum(map(bool, versus)) > 1:
        raise UsageError("--vs, --vs-args and --vs-ref are different comparisons", "give one of them")
    runs = complete_all(base, versus.settings, complete)
    (first, *_) = runs
    if versus.settings:
        return runs, ["as given", f"with {' '.join(versus.settings)}"]
    if versus.arguments:
        more = {"program.command": f"{first.settings.program.command} {versus.arguments}"}
        return [first, first.with_overrides(more, "--vs-args")], ["as given", f"with {versus.arguments}"]
    if versus.ref:
        git.commit(first.settings.program.directory or Path(), versus.ref)
        then = first.with_overrides({"program.ref": versus.ref}, "--vs-ref")
        return [then, first], [versus.ref, "this directory"]
    return runs, []


def diagnose(
    ctx: typer.Context,
    config: str | None,
    shown: options.Shown,
    arranged: "Arrangement",
    *,
    verify: bool,
    print_config: bool,
) -> None:
    """Measures and records the program, and diagnoses the recording; with `verify`, tries each fix without an edit.

    `arranged` is how the tables of the profile are shown. Raises the errors of `measure`.
    """
    from gpubench.host import live
    from gpubench.host.program_recorder import ProgramProfileRecorder, ProgramRecorder, complete_program
    from gpubench.report.terminal import Terminal
    from gpubench.settings.loading import complete_all
    from gpubench.settings.schema import ProfileSettings, ProgramProfileSettings

    base = configuration(ctx, config, ProgramProfileSettings, ProfileSettings)
    (run,) = options.labelled(ctx, complete_all(base, None, complete_program))
    if not run.settings.profiling.enabled:
        raise UsageError("profiling.enabled=false records no profile to diagnose", "add --profiling.enabled=true")
    if verify:
        running.check_trial_name(run)
    if print_config:
        running.print_configurations([run], "profile")
        return
    terminal = Terminal(quiet=shown.quiet, verbosity=shown.verbose)
    outcomes = running.measure([run], ProgramProfileRecorder, live, terminal)
    stopped: GpubenchError | None = None
    if verify and outcomes[0].recorder.is_spread:
        stopped = _spread("train-bench")
    elif verify:
        stopped = running.try_fixes(run, outcomes[0], terminal, complete_program, ProgramRecorder)
    running.finish(outcomes, None, terminal, json=shown.json, arranged=arranged)
    if stopped:
        raise stopped


def _spread(command: str) -> UsageError:
    return UsageError(
        "--verify needs all ranks of the program on one machine, because other machines do not know the fixes",
        f"try a fix with {command} --vs KEY=VALUE on every machine",
    )


def follow(
    ctx: typer.Context, config: str | None, shown: options.Shown, versus: Versus, *, verify: bool, print_config: bool
) -> None:
    """Runs a few steps of the program, or of two versions of it, and reports what fills its memory.

    With `verify`, tries each fix without an edit, and times them. Raises the errors of `measure`.
    """
    from gpubench.host import memory_recorder
    from gpubench.host.program_recorder import (
        ProgramMemoryRecorder,
        complete_program_memory,
    )
    from gpubench.report.terminal import Terminal
    from gpubench.settings.schema import MemorySettings, ProgramMemorySettings

    if verify and any(versus):
        raise UsageError("--verify tries the fixes of one program, and --vs compares two", "leave one out")
    base = configuration(ctx, config, ProgramMemorySettings, MemorySettings)
    runs, labels = _versions(base, versus, complete_program_memory)
    runs = options.labelled(ctx, runs, own=1 if versus.ref else 0)
    if verify:
        running.check_trial_name(runs[0])
    if print_config:
        running.print_configurations(runs, "memory")
        return
    if not verify:
        running.run_and_report(runs, ProgramMemoryRecorder, memory_recorder, labels=labels, **shown._asdict())
        return
    terminal = Terminal(quiet=shown.quiet, verbosity=shown.verbose)
    outcomes = running.measure(runs, ProgramMemoryRecorder, memory_recorder, terminal)
    stopped: GpubenchError | None
    if outcomes[0].recorder.is_spread:
        stopped = _spread("memory")
    else:
        stopped = running.try_memory_fixes_of_program(runs[0], outcomes[0], terminal)
        if (found := outcomes[0].recorder.findings) and not any(one.measured for one in found.findings):
            terminal.err.print("no finding has a fix that gpubench can try without an edit of the program")
    running.finish(outcomes, None, terminal, json=shown.json)
    if stopped:
        raise stopped


def configuration(
    ctx: typer.Context,
    config: str | None,
    cls: "type[RunSettings]",
    of_models: "type[RunSettings]",
) -> "Configuration[Any]":
    """Returns the settings `cls` of the program from all sources.

    `of_models` are the settings that the command takes without a program.
    """
    from gpubench.settings.field import fields
    from gpubench.settings.loading import canonical, load

    if launched_by_torchrun():
        command = f"gpubench {ctx.info_name} -- torchrun train.py"
        raise UsageError("torchrun started gpubench, and the program is started by gpubench", command)
    words = options.program(ctx)
    others = fields(of_models).keys() - fields(cls)
    if foreign := [name for name in options.given(ctx) if canonical(of_models, name) in others]:
        raise UsageError(
            f"--{foreign[0].replace('_', '-')} configures a model of gpubench, not a program",
            "leave it out, or give the program an argument of its own after --",
        )
    given = options.overrides(ctx, cls)
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
