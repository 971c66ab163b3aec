"""What a memory run has to say in the terminal."""

from collections.abc import Sequence

from rich.console import Console

from gpubench.comparison import naming
from gpubench.comparison.result import Comparisons
from gpubench.host.benchmark import Outcome
from gpubench.host.memory_recording import MemoryRecorder
from gpubench.report import footprint_tables, frame, sheets, trying_tables
from gpubench.report.plain import clean
from gpubench.runs import TRACES
from gpubench.screen import say


def show(outcomes: Sequence[Outcome], comparisons: Comparisons | None, console: Console) -> None:
    frame.show(outcomes, comparisons, console, _show_run)


def _show_run(outcome: Outcome, console: Console) -> None:
    recorder = outcome.recorder
    assert isinstance(recorder, MemoryRecorder)
    found = recorder.batch_sizes
    if found:
        say(console, trying_tables.batch_sizes_sentence(found), "bold")
        say(console, trying_tables.line_sentence(found), "dim")
        sheets.show([trying_tables.batch_sizes(found)], console)
        console.print()
    if recorder.footprints:
        _show_footprint(recorder, console)
    elif not found:
        why = outcome.error.message if outcome.error else outcome.status
        say(console, f"nothing was followed: {clean(why)}")
    if recorder.trades:
        sheets.show([trying_tables.trades(recorder.trades)], console)


def _show_footprint(recorder: MemoryRecorder, console: Console) -> None:
    """Of the fullest rank."""
    settings, ranks = recorder.settings, recorder.footprints
    fullest = max(ranks, key=lambda found: found.peak.level.total)
    batch = recorder.batch_sizes.largest if recorder.batch_sizes else settings.training.batch_size
    label = naming.training(frame.by_key(settings) | {"training.batch_size": batch}, settings.distributed.world_size)
    label += f", rank {fullest.rank}" if len(ranks) > 1 else ""
    files = sorted(recorder.writer.path.joinpath(TRACES).glob("*.snapshot.pickle"))
    footprint_tables.show(fullest, recorder.advice, console, label, [str(file) for file in files])
