"""What a profiled run has to say in the terminal: how fast it is, from its clean repeats, and then why."""

from collections.abc import Sequence

from rich.console import Console

from gpubench.host.benchmark import Outcome
from gpubench.report import frame, profiling, training
from gpubench.report.plain import clean
from gpubench.runs import TRACES
from gpubench.screen import say


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    frame.show(outcomes, None, console, _show_run)


def _show_run(outcome: Outcome, console: Console) -> None:
    recorder = outcome.recorder
    say(console, training.headline(recorder.settings, outcome.summary), "bold")
    diagnosis = recorder.diagnosis
    if diagnosis is None:
        why = outcome.error.message if outcome.error else outcome.status
        say(console, f"no profile: {clean(why)}")
        return
    trace = recorder.writer.path / TRACES / diagnosis.traces[0].name
    unit = recorder.settings.profiling.unit
    profiling.show(diagnosis.profile, diagnosis.findings, console, str(trace), unit, own=True)
