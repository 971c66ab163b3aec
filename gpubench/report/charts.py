"""Draws charts as SVG: scales, shapes, and plots with two axes.

The drawings fit any width: x is in percent of the drawing and y in pixels, so that text keeps its size on a phone.

Curves cannot use %: they are in an inner drawing, 100 wide, which is stretched and cuts off what lies outside it.
Colours come from classes of the page's style sheet. All text is escaped.
"""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from gpubench import units
from gpubench.text import SAME_PART
from gpubench.trace.profile import CAUSES

Series = NDArray[np.float64]

HUES = frozenset(
    {
        *("other", "data_wait", "host_to_device", "forward", "backward", "exposed_communication", "optimizer"),
        "evaluation",
        *("scheduler", "recv_wait", "send_wait", "idle"),
        *("compute", "copy", "set"),
        *CAUSES,
    }
)
"""The styles that have a colour: phases of the host, work of the device, causes of idle time. Other styles have the
colour of a similar one, or grey."""
ALIKE = {
    **SAME_PART,
    "communication": "exposed_communication",
    "copies": "copy",
    "operators": "compute",
    "python": "python_and_launch",
}


def hue(style: str) -> str:
    """Returns the style sheet's class that colours a style."""
    known = ALIKE.get(style, style)
    return f"hue-{known if known in HUES else 'other'}"


_MEASURES: Final = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")),
    "B": ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")),
    "fraction": ((0.01, "%"),),
}


@dataclass(frozen=True)
class Measure:
    """The unit in which an axis is labelled: `name`, which is `factor` times the unit of the data."""

    factor: float
    name: str


