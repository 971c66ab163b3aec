"""SVG that fits any width: x in percent of the drawing, y in pixels, so that text keeps its size on a phone.

Only curves cannot say %: they live in an inner drawing, 100 wide, which is stretched and which cuts off what lies
beyond. Colours come from classes of the page's style sheet. Everything that is put in is escaped.
"""

from collections.abc import Iterable

import numpy as np
from markupsafe import Markup

from gpubench.report.scales import Series, Tick

WIDTH = 100.0  # of the inner drawing: percent, as everywhere else
FOOT = 44.0  # pixels under a drawing for its bottom axis


def drawing(title: str, description: str, height: float, parts: Iterable[Markup]) -> Markup:
    """A whole picture with its name and its content in words, for those who do not see it."""
    return Markup(
        '<svg class="drawing" role="img" width="100%" height="{}"><title>{}</title><desc>{}</desc>{}</svg>\n'
    ).format(_number(height), title, description, Markup("").join(parts))


def curves(height: float, parts: Iterable[Markup]) -> Markup:
    """The inner drawing: (0, 0) to (WIDTH, height), stretched to the outer one's width."""
    return Markup(
        '<svg width="100%" height="{0}" viewBox="0 0 {1} {0}" preserveAspectRatio="none" aria-hidden="true">{2}</svg>'
    ).format(_number(height), _number(WIDTH), Markup("").join(parts))


def path(x: Series, y: Series, style: str) -> Markup:
    """A line through the points, in the inner drawing. Its end of no length shows a single point as a dot."""
    return Markup('<path class="{}" d="{}"/>').format(style, "M" + "L".join(_points(x, y)) + "h0")


def area(x: Series, low: Series, high: Series, style: str) -> Markup:
    """The band between two lines, in the inner drawing."""
    outline = [*_points(x, high), *_points(x[::-1], low[::-1])]
    return Markup('<path class="{}" d="{}"/>').format(style, "M" + "L".join(outline) + "Z")


def bar(start: float, end: float, y: float, height: float, style: str, hint: str = "") -> Markup:
    """A box from `start` to `end` percent; `hint` is shown on hover."""
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
    """A mark at (x percent, y) whose outline `shape` is path data around its own (0, 0)."""
    return Markup('<svg x="{}%" y="{}" class="symbol"><path class="{}" d="{}">{}</path></svg>').format(
        _number(x), _number(y), style, shape, _hint(hint)
    )


def dot(x: float, y: float, radius: float, style: str, hint: str = "") -> Markup:
    return Markup('<circle class="{}" cx="{}%" cy="{}" r="{}">{}</circle>').format(
        style, _number(x), _number(y), _number(radius), _hint(hint)
    )


def bottom_axis(places: Iterable[tuple[float, Tick]], y: float, top: float, name: str) -> Markup:
    """Grid lines up to `top`, a label under each, and what is measured in which unit beneath them."""
    parts = []
    for x, tick in places:
        parts += [line(x, top, x, y, "grid"), text(x, y + 16, tick.label, "tick middle")]
    parts.append(text(50, y + 34, name, "name middle"))
    return Markup("").join(parts)


def left_axis(places: Iterable[tuple[float, Tick]], name: str) -> Markup:
    """Grid lines across, a label left of each, and the unit above them; labels stand in the margin."""
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
    """At most two decimals; what is not finite is a mistake of the caller."""
    if not np.isfinite(value):
        raise ValueError(f"no place for {value}")
    return f"{round(value, 2):g}" if abs(value) < 1e5 else f"{value:.0f}"
