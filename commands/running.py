"""The part that all commands with workers share: they complete settings, run them, and report the results."""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gpubench.commands import output
from gpubench.errors import UsageError
from gpubench.ranks import is_rank_zero, launched_by_torchrun

if TYPE_CHECKING:
    from gpubench.compare.result import Comparisons
    from gpubench.host.live import Drawing
    from gpubench.host.recorder import Recorder
    from gpubench.host.schedule import Outcome
    from gpubench.report.terminal import Terminal
    from gpubench.settings.defaults import Choice
    from gpubench.settings.loading import Configuration, S


def resolved(
    base: "Configuration[S]", vs: list[str] | None, complete: "Callable[[S], tuple[S, list[Choice]]]"
) -> "list[Configuration[S]]":
    """Returns the complete configuration, and that of `--vs`. Raises errors before a run directory is created."""
    from gpubench.settings.defaults import completed
    from gpubench.settings.loading import parse_assignments, told

    precision = base.settings.measurement.target_precision
    if launched_by_torchrun() and precision is not None:
        said = "a target precision takes fresh processes, which torchrun does not start"
        raise UsageError(told(f"{said}: measurement.target_precision={precision}", base.origins), "use --repeats")
    if launched_by_torchrun() and vs:
        raise UsageError("--vs starts fresh processes, which torchrun does not", "run it without torchrun")
    runs = [base, base.with_overrides(parse_assignments(type(base.settings), vs), "--vs")] if vs else [base]
    return [completed(run, complete) for run in runs]


def print_configurations(runs: "Sequence[Configuration[Any]]", command: str) -> None:
    """Prints the configurations on stdout, one after the other; under torchrun on one rank only."""
    if is_rank_zero():
        output.write("---\n".join(run.to_yaml() for run in runs), f"gpubench {command} --print-config > FILE")


def carry_out(
    runs: "Sequence[Configuration[Any]]",
    recorder: "Callable[[Configuration[Any], Sequence[str]], Recorder[Any]]",
    drawing: "Drawing[Any]",
    *,
    json: bool,
    quiet: bool,
    verbose: int,
) -> None:
    """Runs one configuration, or two interleaved, then shows and writes the results, and raises the run's error."""
    from gpubench.report import notebook
    from gpubench.report.terminal import Terminal

    terminal = Terminal(quiet=quiet, verbosity=verbose)
    outcomes = measured(runs, recorder, drawing, terminal)
    paths = [outcome.recorder.writer.path for outcome in outcomes]
    pair = notebook.judge_pair(paths) if len(paths) == 2 else None
    finish(outcomes, pair, terminal, json=json)


def measured(
    runs: "Sequence[Configuration[Any]]",
    recorder: "Callable[[Configuration[Any], Sequence[str]], Recorder[Any]]",
    drawing: "Drawing[Any]",
    terminal: "Terminal",
    *,
    independent: bool = False,
) -> "list[Outcome]":
    """Runs the configurations interleaved and writes their reports. Under the user's torchrun only rank 0 returns.

    `independent` as in `schedule.run`.
    """
    from gpubench.host import schedule
    from gpubench.host.live import view_on
    from gpubench.report import notebook

    if launched_by_torchrun() and not is_rank_zero():
        schedule.join(runs[0].settings)
    recorders = schedule.open_runs(recorder, runs, sys.argv)
    with view_on(terminal.err, drawing, quiet=terminal.quiet) as view:
        outcomes: list[Outcome] = schedule.run(recorders, view, independent=independent)
    for outcome in outcomes:
        notebook.write_up(outcome.recorder.writer.path)
    return outcomes


def finish(
    outcomes: "Sequence[Outcome]",
    pair: "Comparisons | None",
    terminal: "Terminal",
    *,
    json: bool,
    unfolded: bool = False,
) -> None:
    """Prints the results from the run directories, and raises the error of the run, if any."""
    from gpubench.report import run

    paths = [outcome.recorder.writer.path for outcome in outcomes]
    text = run.to_json(paths, pair) if json else terminal.render(run.document(paths, pair, unfolded=unfolded))
    output.write(text, "the run directory has all results")
    for outcome in outcomes:
        if outcome.error:
            raise outcome.error
