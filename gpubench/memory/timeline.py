"""A history thinned out for drawing, with its peaks."""

from collections.abc import Iterable, Sequence

import numpy as np

from gpubench.memory.footprint import Timeline, TimelineMark
from gpubench.memory.moments import Moments, Places, Span

POINTS = 800
"""More than a plot has pixels for."""


def timeline(moments: Moments, peaks: Iterable[int]) -> tuple[Timeline, dict[int, int]]:
    """What was held over the course of the history, in about `POINTS` points, and where in it the moments `peaks` are.

    The moments are dealt into so many stretches of one length, and each leaves the one in which most is allocated.
    The first and the last moment, the one in which most is reserved, and `peaks` stay besides.
    """
    kept = _kept(moments, peaks)
    series = {name: column.tolist() for name, column in moments.series(kept).items() if column.any()}
    drawn = Timeline(
        amounts=series,
        reserved=None if moments.reserved is None else moments.reserved[kept].tolist(),
        marks=_marks(moments.spans, kept),
    )
    return drawn, {int(moment): place for place, moment in enumerate(kept)}


def _kept(moments: Moments, peaks: Iterable[int]) -> Places:
    """Sorted."""
    stretches = min(POINTS, len(moments))
    borders = np.arange(stretches + 1) * len(moments) // stretches
    starts = borders[:-1]
    highest = np.maximum.reduceat(moments.allocated, starts)
    as_high = np.flatnonzero(moments.allocated == np.repeat(highest, np.diff(borders)))
    found = as_high[np.searchsorted(as_high, starts)]
    most_reserved = [] if moments.reserved is None else [int(np.argmax(moments.reserved))]
    return np.union1d(found, np.array([0, len(moments) - 1, *most_reserved, *peaks], np.int64))


def _marks(spans: Sequence[Span], kept: Places) -> list[TimelineMark]:
    """Each at the first point that is not before it."""
    return [
        TimelineMark(at=int(at), phase=span.phase, step=span.step)
        for span, at in zip(spans, np.searchsorted(kept, [span.first for span in spans]), strict=True)
    ]
