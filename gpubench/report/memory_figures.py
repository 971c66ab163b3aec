"""Drawings of memory: the history, the phases, batch sizes, and throughput against peak."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from markupsafe import Markup

from gpubench import units
from gpubench.memory.batch_sizes import BatchSizes, LinearFit, Trade, Trades
from gpubench.memory.footprint import CATEGORIES, Amounts, Footprint, MemoryTimeline, Stage, TimelineMark
from gpubench.report import charts, timelines
from gpubench.report.charts import HEAD, Axis, Scale, Series, framed, widen
from gpubench.report.document import Block, Figure, Figures, Heading, Medium, Paragraph
from gpubench.report.findings import options
from gpubench.text import words

NAMES = {"before": "there before", "other": "context"}
"""Display names of categories whose own names are unclear."""
STYLES = {
    "parameters": "backward",
    "buffers": "forward",
    "gradients": "compute",
    "optimizer_state": "optimizer",
    "activations": "data_wait",
    "inputs": "host_to_device",
    "temporaries": "exposed_communication",
    "workspaces": "allocator",
    "before": "queued",
    "unknown": "unknown",
    "fragmentation": "set",
    "other": "other",
}
"""The timeline colour of each category; other categories are grey."""
HISTORY_HEIGHT = 260.0
TOP = 30.0  # pixels for the names of the steps
STRIP = 16.0  # pixels of the row of phases under the plot
NEAR_PEAK = 1.5  # times the peak: a capacity beyond it would compress the plot

STAGES: dict[Stage, str] = {"setup": "set-up", "first": "first step", "steady": "steady step"}
"""What the stages of a run are called."""


def style(name: str) -> str:
    """Returns the timeline's style with the colour of a category."""
    return STYLES.get(name, "other")


def hue(name: str) -> str:
    """Returns the style sheet's class that colours a category."""
    return charts.hue(style(name))


def over_time(footprint: Footprint) -> Iterator[Block]:
    """Yields the memory held over the history, or a note that nothing was held."""
    drawing = _over_time(footprint)
    if drawing is None:
        yield Paragraph("nothing was held over the history", "missing", on=Medium.PAGE)
        return
    yield Figure("Over the history", drawing, _beneath(footprint.timeline), legends=_legend(footprint))


def phases(footprint: Footprint, stages: Mapping[Stage, str]) -> Iterator[Block]:
    """Yields a bar for each phase's peak. `stages` are the display names of the stages."""
    drawing = _phases(footprint, stages)
    if drawing is not None:
        yield Heading("Phases", 3)
        yield Figure("Peak of each phase", drawing, shape="lanes", legends=_legend(footprint))


def batch_sizes(found: BatchSizes) -> Iterator[Block]:
    """Yields the plots of memory and of throughput over the batch size."""
    x = Scale(0, 1.06 * max(_shown(found), default=1), 0, 100)
    drawn = []
    if peaks := peak_by_batch(found, x):
        drawn.append(Figure("Peak by batch size", peaks, " ".join(_notes(found))))
    if speeds := throughput_by_batch(found, x):
        drawn.append(Figure("Throughput by batch size", speeds))
    if drawn:
        yield Figures(drawn)


def trades(found: Trades) -> Iterator[Block]:
    """Yields the plot of throughput over memory, if any setting was timed."""
    drawing, missing = scatter(found), len(found.trades) - len(_spots(found))
    if drawing is None:
        return
    notes = ["Left is less memory, up is faster. Diamonds: no setting is known to be better in both."]
    notes.append("Numbers: rows of the table.")
    if any(trade.interval for trade in found.trades):
        notes.append("Whiskers: 95 % intervals.")
    if missing:
        was = "was" if missing == 1 else "were"
        notes.append(f"Not drawn: {units.counted(missing, 'run')} that failed or {was} not timed.")
    yield Figure("Throughput against peak", drawing, " ".join(notes))


