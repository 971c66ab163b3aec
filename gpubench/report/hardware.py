"""Figures of what the hardware did: telemetry over time, clocks held down, memory."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from gpubench import units
from gpubench.comparison.evidence import RunEvidence
from gpubench.report import plots, recorded, rows
from gpubench.report.figures import Figure, Recording, styles
from gpubench.report.plots import Curve, Plane, Span
from gpubench.report.recorded import Quantity, RepeatSteps
from gpubench.report.scales import Series

TOLD_APART = 4  # devices that have a colour of their own
PEAKS = {
    "peak_memory_allocated": "allocated",
    "peak_memory_reserved": "reserved",
    "peak_memory_total": "in all",
    "peak_memory_rss": "on the host",
}


def telemetry(sides: Sequence[Recording]) -> list[Figure]:
    """Each repeat from its first step on, averaged where it was steady; the mean where there are several GPUs.

    The CPU's only where no GPU's is.
    """
    gpus = [found for quantity in recorded.GPU if (found := _aligned(sides, quantity))]
    throttled = _throttled(sides)
    if gpus or throttled:
        return gpus + ([throttled] if throttled else [])
    return [found for quantity in recorded.CPU if (found := _aligned(sides, quantity))]


def peaks(sides: Sequence[Recording], metrics: Sequence[Mapping[str, float]]) -> Figure | None:
    """metrics: of each side, bytes by metric."""
    items = [
        (f"{word} {label}".strip(), known[name], f"fill solid {style}")
        for name, word in PEAKS.items()
        for (style, label), known in zip(styles(sides), metrics, strict=True)
        if name in known
    ]
    drawing = rows.bars("peak memory", "B", items)
    return Figure("Peak memory", drawing) if drawing else None


def memory(sides: Sequence[Recording]) -> Figure | None:
    return _aligned(sides, recorded.GPU_MEMORY) or _aligned(sides, recorded.CPU_MEMORY)


def whole_run(run: RunEvidence, quantities: Sequence[Quantity]) -> list[Figure]:
    """One run from its first sample to its last, its steady windows shaded; a line for each device, named if few."""
    if not run.telemetry:
        return []
    began = run.telemetry[0].time
    spans = [Span(window.start - began, window.end - began) for window in run.windows if window.start >= began]
    found = []
    for quantity in quantities:
        by_device = recorded.readings(run.telemetry, quantity)
        several = 1 < len(by_device) <= TOLD_APART
        curves, steady = [], []
        for place, reading in enumerate(by_device):
            label = reading.device if several else ""
            name = label.removeprefix("GPU ")  # short, as it stands in the margin
            style = f"device-{place}" if several else "a"
            *earlier, last = reading.since(began).pieces()
            curves += [Curve(piece.times, piece.values, style, "") for piece in earlier]
            curves.append(Curve(last.times, last.values, style, name))
            inside = [reading.between(window.start, window.end).values for window in run.windows]
            steady.append((label, np.concatenate([np.empty(0), *inside])))
        if figure := _timeline(quantity, curves, steady, "time since the run began", spans):
            found.append(figure)
    return found


def _aligned(sides: Sequence[Recording], quantity: Quantity) -> Figure | None:
    curves, steady = [], []
    for (style, label), side in zip(styles(sides), sides, strict=True):
        for run, repeats in _by_run(side):
            whole = recorded.together(recorded.readings(run.telemetry, quantity))
            if whole is None:
                continue
            readings = [whole.between(began, ended).since(began) for began, ended in _spans(repeats)]
            curves += [Curve(reading.times, reading.values, style, label) for reading in readings if len(reading.times)]
            drawn = {repeat.repeat for repeat in repeats}
            steady += [
                (label, whole.between(window.start, window.end).values)
                for window in run.windows
                if window.repeat in drawn
            ]
    return _timeline(quantity, curves, steady, "time since the first step of a repeat")


def _by_run(side: Recording) -> Iterator[tuple[RunEvidence, list[RepeatSteps]]]:
    """The runs that are drawn: the telemetry of others would be read for nothing."""
    for name, run in side.runs.items():
        if repeats := [repeat for repeat in side.repeats if repeat.run == name]:
            yield run, repeats


def _spans(repeats: Sequence[RepeatSteps]) -> list[tuple[float, float]]:
    return [(repeat.began, repeat.ended) for repeat in repeats if repeat.began is not None and repeat.ended is not None]


def _timeline(
    quantity: Quantity,
    curves: Sequence[Curve],
    steady: Sequence[tuple[str, Series]],
    x_name: str,
    spans: Sequence[Span] = (),
) -> Figure | None:
    """steady: by label, the values within the steady windows, which are averaged."""
    if not (quantity.news or any(curve.y.any() for curve in curves)):
        return None
    means = ", ".join(f"{label} {mean}".strip() for label, mean in _means(steady, quantity.unit).items())
    plane = Plane(
        title=f"{quantity.title} over time",
        description=f"means: {means}" if means else "",
        x_unit="s",
        x_name=x_name,
        y_unit=quantity.unit,
        height=110,
        from_zero=quantity.from_zero,
        spans=spans,
    )
    drawing = plots.over(plane, curves)
    title = quantity.title[0].upper() + quantity.title[1:]
    return Figure(title, drawing, f"On average over the steady steps: {means}." if means else "") if drawing else None


def _means(series: Sequence[tuple[str, Series]], unit: str) -> dict[str, str]:
    by_label: dict[str, list[Series]] = {}
    for label, values in series:
        if len(values):
            by_label.setdefault(label, []).append(values)
    return {label: units.quantity(float(np.mean(np.concatenate(values))), unit) for label, values in by_label.items()}


def _throttled(sides: Sequence[Recording]) -> Figure | None:
    """When clocks were held down; nothing if they never were, or if no driver says."""
    marks: list[tuple[str, str, Series]] = []
    reasons: dict[str, None] = {}
    longest = 0.0
    for (style, label), side in zip(styles(sides), sides, strict=True):
        moments: list[Series] = [np.empty(0)]
        for run, repeats in _by_run(side):
            held, why = recorded.throttling(run.telemetry)
            reasons.update(dict.fromkeys(why))
            for began, ended in _spans(repeats):
                longest = max(longest, ended - began)
                moments.append(held[(held >= began) & (held <= ended)] - began)
        marks.append((style, label, np.concatenate(moments)))
    if not any(len(moments) for *_, moments in marks):
        return None
    said = f"Held down by {', '.join(reasons)}."
    plane = Plane("clocks held down over time", said, "s", "time since the first step of a repeat", "")
    return Figure("Clocks held down", plots.marks(plane, marks, longest), said)
