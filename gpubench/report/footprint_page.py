"""A footprint as a section of a run's page, and as a page of its own: memory over the history, phases, tables."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
from markupsafe import Markup

from gpubench import units
from gpubench.findings import Findings
from gpubench.memory.footprint import Amounts, Footprint, Timeline, TimelineMark
from gpubench.report import footprint_phrases, footprint_tables, lanes, plots, profile_page, svg, wording
from gpubench.report.figures import Figure
from gpubench.report.footprint_phrases import category, ordered, share
from gpubench.report.plain import clean, words
from gpubench.report.scales import Axis, Scale, Series
from gpubench.report.templating import environment

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
"""Of each category, whose colour among those of the timelines it has; any other is grey."""
HEIGHT = 260.0
TOP = 30.0  # room for the names of the steps
STRIP = 16.0  # pixels of the row of phases under the plot
NEAR = 1.5  # times the peak: a capacity beyond it would only press the plot flat


def section(footprint: Footprint, findings: Findings | None = None) -> dict[str, Any]:
    """What templates/footprint.html shows."""
    bars = phases(footprint)
    history, beginning = over_time(footprint), footprint_phrases.beginning(footprint)
    return {
        "headline": wording.opening(footprint_phrases.headline(footprint)),
        "verdict": wording.opening(clean(findings.headline).rstrip(".")) if findings else "",
        "about": wording.opening(footprint_phrases.about(footprint)),
        "doubts": [*([wording.opening(beginning)] if beginning else []), *map(clean, footprint.notes)],
        "history": Figure("Over the history", history, _beneath(footprint.timeline)) if history else None,
        "legend": [(hue(name), category(name)) for name, _ in ordered(_anywhere(footprint))],
        "parts": [_part(footprint, name, size) for name, size in ordered(footprint.peak.amounts)],
        "counts": [
            (count.name, wording.typeset(units.size(count.size)), _added(count.adds), count.what)
            for count in footprint_phrases.counts(footprint.peak)
        ],
        "allocator": wording.opening(footprint_phrases.allocator(footprint)),
        "corrections": [
            (words(one.name), _added(one.size), clean(one.reason))
            for one in footprint_phrases.corrections(footprint.corrections)
        ],
        "phases": Figure("Peak of each phase", bars) if bars else None,
        "sheets": [
            shown
            for shown in (
                footprint_tables.phases(footprint),
                footprint_tables.holders(footprint),
                footprint_tables.modules(footprint),
            )
            if shown
        ],
        "cards": profile_page.cards(findings, "peak") if findings else None,
    }


def page(footprint: Footprint, findings: Findings | None = None, label: str = "") -> str:
    """A whole page. label: the file that the footprint is of, or what ran."""
    template = environment().get_template("memory.html")
    return template.render(found=section(footprint, findings), label=clean(label))


def hue(name: str) -> str:
    """The class of the style sheet that colours a category."""
    return lanes.hue(STYLES.get(name, "other"))


def over_time(footprint: Footprint) -> Markup | None:
    """All that is held, by category, in the order of events, over a row of phases; None where nothing ever is."""
    held = footprint.timeline
    stacked = _stacked(held)
    top = float(stacked[-1][2].max()) if stacked else 0.0
    if top <= 0:
        return None
    capacity = footprint.capacity if footprint.capacity and footprint.capacity <= NEAR * top else None
    y = Scale(0, max(top, float(capacity or 0)) * 1.08, HEIGHT, 0)
    x = Scale(0, max(1, len(stacked[0][1]) - 1), 0, svg.WIDTH)
    places = x.places(np.arange(len(stacked[0][1]), dtype=np.float64))
    areas = [svg.area(places, y.places(low), y.places(high), hue(name)) for name, low, high in stacked]
    if held.reserved is not None:
        areas.append(svg.path(places, y.places(np.asarray(held.reserved, dtype=np.float64)), "line error"))
    parts = [
        *plots.framed(None, Axis(y, "B", count=round(HEIGHT / 40)), areas, TOP),
        *_strip(held, x),
        *_steps(held, x),
        *_labels(footprint, x(footprint.peak.position), y, capacity),
    ]
    said = "; ".join(f"{category(name)} {units.size(size)}" for name, size in ordered(footprint.peak.amounts))
    return svg.drawing("memory over the history", f"at the peak: {said}", TOP + HEIGHT + STRIP + 8, parts)


def phases(footprint: Footprint) -> Markup | None:
    """A bar for each phase at its peak, split by category; None where nothing is held in any."""
    stacks = [
        stack(
            f"{footprint_phrases.STAGES[phase.stage]}, {words(phase.phase)}: {units.size(phase.level.total)}",
            phase.peak,
        )
        for phase in footprint.phases
    ]
    return lanes.stacked("peak of each phase", "; ".join(one.name for one in stacks), stacks, "B", "held")


def stack(name: str, amounts: Amounts) -> lanes.Stack:
    """What is held, split by category."""
    return lanes.Stack(
        name,
        [
            lanes.Piece(f"{category(kind)} {units.size(size)}", STYLES.get(kind, "other"), size)
            for kind, size in ordered(amounts)
        ],
    )


def _labels(footprint: Footprint, place: float, y: Scale, capacity: int | None) -> list[Markup]:
    """A dot at the peak, `place` percent from the left, and the device's capacity, named on the other side."""
    total = footprint.peak.level.total
    said = f"peak {units.size(total)}"
    parts = [
        svg.dot(place, TOP + y(total), 4, "mark", said),
        svg.text(place, TOP + y(total) - 7, said, f"label {'after' if place < 50 else 'before'}"),
    ]
    if capacity:
        height, where = TOP + y(capacity), "label before" if place < 50 else "label after"
        parts.append(svg.line(0, height, 100, height, "median error"))
        parts.append(svg.text(100 if place < 50 else 0, height - 7, f"capacity {units.size(capacity)}", where))
    return parts


