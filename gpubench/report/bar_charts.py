"""Plots whose vertical axis is a list: ratios with intervals, the waterfall of a step, bars of memory.

Each row has its name left and its figure right of the drawing; on a phone the style sheet moves both above it.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup

from gpubench import units
from gpubench.compare.result import Verdict, Waterfall
from gpubench.compare.verdicts import leading
from gpubench.report import charts, phrases
from gpubench.report.charts import Axis, Measure, Scale, Tick, measure, ticks, widen
from gpubench.text import MINUS, phase_name, shorten, typeset

if TYPE_CHECKING:
    from gpubench.gain import Gain  # which reports of other commands do not load

LONGEST = 24  # characters of a name left of a drawing
PITCH = 40.0
THICKNESS = 16.0
TOP = 8.0
WIDEST = 2.0  # times what the axis needs: an interval that is wider ends in an arrow, and does not flatten the others
NEAR_THE_END = 0.93  # of half the axis: the label of a tick beyond it would stick out of the drawing
SQUARE = 30.0  # pixels: the height of a cell of `pairs`
FAINTEST, STRONGEST = 0.08, 0.6  # opacity of a cell

_MARKS = {
    "established": "M-7 0L0-7L7 0L0 7Z",
    "equivalent": "M-5-5H5V5H-5Z",
    "inconclusive": "M-5 0A5 5 0 1 0 5 0A5 5 0 1 0-5 0Z",
    "rejected": "M-5-5L5 5M5-5L-5 5",
}
_ARROWS = {"left": "M0-6L-8 0L0 6Z", "right": "M0-6L8 0L0 6Z"}


def _standing(verdict: Verdict) -> str:
    """Returns how strong the evidence of a verdict is, which decides the shape of its mark."""
    return "established" if verdict.verdict in ("faster", "slower", "more", "less") else verdict.verdict


def _duration(seconds: float) -> str:
    return typeset(units.signed_seconds(seconds))


@dataclass(frozen=True)
class Row:
    """A row of the plot; `value` is shown on its right."""

    name: str
    value: str
    parts: list[Markup]


def _rows(title: str, description: str, under: Sequence[Markup], rows: Sequence[Row], axis: Markup) -> Markup:
    parts = [*under, axis]
    for place, row in enumerate(rows):
        y = _middle(place)
        parts += [
            *row.parts,
            charts.text(0, y + 4, row.name, "row-name"),
            charts.text(100, y + 4, row.value, "row-value"),
        ]
    return charts.drawing(title, description, _foot(len(rows)) + charts.FOOT, parts)


def apart(names: Sequence[str]) -> list[str]:
    """Returns the names of rows, shortened; those that are alike then are numbered in their order."""
    short = [shorten(name, LONGEST) for name in names]
    number: Counter[str] = Counter()
    found = []
    for name, one in zip(names, short, strict=True):
        number[one] += 1
        mark = f" #{number[one]}" if short.count(one) > 1 else ""
        found.append(shorten(name, LONGEST - len(mark)) + mark)
    return found


def _middle(row: int) -> float:
    return TOP + PITCH * (row + 0.5) + 4  # slightly low, because on a phone the names are above the rows


def _foot(rows: int) -> float:
    return TOP + PITCH * rows + 4


def ratios(verdicts: Sequence[Verdict]) -> Markup | None:
    """Draws each metric's ratio with its interval and the margin; None if no metric has a ratio.

    The axis is logarithmic and fits most metrics; an interval that exceeds it ends in an arrow.
    """
    shown = [verdict for verdict in verdicts if verdict.ratio and verdict.ratio > 0]
    if all(verdict.verdict == "withheld" for verdict in shown):
        return None
    limit = _limit(shown)
    x = Scale(-limit, limit, 0, 100)
    bottom = _foot(len(shown))
    places = [(x(math.log(tick.value)), tick) for tick in _ratio_ticks(limit)]
    unit = "change, %" if limit < math.log(2) else "ratio"
    axis = charts.bottom_axis(places, bottom, TOP, f"B against A, {unit}")
    under = []
    rows = []
    for place, verdict in enumerate(shown):
        y = _middle(place)
        low, high = (x(math.log1p(sign * min(verdict.margin, 0.99))) for sign in (-1, 1))
        under.append(charts.bar(low, high, y - PITCH / 2, PITCH, "margin"))
        under += [charts.line(edge, y - PITCH / 2, edge, y + PITCH / 2, "margin-edge") for edge in (low, high)]
        if verdict.verdict == "withheld":
            rows.append(Row(phase_name(verdict.metric), "withheld", []))
        else:
            value = typeset(phrases.change(verdict))
            rows.append(Row(phase_name(verdict.metric), value, _interval(verdict, x, limit, y)))
    under.append(charts.line(50, TOP, 50, bottom, "unchanged"))
    said = "; ".join(f"{row.name} {row.value}, {verdict.verdict}" for row, verdict in zip(rows, shown, strict=True))
    return _rows("Ratio of each metric with its 95 % interval", said, under, rows, axis)


def gains(title: str, items: "Sequence[tuple[str, Gain]]") -> Markup | None:
    """Draws ratios with their names and intervals on a logarithmic axis around 1; None for none."""
    if not items:
        return None
    limit = max(0.02, *(abs(math.log(found.ratio)) for _, found in items)) * 1.25
    limit = max(limit, min(2 * limit, max(abs(math.log(end)) for _, found in items for end in found) * 1.05))
    x = Scale(-limit, limit, 0, 100)
    bottom = _foot(len(items))
    axis = charts.bottom_axis(
        [(x(math.log(tick.value)), tick) for tick in _ratio_ticks(limit)],
        bottom,
        TOP,
        "throughput against the baseline",
    )
    drawn = []
    names = apart([name for name, _ in items])
    for place, (name, (_, found)) in enumerate(zip(names, items, strict=True)):
        y = _middle(place)
        style = "gain" if found.low > 1 else "loss" if found.high < 1 else "margin"
        value = str(found)
        parts = [
            charts.bar(x(0), x(math.log(found.ratio)), y - THICKNESS / 2, THICKNESS, style, value),
            *_whisker(x, math.log(found.low), math.log(found.high), y),
        ]
        drawn.append(Row(name, typeset(value), parts))
    said = "; ".join(f"{row.name} {row.value}" for row in drawn)
    return _rows(title, said, [charts.line(50, TOP, 50, bottom, "unchanged")], drawn, axis)


def pairs(title: str, names: Sequence[str], effects: "Mapping[tuple[int, int], Gain]") -> Markup | None:
    """Draws the ratio of every two names as a cell with its change in percent; None for no pair.

    `effects` are by the numbers of the two names, the smaller one first. Those whose interval excludes 1 are bold, and
    stronger the further they are from 1. The rows and columns are numbered from 1.
    """
    if not effects:
        return None
    width = 100 / len(names)
    largest = max(0.02, *(abs(math.log(ratio)) for ratio, _, _ in effects.values()))
    columns = [
        charts.text(width * (place + 0.5), TOP + 4, str(place + 1), "tick middle") for place in range(len(names) - 1)
    ]
    rows = [charts.text(0, TOP + SQUARE * place - 4, str(place + 1), "tick outside") for place in range(1, len(names))]
    parts = [*columns, *rows]
    for (one, other), (ratio, low, high) in effects.items():
        top = TOP + SQUARE * (other - 0.6)
        is_known = low > 1 or high < 1
        strength = max(FAINTEST, STRONGEST * abs(math.log(ratio)) / largest) if is_known else FAINTEST
        hint = f"{names[one]} and {names[other]}: {ratio:.3f} x [{low:.3f}, {high:.3f}]"
        cell = charts.bar(width * one, width * (one + 1), top, SQUARE, f"cell {'b' if ratio > 1 else 'a'}", hint)
        parts.append(Markup('<g opacity="{:.2f}">{}</g>').format(strength, cell))
        weight = "label middle" if is_known else "middle"
        said = typeset(units.signed_percent(ratio - 1, 1).removesuffix(" %"))
        parts.append(charts.text(width * (one + 0.5), top + SQUARE / 2 + 4, said, weight))
    told = "; ".join(f"{names[one]} and {names[other]} {ratio:.3f}" for (one, other), (ratio, *_) in effects.items())
    return charts.drawing(title, told, TOP + SQUARE * (len(names) - 0.4), parts)


def _limit(verdicts: Sequence[Verdict]) -> float:
    """Returns half the axis as a log ratio: what the leading metric and three quarters of all metrics need."""
    moved = [abs(math.log(verdict.ratio)) for verdict in verdicts if verdict.ratio]
    lead = leading(verdicts)
    ends = [math.log(lead.ratio), *_log_interval(lead)] if lead and lead.ratio else [0.0]
    reach = min(max(map(abs, ends)), math.log(10))
    margin = max(verdict.margin for verdict in verdicts)
    needed = max(2.5 * margin, 1.25 * reach, 1.25 * float(np.quantile(moved, 0.75)), 1e-4)
    ends = [abs(end) for verdict in verdicts for end in _log_interval(verdict)]
    widest = max((end for end in ends if end <= WIDEST * needed), default=0.0)
    return max(1.1 * widest, needed)


def _log_interval(verdict: Verdict) -> tuple[float, ...]:
    """Returns the logarithms of the interval's ends; an end at or below 0 is at the left border."""
    return tuple(math.log(end) if end > 0 else -math.inf for end in verdict.interval or ())


