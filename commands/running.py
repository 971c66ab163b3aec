"""Runs configurations and reports their results: what all commands that start workers share."""

import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import typer

from gpubench.commands import output
from gpubench.commands.gate import OPEN, Gate
from gpubench.commands.trust import permit
from gpubench.errors import GpubenchError, Interrupted, RunDirectoryLost, SettingsError
from gpubench.ranks import is_rank_zero, launched_by_torchrun

if TYPE_CHECKING:
    from gpubench.compare.result import Comparisons
    from gpubench.host.live import Drawing
    from gpubench.host.recorder import Recorder
    from gpubench.host.schedule import Outcome
    from gpubench.report.profile_tables import Arrangement
    from gpubench.report.terminal import Terminal
    from gpubench.settings.loading import Configuration
    from gpubench.settings.schema import CompletedMemorySettings
    from gpubench.trials import MemoryBench, Searched, TriedFixes

T = TypeVar("T")


def print_configurations(runs: "Sequence[Configuration[Any]]", command: str) -> None:
    """Prints the configurations on stdout, one after the other; under torchrun on one rank only."""
    if is_rank_zero():
        output.write("---\n".join(run.to_yaml() for run in runs), f"gpubench {command} --print-config > FILE")


def run_and_report(
    runs: "Sequence[Configuration[Any]]",
    recorder: "Callable[[Configuration[Any], Sequence[str]], Recorder[Any]]",
    drawing: "Drawing[Any]",
    *,
    json: bool,
    quiet: bool,
    verbose: int,
    labels: Sequence[str] = (),
    gate: Gate = OPEN,
) -> None:
    """Runs one configuration, or two interleaved, then shows and writes the results, and raises the run's error.

    `labels` name the two in their comparison; by default it names the settings in which they differ. Raises typer.Exit
    if the gate does not let the second one pass, and UsageError if the runs cannot decide it.
    """
    from gpubench.report import after_run
    from gpubench.report.terminal import Terminal

    terminal = Terminal(quiet=quiet, verbosity=verbose)
    outcomes = measure(runs, recorder, drawing, terminal)
    paths = [outcome.recorder.writer.path for outcome in outcomes]
    pair, undecidable = None, None
    if len(paths) == 2:
        try:
            pair = after_run.judge_pair(paths, labels, conditions=gate.conditions)
        except GpubenchError as error:  # the measurements are shown all the same
            pair, undecidable = after_run.judge_pair(paths, labels), error
    finish(outcomes, pair, terminal, json=json)
    if undecidable:
        raise undecidable
    gate.decide(pair, terminal)


def sweep_and_report(
    runs: "Sequence[Configuration[Any]]",
    recorder: "Callable[[Configuration[Any], Sequence[str]], Recorder[Any]]",
    drawing: "Drawing[Any]",
    *,
    json: bool,
    quiet: bool,
    verbose: int,
) -> None:
    """Runs configurations that differ in one number, interleaved, and prints them as one table.

    One that fails does not end the others, unless it is the first one. Raises the first error at the end.
    """
    from gpubench.report.terminal import Terminal

    terminal = Terminal(quiet=quiet, verbosity=verbose)
    finish(measure(runs, recorder, drawing, terminal, independent=True), None, terminal, json=json, swept=True)


def measure(
    runs: "Sequence[Configuration[Any]]",
    recorder: "Callable[[Configuration[Any], Sequence[str]], Recorder[Any]]",
    drawing: "Drawing[Any]",
    terminal: "Terminal",
    *,
    independent: bool = False,
    order: Sequence[int] = (),
    until: float = math.inf,
) -> "list[Outcome]":
    """Runs the configurations interleaved, and writes their reports.

    What still runs at the time `until`, in seconds of `time.monotonic()`, is interrupted. `independent` and `order` are
    those of `schedule.run`. Under the user's own torchrun the function returns on rank 0 only; the other ranks become
    workers. For a program on several machines it returns on that of rank 0 only; on the others it raises the error of
    the run or typer.Exit. Raises UsageError as `trust.permit` does.
    """
    from gpubench.host import launch, schedule
    from gpubench.host.live import view_on
    from gpubench.report import after_run

    permit(runs, terminal)
    if launched_by_torchrun() and not is_rank_zero():
        launch.become_worker(runs[0].settings)
    recorders = schedule.open_runs(recorder, runs, sys.argv)
    with view_on(terminal.err, drawing, quiet=terminal.quiet) as view:

        def watch(recorder: "Recorder[Any]") -> None:
            view(recorder)
            if time.monotonic() > until:
                raise KeyboardInterrupt

        outcomes: list[Outcome] = schedule.run(recorders, watch, independent=independent, order=order)
    if outcomes[0].recorder.elsewhere:
        _leave_to(outcomes[0].recorder.elsewhere, outcomes, terminal)
    for outcome in outcomes:
        after_run.write_up(outcome.recorder.writer.path)
    return outcomes


