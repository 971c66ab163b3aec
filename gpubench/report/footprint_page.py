"""A footprint as a section of a run's page and as a page of its own: memory over time, phases, tables."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
from markupsafe import Markup

from gpubench import units
from gpubench.findings import Findings
from gpubench.memory.footprint import Amounts, Footprint, Timeline, TimelineMark
from gpubench.report import charts, lanes, profile_page, wording
from gpubench.report import footprint as in_words
from gpubench.report.charts import Axis, Scale, Series
from gpubench.report.figures import Figure
from gpubench.report.footprint import category, ordered, share
from gpubench.report.templating import environment
from gpubench.text import clean, words

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
HEIGHT = 260.0
TOP = 30.0  # pixels for the names of the steps
STRIP = 16.0  # pixels of the row of phases under the plot
NEAR = 1.5  # times the peak: a capacity beyond it would compress the plot


def section(footprint: Footprint, findings: Findings | None = None) -> dict[str, Any]:
    """Return the variables of templates/footprint.html."""
    bars = phases(footprint)
    history, beginning = over_time(footprint), in_words.beginning(footprint)
    return {
        "headline": wording.opening(in_words.headline(footprint)),
        "verdict": wording.opening(clean(findings.headline).rstrip(".")) if findings else "",
        "about": wording.opening(in_words.about(footprint)),
        "doubts": [*([wording.opening(beginning)] if beginning else []), *map(clean, footprint.notes)],
        "history": Figure("Over the history", history, _beneath(footprint.timeline)) if history else None,
        "legend": [(hue(name), category(name)) for name, _ in ordered(_anywhere(footprint))],
        "parts": [_part(footprint, name, size) for name, size in ordered(footprint.peak.amounts)],
        "counts": [
            (count.name, wording.typeset(units.size(count.size)), _added(count.adds), count.what)
            for count in in_words.counts(footprint.peak)
        ],
        "allocator": wording.opening(in_words.allocator(footprint)),
        "corrections": [
            (words(one.name), _added(one.size), clean(one.reason))
            for one in in_words.corrections(footprint.corrections)
        ],
        "phases": Figure("Peak of each phase", bars) if bars else None,
        "sheets": [
            shown
            for shown in (
                in_words.phases(footprint),
                in_words.holders(footprint),
                in_words.modules(footprint),
            )
            if shown
        ],
        "cards": profile_page.cards(findings, "peak") if findings else None,
    }


def page(footprint: Footprint, findings: Findings | None = None, label: str = "") -> str:
    """Return a whole page. `label` is the file of the footprint, or what ran."""
    template = environment().get_template("memory.html")
    return template.render(found=section(footprint, findings), label=clean(label))


def hue(name: str) -> str:
    """Return the style sheet's class that colours a category."""
    return lanes.hue(STYLES.get(name, "other"))


def over_time(footprint: Footprint) -> Markup | None:
    """Return a plot of held memory by category, in the order of events, above a row of phases; None without data."""
    held = footprint.timeline
    stacked = _stacked(held)
    top = float(stacked[-1][2].max()) if stacked else 0.0
    if top <= 0:
        return None
    capacity = footprint.capacity if footprint.capacity and footprint.capacity <= NEAR * top else None
    y = Scale(0, max(top, float(capacity or 0)) * 1.08, HEIGHT, 0)
    x = Scale(0, max(1, len(stacked[0][1]) - 1), 0, charts.WIDTH)
    places = x.places(np.arange(len(stacked[0][1]), dtype=np.float64))
    areas = [charts.area(places, y.places(low), y.places(high), hue(name)) for name, low, high in stacked]
    if held.reserved is not None:
        areas.append(charts.path(places, y.places(np.asarray(held.reserved, dtype=np.float64)), "line error"))
    parts = [
        *charts.framed(None, Axis(y, "B", count=round(HEIGHT / 40)), areas, TOP),
        *_strip(held, x),
        *_steps(held, x),
        *_labels(footprint, x(footprint.peak.position), y, capacity),
    ]
    said = "; ".join(f"{category(name)} {units.size(size)}" for name, size in ordered(footprint.peak.amounts))
    return charts.drawing("memory over the history", f"at the peak: {said}", TOP + HEIGHT + STRIP + 8, parts)


