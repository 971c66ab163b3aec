"""The figures of a page, each with its heading and what has to be said beneath it; what was not recorded gives none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from gpubench import units
from gpubench.comparison.evidence import RunEvidence, Side
from gpubench.report import plots, recorded, wording
from gpubench.report.plots import Curve, Plane, Span
from gpubench.report.recorded import RepeatSteps
from gpubench.report.scales import Series, bulk

SHOWN = 6  # repeats of one side: more lines than that cover each other
NAMES = ("A", "B")


@dataclass(frozen=True)
class Figure:
    title: str
    drawing: Markup
    note: str = ""


@dataclass(frozen=True)
class Recording:
    """One side's repeats as they are drawn, and the runs they come from by label."""

    repeats: Sequence[RepeatSteps]
    runs: Mapping[str, RunEvidence]
    metric: str
    unit: str
    total: int
    """Repeats there are; those beyond SHOWN are not drawn."""


def recording(side: Side) -> Recording:
    first = side.runs[0]
    metric = "step_time" if first.record else next(iter(first.metrics), "value")
    found = recorded.repeats_of(side.runs, metric, SHOWN)
    unit = first.metrics[metric].unit if metric in first.metrics else "s"
    return Recording(found, {run.label: run for run in side.runs}, metric, unit, sum(run.repeats for run in side.runs))


def steps(sides: Sequence[Recording]) -> Figure | None:
    """The metric over the steps of each repeat, its axis fitted to the steady ones."""
    drawn = [repeat for side in sides for repeat in side.repeats]
    if not drawn or len({side.unit for side in sides}) > 1:
        return None
    low, high = bulk([repeat.steady for repeat in drawn if len(repeat.steady)] or [repeat.values for repeat in drawn])
    curves = [
        Curve(repeat.number, repeat.values, style, label)
        for (style, label), side in zip(styles(sides), sides, strict=True)
        for repeat in side.repeats
    ]
    warmup = max((repeat.warmup for repeat in drawn if np.isfinite(repeat.warmup)), default=0.0)
    plane = Plane(
        title=f"{wording.name(sides[0].metric)} over steps",
        description=_in_words(sides),
        x_unit="",
        x_name="step of a repeat",
        y_unit=sides[0].unit,
        height=240,
        y_range=(low, high),
        spans=[Span(0, warmup, "warm-up")] if warmup else [],
    )
    drawing = plots.over(plane, curves)
    said = [_outside([repeat.values for repeat in drawn], low, high, sides[0].unit)]
    if max(len(repeat.values) for repeat in drawn) > plots.COLUMNS:
        said.append("The line is the mean and the band the extremes of the steps under each of its points.")
    if any(side.total > len(side.repeats) for side in sides):
        said.append(f"Only the first {SHOWN} repeats of a side are drawn.")
    return Figure(plane.title.capitalize(), drawing, " ".join(filter(None, said))) if drawing else None


def distribution(sides: Sequence[Recording]) -> Figure | None:
    """Histograms of the steady values; a dot below for each repeat's mean, as a repeat is the unit of evidence."""
    steady = [[repeat.steady for repeat in side.repeats if len(repeat.steady)] for side in sides]
    pooled = [np.concatenate(repeats) for repeats in steady if repeats]
    if not pooled or len({side.unit for side in sides}) > 1:
        return None
    low, high = bulk(pooled)
    name = wording.name(sides[0].metric)
    plane = Plane(
        title=f"distribution of {name} over the steady steps",
        description=_in_words(sides),
        x_unit=sides[0].unit,
        x_name=name,
        y_unit="fraction",
        height=170,
    )
    drawing = plots.distributions(plane, steady, [label for _, label in styles(sides)], low, high)
    said = "The dots are the means of the repeats: how far they lie apart is what a verdict has to reckon with."
    said = f"{said} {_outside(pooled, low, high, sides[0].unit)}".rstrip()
    return Figure(f"D{plane.title[1:]}", drawing, said) if drawing else None


def styles(sides: Sequence[Recording]) -> list[tuple[str, str]]:
    """Class and label of each side; a run alone needs no label."""
    return list(zip(plots.SIDES, NAMES if len(sides) > 1 else ("",), strict=False))


def _in_words(sides: Sequence[Recording]) -> str:
    said = []
    for (_, label), side in zip(styles(sides), sides, strict=True):
        steady = [repeat.steady for repeat in side.repeats if len(repeat.steady)]
        median = units.quantity(float(np.median(np.concatenate(steady))), side.unit) if steady else "not known"
        said.append(f"{label} {units.counted(len(side.repeats), 'repeat')}, median steady step {median}".strip())
    return "; ".join(said)


def _outside(series: Sequence[Series], low: float, high: float, unit: str) -> str:
    """What the axis leaves out."""
    outside = sum(int(np.count_nonzero((values < low) | (values > high))) for values in series)
    if not outside:
        return ""
    total, largest = sum(map(len, series)), max(float(values.max()) for values in series)
    lie = "lies" if outside == 1 else "lie"
    return (
        f"{outside:,} of {total:,} steps {lie} beyond the axis; the largest value is {units.quantity(largest, unit)}."
    )
