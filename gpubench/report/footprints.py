"""Show a memory run in the terminal."""

from collections.abc import Sequence

from rich.console import Console

from gpubench.compare import comparability
from gpubench.compare.result import Comparisons
from gpubench.host.memory_recorder import MemoryRecorder
from gpubench.host.schedule import Outcome
from gpubench.report import fixes, footprint, frame, sheets
from gpubench.runs.directory import TRACES
from gpubench.text import clean, say


def show(outcomes: Sequence[Outcome], comparisons: Comparisons | None, console: Console) -> None:
    frame.show(outcomes, comparisons, console, _show_run)


def _show_run(outcome: Outcome, console: Console) -> None:
    recorder = outcome.recorder
    assert isinstance(recorder, MemoryRecorder)
    found = recorder.batch_sizes
    if found:
        say(console, fixes.batch_sizes_sentence(found), "bold")
        say(console, fixes.line_sentence(found), "dim")
        sheets.show([fixes.batch_sizes(found)], console)
        console.print()
    if recorder.footprints:
        _show_footprint(recorder, console)
    elif not found:
        why = outcome.error.message if outcome.error else outcome.status
        say(console, f"nothing was recorded: {clean(why)}")
    if recorder.trades:
        sheets.show([fixes.trades(recorder.trades)], console)


def _show_footprint(recorder: MemoryRecorder, console: Console) -> None:
    """Print the footprint of the rank with the largest peak."""
    settings, ranks = recorder.settings, recorder.footprints
    fullest = max(ranks, key=lambda found: found.peak.level.total)
    batch = recorder.batch_sizes.largest if recorder.batch_sizes else settings.training.batch_size
    label = comparability.training(
        frame.by_key(settings) | {"training.batch_size": batch}, settings.distributed.world_size
    )
    label += f", rank {fullest.rank}" if len(ranks) > 1 else ""
    files = sorted(recorder.writer.path.joinpath(TRACES).glob("*.snapshot.pickle"))
    footprint.show(fullest, recorder.advice, console, label, [str(file) for file in files])
