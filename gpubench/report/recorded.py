"""What was recorded while runs went on, as series that can be drawn: steps by repeat, telemetry by quantity."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gpubench.comparison.evidence import RunEvidence
from gpubench.report.scales import Series
from gpubench.telemetry import TelemetrySample


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

    @property
    def steady(self) -> Series:
        return self.values[self.number >= self.warmup]


def repeats_of(runs: Iterable[RunEvidence], metric: str, limit: int) -> list[RepeatSteps]:
    """The first `limit` repeats with steps behind them; no run is read beyond those."""
    found: list[RepeatSteps] = []
    for run in runs:
        if len(found) >= limit:
            break
        found += _logged(run, metric) if run.record is None and not len(run.steps) else _measured(run)
    return found[:limit]


def _measured(run: RunEvidence) -> list[RepeatSteps]:
    """The steps in order, each as long as its slowest rank took."""
    table = run.steps
    first = {window.repeat: window.first for window in run.windows}
    found = []
    for repeat in np.unique(table.repeat).tolist():
        rows = np.flatnonzero(table.repeat == repeat)
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
            )
        )
    return found


def _logged(run: RunEvidence, metric: str) -> list[RepeatSteps]:
    """What another tool logged, if it is not the time of a step: its steady values."""
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
    """Something that telemetry samples. `of` gives the values at one instant, by device."""

    title: str
    unit: str
    from_zero: bool
    of: Callable[[TelemetrySample], Mapping[str, float | None]]
    news: bool = True
    """False: zero from beginning to end is not worth a figure."""


BREAK = 10  # times the usual distance of two samples


@dataclass(frozen=True)
class Reading:
    """One device's values over time. `times` (seconds since the epoch), `values`: (n,)."""

    device: str
    times: Series
    values: Series

    def between(self, start: float, end: float) -> "Reading":
        inside = (self.times >= start) & (self.times <= end)
        return Reading(self.device, self.times[inside], self.values[inside])

    def since(self, moment: float) -> "Reading":
        return Reading(self.device, self.times - moment, self.values)

    def pieces(self) -> "list[Reading]":
        """What was read without a break: between two repeats another run may have had the machine."""
        gaps = np.diff(self.times)
        breaks = np.flatnonzero(gaps > BREAK * np.median(gaps)) + 1 if len(gaps) else np.empty(0, np.int64)
        parts = zip(np.split(self.times, breaks), np.split(self.values, breaks), strict=True)
        return [Reading(self.device, times, values) for times, values in parts]


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


def readings(samples: Sequence[TelemetrySample], quantity: Quantity) -> list[Reading]:
    """By device; a device that never said anything is left out."""
    times: dict[str, list[float]] = {}
    values: dict[str, list[float]] = {}
    for sample in samples:
        for device, value in quantity.of(sample).items():
            if value is not None and np.isfinite(value):
                times.setdefault(device, []).append(sample.time)
                values.setdefault(device, []).append(value)
    return [Reading(device, np.array(times[device]), np.array(values[device], np.float64)) for device in times]


def together(by_device: Sequence[Reading]) -> Reading | None:
    """The mean of all devices at each instant at which any was read."""
    if not by_device:
        return None
    times, place = np.unique(np.concatenate([reading.times for reading in by_device]), return_inverse=True)
    total = np.bincount(place, np.concatenate([reading.values for reading in by_device]))
    return Reading("", times, total / np.bincount(place))


def throttling(samples: Sequence[TelemetrySample]) -> tuple[Series, list[str]]:
    """When some GPU's clocks were held down, and by what. Clocks that the user set do not count."""
    held: list[float] = []
    reasons: dict[str, None] = {}
    for sample in samples:
        here = {reason for gpu in sample.gpus for reason in gpu.throttle_reasons or ()} - {"ApplicationsClocksSetting"}
        if here:
            held.append(sample.time)
            reasons.update(dict.fromkeys(sorted(here)))
    return np.array(held, np.float64), list(reasons)