def phases(footprint: Footprint) -> Markup | None:
    """Return a bar for each phase's peak, split by category; None if nothing is held."""
    stacks = [
        stack(
            f"{in_words.STAGES[phase.stage]}, {words(phase.phase)}: {units.size(phase.level.total)}",
            phase.peak,
        )
        for phase in footprint.phases
    ]
    return lanes.stacked("peak of each phase", "; ".join(one.name for one in stacks), stacks, "B", "held")


def stack(name: str, amounts: Amounts) -> lanes.Stack:
    """Return the areas of held memory, split by category."""
    return lanes.Stack(
        name,
        [
            lanes.Piece(f"{category(kind)} {units.size(size)}", STYLES.get(kind, "other"), size)
            for kind, size in ordered(amounts)
        ],
    )


def _labels(footprint: Footprint, place: float, y: Scale, capacity: int | None) -> list[Markup]:
    """Return a dot at the peak, `place` percent from the left, and the device's capacity with a label opposite."""
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


def _stacked(held: Timeline) -> list[tuple[str, Series, Series]]:
    """Return (category, lower border, upper border) from the bottom up, borders of shape (points,)."""
    known: Amounts = dict.fromkeys(held.amounts, 1)
    found = []
    low = np.zeros(len(next(iter(held.amounts.values()), [])))
    for name, _ in ordered(known):
        high = low + np.asarray(held.amounts[name], dtype=np.float64)
        found.append((name, low, high))
        low = high
    return found if len(low) else []


def _strip(held: Timeline, x: Scale) -> list[Markup]:
    """Return a box for each phase of the program, with its name, or its initial if the box is small."""
    parts = []
    for number, (mark, left, right) in enumerate(_spans(held.marks, x)):
        name, style = words(mark.phase), "margin" if number % 2 else "shade"
        parts.append(charts.bar(left, right, TOP + HEIGHT + 2, STRIP, style, f"{name}, {_step(mark.step)}"))
        if label := next((one for one in (name, _initial(name)) if lanes.LETTER * len(one) <= right - left), ""):
            parts.append(charts.text((left + right) / 2, TOP + HEIGHT + 14, label, "tick middle"))
    return parts


def _steps(held: Timeline, x: Scale) -> list[Markup]:
    """Return the first mark of each step, with its name if there is space."""
    firsts = [next(group) for _, group in groupby(held.marks, key=lambda mark: mark.step)]
    parts = []
    for mark, left, right in _spans(firsts, x):
        name = _step(mark.step)
        parts.append(charts.line(left, TOP - 14, left, TOP + HEIGHT, "step"))
        if right - left >= lanes.LETTER * len(name):
            parts.append(charts.text(left, TOP - 6, name, "note after"))
    return parts


def _spans(marks: Sequence[TimelineMark], x: Scale) -> list[tuple[TimelineMark, float, float]]:
    """Yield each mark with its start and end in percent; marks shorter than a point are left out."""
    ends = [*(mark.at for mark in marks), x.high][1:]
    return [(mark, x(mark.at), x(end)) for mark, end in zip(marks, ends, strict=True) if end > mark.at]


def _step(number: int | None) -> str:
    return in_words.STAGES["setup"] if number is None else f"step {number}"


def _initial(name: str) -> str:
    return name[:1].upper()


def _beneath(held: Timeline) -> str:
    names = dict.fromkeys(words(mark.phase) for mark in held.marks)
    told = ", ".join(f"{_initial(name)} {name}" for name in names)
    said = f"In the order of allocations and frees, not to scale in time. Phases below: {told}."
    return f"{said} The line shows what the allocator has reserved." if held.reserved is not None else said


def _anywhere(footprint: Footprint) -> Amounts:
    """Return the categories of the timeline."""
    return {name: max(sizes, default=0) for name, sizes in footprint.timeline.amounts.items()}


def _part(footprint: Footprint, name: str, size: int) -> tuple[str, str, str, str]:
    part = share(size, footprint.peak.level.total)
    return category(name), hue(name), wording.typeset(units.size(size)), wording.typeset(part)


def _added(size: int | None) -> str:
    return wording.typeset(in_words.added(size))
