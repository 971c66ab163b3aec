"""Rows of boxes: the timeline of a step, and stacked bars.

A row's name is above it, so that long names fit on a phone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from gpubench import units
from gpubench.report import charts
from gpubench.report.charts import Axis, Scale, hue
from gpubench.text import shorten, step_part, words
from gpubench.trace.profile import Box, Lane, StepTimeline

PITCH = 46.0
THICKNESS = 22.0
NAME = 15.0  # pixels from a row's top to the baseline of its name
TOP = 4.0
OUTLINED = 0.5  # percent of the drawing: wider boxes get an outline
LONGEST = 120  # characters of a name on hover
LETTER = 2.2  # percent of a phone's width that a letter takes

LONG_NAMES = {
    "recording": "waits of the recording itself",
    "queued": "queued, or work that was not recorded",
    "backlog": "work launched before the recording",
}
"""Causes of idle time whose names need an explanation."""


def style_words(style: str) -> str:
    """Returns the display name of a part or phase."""
    return LONG_NAMES.get(style) or step_part(style)


def legend(lanes: Iterable[Lane]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Returns (lane, (class, style) of the boxes whose style the lane is the first to have); streams are one lane."""
    found: dict[str, list[tuple[str, str]]] = {}
    known: set[str] = set()
    for lane in lanes:
        styles = [style for style in dict.fromkeys(box.style for box in lane.boxes) if style not in known]
        known.update(styles)
        kind = "streams" if "stream" in lane.name else words(lane.name)
        found.setdefault(kind, []).extend((hue(style), style_words(style)) for style in styles)
    return [(kind, styles) for kind, styles in found.items() if styles]


def timeline(found: StepTimeline, whole: str = "step") -> Markup | None:
    """Draws one step with a row for each lane that has boxes; None if no lane has. `whole` names the recorded unit."""
    lanes = [lane for lane in found.lanes if lane.boxes]
    if not lanes or found.wall <= 0:
        return None
    x = Scale(0, found.wall, 0, 100)
    axis = Axis(Scale(0, found.wall / 1e9, 0, 100), "s", f"time since the {whole} began", 6)
    bottom = TOP + PITCH * len(lanes)
    parts = [charts.bottom_axis(axis.ticks, bottom, TOP, axis.label)]
    parts += [part for row, lane in enumerate(lanes) for part in _lane(row, lane, x)]
    said = "; ".join(f"{words(lane.name)}, {units.counted(len(lane.boxes), 'piece')}" for lane in lanes)
    return charts.drawing(f"What the {whole} did over time", said, bottom + charts.FOOT, parts)


@dataclass(frozen=True)
class BarPiece:
    """A part of a bar, with its length in the axis's unit; `style` is one of the timeline's."""

    hint: str
    style: str
    size: float


@dataclass(frozen=True)
class NamedBar:
    """A bar and the name above it."""

    name: str
    pieces: Sequence[BarPiece]

    @property
    def size(self) -> float:
        return sum(piece.size for piece in self.pieces)


def stacked(title: str, said: str, stacks: Sequence[NamedBar], unit: str, of: str = "") -> Markup | None:
    """Draws bars from zero, one row each, made of pieces; None if all are empty.

    `said` is the description in words; `of` says what the sizes refer to. The axis of fractions ends at 1.
    """
    most = 1.0 if stacks and unit == "fraction" else max((stack.size for stack in stacks), default=0)
    if most <= 0:
        return None
    bottom = TOP + PITCH * len(stacks)
    axis = Axis(Scale(0, most, 0, 100), unit, of)
    parts = [charts.bottom_axis(axis.ticks, bottom, TOP, axis.label)]
    for row, stack in enumerate(stacks):
        parts.append(charts.text(0, _top(row) + NAME, stack.name, "lane-name"))
        start = 0.0
        for piece in stack.pieces:
            end = start + piece.size
            parts.append(_box(axis.scale(start), axis.scale(end), row, piece.style, piece.hint))
            start = end
    return charts.drawing(title, said, bottom + charts.FOOT, parts)


def _lane(row: int, lane: Lane, x: Scale) -> list[Markup]:
    return [charts.text(0, _top(row) + NAME, words(lane.name), "lane-name")] + [
        part for box in lane.boxes for part in _drawn(box, row, x)
    ]


def _drawn(box: Box, row: int, x: Scale) -> list[Markup]:
    left, right, said = x(box.start), x(box.end), shorten(style_words(box.name), LONGEST)
    length, start = units.seconds((box.end - box.start) / 1e9), units.seconds(box.start / 1e9)
    drawn = _box(left, right, row, box.style, f"{said}, {length}, from {start}")
    if right - left < LETTER * len(said):
        return [drawn]
    return [drawn, charts.text((left + right) / 2, _top(row) + NAME + 20, said, f"inside middle on-{hue(box.style)}")]


def _box(left: float, right: float, row: int, style: str, hint: str) -> Markup:
    outline = "box " if right - left >= OUTLINED else ""
    return charts.bar(left, right, _top(row) + NAME + 5, THICKNESS, f"{outline}{hue(style)}", hint)


def _top(row: int) -> float:
    return TOP + PITCH * row
