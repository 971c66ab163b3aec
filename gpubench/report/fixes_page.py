"""The page's sections on what a memory run tried: batch sizes, and settings that trade memory for speed."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from markupsafe import Markup

from gpubench import units
from gpubench.memory.batch_sizes import BatchSizes, Line, Trade, Trades
from gpubench.report import charts, fixes, wording
from gpubench.report.charts import HEAD, Axis, Scale, Series, framed, widen
from gpubench.report.figures import Figure
from gpubench.report.finding_phrases import options

HEIGHT = 220.0
NEAR = 1.5  # times the limit: points beyond it, or a limit beyond all points, would compress the plot
DIAMOND = "M-6 0L0-6L6 0L0 6Z"
AS_IT_WAS = "as it was"
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


def batch_sizes(found: BatchSizes) -> dict[str, Any]:
    """Return the variables of templates/trying.html for the batch sizes."""
    x = Scale(0, 1.06 * max(_shown(found), default=1), 0, 100)
    peaks, speeds = peak_by_batch(found, x), throughput_by_batch(found, x)
    return {
        "sentence": wording.opening(fixes.batch_sizes_sentence(found)),
        "line": wording.opening(fixes.line_sentence(found)) if found.points else "",
        "figures": [
            *([Figure("Peak by batch size", peaks, " ".join(_beneath(found)))] if peaks else []),
            *([Figure("Throughput by batch size", speeds)] if speeds else []),
        ],
        "sheet": replace(fixes.batch_sizes(found), title="Every batch that was looked at"),
    }


def trades(found: Trades) -> dict[str, Any]:
    """Return the variables of templates/trying.html for the settings."""
    drawing, missing = scatter(found), len(found.trades) - len(_spots(found))
    shown = fixes.trades(found)
    said = ["Left is less memory, up is faster. Diamonds: nothing is known to beat them. Numbers: rows of the table."]
    if any(trade.interval for trade in found.trades):
        said.append("Whiskers: 95 % intervals.")
    if missing:
        said.append(f"Not drawn: {units.counted(missing, 'run')} that failed or {_was(missing)} not timed.")
    return {
        "figure": Figure("Throughput against peak", drawing, " ".join(said)) if drawing else None,
        "sheet": replace(
            shown,
            title="Every setting that was run",
            rows=[(f"{number}. {first}", *rest) for number, (first, *rest) in enumerate(shown.rows, 1)],
        ),
    }


def peak_by_batch(found: BatchSizes, x: Scale) -> Markup | None:
    """Return a plot of predicted and measured peaks, the line through the predictions, and the limit, in bytes.

    None if there is no peak to draw.
    """
    predicted, measured = _predicted(found), _measured(found)
    most = max([*predicted.values(), *measured.values()], default=0)
    if most <= 0:
        return None
    limit = found.limit if 0 < found.limit <= NEAR * most else None
    y = Scale(0, 1.08 * max(most, limit or 0), HEIGHT, 0)
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
    """Return a plot of the timed batches, in samples/s; None if there are none."""
    speeds = sorted(found.speeds, key=lambda speed: speed.batch_size)
    fastest = max(speeds, key=lambda speed: speed.throughput, default=None)
    if fastest is None or fastest.throughput <= 0:
        return None
    y = Scale(0, 1.18 * fastest.throughput, HEIGHT, 0)
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
    """Return a plot with one mark per run, peak against throughput, the efficient ones filled; None without marks."""
    spots = _spots(found)
    if not spots:
        return None
    x = _around([spot.peak for spot in spots], 0, 100)
    y = _around([end for spot in spots for end in _interval(spot, spots)], HEIGHT, 0)
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
    drawn = [*whiskers, *marks, *_labels(spots, x, y)]
    return _drawing("throughput against peak", told, Axis(x, "B", "peak", 4), Axis(y, "samples/s"), [], drawn)


def _drawing(
    title: str, told: Iterable[str], x: Axis, y: Axis, inner: Sequence[Markup], spots: Iterable[Markup]
) -> Markup:
    """Return a drawing with curves in the inner drawing and marks above them."""
    return charts.drawing(title, "; ".join(told), HEAD + HEIGHT + charts.FOOT, [*framed(x, y, inner), *spots])


def _sizes(x: Scale) -> Axis:
    """Return the axis of batch sizes, whose ticks are whole numbers."""
    return Axis(x, "", "batch size", min(4, max(1, int(x.high))))


def _through(line: Line, x: Scale, y: Scale) -> Markup:
    """Return the part of the line within the plot."""
    sizes = np.linspace(x.low, x.high, 201)
    totals = line.constant + line.per_sample * sizes
    within = (totals >= y.low) & (totals <= y.high)
    if not within.any():
        return Markup("")
    return charts.path(x.places(sizes[within]), y.places(totals[within]), "line a")


def _labels(spots: Sequence[Spot], x: Scale, y: Scale) -> Iterator[Markup]:
    """Yield each run's number in the table as a label that overlaps no other; the efficient runs' labels are bold."""
    placed: list[tuple[str, float, float]] = []
    for spot in sorted(spots, key=lambda spot: -spot.throughput):
        place = x(spot.peak)
        side = _side(place)
        near = [height for other, at, height in placed if other == side and abs(at - place) < CLOSE]
        height = max([HEAD + y(spot.throughput) - 7, *(other + APART for other in near)])
        placed.append((side, place, height))
        said = str(spot.number) if spot.trade.fix else f"{spot.number} {AS_IT_WAS}"
        yield charts.text(place, height, said, f"{'label ' if spot.trade.efficient else ''}{side}")


def _interval(spot: Spot, spots: Sequence[Spot]) -> tuple[float, float]:
    """Return the throughput's interval, cut where a very wide one would compress the plot."""
    low, high = spot.trade.interval or (spot.throughput, spot.throughput)
    slowest, fastest = min(one.throughput for one in spots), max(one.throughput for one in spots)
    return max(low, slowest / NEAR), min(high, fastest * NEAR)


def _told(spot: Spot) -> str:
    name = options(spot.trade.fix) or AS_IT_WAS
    return f"{spot.number}. {name}: {units.size(spot.peak)}, {units.rate(spot.throughput, 'samples/s')}"


def _side(place: float) -> str:
    """Return the side of a mark on which its label has more space; `place` is in percent from the left."""
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
    """Return the predicted totals to draw: those near or below the limit, or else the smallest."""
    known = {point.batch_size: point.total for point in found.points}
    near = {size: total for size, total in known.items() if total <= NEAR * found.limit}
    return near or dict(sorted(known.items())[:1])


def _measured(found: BatchSizes) -> dict[int, int]:
    return {one.batch_size: one.total for one in found.confirmed if one.total is not None}


def _shown(found: BatchSizes) -> set[int]:
    """Return the batch sizes that any of the plots shows."""
    return {*_predicted(found), *_measured(found), *(speed.batch_size for speed in found.speeds)}


def _beneath(found: BatchSizes) -> Iterator[str]:
    yield "Dots and the line through them: predicted."
    if _measured(found):
        yield "Diamonds: measured."
    if beyond := [str(point.batch_size) for point in found.points if point.batch_size not in _predicted(found)]:
        yield f"Predicted far beyond the limit and not drawn: {', '.join(beyond)}."
    if failed := [str(one.batch_size) for one in found.confirmed if one.total is None]:
        yield f"Failed when run: {', '.join(failed)}."


def _was(number: int) -> str:
    return "was" if number == 1 else "were"
