"""Rows of boxes: the timeline of a step with a row for each lane, and stacked bars.

A row's name is above it, so that long names fit on a phone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from gpubench import units
from gpubench.report import charts, finding_phrases
from gpubench.report.charts import Axis, Scale
from gpubench.text import shorten, words
from gpubench.trace.profile import CAUSES, Box, Lane, Rank, Timeline

PITCH = 46.0
THICKNESS = 22.0
NAME = 15.0  # pixels from a row's top to the baseline of its name
TOP = 4.0
OUTLINED = 0.5  # percent of the drawing: wider boxes get an outline
LONGEST = 120  # characters of a name on hover
LETTER = 2.2  # percent of a phone's width that a letter takes

HUES = frozenset(
    {
        *("other", "data_wait", "host_to_device", "forward", "backward", "exposed_communication", "optimizer"),
        *("scheduler", "recv_wait", "send_wait", "idle"),
        *("compute", "communication", "copy", "set"),
        *CAUSES,
    }
)
"""Styles with a colour of their own: phases of the host, work of the device, causes of idle time. Other styles have the
colour of a similar one, or grey."""
ALIKE = {"copies": "copy", "operators": "compute", "python": "python_and_launch"}


def hue(style: str) -> str:
    """Return the style sheet's class that colours a style."""
    known = ALIKE.get(style, style)
    return f"hue-{known if known in HUES else 'other'}"


def legend(lanes: Iterable[Lane]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return (lane, (class, style) of the boxes whose style the lane is the first to have); streams are one lane."""
    found: dict[str, list[tuple[str, str]]] = {}
    known: set[str] = set()
    for lane in lanes:
        styles = [style for style in dict.fromkeys(box.style for box in lane.boxes) if style not in known]
        known.update(styles)
        kind = "streams" if "stream" in lane.name else words(lane.name)
        found.setdefault(kind, []).extend((hue(style), finding_phrases.style_words(style)) for style in styles)
    return [(kind, styles) for kind, styles in found.items() if styles]


def timeline(found: Timeline, whole: str = "step") -> Markup | None:
    """Draw one step with a row for each lane that has boxes; None if no lane has. `whole` names the recorded unit."""
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
class Piece:
    """A part of a bar, with its length in the axis's unit; `style` is one of the timeline's."""

    hint: str
    style: str
    size: float


@dataclass(frozen=True)
class Stack:
    """A bar and the name above it."""

    name: str
    pieces: Sequence[Piece]

    @property
    def size(self) -> float:
        return sum(piece.size for piece in self.pieces)


def stacked(title: str, said: str, stacks: Sequence[Stack], unit: str, of: str = "") -> Markup | None:
    """Draw bars from zero, one row each, made of pieces; None if all are empty.

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


def partition(ranks: Sequence[Rank]) -> Markup | None:
    """Draw how each rank's time was spent, as a stacked bar; None if no time was spent."""
    known = [rank for rank in ranks if rank.wall > 0]
    stacks = [
        Stack(finding_phrases.part_name(rank), [_piece(rank, part) for part in finding_phrases.time_parts(rank)])
        for rank in known
    ]
    said = [f"{stack.name} {piece.hint}" for stack in stacks for piece in stack.pieces]
    if len(stacks) == 1:
        stacks = [replace(stacks[0], name="")]
    return stacked("Where the time went", "; ".join(said), stacks, "fraction", "of the wall time")


def _piece(rank: Rank, part: finding_phrases.Part) -> Piece:
    return Piece(f"{part.name} {finding_phrases.part_share(rank, part.time)}", part.style, part.time / rank.wall)


def _lane(row: int, lane: Lane, x: Scale) -> list[Markup]:
    return [charts.text(0, _top(row) + NAME, words(lane.name), "lane-name")] + [
        part for box in lane.boxes for part in _drawn(box, row, x)
    ]


def _drawn(box: Box, row: int, x: Scale) -> list[Markup]:
    left, right, said = x(box.start), x(box.end), shorten(finding_phrases.style_words(box.name), LONGEST)
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