def _stacked(held: Timeline) -> list[tuple[str, Series, Series]]:
    """(category, its lower and its upper border, both (points,)) from the ground up; nothing of no point."""
    known: Amounts = dict.fromkeys(held.amounts, 1)
    found = []
    low = np.zeros(len(next(iter(held.amounts.values()), [])))
    for name, _ in ordered(known):
        high = low + np.asarray(held.amounts[name], dtype=np.float64)
        found.append((name, low, high))
        low = high
    return found if len(low) else []


def _strip(held: Timeline, x: Scale) -> list[Markup]:
    """Which phase the program was in: a box each, with its name or its initial where there is room."""
    parts = []
    for number, (mark, left, right) in enumerate(_spans(held.marks, x)):
        name, style = words(mark.phase), "margin" if number % 2 else "shade"
        parts.append(svg.bar(left, right, TOP + HEIGHT + 2, STRIP, style, f"{name}, {_step(mark.step)}"))
        if label := next((one for one in (name, _initial(name)) if lanes.LETTER * len(one) <= right - left), ""):
            parts.append(svg.text((left + right) / 2, TOP + HEIGHT + 14, label, "tick middle"))
    return parts


def _steps(held: Timeline, x: Scale) -> list[Markup]:
    """Where each step begins, and its name where there is room."""
    firsts = [next(group) for _, group in groupby(held.marks, key=lambda mark: mark.step)]
    parts = []
    for mark, left, right in _spans(firsts, x):
        name = _step(mark.step)
        parts.append(svg.line(left, TOP - 14, left, TOP + HEIGHT, "step"))
        if right - left >= lanes.LETTER * len(name):
            parts.append(svg.text(left, TOP - 6, name, "note after"))
    return parts


def _spans(marks: Sequence[TimelineMark], x: Scale) -> list[tuple[TimelineMark, float, float]]:
    """Each mark with where it begins and where the next does, in percent; what is too short for a point is left out."""
    ends = [*(mark.at for mark in marks), x.high][1:]
    return [(mark, x(mark.at), x(end)) for mark, end in zip(marks, ends, strict=True) if end > mark.at]


def _step(number: int | None) -> str:
    return footprint_phrases.STAGES["setup"] if number is None else f"step {number}"


def _initial(name: str) -> str:
    return name[:1].upper()


def _beneath(held: Timeline) -> str:
    names = dict.fromkeys(words(mark.phase) for mark in held.marks)
    told = ", ".join(f"{_initial(name)} {name}" for name in names)
    said = f"In the order of allocations and releases, not to scale in time. Below it the phases: {told}."
    return f"{said} The line is what the allocator has reserved." if held.reserved is not None else said


def _anywhere(footprint: Footprint) -> Amounts:
    """The categories of the timeline."""
    return {name: max(sizes, default=0) for name, sizes in footprint.timeline.amounts.items()}


def _part(footprint: Footprint, name: str, size: int) -> tuple[str, str, str, str]:
    part = share(size, footprint.peak.level.total)
    return category(name), hue(name), wording.typeset(units.size(size)), wording.typeset(part)


def _added(size: int | None) -> str:
    return wording.typeset(footprint_phrases.added(size))
