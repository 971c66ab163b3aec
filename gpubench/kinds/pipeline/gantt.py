"""The Gantt chart of a pipeline, and how the time of each rank divides."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from gpubench import units
from gpubench.events import Span
from gpubench.report import charts
from gpubench.report.charts import Axis, Scale
from gpubench.report.timelines import THICKNESS, BarPiece, NamedBar, stacked
from gpubench.runs.stages import OF_KIND, PARTS, Part, StageSummary, Times

MOST_BARS = 3000  # that are drawn, to keep the page fast
SAMPLE_COLOURS = 6  # colours of samples, reused in turn
RANK_PITCH = 34.0
RANK_TOP = 8.0
DIGIT = 2.5  # percent of a phone's width that a digit takes; on a desktop two digits fit


@dataclass(frozen=True)
class Bar:
    rank: int
    part: Part
    sample: int
    """The number of the micro-batch's first sample."""
    start: float
    end: float
    first: int | None = None
    """Evaluations [first, last]; None for other work."""
    last: int | None = None


def joined_bars(spans: Iterable[Span]) -> list[Bar]:
    """Sorts spans by time, and joins consecutive spans of a rank on the same micro-batch."""
    done: list[Bar] = []
    latest: dict[tuple[int, Part], Bar] = {}
    for span in spans:
        bar = Bar(span.rank, OF_KIND[span.kind], span.sample, span.time, span.time + span.total, span.step, span.step)
        before = latest.get((bar.rank, bar.part))
        if before and before.sample == bar.sample:
            bar = _joined(before, bar)
        elif before:
            done.append(before)
        latest[bar.rank, bar.part] = bar
    return sorted([*done, *latest.values()], key=lambda bar: (bar.start, bar.rank))


def _joined(before: Bar, bar: Bar) -> Bar:
    first = bar.first if before.first is None else before.first
    last = before.last if bar.last is None else bar.last
    return replace(before, end=max(before.end, bar.end), first=first, last=last)


def drawing(found: Sequence[Bar], ranks: int) -> Markup | None:
    """Draws the first MOST_BARS bars, in seconds from the first bar's start; None if there are no bars."""
    drawn = [bar for bar in found[:MOST_BARS] if 0 <= bar.rank < ranks]
    began, ended = min((bar.start for bar in drawn), default=0.0), max((bar.end for bar in drawn), default=0.0)
    if ended <= began:
        return None
    x = Scale(began, ended, 0, 100)
    axis = Axis(Scale(0, ended - began, 0, 100), "s", "time since the first rank began", 6)
    bottom = RANK_TOP + RANK_PITCH * ranks
    order = {sample: place for place, sample in enumerate(sorted({bar.sample for bar in drawn}))}
    parts = [charts.bottom_axis(axis.ticks, bottom, RANK_TOP, axis.label)]
    parts += [charts.text(0, _rank_middle(rank) + 4, f"rank {rank}", "tick outside") for rank in range(ranks)]
    parts += [part for bar in drawn for part in _drawn(bar, x, order[bar.sample])]
    said = f"{units.counted(ranks, 'rank')}, {units.seconds(ended - began)}, {units.counted(len(order), 'micro-batch')}"
    return charts.drawing("What each rank did over time", said, bottom + charts.FOOT, parts)


def _drawn(bar: Bar, x: Scale, place: int) -> list[Markup]:
    left, right, y = x(bar.start), x(bar.end), _rank_middle(bar.rank)
    hint = f"rank {bar.rank}, {_what(bar)}, {units.seconds(bar.end - bar.start)}"
    if bar.part != "compute":
        return [charts.bar(left, right, y - 3, 6, "wait", hint)]
    box = charts.bar(left, right, y - THICKNESS / 2, THICKNESS, f"box sample-{place % SAMPLE_COLOURS}", hint)
    number = str(bar.sample)
    if right - left < DIGIT:
        return [box]
    where = "inside middle" if right - left >= DIGIT * len(number) else "inside middle on-desk"
    return [box, charts.text((left + right) / 2, y + 4, number, where)]


def _what(bar: Bar) -> str:
    if bar.part != "compute":
        return f"{bar.part.replace('_', ' ')} of sample {bar.sample}"
    return f"sample {bar.sample}" + (f", evaluations {bar.first} to {bar.last}" if bar.first is not None else "")


def shares(stages: Sequence[StageSummary]) -> Markup | None:
    """Draws how each rank's makespan was spent, as a stacked bar; None if no repeat was completed."""
    known = [(stage.rank, stage.times) for stage in stages if stage.times]
    stacks = [NamedBar(f"rank {rank}", [_share(times, part) for part in PARTS]) for rank, times in known]
    said = "; ".join(f"rank {rank} computes {units.percent(times.share('compute'))}" for rank, times in known)
    return stacked("Where each rank's time went", said, stacks, "fraction", "of the makespan")


def _share(times: Times, part: Part) -> BarPiece:
    share, seconds = times.share(part), getattr(times, part)
    return BarPiece(f"{part.replace('_', ' ')} {units.percent(share)}, {units.seconds(seconds)}", part, share)


def _rank_middle(row: int) -> float:
    return RANK_TOP + RANK_PITCH * (row + 0.5)
