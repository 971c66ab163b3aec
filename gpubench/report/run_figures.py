"""The figures of a page, each with its heading and caption; what was not recorded gives none."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpubench import units
from gpubench.compare.evidence import RunEvidence, Side
from gpubench.report import bar_charts, charts
from gpubench.report.charts import Curve, Plane, Remark, Series, ShadedRange, bulk
from gpubench.report.document import Block, Figure, Medium, Paragraph
from gpubench.runs.steps import StepTable
from gpubench.telemetry import TelemetrySample
from gpubench.text import phase_name


@dataclass(frozen=True)
class RepeatSteps:
    """One repeat of a run. `number`, `values`: (n,), the steps' numbers and the metric's values, warm-up included."""

    run: str
    repeat: int
    number: Series
    values: Series
    warmup: float
    """The number of the first steady step."""
    began: float | None
    """Seconds since the epoch, as is `ended`, the end of its last step; None where no times were recorded."""
    ended: float | None
    peaks: Sequence[tuple[float, float, str]] = ()
    """The number and the value of the longest steps, with the phase that made each of them long."""

    @property
    def steady(self) -> Series:
        return self.values[self.number >= self.warmup]


def repeats_of(runs: Iterable[RunEvidence], metric: str, limit: int) -> list[RepeatSteps]:
    """Returns the first `limit` repeats that have steps, without reading further runs."""
    found: list[RepeatSteps] = []
    for run in runs:
        if len(found) >= limit:
            break
        found += _logged(run, metric) if run.record is None and not len(run.steps) else _measured(run)
    return found[:limit]


def _measured(run: RunEvidence) -> list[RepeatSteps]:
    """Returns the steps in order. The time of a step is that of its slowest rank."""
    table = run.steps
    first = {window.repeat: window.first for window in run.windows}
    partial = {window.repeat for window in run.windows if window.partial_first}
    found = []
    for repeat in np.unique(table.repeat).tolist():
        rows = np.flatnonzero((table.repeat == repeat) & (table.step >= int(repeat in partial)))
        rows = rows[np.isfinite(table.total[rows])]
        if not len(rows):
            continue
        step, total, time = table.step[rows], table.total[rows], table.time[rows]
        if np.any(np.diff(step) <= 0):  # several ranks, or out of order
            order = np.argsort(step, kind="stable")
            step, total, time = step[order], total[order], time[order]
        starts = np.flatnonzero(np.diff(step, prepend=step[0] - 1))
        found.append(
            RepeatSteps(
                run=run.label,
                repeat=int(repeat),
                number=step[starts].astype(np.float64),
                values=np.maximum.reduceat(total, starts),
                warmup=first.get(repeat, float("inf")),  # never measured: all of it is warm-up
                began=float(time.min()),
                ended=float((time + total).max()),
                peaks=_peaks(table, rows, first.get(repeat, 0)),
            )
        )
    return found


PEAK = 2.0  # times the usual step
MOST_PEAKS = 8


def _peaks(table: StepTable, rows: NDArray[np.int64], first: int) -> list[tuple[float, float, str]]:
    """Returns number, time and longest phase of steady steps that take more than twice as long as usual.

    The phase is the one that exceeds its median most, such as an evaluation between two steps. Steps in which no phase
    explains half of the excess are left out.
    """
    steady = rows[table.step[rows] >= first]
    total = table.total[steady]
    if not len(steady):
        return []
    usual = float(np.median(total))
    longest = sorted(np.flatnonzero(total > PEAK * usual).tolist(), key=lambda place: -total[place])[:MOST_PEAKS]
    medians = {name: float(np.median(times[steady])) for name, times in table.phases.items()} if longest else {}
    found = []
    for place in longest:
        row = steady[place]
        excess = {name: float(table.phases[name][row]) - median for name, median in medians.items()}
        phase = max(excess, key=excess.__getitem__, default="")
        if phase and excess[phase] > (total[place] - usual) / 2:
            found.append((float(table.step[row]), float(total[place]), phase))
    return found


def _logged(run: RunEvidence, metric: str) -> list[RepeatSteps]:
    """Returns the steady values of a log of another tool that holds something other than step times."""
    series = run.series(metric) or []
    return [
        RepeatSteps(
            run.label, window.repeat, window.first + np.arange(len(values), dtype=np.float64), values, 0, None, None
        )
        for window, values in zip(run.windows, series, strict=False)
        if len(values)
    ]


@dataclass(frozen=True)
class Quantity:
    """A quantity in telemetry samples. `of` returns its values in one sample, by device."""

    title: str
    unit: str
    from_zero: bool
    of: Callable[[TelemetrySample], Mapping[str, float | None]]
    news: bool = True
    """Whether it is drawn even if it is zero all the time."""


BREAK = 10  # times the median distance of two samples


@dataclass(frozen=True)
class DeviceReading:
    """The values of one device over time. `times`, in seconds since the epoch, and `values` have the shape (n,)."""

    device: str
    times: Series
    values: Series

    def between(self, start: float, end: float) -> "DeviceReading":
        inside = (self.times >= start) & (self.times <= end)
        return DeviceReading(self.device, self.times[inside], self.values[inside])

    def since(self, moment: float) -> "DeviceReading":
        return DeviceReading(self.device, self.times - moment, self.values)

    def pieces(self) -> "list[DeviceReading]":
        """Returns the parts without a gap. Between two repeats, another run may have used the machine."""
        gaps = np.diff(self.times)
        breaks = np.flatnonzero(gaps > BREAK * np.median(gaps)) + 1 if len(gaps) else np.empty(0, np.int64)
        parts = zip(np.split(self.times, breaks), np.split(self.values, breaks), strict=True)
        return [DeviceReading(self.device, times, values) for times, values in parts]


def _gpu(field: str) -> Callable[[TelemetrySample], dict[str, float | None]]:
    return lambda sample: {f"GPU {gpu.index}": getattr(gpu, field) for gpu in sample.gpus}


def _cpu(field: str) -> Callable[[TelemetrySample], dict[str, float | None]]:
    return lambda sample: {"CPU": getattr(sample.cpu, field)} if sample.cpu else {}


GPU: Final = (
    Quantity("SM clock", "MHz", False, _gpu("sm_clock_mhz")),
    Quantity("power", "W", False, _gpu("power_w")),
    Quantity("temperature", "°C", False, _gpu("temperature_c")),
    Quantity("GPU busy", "fraction", True, _gpu("utilization")),
)
CPU: Final = (
    Quantity("CPU load of the machine", "fraction", True, _cpu("load")),
    Quantity("CPU time stolen by other guests", "fraction", True, _cpu("steal"), news=False),
    Quantity("CPU used by the workers", "cores", True, _cpu("worker_cpu")),
)
GPU_MEMORY: Final = Quantity("GPU memory in use", "B", True, _gpu("memory_used_bytes"))
CPU_MEMORY: Final = Quantity("memory held by the workers", "B", True, _cpu("memory_rss_bytes"))


def device_readings(samples: Sequence[TelemetrySample], quantity: Quantity) -> list[DeviceReading]:
    """Returns the readings of each device. A device without any value is left out."""
    times: dict[str, list[float]] = {}
    values: dict[str, list[float]] = {}
    for sample in samples:
        for device, value in quantity.of(sample).items():
            if value is not None and np.isfinite(value):
                times.setdefault(device, []).append(sample.time)
                values.setdefault(device, []).append(value)
    return [DeviceReading(device, np.array(times[device]), np.array(values[device], np.float64)) for device in times]


def together(by_device: Sequence[DeviceReading]) -> DeviceReading | None:
    """Returns the mean over the devices at each time at which any was read; None without a device."""
    if not by_device:
        return None
    times, place = np.unique(np.concatenate([reading.times for reading in by_device]), return_inverse=True)
    total = np.bincount(place, np.concatenate([reading.values for reading in by_device]))
    return DeviceReading("", times, total / np.bincount(place))


def throttling(samples: Sequence[TelemetrySample]) -> tuple[Series, list[str]]:
    """Returns when the clocks of a GPU were throttled, and the reasons. A limit set by the user does not count."""
    held: list[float] = []
    reasons: dict[str, None] = {}
    for sample in samples:
        here = {reason for gpu in sample.gpus for reason in gpu.throttle_reasons or ()} - {"ApplicationsClocksSetting"}
        if here:
            held.append(sample.time)
            reasons.update(dict.fromkeys(sorted(here)))
    return np.array(held, np.float64), list(reasons)


SHOWN = 6  # repeats of one side: more lines hide each other
NAMES = ("A", "B")


@dataclass(frozen=True)
class DrawnRepeats:
    """The repeats of one side that are drawn, and their runs by label."""

    repeats: Sequence[RepeatSteps]
    runs: Mapping[str, RunEvidence]
    metric: str
    unit: str
    total: int
    """The number of all repeats, of which at most SHOWN are drawn."""


def recording(side: Side) -> DrawnRepeats:
    first = side.runs[0]
    metric = "step_time" if first.record else next(iter(first.metrics), "value")
    found = repeats_of(side.runs, metric, SHOWN)
    unit = first.metrics[metric].unit if metric in first.metrics else "s"
    return DrawnRepeats(
        found, {run.label: run for run in side.runs}, metric, unit, sum(run.repeats for run in side.runs)
    )


def or_missing(found: Iterable[Figure | None], missing: str) -> Iterator[Block]:
    """Yields the figures, or a note on what is missing if there are none."""
    drawn = [figure for figure in found if figure]
    yield from drawn
    if not drawn:
        yield Paragraph(missing, "missing", on=Medium.PAGE)


def steps(sides: Sequence[DrawnRepeats]) -> Figure | None:
    """Draws the metric over the steps of each repeat, on an axis that fits the steady steps."""
    drawn = [repeat for side in sides for repeat in side.repeats]
    if not drawn or len({side.unit for side in sides}) > 1:
        return None
    low, high = bulk([repeat.steady for repeat in drawn if len(repeat.steady)] or [repeat.values for repeat in drawn])
    if apart := len(sides) == 1 and len(drawn) > 1:
        curves = [
            Curve(repeat.number, repeat.values, f"device-{place}", str(repeat.repeat + 1))
            for place, repeat in enumerate(drawn)
        ]
    else:
        curves = [
            Curve(repeat.number, repeat.values, f"{style} repeat-{place}" if place else style, "" if place else label)
            for (style, label), side in zip(styles(sides), sides, strict=True)
            for place, repeat in enumerate(side.repeats)
        ]
    warmup = max((repeat.warmup for repeat in drawn if np.isfinite(repeat.warmup)), default=0.0)
    plane = Plane(
        title=f"{phase_name(sides[0].metric)} over steps",
        description=_in_words(sides),
        x_unit="",
        x_name="step of a repeat",
        y_unit=sides[0].unit,
        height=240,
        y_range=(low, high),
        spans=[ShadedRange(0, warmup, "warm-up")] if warmup else [],
        remarks=_remarks(drawn),
    )
    drawing = charts.over(plane, curves)
    said = ["Each line is a repeat; its number is at the right."] if apart else []
    if any(len(side.repeats) > 1 for side in sides) and not apart:
        said.append("Each line is a repeat; the first one of a side is solid.")
    said.append(_outside([repeat.values for repeat in drawn], low, high, sides[0].unit))
    if max(len(repeat.values) for repeat in drawn) > charts.COLUMNS:
        said.append("The line is the mean and the band the extremes of the steps under each of its points.")
    if any(side.total > len(side.repeats) for side in sides):
        said.append(f"Only the first {SHOWN} repeats of a side are drawn.")
    note, keys = " ".join(filter(None, said)), len(sides) > 1
    return Figure(plane.title.capitalize(), drawing, note, keys=keys) if drawing else None


APART, APART_ON_A_PHONE = 0.2, 0.45  # of the plot: remarks closer to each other would overlap


def _remarks(drawn: Sequence[RepeatSteps]) -> list[Remark]:
    """Returns the names of the phases that made the longest steps long, as many as have room."""
    width = max(float(repeat.number.max()) for repeat in drawn) or 1.0
    found: list[Remark] = []
    for step, value, phase in sorted((one for repeat in drawn for one in repeat.peaks), key=lambda one: -one[1]):
        if all(abs(step - other.x) >= APART * width for other in found):
            on_a_phone = (other for other in found if other.everywhere)
            everywhere = all(abs(step - other.x) >= APART_ON_A_PHONE * width for other in on_a_phone)
            found.append(Remark(step, value, phase_name(phase), everywhere))
    return found


def distribution(sides: Sequence[DrawnRepeats]) -> Figure | None:
    """Draws histograms of the steady values. A dot below shows the mean of each repeat, the unit of evidence."""
    steady = [[repeat.steady for repeat in side.repeats if len(repeat.steady)] for side in sides]
    pooled = [np.concatenate(repeats) for repeats in steady if repeats]
    if not pooled or len({side.unit for side in sides}) > 1:
        return None
    low, high = bulk(pooled)
    name = phase_name(sides[0].metric)
    plane = Plane(
        title=f"distribution of {name} over the steady steps",
        description=_in_words(sides),
        x_unit=sides[0].unit,
        x_name=name,
        y_unit="fraction",
        height=170,
    )
    drawing = charts.distributions(plane, steady, [label for _, label in styles(sides)], low, high)
    said = "The dots are the means of the repeats. A verdict depends on how much they vary."
    said = f"{said} {_outside(pooled, low, high, sides[0].unit)}".rstrip()
    return Figure(f"D{plane.title[1:]}", drawing, said, keys=len(sides) > 1) if drawing else None


def styles(sides: Sequence[DrawnRepeats]) -> list[tuple[str, str]]:
    """Returns the style and the label of each side. A single run has no label."""
    return list(zip(charts.SIDES, NAMES if len(sides) > 1 else ("",), strict=False))


def _in_words(sides: Sequence[DrawnRepeats]) -> str:
    said = []
    for (_, label), side in zip(styles(sides), sides, strict=True):
        steady = [repeat.steady for repeat in side.repeats if len(repeat.steady)]
        median = units.quantity(float(np.median(np.concatenate(steady))), side.unit) if steady else "not known"
        said.append(f"{label} {units.counted(len(side.repeats), 'repeat')}, median steady step {median}".strip())
    return "; ".join(said)


def _outside(series: Sequence[Series], low: float, high: float, unit: str) -> str:
    """Returns a sentence on the values outside the axis; "" if there are none."""
    outside = sum(int(np.count_nonzero((values < low) | (values > high))) for values in series)
    if not outside:
        return ""
    total, largest = sum(map(len, series)), max(float(values.max()) for values in series)
    lie = "lies" if outside == 1 else "lie"
    return (
        f"{outside:,} of {total:,} steps {lie} beyond the axis; the largest value is {units.quantity(largest, unit)}."
    )


TOLD_APART = 4  # devices that are drawn in different colours
PEAKS = {
    "peak_memory_allocated": "allocated",
    "peak_memory_reserved": "reserved",
    "peak_memory_total": "in all",
    "peak_memory_rss": "in RAM",
}


def telemetry(sides: Sequence[DrawnRepeats]) -> list[Figure]:
    """Draws the telemetry of each repeat from its first step on, as the mean over the GPUs.

    The telemetry of the CPU is drawn only if there is none of a GPU.
    """
    gpus = [found for quantity in GPU if (found := _aligned(sides, quantity))]
    throttled = _throttled(sides)
    if gpus or throttled:
        return gpus + ([throttled] if throttled else [])
    return [found for quantity in CPU if (found := _aligned(sides, quantity))]


def peaks(sides: Sequence[DrawnRepeats], metrics: Sequence[Mapping[str, float]]) -> Figure | None:
    """Draws the peaks of memory. `metrics` has the bytes by metric of each side."""
    items = [
        (f"{word} {label}".strip(), known[name], f"fill solid {style}")
        for name, word in PEAKS.items()
        for (style, label), known in zip(styles(sides), metrics, strict=True)
        if name in known
    ]
    drawing = bar_charts.bars("peak memory", "B", items)
    return Figure("Peak memory", drawing, shape="rows") if drawing else None


def lone_peak(metrics: Mapping[str, float]) -> str:
    """Returns the peak of memory in words if only one is known, which would be a chart of one bar; otherwise ""."""
    known = [(word, metrics[name]) for name, word in PEAKS.items() if name in metrics]
    return f"peak memory {known[0][0]}: {units.size(known[0][1])}" if len(known) == 1 else ""


def memory(sides: Sequence[DrawnRepeats]) -> Figure | None:
    return _aligned(sides, GPU_MEMORY) or _aligned(sides, CPU_MEMORY)


def whole_run(run: RunEvidence, quantities: Sequence[Quantity]) -> list[Figure]:
    """Draws a run from its first sample to its last, with a line for each device and the steady windows shaded."""
    if not run.telemetry:
        return []
    began = run.telemetry[0].time
    spans = [ShadedRange(window.start - began, window.end - began) for window in run.windows if window.start >= began]
    found = []
    for quantity in quantities:
        by_device = device_readings(run.telemetry, quantity)
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


def _aligned(sides: Sequence[DrawnRepeats], quantity: Quantity) -> Figure | None:
    curves, steady = [], []
    for (style, label), side in zip(styles(sides), sides, strict=True):
        for run, repeats in _by_run(side):
            whole = together(device_readings(run.telemetry, quantity))
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


def _by_run(side: DrawnRepeats) -> Iterator[tuple[RunEvidence, list[RepeatSteps]]]:
    """Yields the runs that are drawn. The telemetry of other runs is not read."""
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
    spans: Sequence[ShadedRange] = (),
) -> Figure | None:
    """Draws one quantity over time. `steady` has, by label, the values within the steady windows, for the means."""
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
    drawing = charts.over(plane, curves)
    title = quantity.title[0].upper() + quantity.title[1:]
    return Figure(title, drawing, f"On average over the steady steps: {means}." if means else "") if drawing else None


def _means(series: Sequence[tuple[str, Series]], unit: str) -> dict[str, str]:
    by_label: dict[str, list[Series]] = {}
    for label, values in series:
        if len(values):
            by_label.setdefault(label, []).append(values)
    return {label: units.quantity(float(np.mean(np.concatenate(values))), unit) for label, values in by_label.items()}


def _throttled(sides: Sequence[DrawnRepeats]) -> Figure | None:
    """Draws when clocks were throttled; None if they never were, or if the driver does not report it."""
    marks: list[tuple[str, str, Series]] = []
    reasons: dict[str, None] = {}
    longest = 0.0
    for (style, label), side in zip(styles(sides), sides, strict=True):
        moments: list[Series] = [np.empty(0)]
        for run, repeats in _by_run(side):
            held, why = throttling(run.telemetry)
            reasons.update(dict.fromkeys(why))
            for began, ended in _spans(repeats):
                longest = max(longest, ended - began)
                moments.append(held[(held >= began) & (held <= ended)] - began)
        marks.append((style, label, np.concatenate(moments)))
    if not any(len(moments) for *_, moments in marks):
        return None
    said = f"Reasons: {', '.join(reasons)}."
    plane = Plane("clocks throttled over time", said, "s", "time since the first step of a repeat", "")
    return Figure("Clocks throttled", charts.marks(plane, marks, longest), said)