def _interval(verdict: Verdict, x: Scale, limit: float, y: float) -> list[Markup]:
    standing = _standing(verdict)
    estimate = math.log(verdict.ratio or 1)
    parts = []
    if ends := _log_interval(verdict):
        low, high = ends
        parts.append(charts.line(x(low), y, x(high), y, f"whisker {standing}"))
        for end, side in ((low, "left"), (high, "right")):
            if abs(end) <= limit:
                parts.append(charts.line(x(end), y - 5, x(end), y + 5, f"whisker {standing}"))
            elif abs(estimate) <= limit:
                parts.append(charts.symbol(x(end), y, _ARROWS[side], f"arrow {standing}"))
    if abs(estimate) <= limit:
        parts.append(charts.symbol(x(estimate), y, _MARKS[standing], f"mark {standing}"))
    else:
        parts.append(charts.symbol(x(estimate), y, _ARROWS["right" if estimate > 0 else "left"], f"arrow {standing}"))
    return parts


def _ratio_ticks(limit: float) -> list[Tick]:
    """Returns round changes in percent on both sides, or ratios if the axis spans more than a doubling."""
    if limit >= math.log(2):
        power = max(1, math.ceil(limit / math.log(2) / 3))
        steps = range(-math.floor(limit / math.log(2) / power), math.floor(limit / math.log(2) / power) + 1)
        factors = [2.0 ** (step * power) for step in steps if abs(step * power) * math.log(2) <= NEAR_THE_END * limit]
        return [Tick(factor, f"{units.digits(factor)} x") for factor in factors]
    changes = ticks(math.expm1(-limit), math.expm1(limit), 6, Measure(0.01, "%"))
    return [
        Tick(1 + tick.value, _signed(tick)) for tick in changes if abs(math.log1p(tick.value)) <= NEAR_THE_END * limit
    ]