def _legend(footprint: Footprint) -> list[tuple[str, list[tuple[str, str]]]]:
    """Returns the colour of each category of the timeline."""
    anywhere: Amounts = {name: max(sizes, default=0) for name, sizes in footprint.timeline.amounts.items()}
    return [("held", [(hue(name), category(name)) for name, _ in ordered(anywhere)])]


def category(name: str) -> str:
    return NAMES.get(name) or words(name)


def ordered(amounts: Amounts) -> list[tuple[str, int]]:
    """Returns (category, bytes) of non-zero categories in the order of CATEGORIES, unknown categories last."""
    names = [*CATEGORIES, *(name for name in amounts if name not in CATEGORIES)]
    return [(name, amounts[name]) for name in names if amounts.get(name)]


def added(size: int | None) -> str:
    """Returns a signed size; "" if it is unknown."""
    if size is None:
        return ""
    return f"{'-' if size < 0 else '+'}{units.size(abs(size))}"


def share(part: float, whole: float) -> str:
    """Returns a share in whole percent, or with two digits if it is small."""
    fraction = part / whole if whole else 0.0
    return units.whole_percent(fraction) if abs(fraction) >= 0.0995 or not fraction else units.percent(fraction)


def _over_time(footprint: Footprint) -> Markup | None:
    """Returns a plot of held memory by category, in the order of events, above a row of phases; None without data."""
    held = footprint.timeline
    stacked = _stacked(held)
    top = float(stacked[-1][2].max()) if stacked else 0.0
    if top <= 0:
        return None
    capacity = footprint.capacity if footprint.capacity and footprint.capacity <= NEAR_PEAK * top else None
    y = Scale(0, max(top, float(capacity or 0)) * 1.08, HISTORY_HEIGHT, 0)
    x = Scale(0, max(1, len(stacked[0][1]) - 1), 0, charts.WIDTH)
    places = x.places(np.arange(len(stacked[0][1]), dtype=np.float64))
    areas = [charts.area(places, y.places(low), y.places(high), hue(name)) for name, low, high in stacked]
    if held.reserved is not None:
        areas.append(charts.path(places, y.places(np.asarray(held.reserved, dtype=np.float64)), "line error"))
    parts = [
        *charts.framed(None, Axis(y, "B", count=round(HISTORY_HEIGHT / 40)), areas, TOP),
        *_strip(held, x),
        *_steps(held, x),
        *_labels(footprint, x(footprint.peak.position), y, capacity),
    ]
    said = "; ".join(f"{category(name)} {units.size(size)}" for name, size in ordered(footprint.peak.amounts))
    return charts.drawing("memory over the history", f"at the peak: {said}", TOP + HISTORY_HEIGHT + STRIP + 8, parts)


def _phases(footprint: Footprint, stages: Mapping[Stage, str]) -> Markup | None:
    """Returns a bar for each phase's peak, split by category; None if nothing is held."""
    stacks = [
        stack(
            f"{stages[phase.stage]}, {words(phase.phase)}: {units.size(phase.level.total)}",
            phase.peak,
        )
        for phase in footprint.phases
    ]
    return timelines.stacked("peak of each phase", "; ".join(one.name for one in stacks), stacks, "B", "held")


def stack(name: str, amounts: Amounts) -> timelines.NamedBar:
    """Returns the areas of held memory, split by category."""
    return timelines.NamedBar(
        name,
        [
            timelines.BarPiece(f"{category(kind)} {units.size(size)}", STYLES.get(kind, "other"), size)
            for kind, size in ordered(amounts)
        ],
    )


def _labels(footprint: Footprint, place: float, y: Scale, capacity: int | None) -> list[Markup]:
    """Returns a dot at the peak, `place` percent from the left, and the device's capacity with a label opposite."""
    total = footprint.peak.level.total
    said = f"peak {units.size(total)}"
    parts = [
        charts.dot(place, TOP + y(total), 4, "mark", said),
        charts.text(place, TOP + y(total) - 7, said, f"label {'after' if place < 50 else 'before'}"),
    ]
    if capacity:
        height, where = TOP + y(capacity), "label before" if place < 50 else "label after"
        parts.append(charts.line(0, height, 100, height, "median error"))
        parts.append(charts.text(100 if place < 50 else 0, height - 7, f"capacity {units.size(capacity)}", where))
    return parts


