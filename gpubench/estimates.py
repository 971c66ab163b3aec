"""From an estimate in each repeat to a metric of the run."""

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
    """The defined metric `name` with its estimate in each repeat; `steps` are those behind them.

    A rate is averaged as the time of one: see `metrics.RATES`.
    """
    definition, rate, values = DEFINITIONS[name], _is_rate(name, repeats), _averaged(name, repeats)
    estimate, interval = fmean(values), stats.student_interval(values)
    if rate:
        estimate = 1 / estimate
        interval = (1 / interval[1], 1 / interval[0]) if interval and interval[0] > 0 else None
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
    """Half the 95 % interval of what a metric is averaged as, which for a rate is a time, as a fraction of it."""
    return stats.relative_half_width(_averaged(name, repeats))


def _is_rate(name: str, repeats: Sequence[float]) -> bool:
    return name in RATES and min(repeats, default=0) > 0


def _averaged(name: str, repeats: Sequence[float]) -> list[float]:
    return [1 / value for value in repeats] if _is_rate(name, repeats) else list(repeats)