def _leave_to(host: str, outcomes: "Sequence[Outcome]", terminal: "Terminal") -> NoReturn:
    """Ends the command on a machine without rank 0. Raises the error of the run, or typer.Exit."""
    for outcome in outcomes:
        if outcome.error:
            if (path := outcome.recorder.writer.path).exists():
                terminal.err.print(f"failed: {path}", highlight=False, markup=False, soft_wrap=True)
            raise outcome.error
    terminal.err.print(f"completed: rank 0 is on {host}, which has the results", highlight=False, markup=False)
    raise typer.Exit


def finish(
    outcomes: "Sequence[Outcome]",
    pair: "Comparisons | None",
    terminal: "Terminal",
    *,
    json: bool,
    arranged: "Arrangement | None" = None,
    swept: bool = False,
) -> None:
    """Prints the results from the run directories, and raises the error of the run, if any.

    `arranged` is how the tables of a profile are shown, also on the page of the run. Runs that were `swept` differ in
    one number, and are printed as one table.
    """
    from gpubench.report import after_run, index, run, sweep
    from gpubench.report.profile_tables import PLAIN

    if terminal.err.is_terminal and not terminal.quiet:
        terminal.err.print()  # between the progress and the results
    for outcome in outcomes:
        try:
            outcome.recorder.writer.check()
        except RunDirectoryLost as lost:  # there is nothing to print
            raise outcome.error or lost from None
    paths = [outcome.recorder.writer.path for outcome in outcomes]
    if arranged:
        for path in paths:
            after_run.write_up(path, arranged)
    if json:
        text = run.to_json(paths, pair)
    else:
        text = terminal.render(sweep.document(paths) if swept else run.document(paths, pair, arranged or PLAIN))
    output.write(text, "the run directory has all results")
    index.refresh(paths[0].parent.parent)
    for outcome in outcomes:
        if outcome.error:
            raise outcome.error


def check_trial_name(run: "Configuration[Any]") -> None:
    """Raises SettingsError if the name of the folder for trials would be too long. Call it before the first run."""
    from gpubench.foreign_files import TRIALS
    from gpubench.settings.keys import about, naming_origins
    from gpubench.settings.sections import MOST_OF_A_NAME

    name, limit = run.settings.experiment, MOST_OF_A_NAME - len(TRIALS)
    if (size := len(name.encode())) > limit:
        with naming_origins(run.origins), about("experiment"):
            raise SettingsError(
                f"{name!r} has {size} bytes; the limit is {limit}, because the folder of the trial runs adds "
                f"{TRIALS} to the name",
                f"give an --experiment of at most {limit} bytes",
            )


def try_fixes(
    run: "Configuration[Any]",
    outcome: "Outcome",
    terminal: "Terminal",
    complete: "Callable[[Any], tuple[Any, dict[str, str]]]",
    timed_by: "Callable[[Configuration[Any], Sequence[str]], Recorder[Any]]",
) -> GpubenchError | None:
    """Runs each fix that a profile proposes, and records its saving. Returns the error that ended the trials, or None.

    `complete` completes the settings of a run with a fix, and `timed_by` is its recorder. Nothing is run if the
    profiled run failed.
    """
    from gpubench.settings.loading import completed
    from gpubench.trials import Bench, verify_speed

    recorder = outcome.recorder
    if recorder.findings is None or outcome.error:
        return None
    if not any(finding.fix for finding in recorder.findings.findings):
        terminal.say("nothing to try: no finding has a setting that a run could be made with")
    bench = Bench(lambda fixed: completed(fixed, complete), _timing(terminal, timed_by), _judge)
    return _record(verify_speed(run, recorder.findings, bench), recorder.conclude, recorder)


