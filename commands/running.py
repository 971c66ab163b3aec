"""What every command that starts workers does once its settings are known."""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gpubench.commands import output
from gpubench.errors import UsageError
from gpubench.ranks import is_rank_zero, launched_by_torchrun

if TYPE_CHECKING:
    from gpubench.configuration import Configuration, S
    from gpubench.defaults import Choice
    from gpubench.host.benchmark import Outcome
    from gpubench.host.live import Drawing
    from gpubench.host.recording import Recorder
    from gpubench.terminal import Terminal


def resolved(
    base: "Configuration[S]", vs: list[str] | None, complete: "Callable[[S], tuple[S, list[Choice]]]"
) -> "list[Configuration[S]]":
    """The configuration without gaps, and the other one of `--vs`. May refuse, so before a run directory is made."""
    from gpubench.configuration import parse_assignments
    from gpubench.defaults import completed
    from gpubench.origins import told

    precision = base.settings.measurement.target_precision
    if launched_by_torchrun() and precision is not None:
        said = "a target precision takes fresh processes, which torchrun does not start"
        raise UsageError(told(f"{said}: measurement.target_precision={precision}", base.origins), "use --repeats")
    if launched_by_torchrun() and vs:
        raise UsageError("--vs starts fresh processes, which torchrun does not", "run it without torchrun")
    runs = [base, base.with_overrides(parse_assignments(type(base.settings), vs), "--vs")] if vs else [base]
    return [completed(run, complete) for run in runs]


def print_configurations(runs: "Sequence[Configuration[Any]]", command: str) -> None:
    """On stdout, one behind the other; under torchrun once."""
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
    """Runs one configuration, or two in turn; shows and writes up what came of it, and raises what went wrong."""
    from gpubench import notebook
    from gpubench.report import frame
    from gpubench.terminal import Terminal

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
    """Runs them in turn and writes them up. Of the user's own torchrun only rank 0 comes back.

    `independent` as in `benchmark.run`.
    """
    from gpubench import notebook
    from gpubench.host import benchmark

    if launched_by_torchrun() and not is_rank_zero():
        benchmark.join(runs[0].settings)
    recorders = benchmark.open_runs(recorder, runs, sys.argv)
    with terminal.view(drawing) as view:
        outcomes: list[Outcome] = benchmark.run(recorders, view, independent=independent)
    for outcome in outcomes:
        notebook.write_up(outcome.recorder.writer.path)
    return outcomes


def finish(text: str, outcomes: "Sequence[Outcome]") -> None:
    """Says what came of it, and raises what went wrong."""
    output.write(text, "the run directory has it all")
    for outcome in outcomes:
        if outcome.error:
            raise outcome.error
