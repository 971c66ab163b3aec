"""What every command that starts workers does once its settings are known."""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gpubench.commands import output
from gpubench.ranks import is_rank_zero, launched_by_torchrun

if TYPE_CHECKING:
    from gpubench.benchmark import Outcome
    from gpubench.configuration import Configuration, S
    from gpubench.defaults import Choice
    from gpubench.live import Drawing
    from gpubench.recording import Recorder


def resolved(
    base: "Configuration[S]", vs: list[str] | None, complete: "Callable[[S], tuple[S, list[Choice]]]"
) -> "list[Configuration[S]]":
    """The configuration without gaps, and the other one of `--vs`. May refuse, so before a run directory is made."""
    from gpubench.configuration import parse_assignments
    from gpubench.defaults import completed

    runs = [base, base.with_overrides(parse_assignments(type(base.settings), vs), "--vs")] if vs else [base]
    return [completed(run, complete) for run in runs]


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
    from gpubench import benchmark, notebook
    from gpubench.report import frame
    from gpubench.terminal import Terminal

    if launched_by_torchrun() and not is_rank_zero():
        benchmark.join(runs[0].settings)
    terminal = Terminal(quiet=quiet, verbosity=verbose)
    recorders = benchmark.open_runs(recorder, runs, sys.argv)
    with terminal.view(drawing) as view:
        outcomes: list[Outcome] = benchmark.run(recorders, view)
    paths = [outcome.recorder.writer.path for outcome in outcomes]
    for path in paths:
        notebook.write_up(path)
    pair = notebook.judge_pair(paths, frame.differences(*outcomes)) if len(paths) == 2 else None
    text = frame.to_json(outcomes, pair) if json else terminal.render(show, outcomes, pair)
    output.write(text, "the run directory has it all")
    for outcome in outcomes:
        if outcome.error:
            raise outcome.error
