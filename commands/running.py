"""The part that all commands with workers share: they complete settings, run them, and report the results."""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gpubench.commands import output
from gpubench.errors import UsageError
from gpubench.ranks import is_rank_zero, launched_by_torchrun

if TYPE_CHECKING:
    from gpubench.host.live import Drawing
    from gpubench.host.recorder import Recorder
    from gpubench.host.schedule import Outcome
    from gpubench.report.terminal import Terminal
    from gpubench.settings.defaults import C
    from gpubench.settings.loading import Configuration, S


def resolved(
    base: "Configuration[S]", vs: list[str] | None, complete: "Callable[[S], tuple[C, dict[str, str]]]"
) -> "list[Configuration[C]]":
    """Returns the complete configuration, and that of `--vs`. Raises errors before a run directory is created."""
    from gpubench.settings.defaults import completed
    from gpubench.settings.loading import naming_origins, parse_assignments

    precision = base.settings.measurement.target_precision
    if launched_by_torchrun() and precision is not None:
        message = "a target precision takes fresh processes, which torchrun does not start"
        with naming_origins(base.origins):
            key = "measurement.target_precision"
            raise UsageError(f"{message}: {key}={precision}", "use --repeats", keys=[key])
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
    show: "Callable[..., None]",
    *,
    json: bool,
    quiet: bool,
    verbose: int,
) -> None:
    """Runs one configuration, or two interleaved, then shows and writes the results, and raises the run's error."""
    from gpubench.report import frame, notebook
    from gpubench.report.terminal import Terminal

    terminal = Terminal(quiet=quiet, verbosity=verbose)
    outcomes = measured(runs, recorder, drawing, terminal)
    paths = [outcome.recorder.writer.path for outcome in outcomes]
    pair = notebook.judge_pair(paths, frame.differences(*outcomes)) if len(paths) == 2 else None
    text = frame.to_json(outcomes, pair) if json else terminal.render(show, outcomes, pair)
    finish(text, outcomes)


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
    from gpubench.report import notebook

    if launched_by_torchrun() and not is_rank_zero():
        schedule.join(runs[0].settings)
    recorders = schedule.open_runs(recorder, runs, sys.argv)
    with terminal.view(drawing) as view:
        outcomes: list[Outcome] = schedule.run(recorders, view, independent=independent)
    for outcome in outcomes:
        notebook.write_up(outcome.recorder.writer.path)
    return outcomes


def finish(text: str, outcomes: "Sequence[Outcome]") -> None:
    """Prints the results, and raises the error of the run, if any."""
    output.write(text, "the run directory has all results")
    for outcome in outcomes:
        if outcome.error:
            raise outcome.error
