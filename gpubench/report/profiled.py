"""What a profiled run has to say in the terminal: how fast it is, from its clean repeats, and then why."""

from collections.abc import Sequence
from functools import partial

from rich.console import Console

from gpubench.host.benchmark import Outcome
from gpubench.report import frame, profiling, training
from gpubench.report.plain import clean
from gpubench.runs import TRACES
from gpubench.screen import say


def show(outcomes: Sequence[Outcome], console: Console, *, unfolded: bool = False) -> None:
    """unfolded: every module has a row, also where layers are equal."""
    frame.show(outcomes, None, console, partial(_show_run, unfolded=unfolded))


def _show_run(outcome: Outcome, console: Console, *, unfolded: bool) -> None:
    recorder = outcome.recorder
    say(console, training.headline(recorder.settings, outcome.summary), "bold")
    diagnosis = recorder.diagnosis
    if diagnosis is None:
        why = outcome.error.message if outcome.error else outcome.status
        say(console, f"no profile: {clean(why)}")
        return
    trace = recorder.writer.path / TRACES / diagnosis.traces[0].name
    unit = recorder.settings.profiling.unit
    profiling.show(diagnosis.profile, diagnosis.findings, console, str(trace), unit, own=True, unfolded=unfolded)
