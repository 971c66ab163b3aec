"""From data to places on a page: scales, ticks at round numbers, and long series no longer than a screen is wide."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Series = NDArray[np.float64]

_MEASURES: Final = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")),
    "B": ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")),
    "fraction": ((0.01, "%"),),
}


@dataclass(frozen=True)
class Measure:
    """How a unit is written along an axis: `factor` base units make one of `name`."""

    factor: float
    name: str


@dataclass(frozen=True)
class Tick:
    """`value` in the data's unit, `label` in the axis's."""

    value: float
    label: str


@dataclass(frozen=True)
class Scale:
    """Maps [low, high] of the data linearly onto [start, end] of the page."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """The place of `value`, held within the page's side of the scale."""
        share = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * min(1.0, max(0.0, share))

    def places(self, values: Series) -> Series:
        """The places of many values; one beyond the scale keeps a place just beyond it, for the plot's edge to cut."""
        shares = (values - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * np.clip(shares, -0.5, 1.5)


def measure(unit: str, largest: float) -> Measure:
    """The measure of `unit` in which `largest` has digits before the point; the unit itself where none is larger."""
    known = _MEASURES.get(unit, ((1.0, unit),))
    return Measure(*next(((factor, name) for factor, name in known if abs(largest) >= factor), known[-1]))


def ticks(low: float, high: float, count: int, measured: Measure) -> list[Tick]:
    """About `count` round values within [low, high], labelled in the measure, with no more decimals than they need."""
    low, high = low / measured.factor, high / measured.factor
    step = _round_step((high - low) / max(1, count))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [
        Tick(number * step * measured.factor, f"{number * step + 0.0:,.{decimals}f}")
        for number in range(first, last + 1)
    ]


@dataclass(frozen=True)
class Axis:
    """A scale with about `count` round values along it. `name`: what it measures."""

    scale: Scale
    unit: str
    name: str = ""
    count: int = 5

    @property
    def ticks(self) -> list[tuple[float, Tick]]:
        """Each with its place on the page."""
        found = ticks(self.scale.low, self.scale.high, self.count, self._measure)
        return [(self.scale(tick.value), tick) for tick in found]

    @property
    def label(self) -> str:
        """The name and the unit that the ticks are in: "time, ms"."""
        return ", ".join(filter(None, (self.name, self._measure.name)))

    @property
    def _measure(self) -> Measure:
        return measure(self.unit, self.scale.high)


def _round_step(rough: float) -> float:
    """The nearest of 1, 2, 5 times a power of ten, as a ratio."""
    power: float = 10.0 ** math.floor(math.log10(rough))
    return min((factor * power for factor in (1, 2, 5, 10)), key=lambda step: abs(math.log(step / rough)))


def widen(low: float, high: float, share: float = 0.06) -> tuple[float, float]:
    """Room on both sides; never an empty range."""
    room = (high - low) * share or abs(high) * share or 1.0
    return low - room, high + room


@dataclass(frozen=True)
class Envelope:
    """A series as columns of pixels show it: the least, the mean and the largest value of each, all (columns,)."""

    x: Series
    low: Series
    mean: Series
    high: Series


def reduce(x: Series, y: Series, columns: int) -> Envelope:
    """Min, mean and max of `y` over equal runs of positions, so that no extreme is lost. `x` is the runs' middle.

    x, y: (n,), finite; a series of no more than `columns` values is returned as it is.
    """
    n = len(y)
    if n <= columns:
        return Envelope(x, y, y, y)
    starts = np.arange(columns) * n // columns
    lengths = np.diff(np.append(starts, n))
    return Envelope(
        x=np.add.reduceat(x, starts) / lengths,
        low=np.minimum.reduceat(y, starts),
        mean=np.add.reduceat(y, starts) / lengths,
        high=np.maximum.reduceat(y, starts),
    )


def bulk(series: Sequence[Series], tail: float = 0.025) -> tuple[float, float]:
    """A range for the many and not the few: half as wide again on each side as all but the `tail` at each end need.

    It holds every one of the series, however long the others are; of normal values it holds 99.99 %. It does not reach
    below 0 where no value does.
    """
    ends = [np.quantile(values, [tail, 1 - tail]) for values in series]
    low, high = widen(float(min(low for low, _ in ends)), float(max(high for _, high in ends)), 0.5)
    return (0.0, high) if low < 0 <= min(float(values.min()) for values in series) else (low, high)


def histogram(series: Sequence[Series], low: float, high: float) -> tuple[Series, list[Series]]:
    """Edges (bins + 1,), and for each series the share of all its values in each bin (bins,).

    Bins are as wide as the narrower series needs, within 12 and 120 of them: 2 IQR / n^(1/3) (Freedman and Diaconis
    1981). Values outside [low, high] count in the share but fall in no bin.
    """
    widths = [2 * float(np.subtract(*np.quantile(values, [0.75, 0.25]))) / len(values) ** (1 / 3) for values in series]
    width = min((width for width in widths if width > 0), default=high - low)
    bins = int(np.clip((high - low) / width, 12, 120))
    edges: Any = np.linspace(low, high, bins + 1)
    return edges, [np.histogram(values, edges)[0] / len(values) for values in series]