def _stacked(held: MemoryTimeline) -> list[tuple[str, Series, Series]]:
    """Returns (category, lower border, upper border) from the bottom up, borders of shape (points,)."""
    known: Amounts = dict.fromkeys(held.amounts, 1)
    found = []
    low = np.zeros(len(next(iter(held.amounts.values()), [])))
    for name, _ in ordered(known):
        high = low + np.asarray(held.amounts[name], dtype=np.float64)
        found.append((name, low, high))
        low = high
    return found if len(low) else []


def _strip(held: MemoryTimeline, x: Scale) -> list[Markup]:
    """Returns a box for each phase of the program, with its name, or its initial if the box is small."""
    parts = []
    for number, (mark, left, right) in enumerate(_spans(held.marks, x)):
        name, style = words(mark.phase), "margin" if number % 2 else "shade"
        parts.append(charts.bar(left, right, TOP + HISTORY_HEIGHT + 2, STRIP, style, f"{name}, {_step(mark.step)}"))
        if label := next((one for one in (name, _initial(name)) if timelines.LETTER * len(one) <= right - left), ""):
            parts.append(charts.text((left + right) / 2, TOP + HISTORY_HEIGHT + 14, label, "tick middle"))
    return parts


def _steps(held: MemoryTimeline, x: Scale) -> list[Markup]:
    """Returns the first mark of each step, with its name if there is space."""
    firsts = [next(group) for _, group in groupby(held.marks, key=lambda mark: mark.step)]
    parts = []
    for mark, left, right in _spans(firsts, x):
        name = _step(mark.step)
        parts.append(charts.line(left, TOP - 14, left, TOP + HISTORY_HEIGHT, "step"))
        if right - left >= timelines.LETTER * len(name):
            parts.append(charts.text(left, TOP - 6, name, "note after"))
    return parts


def _spans(marks: Sequence[TimelineMark], x: Scale) -> list[tuple[TimelineMark, float, float]]:
    """Yields each mark with its start and end in percent; marks shorter than a point are left out."""
    ends = [*(mark.at for mark in marks), x.high][1:]
    return [(mark, x(mark.at), x(end)) for mark, end in zip(marks, ends, strict=True) if end > mark.at]


def _step(number: int | None) -> str:
    return "set-up" if number is None else f"step {number}"


def _initial(name: str) -> str:
    return name[:1].upper()


def _beneath(held: MemoryTimeline) -> str:
    names = dict.fromkeys(words(mark.phase) for mark in held.marks)
    told = ", ".join(f"{_initial(name)} {name}" for name in names)
    said = f"In the order of allocations and frees, not to scale in time. Phases below: {told}."
    return f"{said} The line shows what the allocator has reserved." if held.reserved is not None else said


PLOT_HEIGHT = 220.0
NEAR = 1.5  # times the limit: points beyond it, or a limit beyond all points, would compress the plot
DIAMOND = "M-6 0L0-6L6 0L0 6Z"
AS_IT_WAS = "as it was"
MOST_NUMBERED = 12  # runs in a plot up to which each one has its number
CLOSE = 8.0  # percent: labels of marks this close would overlap
APART = 15.0  # pixels between two such labels


@dataclass(frozen=True)
class Spot:
    """A trade with a known peak and throughput."""

    number: int
    """The number of its row in the table."""
    peak: int
    throughput: float
    trade: Trade


