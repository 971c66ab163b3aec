"""Plots with two axes: values over steps or time, and distributions. Style `a` is the baseline, `b` the candidate."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from markupsafe import Markup

from gpubench import units
from gpubench.report import svg
from gpubench.report.scales import Axis, Scale, Series, histogram, reduce, widen

COLUMNS = 600  # as many as a plot is pixels wide on most screens
HEAD = 20.0  # pixels above a plot for its unit
SIDES = ("a", "b")


@dataclass(frozen=True)
class Curve:
    """x, y: (n,), n >= 1, finite, x from 0 on. `style` is a class of the style sheet; one style has one label."""

    x: Series
    y: Series
    style: str
    label: str = ""


@dataclass(frozen=True)
class Span:
    """A stretch of the x axis set apart."""

    start: float
    end: float
    label: str = ""


@dataclass(frozen=True)
class Plane:
    """What a plot is of, and how it is framed."""

    title: str
    description: str
    x_unit: str
    """Of the x axis: "steps" or "s"."""
    x_name: str
    y_unit: str
    height: float = 200.0
    from_zero: bool = False
    y_range: tuple[float, float] | None = None
    """None shows everything."""
    spans: Sequence[Span] = field(default=())


def over(plane: Plane, curves: Sequence[Curve]) -> Markup | None:
    """Curves over steps or time; None if there is nothing to draw. A long one becomes its mean within its extremes."""
    if not curves:
        return None
    low, high = plane.y_range or _extent([curve.y for curve in curves])
    low, high = widen(0.0 if plane.from_zero else low, high)
    y = Scale(max(low, 0.0) if plane.from_zero else low, high, plane.height, 0)
    right = max(float(np.max(curve.x)) for curve in curves)
    x = Scale(0, right if right > 0 else 1, 0, svg.WIDTH)
    inner = [svg.bar(x(span.start), x(span.end), 0, plane.height, "shade") for span in plane.spans]
    inner += [part for curve in curves for part in _curve(curve, x, y)]
    up = Axis(y, plane.y_unit, count=round(plane.height / 40))
    parts = [
        *framed(Axis(x, plane.x_unit, plane.x_name), up, inner),
        *(svg.text(x(span.start), HEAD - 5, span.label, "note") for span in plane.spans if span.label),
        *_end_labels(curves, y),
    ]
    return svg.drawing(plane.title, plane.description, HEAD + plane.height + svg.FOOT, parts)


def framed(
    x: Axis | None, y: Axis, inner: Iterable[Markup], top: float = HEAD, foot: float | None = None
) -> list[Markup]:
    """Both axes, and the inner drawing from `top` on, which is as tall as the scale of `y` says.

    x: None for a plot that has something else below; foot: pixels from the top to the bottom axis, if not right below.
    """
    height = y.scale.start
    parts = [svg.left_axis(((top + place, tick) for place, tick in y.ticks), y.label)]
    if x:
        parts.append(svg.bottom_axis(x.ticks, foot or top + height, top, x.label))
    return [*parts, Markup('<g transform="translate(0 {})">{}</g>').format(f"{top:g}", svg.curves(height, inner))]


def _extent(series: Sequence[Series]) -> tuple[float, float]:
    return float(min(np.min(values) for values in series)), float(max(np.max(values) for values in series))


def _curve(curve: Curve, x: Scale, y: Scale) -> list[Markup]:
    envelope = reduce(curve.x, curve.y, COLUMNS)
    places = x.places(envelope.x)
    line = svg.path(places, y.places(envelope.mean), f"line {curve.style}")
    if envelope.low is envelope.high:
        return [line]
    return [svg.area(places, y.places(envelope.low), y.places(envelope.high), f"extremes {curve.style}"), line]


def _end_labels(curves: Sequence[Curve], y: Scale) -> list[Markup]:
    """Each style's name right of where its curves end, pushed apart where they would overlap."""
    ends: dict[tuple[str, str], list[float]] = {}
    for curve in curves:
        if curve.label:
            last_tenth = curve.y[-1 - len(curve.y) // 10 :]
            ends.setdefault((curve.style, curve.label), []).append(y(float(np.mean(last_tenth))))
    parts, last = [], -np.inf
    for (style, label), places in sorted(ends.items(), key=lambda item: float(np.mean(item[1]))):
        last = max(float(np.mean(places)), last + 15)
        parts.append(svg.text(100, HEAD + last + 4, label, f"end label {style}"))
    return parts


def distributions(
    plane: Plane, sides: Sequence[Sequence[Series]], names: Sequence[str], low: float, high: float
) -> Markup | None:
    """Histograms of one or two sides over each other, their medians, and a dot for the mean of each repeat.

    sides: for each side, the steady values (n,) of its repeats; None if no side has any. The axis is [low, high].
    """
    pooled = [np.concatenate(list(series)) if len(series) else np.empty(0) for series in sides]
    shown = [
        (style, name, values, series)
        for style, name, values, series in zip(SIDES, names, pooled, sides, strict=False)
        if len(values)
    ]
    if not shown:
        return None
    edges, shares = histogram([values for _, _, values, _ in shown], low, high)
    top, bottom = HEAD + 24, HEAD + 24 + plane.height
    foot = bottom + 8 + 16 * len(shown)
    x = Scale(low, high, 0, svg.WIDTH)
    y = Scale(0, max(float(share.max()) for share in shares) * 1.08 or 1.0, plane.height, 0)
    outlines = []
    for (style, *_), share in zip(shown, shares, strict=True):
        corners, heights = x.places(np.repeat(edges, 2)), y.places(np.concatenate([[0], np.repeat(share, 2), [0]]))
        outlines.append(svg.area(corners, np.full(len(corners), plane.height), heights, f"fill {style}"))
        outlines.append(svg.path(corners, heights, f"line {style}"))
    medians = [(style, name, float(np.median(values))) for style, name, values, _ in shown]
    parts = [
        *framed(Axis(x, plane.x_unit, plane.x_name), Axis(y, "fraction", "of steps", 3), outlines, top, foot),
        *_medians(medians, plane, x, top, bottom),
    ]
    for row, (style, name, _, series) in enumerate(shown):
        place = bottom + 12 + 16 * row
        parts.append(svg.text(0, place + 4, name, f"tick outside {style}"))
        means = [float(np.mean(values)) for values in series]
        parts += [
            svg.dot(x(mean), place, 4, f"mean {style}", units.quantity(mean, plane.x_unit))
            for mean in means
            if low <= mean <= high
        ]
    return svg.drawing(plane.title, plane.description, foot + svg.FOOT, parts)


def _medians(
    medians: Sequence[tuple[str, str, float]], plane: Plane, x: Scale, top: float, bottom: float
) -> list[Markup]:
    """A line at each median, its label on a row of its own and on the side that has room."""
    parts = []
    for row, (style, name, median) in enumerate(medians):
        place, y = x(median), top - 22 + 16 * row
        said = f"{name} median {units.quantity(median, plane.x_unit)}".strip()
        parts += [
            svg.line(place, y - 9, place, bottom, f"median {style}"),
            svg.text(place, y, said, f"label {'after' if place < 60 else 'before'} {style}"),
        ]
    return parts


def marks(plane: Plane, sides: Sequence[tuple[str, str, Series]], end: float) -> Markup:
    """One row for each (style, name, moments): a tick at each moment from 0 to `end`, which has to be positive."""
    bottom = HEAD + 22 * len(sides)
    x = Scale(0, end, 0, 100)
    axis = Axis(x, plane.x_unit, plane.x_name)
    parts = [svg.bottom_axis(axis.ticks, bottom, HEAD, axis.label)]
    for row, (style, name, moments) in enumerate(sides):
        y = HEAD + 22 * row
        parts.append(svg.text(0, y + 14, name, f"tick outside {style}"))
        columns = np.unique(np.round(moments / end * COLUMNS)) * (100 / COLUMNS)
        width = 100 / COLUMNS
        parts += [svg.bar(column, column + width, y + 4, 13, f"fill solid {style}") for column in columns.tolist()]
    return svg.drawing(plane.title, plane.description, bottom + svg.FOOT, parts)
