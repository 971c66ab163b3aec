"""From an estimate in each repeat to a metric of the run."""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import Generic, TypeVar

from gpubench import stats
from gpubench.events import RepeatDone, StageDone
from gpubench.metrics import DEFINITIONS, RATES, Distribution, Metric
from gpubench.telemetry import TelemetrySample, energy_between

M = TypeVar("M")
Estimate = Callable[[M], float | None]
"""Of one repeat; None where it cannot be known."""
MOST_DOUBT = 700.0
"""Of a logarithm: what a float can hold of an interval, however far two repeats lie apart."""


class Metrics(Generic[M]):
    """Metrics in the making, one estimate for each of the repeats that were measured."""

    def __init__(self, found: Sequence[M], steps: int, effective_steps: float | None) -> None:
        """`steps` are behind every metric, worth `effective_steps` independent ones."""
        self.found = found
        self.made: list[Metric] = []
        self._behind = steps, effective_steps

    def add(self, name: str, estimate: Estimate[M], single: Callable[[M], Sequence[float]] | None = None) -> None:
        """Leaves the metric out unless every repeat has an estimate. `single` are the values of which it is made."""
        estimates = [estimate(one) for one in self.found]
        known = [value for value in estimates if value is not None]
        if known and len(known) == len(estimates):
            distribution = stats.describe([single(one) for one in self.found]) if single else None
            self.made.append(metric_of(name, known, *self._behind, distribution))

    def get(self, name: str) -> Metric | None:
        return next((metric for metric in self.made if metric.name == name), None)


def largest(reports: Iterable[RepeatDone | StageDone], name: str) -> float | None:
    """Of what the ranks say of themselves under `name`, such as peak_rss; None where none of them knows."""
    return max((size for report in reports if (size := getattr(report, name))), default=None)


def energy_each(
    telemetry: Sequence[TelemetrySample], start: float, end: float, gpus: Sequence[int], samples: int
) -> float | None:
    """Joules a sample; None where there is no counter, or no sample."""
    joules = energy_between(telemetry, start, end, gpus) if gpus and samples else None
    return None if joules is None else joules / samples


def metric_of(
    name: str, repeats: list[float], steps: int, effective_steps: float | None, distribution: Distribution | None
) -> Metric:
    """The defined metric `name` with its estimate in each repeat; `steps` are those behind them."""
    definition = DEFINITIONS[name]
    estimate, interval = _mean_and_interval(name, repeats)
    return Metric(
        name=name,
        unit=definition.unit,
        better=definition.better,
        estimate=estimate,
        interval=interval,
        n=steps,
        effective_n=effective_steps,
        repeats=repeats,
        distribution=distribution,
    )


def relative_half_width(name: str, repeats: Sequence[float]) -> float | None:
    """How far the 95 % interval of a metric reaches from the mean of its repeats, as `Metric.reach` has it."""
    return metric_of(name, list(repeats), 0, None, None).reach if repeats else None


def _mean_and_interval(name: str, repeats: Sequence[float]) -> tuple[float, tuple[float, float] | None]:
    """The mean over the repeats, of a rate the harmonic one (see `metrics.RATES`), and its 95 % interval.

    The interval is Student's t on the scale on which the quantity has no edge, around the mean: on the logarithm of
    what is positive, so that a rate and the time that it is made of get intervals which are each other's inverse, and
    on the log odds of a share. No time falls below 0 and no share leaves 0 to 1. Values that have no logarithm, such
    as a count of 0, are taken as they are, and the interval is cut at the same edges.
    """
    rate, share = name in RATES and min(repeats) > 0, DEFINITIONS[name].unit == "fraction"
    mean = 1 / fmean([1 / value for value in repeats]) if rate else fmean(repeats)
    if len(repeats) < 2:
        return mean, None
    most = max(1.0, mean) if share else sys.float_info.max  # infinity is none of JSON's numbers
    if min(repeats) <= 0:
        half = stats.student_half_width(repeats)
        least = 0.0 if min(repeats) == 0 else -math.inf
        return mean, (max(least, mean - half), min(most, mean + half))
    if share and not rate and max(repeats) < 1:
        factor = _factor([value / (1 - value) for value in repeats])
        return mean, (mean / (mean + (1 - mean) * factor), mean * factor / (mean * factor + 1 - mean))
    factor = _factor(repeats)
    return mean, (max(sys.float_info.min, mean / factor), min(most, mean * factor))


def _factor(values: Sequence[float]) -> float:
    """By how much positive values may be off, either way, at 95 %."""
    return math.exp(min(stats.student_half_width([math.log(value) for value in values]), MOST_DOUBT))