def peak_by_batch(found: BatchSizes, x: Scale) -> Markup | None:
    """Returns a plot of predicted and measured peaks, the line through the predictions, and the limit, in bytes.

    None if there is no peak to draw.
    """
    predicted, measured = _predicted(found), _measured(found)
    most = max([*predicted.values(), *measured.values()], default=0)
    if most <= 0:
        return None
    limit = found.limit if 0 < found.limit <= NEAR * most else None
    y = Scale(0, 1.08 * max(most, limit or 0), PLOT_HEIGHT, 0)
    spots = [
        charts.dot(x(size), HEAD + y(total), 4, "mean a", f"{size}: {units.size(total)} predicted")
        for size, total in predicted.items()
    ]
    spots += [
        charts.symbol(x(size), HEAD + y(total), DIAMOND, "mean b", f"{size}: {units.size(total)} measured")
        for size, total in measured.items()
    ]
    if limit:
        height = HEAD + y(limit)
        spots.append(charts.line(0, height, 100, height, "median error"))
        spots.append(charts.text(0, height - 7, f"limit {units.size(limit)}", "label after"))
    told = [f"{size} {units.size(total)} predicted" for size, total in predicted.items()]
    told += [f"{size} {units.size(total)} measured" for size, total in measured.items()]
    return _drawing("peak by batch size", told, _sizes(x), Axis(y, "B"), [_through(found.line, x, y)], spots)


def throughput_by_batch(found: BatchSizes, x: Scale) -> Markup | None:
    """Returns a plot of the timed batches, in samples/s; None if there are none."""
    speeds = sorted(found.speeds, key=lambda speed: speed.batch_size)
    fastest = max(speeds, key=lambda speed: speed.throughput, default=None)
    if fastest is None or fastest.throughput <= 0:
        return None
    y = Scale(0, 1.18 * fastest.throughput, PLOT_HEIGHT, 0)
    told = [f"{one.batch_size} {units.rate(one.throughput, 'samples/s')}" for one in speeds]
    spots = [
        charts.symbol(x(one.batch_size), HEAD + y(one.throughput), DIAMOND, "mean b", said)
        for one, said in zip(speeds, told, strict=True)
    ]
    place = x(fastest.batch_size)
    said = f"fastest: {fastest.batch_size}"
    spots.append(charts.text(place, HEAD + y(fastest.throughput) - 9, said, f"label {_side(place)}"))
    line = charts.path(
        _along(x, [one.batch_size for one in speeds]), _along(y, [one.throughput for one in speeds]), "line b"
    )
    return _drawing("throughput by batch size", told, _sizes(x), Axis(y, "samples/s"), [line], spots)


def scatter(found: Trades) -> Markup | None:
    """Returns a plot with one mark per run, peak against throughput, the efficient ones filled; None without marks."""
    spots = _spots(found)
    if not spots:
        return None
    x = _around([spot.peak for spot in spots], 0, 100)
    y = _around([end for spot in spots for end in _interval(spot, spots)], PLOT_HEIGHT, 0)
    whiskers = [
        charts.line(x(spot.peak), HEAD + y(low), x(spot.peak), HEAD + y(high), "error")
        for spot in spots
        if spot.trade.interval
        for low, high in [_interval(spot, spots)]
    ]
    told = [_told(spot) for spot in spots]
    marks = [
        charts.symbol(x(spot.peak), HEAD + y(spot.throughput), DIAMOND, "mean a", said)
        if spot.trade.efficient
        else charts.dot(x(spot.peak), HEAD + y(spot.throughput), 4, "mark inconclusive", said)
        for spot, said in zip(spots, told, strict=True)
    ]
    drawn = [*whiskers, *marks, *_numbers(spots, x, y)]
    return _drawing("throughput against peak", told, Axis(x, "B", "peak", 4), Axis(y, "samples/s"), [], drawn)


def _drawing(
    title: str, told: Iterable[str], x: Axis, y: Axis, inner: Sequence[Markup], spots: Iterable[Markup]
) -> Markup:
    """Returns a drawing with curves in the inner drawing and marks above them."""
    return charts.drawing(title, "; ".join(told), HEAD + PLOT_HEIGHT + charts.FOOT, [*framed(x, y, inner), *spots])


def _sizes(x: Scale) -> Axis:
    """Returns the axis of batch sizes, whose ticks are whole numbers."""
    return Axis(x, "", "batch size", min(4, max(1, int(x.high))))