def _signed(tick: Tick) -> str:
    return f"+{tick.label}" if tick.value > 1e-12 else tick.label.replace("-", MINUS)


def waterfall(found: Waterfall) -> Markup:
    """Draws the baseline's step, the changes of its phases with their 95 % intervals, and the candidate's step.

    The axis begins at 0 only if the changes are visible then; otherwise the two whole bars are broken.
    """
    after = np.cumsum([found.baseline, *(phase.change for phase in found.phases)]).tolist()
    whisker_room = max(after) - min(after) or found.baseline * 0.02
    low, high = min(*after, found.candidate), max(*after, found.candidate)
    for end, phase in zip(after[1:], found.phases, strict=True):
        if phase.interval:
            low = min(low, max(end - phase.change + phase.interval[0], low - whisker_room))
            high = max(high, min(end - phase.change + phase.interval[1], high + whisker_room))
    low, high = widen(low, high, 0.08)
    broken = low > 0.6 * high
    x = Scale(low - (high - low) * 0.15 if broken else 0.0, high, 0, 100)
    measured = measure("s", high)
    rows = [_whole("A, all of it", found.baseline, x, 0, "fill solid a", broken)]
    for place, (before, end, phase) in enumerate(zip(after, after[1:], found.phases, strict=False), 1):
        y = _middle(place)
        hint = f"{units.seconds(phase.baseline)} to {units.seconds(phase.candidate)}"
        parts = [
            charts.line(x(before), y - PITCH + THICKNESS / 2, x(before), y + THICKNESS / 2, "step"),
            charts.bar(x(before), x(end), y - THICKNESS / 2, THICKNESS, "gain" if phase.change < 0 else "loss", hint),
        ]
        if phase.interval:
            parts += _whisker(x, before + phase.interval[0], before + phase.interval[1], y)
        rows.append(Row(phase_name(phase.phase), _duration(phase.change), parts))
    rows.append(_whole("B, all of it", found.candidate, x, len(rows), "fill solid b", broken))
    axis = charts.bottom_axis(
        [(x(tick.value), tick) for tick in ticks(x.low, x.high, 5, measured) if x(tick.value) >= (8 if broken else 0)],
        _foot(len(rows)), TOP, f"time of a {found.per}, {measured.name}",
    )  # fmt: skip
    said = "; ".join(f"{row.name} {row.value}" for row in rows)
    return _rows(f"Where the change of a {found.per}'s time comes from", said, (), rows, axis)


