"""The part of a run's report about its memory: what fills it, which batch sizes fit, and what was tried."""

from collections.abc import Iterator
from dataclasses import replace

from gpubench import units
from gpubench.compare.evidence import RunEvidence
from gpubench.kinds.memory import batch_sizes_report, footprint_report, trades_report
from gpubench.memory.footprint import Footprint, Footprints
from gpubench.report.document import EVERYWHERE, UNASKED, Block, Heading, Paragraph, raised
from gpubench.report.kind_report import intervals, missing
from gpubench.runs import headlines
from gpubench.runs.directory import SNAPSHOT, TRACES

METRICS = IN_BRIEF = ()
"""No metric leads: the peaks are in the blocks before them."""
MORE = ""


def answer(run: RunEvidence) -> str:
    """Says which batch size fits or, if none was searched for, what fills the memory; "" if neither is known."""
    if run.batch_sizes:
        return batch_sizes_report.batch_sizes_sentence(run.batch_sizes)
    if run.footprints and run.footprints.ranks:
        return footprint_report.headline(_fullest(run.footprints))
    return ""


def before_metrics(run: RunEvidence) -> Iterator[Block]:
    """Yields the batch sizes, the memory of the rank with the largest peak, and the settings that were tried."""
    if run.batch_sizes:
        yield from batch_sizes_report.batch_sizes(run.batch_sizes, headed=True)
    if run.footprints and run.footprints.ranks:
        yield from _footprint(run, run.footprints)
    if run.trades:
        yield from trades_report.trades(run.trades)
    if not (run.batch_sizes or run.footprints or run.trades):
        yield missing(run, "nothing was recorded")


def after_metrics(run: RunEvidence) -> Iterator[Block]:
    """Yields nothing: no step is timed."""
    yield from ()


def over_time(run: RunEvidence) -> Iterator[Block]:
    """Yields nothing: no step is timed."""
    yield from ()


def measured(run: RunEvidence) -> str:
    return units.counted(run.repeats, "repeat")


def caption(run: RunEvidence) -> str:
    return f"{measured(run)}; {intervals(run.repeats)}"


def without_throughput(run: RunEvidence) -> str:
    return "nothing was timed"


def without_metrics(run: RunEvidence) -> str:
    """How far a run came that has no metrics."""
    return "nothing was recorded"


def _fullest(footprints: Footprints) -> Footprint:
    return max(footprints.ranks, key=lambda found: found.peak.level.total)


def _footprint(run: RunEvidence, footprints: Footprints) -> Iterator[Block]:
    found, ranks = _fullest(footprints), footprints.ranks
    batch = run.batch_sizes.largest if run.batch_sizes else run.settings.get("training.batch_size")
    if "program.command" in run.settings:
        label = str(run.settings["program.command"])
    else:
        label = headlines.training(run.settings | {"training.batch_size": batch}, run.ranks)
    label += f", rank {found.rank}" if len(ranks) > 1 else ""
    if run.batch_sizes:
        yield Heading("What fills the memory", anchor="memory", on=EVERYWHERE)
        yield Paragraph(footprint_report.headline(found), "strong")
    files = sorted(run.path.joinpath(TRACES).glob(f"*{SNAPSHOT}"))
    made = footprint_report.blocks(found, run.findings, label, [str(file) for file in files])
    if run.batch_sizes:
        yield from (replace(block, on=block.on & UNASKED) for block in made)
    else:
        yield from raised(made)