def try_memory_advice(
    run: "Configuration[CompletedMemorySettings]", outcome: "Outcome", terminal: "Terminal", *, verify: bool
) -> GpubenchError | None:
    """Runs the batch sizes that were predicted to fit or, with `verify`, each memory fix; records the results.

    Returns the error that ended the trials, or None. Nothing is run after a prediction or a failed run.
    """
    from gpubench.host.memory_recorder import MemoryRecorder
    from gpubench.host.recorder import TrainRecorder
    from gpubench.memory.defaults import complete_memory
    from gpubench.settings.loading import completed
    from gpubench.trials import MemoryBench, confirm

    recorder = outcome.recorder
    assert isinstance(recorder, MemoryRecorder)

    def keep_batch_sizes(searched: "Searched") -> None:
        recorder.keep_batch_sizes(searched.found)
        if searched.best and isinstance(searched.best.recorder, MemoryRecorder):
            recorder.adopt(searched.best.recorder)

    if outcome.error or run.settings.memory.predict:
        return None
    bench = MemoryBench(
        lambda fixed: completed(fixed, complete_memory),
        _timing(terminal, TrainRecorder),
        _judge,
        _following(terminal, MemoryRecorder),
    )
    if recorder.batch_sizes:
        return _record(confirm(recorder.batch_sizes, run, bench), keep_batch_sizes, recorder)
    return _try_memory_fixes(run, outcome, bench) if verify else None


def try_memory_fixes_of_program(
    run: "Configuration[Any]", outcome: "Outcome", terminal: "Terminal"
) -> GpubenchError | None:
    """Runs each memory fix of a program that can be made from outside, and records the results.

    Returns the error that ended the trials, or None. Nothing is run after a failed run.
    """
    from gpubench.host.program_recorder import (
        ProgramMemoryRecorder,
        ProgramRecorder,
        complete_program_memory,
    )
    from gpubench.settings.loading import completed
    from gpubench.settings.schema import CompletedProgramSettings
    from gpubench.trials import MemoryBench

    bench = MemoryBench(
        lambda fixed: completed(fixed, complete_program_memory),
        _timing(terminal, ProgramRecorder),
        _judge,
        _following(terminal, ProgramMemoryRecorder),
        CompletedProgramSettings,
    )
    return None if outcome.error else _try_memory_fixes(run, outcome, bench)


def _try_memory_fixes(run: "Configuration[Any]", outcome: "Outcome", bench: "MemoryBench") -> GpubenchError | None:
    from gpubench.host.memory_recorder import FootprintRecorder
    from gpubench.trials import verify_memory

    recorder = outcome.recorder
    assert isinstance(recorder, FootprintRecorder)

    def keep(tried: "TriedFixes") -> None:
        recorder.conclude(tried.findings)
        recorder.keep_trades(tried.trades)

    return _record(verify_memory(outcome, run, recorder.advice, bench), keep, recorder) if recorder.advice else None


def _record(results: Iterable[T], keep: Callable[[T], None], recorder: "Recorder[Any]") -> GpubenchError | None:
    """Calls `keep` with each result as it arrives. Returns the error that ended the trials, or None."""
    import msgspec

    from gpubench.report import after_run

    ended: GpubenchError | None = None
    try:
        for result in results:
            keep(result)
    except KeyboardInterrupt:  # the second Ctrl-C, between two measurements
        ended = Interrupted("interrupted", "the run directory keeps the results so far")
    except GpubenchError as error:
        ended = error
    if isinstance(ended, Interrupted) and recorder.findings:
        recorder.conclude(msgspec.structs.replace(recorder.findings, interrupted=True))
    after_run.write_up(recorder.writer.path)
    return ended


def _judge(*outcomes: "Outcome") -> "Comparisons | None":
    from gpubench.report import after_run

    # A trial asks about the throughput alone, so that no other metric is judged together with it.
    return after_run.judge_pair([outcome.recorder.writer.path for outcome in outcomes], metrics=["throughput"])


def _following(
    terminal: "Terminal", recorded_by: "Callable[[Configuration[Any], Sequence[str]], Recorder[Any]]"
) -> "Callable[[Sequence[Configuration[Any]]], list[Outcome]]":
    """Returns a function that records the memory of configurations, one after the other."""
    from gpubench.host import memory_recorder

    def follow(runs: "Sequence[Configuration[Any]]") -> "list[Outcome]":
        outcomes = []
        for run in runs:
            outcomes += measure([run], recorded_by, memory_recorder, terminal)
            if isinstance(outcomes[-1].error, Interrupted):
                raise outcomes[-1].error
        return outcomes

    return follow


def _timing(
    terminal: "Terminal", timed_by: "Callable[[Configuration[Any], Sequence[str]], Recorder[Any]]"
) -> "Callable[[Sequence[Configuration[Any]]], list[Outcome]]":
    """Returns a function that times configurations, interleaved. `timed_by` is their recorder."""
    from gpubench.host import live

    return lambda runs: measure(runs, timed_by, live, terminal, independent=True)