def _whole(name: str, value: float, x: Scale, place: int, style: str, broken: bool) -> Row:
    y = _middle(place)
    parts = [charts.bar(0, x(value), y - THICKNESS / 2, THICKNESS, style)]
    if broken:
        parts.append(charts.symbol(4, y, "M-4 11L2-11M2 11L8-11", "break"))
    return Row(name, units.seconds(value), parts)


def _whisker(x: Scale, low: float, high: float, y: float) -> list[Markup]:
    parts = [charts.line(x(low), y, x(high), y, "error")]
    for end, side in ((low, "left"), (high, "right")):
        if x.low <= end <= x.high:
            parts.append(charts.line(x(end), y - 4, x(end), y + 4, "error"))
        else:
            parts.append(charts.symbol(x(end), y, _ARROWS[side], "error-arrow"))
    return parts


def bars(title: str, unit: str, items: Sequence[tuple[str, float, str]]) -> Markup | None:
    """Draws bars from zero, one for each (name, value, style); None if all are zero, or there are fewer than two."""
    largest = max((value for _, value, _ in items), default=0.0)
    if largest <= 0 or len(items) < 2:
        return None
    x = Scale(0, largest * 1.04, 0, 100)
    rows = [
        Row(
            name,
            units.quantity(value, unit),
            [charts.bar(0, x(value), _middle(place) - THICKNESS / 2, THICKNESS, style)],
        )
        for place, (name, (_, value, style)) in enumerate(zip(apart([name for name, *_ in items]), items, strict=True))
    ]
    axis = Axis(x, unit, count=4)
    drawn = charts.bottom_axis(axis.ticks, _foot(len(rows)), TOP, axis.label)
    return _rows(title, "; ".join(f"{row.name} {row.value}" for row in rows), (), rows, drawn)


def stack(title: str, items: Sequence[tuple[str, float, str]]) -> Markup | None:
    """Draws one bar of all (name, value, style) parts, in seconds; None if fewer than two are not zero."""
    whole = sum(value for _, value, _ in items)
    if sum(value > 0 for _, value, _ in items) < 2:
        return None
    parts, start = [], 0.0
    for name, value, style in items:
        end = start + 100 * value / whole
        parts.append(charts.bar(start, end, 0, 44, style, f"{name} {units.seconds(value)}"))
        start = end
    said = "; ".join(f"{name} {units.seconds(value)}, {units.percent(value / whole)}" for name, value, _ in items)
    return charts.drawing(title, said, 44, parts)