@dataclass(frozen=True)
class Tick:
    """A tick of an axis: its value in the unit of the data, and its label in the unit of the axis."""

    value: float
    label: str


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] of the data linearly onto [start, end] of the page."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Returns the position of `value` on the page; outside the scale, that of the nearest end."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * min(1.0, max(0.0, share))

    def places(self, values: Series) -> Series:
        """Returns the positions of many values. One beyond the scale is cut by the edge of the plot."""
        shares = (values - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * np.clip(shares, -0.5, 1.5)


def measure(unit: str, largest: float) -> Measure:
    """Returns the unit of an axis in which `largest` is at least 1, or the smallest one known for `unit`."""
    known = _MEASURES.get(unit, ((1.0, unit),))
    return Measure(*next(((factor, name) for factor, name in known if abs(largest) >= factor), known[-1]))


def ticks(low: float, high: float, count: int, measured: Measure) -> list[Tick]:
    """Returns about `count` round values within [low, high], with labels that have no more decimals than needed."""
    low, high = low / measured.factor, high / measured.factor
    step = _round_step((high - low) / max(1, count))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [
        Tick(number * step * measured.factor, f"{number * step + 0.0:,.{decimals}f}")
        for number in range(first, last + 1)
    ]


@dataclass(frozen=True)
class Axis:
    """A scale with about `count` ticks. `name` is the quantity along it."""

    scale: Scale
    unit: str
    name: str = ""
    count: int = 5

    @property
    def ticks(self) -> list[tuple[float, Tick]]:
        """Each tick with its position on the page."""
        found = ticks(self.scale.low, self.scale.high, self.count, self._measure)
        return [(self.scale(tick.value), tick) for tick in found]

    @property
    def label(self) -> str:
        """The name and the unit that the ticks are in: "time, ms"."""
        return ", ".join(filter(None, (self.name, self._measure.name)))

    @property
    def _measure(self) -> Measure:
        return measure(self.unit, self.scale.high)


def _round_step(rough: float) -> float:
    """Returns the step nearest to `rough`, by ratio, that is 1, 2 or 5 times a power of ten."""
    rough = max(rough, sys.float_info.min)  # a range of the smallest numbers has steps of 0
    power: float = 10.0 ** math.floor(math.log10(rough))
    return min((factor * power for factor in (1, 2, 5, 10)), key=lambda step: abs(math.log(step / rough)))


def widen(low: float, high: float, share: float = 0.06) -> tuple[float, float]:
    """Returns the range with room added on both sides, and never an empty range."""
    room = (high - low) * share or abs(high) * share or 1.0
    return low - room, high + room


@dataclass(frozen=True)
class Envelope:
    """A series reduced to columns of pixels: the smallest, mean and largest value of each, all of shape (columns,)."""

    x: Series
    low: Series
    mean: Series
    high: Series


def reduce(x: Series, y: Series, columns: int) -> Envelope:
    """Returns the minimum, mean and maximum of `y` over `columns` equal parts, so that no extreme is lost.

    x and y are finite, of shape (n,). The x of a part is its middle. A series of at most `columns` values is unchanged.
    """
    n = len(y)
    if n <= columns:
        return Envelope(x, y, y, y)
    starts = np.arange(columns) * n // columns
    lengths = np.diff(np.append(starts, n))
    return Envelope(
        x=np.add.reduceat(x, starts) / lengths,
        low=np.minimum.reduceat(y, starts),
        mean=np.add.reduceat(y, starts) / lengths,
        high=np.maximum.reduceat(y, starts),
    )


def bulk(series: Sequence[Series], tail: float = 0.025) -> tuple[float, float]:
    """Returns a range that shows nearly all values and leaves outliers out.

    It is the range from the quantile `tail` to 1 - `tail` of all series, widened by half its width on each side.
    It contains 99.99 % of normally distributed values. It includes negative numbers only if a value is negative.
    """
    ends = [np.quantile(values, [tail, 1 - tail]) for values in series]
    low, high = widen(float(min(low for low, _ in ends)), float(max(high for _, high in ends)), 0.5)
    return (0.0, high) if low < 0 <= min(float(values.min()) for values in series) else (low, high)


def histogram(series: Sequence[Series], low: float, high: float) -> tuple[Series, list[Series]]:
    """Returns the edges (bins + 1,), and for each series the fraction of all its values in each bin (bins,).

    There are 12 to 120 bins, of the width 2 IQR / n^(1/3) (Freedman and Diaconis 1981), the least of all series.
    Values outside [low, high] are counted in the total but are in no bin.
    """
    widths = [2 * float(np.subtract(*np.quantile(values, [0.75, 0.25]))) / len(values) ** (1 / 3) for values in series]
    width = min((width for width in widths if width > 0), default=high - low)
    bins = int(np.clip((high - low) / width, 12, 120))
    edges: Any = np.linspace(low, high, bins + 1)
    return edges, [np.histogram(values, edges)[0] / len(values) for values in series]


WIDTH = 100.0  # of the inner drawing: percent, as everywhere else
FOOT = 44.0  # pixels under a drawing for its bottom axis


def drawing(title: str, description: str, height: float, parts: Iterable[Markup]) -> Markup:
    """Returns a complete drawing, with a title and a description for screen readers."""
    return Markup(
        '<svg class="drawing" role="img" width="100%" height="{}"><title>{}</title><desc>{}</desc>{}</svg>\n'
    ).format(_number(height), title, description, Markup("").join(parts))


def curves(height: float, parts: Iterable[Markup]) -> Markup:
    """Returns an inner drawing from (0, 0) to (WIDTH, height), which is stretched to the width of the outer one."""
    return Markup(
        '<svg width="100%" height="{0}" viewBox="0 0 {1} {0}" preserveAspectRatio="none" aria-hidden="true">{2}</svg>'
    ).format(_number(height), _number(WIDTH), Markup("").join(parts))


def path(x: Series, y: Series, style: str) -> Markup:
    """Returns a line through the points, for the inner drawing. Its last segment, of length 0, shows a single point."""
    return Markup('<path class="{}" d="{}"/>').format(style, "M" + "L".join(_points(x, y)) + "h0")


def area(x: Series, low: Series, high: Series, style: str) -> Markup:
    """Returns the area between two lines, for the inner drawing."""
    outline = [*_points(x, high), *_points(x[::-1], low[::-1])]
    return Markup('<path class="{}" d="{}"/>').format(style, "M" + "L".join(outline) + "Z")


def bar(start: float, end: float, y: float, height: float, style: str, hint: str = "") -> Markup:
    """Returns a box from `start` to `end` percent. `hint` is shown on hover."""
    left, right = min(start, end), max(start, end)
    return Markup('<rect class="{}" x="{}%" y="{}" width="{}%" height="{}">{}</rect>').format(
        style, _number(left), _number(y), _number(right - left), _number(height), _hint(hint)
    )


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> Markup:
    return Markup('<line class="{}" x1="{}%" y1="{}" x2="{}%" y2="{}"/>').format(
        style, *(_number(value) for value in (x1, y1, x2, y2))
    )


def text(x: float, y: float, content: str, style: str) -> Markup:
    return Markup('<text class="{}" x="{}%" y="{}">{}</text>').format(style, _number(x), _number(y), content)


def symbol(x: float, y: float, shape: str, style: str, hint: str = "") -> Markup:
    """Returns a mark at (x percent, y). `shape` is the path data of its outline around (0, 0)."""
    return Markup('<svg x="{}%" y="{}" class="symbol"><path class="{}" d="{}">{}</path></svg>').format(
        _number(x), _number(y), style, shape, _hint(hint)
    )


def dot(x: float, y: float, radius: float, style: str, hint: str = "") -> Markup:
    return Markup('<circle class="{}" cx="{}%" cy="{}" r="{}">{}</circle>').format(
        style, _number(x), _number(y), _number(radius), _hint(hint)
    )


def bottom_axis(places: Iterable[tuple[float, Tick]], y: float, top: float, name: str) -> Markup:
    """Returns the bottom axis: grid lines up to `top`, a label under each, and the name of the axis below."""
    parts = []
    for x, tick in places:
        parts += [line(x, top, x, y, "grid"), text(x, y + 16, tick.label, "tick middle")]
    parts.append(text(50, y + 34, name, "name middle"))
    return Markup("").join(parts)


def left_axis(places: Iterable[tuple[float, Tick]], name: str) -> Markup:
    """Returns the left axis: horizontal grid lines, a label in the margin left of each, and the unit above them."""
    parts = []
    for y, tick in places:
        parts += [line(0, y, 100, y, "grid"), text(0, y + 4, tick.label, "tick outside")]
    parts.append(text(0, -8, name, "name above"))
    return Markup("").join(parts)


def _hint(hint: str) -> Markup:
    return Markup("<title>{}</title>").format(hint) if hint else Markup("")


def _points(x: Series, y: Series) -> list[str]:
    return [f"{a:g},{b:g}" for a, b in zip(np.round(x, 2).tolist(), np.round(y, 1).tolist(), strict=True)]


def _number(value: float) -> str:
    """Returns the number with at most two decimals. Raises ValueError if it is not finite."""
    if not np.isfinite(value):
        raise ValueError(f"a drawing has no position {value}")
    return f"{round(value, 2):g}" if abs(value) < 1e5 else f"{value:.0f}"


COLUMNS = 600  # as many as a plot is pixels wide on most screens
HEAD = 20.0  # pixels above a plot for its unit
SIDES = ("a", "b")


@dataclass(frozen=True)
class Curve:
    """A curve through the points x and y: finite, of shape (n,), n >= 1, x not negative.

    `style` is a class of the style sheet. All curves of a style have the same label.
    """

    x: Series
    y: Series
    style: str
    label: str = ""


@dataclass(frozen=True)
class ShadedRange:
    """A range of the x axis that is shaded."""

    start: float
    end: float
    label: str = ""


@dataclass(frozen=True)
class Remark:
    """Words beside a point of a curve. Those that are not `everywhere` are left out on a phone."""

    x: float
    y: float
    text: str
    everywhere: bool


@dataclass(frozen=True)
class Plane:
    """The title, axes and size of a plot."""

    title: str
    description: str
    x_unit: str
    """The unit of the x axis: "steps" or "s"."""
    x_name: str
    y_unit: str
    height: float = 200.0
    from_zero: bool = False
    y_range: tuple[float, float] | None = None
    """The range of the y axis; None shows all values."""
    spans: Sequence[ShadedRange] = field(default=())
    remarks: Sequence[Remark] = field(default=())


def over(plane: Plane, curves: Sequence[Curve]) -> Markup | None:
    """Draws curves over steps or time; None if there are none. A long curve is drawn as its mean and its extremes."""
    if not curves:
        return None
    low, high = plane.y_range or _extent([curve.y for curve in curves])
    low, high = widen(0.0 if plane.from_zero else low, high)
    y = Scale(max(low, 0.0) if plane.from_zero else low, high, plane.height, 0)
    right = max(float(np.max(curve.x)) for curve in curves)
    x = Scale(0, right if right > 0 else 1, 0, WIDTH)
    inner = [bar(x(span.start), x(span.end), 0, plane.height, "shade") for span in plane.spans]
    inner += [part for curve in curves for part in _curve(curve, x, y)]
    up = Axis(y, plane.y_unit, count=round(plane.height / 40))
    parts = [
        *framed(Axis(x, plane.x_unit, plane.x_name), up, inner),
        *(text(x(span.start), HEAD - 5, span.label, "note") for span in plane.spans if span.label),
        *(_remark(one, x, y) for one in plane.remarks),
        *_end_labels(curves, y),
    ]
    return drawing(plane.title, plane.description, HEAD + plane.height + FOOT, parts)


def framed(
    x: Axis | None, y: Axis, inner: Iterable[Markup], top: float = HEAD, foot: float | None = None
) -> list[Markup]:
    """Returns both axes, and the inner drawing below `top`, as tall as the scale of `y`.

    `x` is None for a plot without a bottom axis. `foot` is the distance in pixels from the top to the bottom
    axis, if that is not directly below the drawing.
    """
    height = y.scale.start
    parts = [left_axis(((top + place, tick) for place, tick in y.ticks), y.label)]
    if x:
        parts.append(bottom_axis(x.ticks, foot or top + height, top, x.label))
    return [*parts, Markup('<g transform="translate(0 {})">{}</g>').format(f"{top:g}", curves(height, inner))]


def _extent(series: Sequence[Series]) -> tuple[float, float]:
    return float(min(np.min(values) for values in series)), float(max(np.max(values) for values in series))


def _curve(curve: Curve, x: Scale, y: Scale) -> list[Markup]:
    envelope = reduce(curve.x, curve.y, COLUMNS)
    places = x.places(envelope.x)
    line = path(places, y.places(envelope.mean), f"line {curve.style}")
    if envelope.low is envelope.high:
        return [line]
    return [area(places, y.places(envelope.low), y.places(envelope.high), f"extremes {curve.style}"), line]


def _remark(remark: Remark, x: Scale, y: Scale) -> Markup:
    """Draws the words of a remark on the side of its point that has room, within the plot."""
    place = x(remark.x)
    style = "after" if place < 75 else "before"
    return text(place, HEAD + y(remark.y) + 11, remark.text, style if remark.everywhere else f"{style} on-desk")


def _end_labels(curves: Sequence[Curve], y: Scale) -> list[Markup]:
    """Returns the label of each style, right of the ends of its curves. Labels that would overlap are moved apart."""
    ends: dict[tuple[str, str], list[float]] = {}
    for curve in curves:
        if curve.label:
            last_tenth = curve.y[-1 - len(curve.y) // 10 :]
            ends.setdefault((curve.style, curve.label), []).append(y(float(np.mean(last_tenth))))
    parts, last = [], -np.inf
    for (style, label), places in sorted(ends.items(), key=lambda item: float(np.mean(item[1]))):
        last = max(float(np.mean(places)), last + 15)
        parts.append(text(100, HEAD + last + 4, label, f"end label {style}"))
    return parts


def distributions(
    plane: Plane, sides: Sequence[Sequence[Series]], names: Sequence[str], low: float, high: float
) -> Markup | None:
    """Draws histograms of one or two sides, their medians, and a dot for the mean of each repeat.

    `sides` has for each side the steady values (n,) of its repeats; returns None if no side has any. The axis is [low,
    high].
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
    x = Scale(low, high, 0, WIDTH)
    y = Scale(0, max(float(share.max()) for share in shares) * 1.08 or 1.0, plane.height, 0)
    outlines = []
    for (style, *_), share in zip(shown, shares, strict=True):
        corners, heights = x.places(np.repeat(edges, 2)), y.places(np.concatenate([[0], np.repeat(share, 2), [0]]))
        outlines.append(area(corners, np.full(len(corners), plane.height), heights, f"fill {style}"))
        outlines.append(path(corners, heights, f"line {style}"))
    medians = [(style, name, float(np.median(values))) for style, name, values, _ in shown]
    parts = [
        *framed(Axis(x, plane.x_unit, plane.x_name), Axis(y, "fraction", "of steps", 3), outlines, top, foot),
        *_medians(medians, plane, x, top, bottom),
    ]
    for row, (style, name, _, series) in enumerate(shown):
        place = bottom + 12 + 16 * row
        parts.append(text(0, place + 4, name, f"tick outside {style}"))
        means = [float(np.mean(values)) for values in series]
        parts += [
            dot(x(mean), place, 4, f"mean {style}", units.quantity(mean, plane.x_unit))
            for mean in means
            if low <= mean <= high
        ]
    return drawing(plane.title, plane.description, foot + FOOT, parts)


def _medians(
    medians: Sequence[tuple[str, str, float]], plane: Plane, x: Scale, top: float, bottom: float
) -> list[Markup]:
    """Draws a line at each median, with its label on a row of its own and on the side that has room."""
    parts = []
    for row, (style, name, median) in enumerate(medians):
        place, y = x(median), top - 22 + 16 * row
        said = f"{name} median {units.quantity(median, plane.x_unit)}".strip()
        parts += [
            line(place, y - 9, place, bottom, f"median {style}"),
            text(place, y, said, f"label {'after' if place < 60 else 'before'} {style}"),
        ]
    return parts


def marks(plane: Plane, sides: Sequence[tuple[str, str, Series]], end: float) -> Markup:
    """Draws a row for each (style, name, moments), with a tick at each moment from 0 to `end`, which is positive."""
    bottom = HEAD + 22 * len(sides)
    x = Scale(0, end, 0, 100)
    axis = Axis(x, plane.x_unit, plane.x_name)
    parts = [bottom_axis(axis.ticks, bottom, HEAD, axis.label)]
    for row, (style, name, moments) in enumerate(sides):
        y = HEAD + 22 * row
        parts.append(text(0, y + 14, name, f"tick outside {style}"))
        columns = np.unique(np.round(moments / end * COLUMNS)) * (100 / COLUMNS)
        width = 100 / COLUMNS
        parts += [bar(column, column + width, y + 4, 13, f"fill solid {style}") for column in columns.tolist()]
    return drawing(plane.title, plane.description, bottom + FOOT, parts)
