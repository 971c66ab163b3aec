"""Show a profiled run in the terminal: its speed, from the clean repeats, and then the causes."""

from collections.abc import Sequence
from functools import partial

from rich.console import Console

from gpubench.host.schedule import Outcome
from gpubench.report import frame, profile, training
from gpubench.runs.directory import TRACES
from gpubench.text import clean, say


def show(outcomes: Sequence[Outcome], console: Console, *, unfolded: bool = False) -> None:
    """Print the run; `unfolded` gives every module a row, also equal layers."""
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
    profile.show(diagnosis.profile, diagnosis.findings, console, str(trace), unit, own=True, unfolded=unfolded)