def _through(line: LinearFit, x: Scale, y: Scale) -> Markup:
    """Returns the part of the line within the plot."""
    sizes = np.linspace(x.low, x.high, 201)
    totals = line.constant + line.per_sample * sizes
    within = (totals >= y.low) & (totals <= y.high)
    if not within.any():
        return Markup("")
    return charts.path(x.places(sizes[within]), y.places(totals[within]), "line a")


def _numbers(spots: Sequence[Spot], x: Scale, y: Scale) -> Iterator[Markup]:
    """Yields each run's number in the table as a label that overlaps no other; the efficient runs' labels are bold.

    Of many runs, only the efficient ones and the one as it was have a label.
    """
    placed: list[tuple[str, float, float]] = []
    named = [spot for spot in spots if len(spots) <= MOST_NUMBERED or spot.trade.efficient or not spot.trade.fix]
    for spot in sorted(named, key=lambda spot: -spot.throughput):
        place = x(spot.peak)
        side = _side(place)
        near = [height for other, at, height in placed if other == side and abs(at - place) < CLOSE]
        height = max([HEAD + y(spot.throughput) - 7, *(other + APART for other in near)])
        placed.append((side, place, height))
        said = str(spot.number) if spot.trade.fix else f"{spot.number} {AS_IT_WAS}"
        yield charts.text(place, height, said, f"{'label ' if spot.trade.efficient else ''}{side}")


def _interval(spot: Spot, spots: Sequence[Spot]) -> tuple[float, float]:
    """Returns the throughput's interval, cut where a very wide one would compress the plot."""
    low, high = spot.trade.interval or (spot.throughput, spot.throughput)
    slowest, fastest = min(one.throughput for one in spots), max(one.throughput for one in spots)
    return max(low, slowest / NEAR), min(high, fastest * NEAR)


def _told(spot: Spot) -> str:
    name = options(spot.trade.fix) or AS_IT_WAS
    return f"{spot.number}. {name}: {units.size(spot.peak)}, {units.rate(spot.throughput, 'samples/s')}"


def _side(place: float) -> str:
    """Returns the side of a mark on which its label has more space; `place` is in percent from the left."""
    return "after" if place < 50 else "before"


def _along(scale: Scale, values: Sequence[float]) -> Series:
    return scale.places(np.asarray(values, dtype=np.float64))


def _around(values: Sequence[float], start: float, end: float) -> Scale:
    low, high = widen(float(min(values)), float(max(values)), 0.14)
    return Scale(max(0.0, low), high, start, end)


def _spots(found: Trades) -> list[Spot]:
    return [
        Spot(number, trade.peak, trade.throughput, trade)
        for number, trade in enumerate(found.trades, 1)
        if trade.peak is not None and trade.throughput is not None
    ]


def _predicted(found: BatchSizes) -> dict[int, int]:
    """Returns the predicted totals to draw: those near or below the limit, or else the smallest."""
    known = {point.batch_size: point.total for point in found.points}
    near = {size: total for size, total in known.items() if total <= NEAR * found.limit}
    return near or dict(sorted(known.items())[:1])


def _measured(found: BatchSizes) -> dict[int, int]:
    return {one.batch_size: one.total for one in found.confirmed if one.total is not None}


def _shown(found: BatchSizes) -> set[int]:
    """Returns the batch sizes that any of the plots shows."""
    return {*_predicted(found), *_measured(found), *(speed.batch_size for speed in found.speeds)}


def _notes(found: BatchSizes) -> Iterator[str]:
    yield "Dots and the line through them: predicted."
    if _measured(found):
        yield "Diamonds: measured."
    if beyond := [str(point.batch_size) for point in found.points if point.batch_size not in _predicted(found)]:
        yield f"Predicted far beyond the limit and not drawn: {', '.join(beyond)}."
    if failed := [str(one.batch_size) for one in found.confirmed if one.total is None]:
        yield f"Failed when run: {', '.join(failed)}."
