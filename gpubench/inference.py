"""How sure a ratio is: intervals that take their width from whatever varies most, repeats or the steps inside them.

Errors are of the natural logarithm of a mean, that is relative ones, so that a ratio and its inverse get the same
verdict. Methods and their measured coverage are in docs/statistics.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from gpubench import stats
from gpubench.stats import Series

CONFIDENCE = 0.95
POWER = 0.8
SEED = 20_180_401  # of every resampling: the same data give the same verdict
RESAMPLES = 2000
MOST_REPEATS = 1000  # beyond this a question is as good as open

_TAILS = (0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2)


@dataclass(frozen=True)
class Steps:
    """The steady steps of one repeat."""

    values: Series

    @cached_property
    def error(self) -> "Error | None":
        """Of the logarithm of their mean, autocorrelation counted; None for fewer than 4 or a mean of 0."""
        found = stats.mean_error(self.values)
        return Error(*found) if found else None


@dataclass(frozen=True)
class Sample:
    """One metric on one side of a comparison."""

    units: Series
    """One estimate per independent unit: a repeat, or a run where there are several."""
    steps: Sequence[Sequence[Steps]] | None = None
    """For each unit the step series of its repeats; None where the metric has none, or they are not worth reading."""

    @property
    def n(self) -> int:
        return len(self.units)

    @property
    def mean(self) -> float:
        return float(self.units.mean())


@dataclass(frozen=True)
class Error:
    """Standard error of the logarithm of a mean, and the degrees of freedom it was estimated with."""

    size: float
    df: float

    def half_width(self) -> float:
        """Of Student's 95 % interval, in the logarithm."""
        return float(stdtrit(self.df, _TAILS[1])) * self.size


@dataclass(frozen=True)
class Ratio:
    """candidate / baseline, of the means of their units."""

    estimate: float
    interval: tuple[float, float]
    error: Error
    over_units: bool
    """Whether the interval rests on the variation between units; else only on that of the steps inside them."""


def ratio(baseline: Sample, candidate: Sample, *, paired: bool = False) -> Ratio | None:
    """The ratio of two means with its 95 % interval; None where nothing tells how far to trust it, or a mean is 0.

    Two units or more on each side: Student's interval after Welch (1947, Biometrika 34, 28) with the spread between
    units, or with that of the steps inside them, whichever error is larger, each with its own degrees of freedom. The
    spread between units contains the steps' noise already; the second is there for the few units that agree by chance.
    Where the sides have unequal numbers Welch's is too narrow if the smaller side's few units happen to agree, so that
    the interval with the pooled spread is taken if it is wider.
    `paired` units were measured in turn, the i-th of one side beside the i-th of the other, and are taken by pairs.

    One unit on a side: moving-block resampling of the steps, which knows nothing of how processes differ.
    """
    if baseline.mean <= 0 or candidate.mean <= 0:
        return None
    estimate = candidate.mean / baseline.mean
    between, within = _between(baseline, candidate, paired), _within(baseline, candidate)
    if min(baseline.n, candidate.n) > 1 and between:
        error = max(between, within, key=lambda e: e.size) if within else between
        return student(estimate, error)
    if within:
        low, high = np.exp(_resampled_interval(baseline, candidate, within))
        return Ratio(estimate, (float(estimate * low), float(estimate * high)), within, over_units=False)
    return None


def inverse(ratio: Ratio) -> Ratio:
    """Of the rates, given that of the times."""
    low, high = ratio.interval
    return Ratio(1 / ratio.estimate, (1 / high, 1 / low), ratio.error, ratio.over_units)


def student(estimate: float, error: Error) -> Ratio:
    """A ratio with Student's interval of its logarithm."""
    factor = math.exp(error.half_width())
    return Ratio(estimate, (estimate / factor, estimate * factor), error, over_units=True)


def difference(baseline: Sample, candidate: Sample, *, paired: bool = False) -> tuple[float, float] | None:
    """95 % interval of candidate - baseline in their unit, by Welch's rule; None where nothing tells its width.

    Errors of both means are absolute here, so that a mean of 0, a phase that one side lacks, is as good as any.
    """
    change = candidate.mean - baseline.mean
    if paired and baseline.n == candidate.n > 1:
        interval = stats.student_interval(candidate.units - baseline.units)
        return None if interval is None else (float(interval[0]), float(interval[1]))
    sides = [(side.mean, side_error(side)) for side in (baseline, candidate)]
    if any(error is None and mean for mean, error in sides):
        return None
    errors = [Error(error.size * mean, error.df) for mean, error in sides if error and mean]
    half = combined(*errors).half_width() if errors else 0.0
    return change - half, change + half


def side_error(side: Sample) -> Error | None:
    """Of one side's mean: between its units or within them, whichever is larger; None where neither is known."""
    known = [error for error in (_spread_error(side), _steps_error(side)) if error]
    return max(known, key=lambda e: e.size) if known else None


def spread(side: Sample) -> float | None:
    """Standard deviation between the units as a fraction of their mean; None for fewer than two or a mean of 0."""
    if side.n < 2 or side.mean <= 0:
        return None
    return float(side.units.std(ddof=1)) / side.mean


def pooled_spread(baseline: Sample, candidate: Sample, *, paired: bool = False) -> tuple[float, int] | None:
    """Spread of a unit, from both sides together, and its degrees of freedom; None where each side has only one."""
    if paired and (pairs := _pair_residuals(baseline, candidate)) is not None:
        return float(pairs.std(ddof=1)) / np.sqrt(2), len(pairs) - 1
    known = [(value, side.n - 1) for side in (baseline, candidate) if (value := spread(side)) is not None]
    df = sum(weight for _, weight in known)
    return (float(np.sqrt(sum(value**2 * weight for value, weight in known) / df)), df) if known else None


def noise_floor(unit_spread: float, df: float, baseline_units: int, candidate_units: int) -> float:
    """Smallest relative difference that so many units a side tell from noise, as a fraction.

    The half-width of Student's two-sample interval, with a spread that was learned with `df` degrees of freedom.
    """
    size = unit_spread * np.sqrt(1 / baseline_units + 1 / candidate_units)
    return float(np.expm1(Error(size, df).half_width()))


def resolvable(error: Error, margin: float) -> float:
    """Smallest change that such an interval would place wholly beyond the margin in POWER of all comparisons."""
    return float(np.expm1(np.log1p(margin) + error.half_width() + float(stdtrit(error.df, POWER)) * error.size))


def repeats_for(change: float, unit_spread: float, margin: float, *, paired: bool = False) -> int | None:
    """Units a side after which a change of this size has its verdict in POWER of all cases; None beyond MOST_REPEATS.

    `change` is |ratio - 1|. The interval, and the estimate's own scatter, have to fit between it and the margin's edge.
    """
    gap = abs(abs(np.log1p(change)) - np.log1p(margin))
    n = np.arange(2, MOST_REPEATS + 1)
    df = n - 1 if paired else 2 * n - 2
    enough = np.flatnonzero((stdtrit(df, _TAILS[1]) + stdtrit(df, POWER)) * unit_spread * np.sqrt(2 / n) < gap)
    return int(n[enough[0]]) if len(enough) else None


def combined(*errors: Error) -> Error:
    """Of a sum or difference of independent terms; degrees of freedom after Satterthwaite (1946, Biometrics 2, 110)."""
    variance = sum(error.size**2 for error in errors)
    if variance == 0:
        return Error(0.0, min(error.df for error in errors))
    weights = sum(error.size**4 / error.df for error in errors)
    return Error(float(np.sqrt(variance)), float(variance**2 / weights))


def _between(baseline: Sample, candidate: Sample, paired: bool) -> Error | None:
    if paired and (pairs := _pair_residuals(baseline, candidate)) is not None:
        return Error(float(pairs.std(ddof=1) / np.sqrt(len(pairs))), len(pairs) - 1)
    ours, theirs = _spread_error(baseline), _spread_error(candidate)
    pooled = pooled_spread(baseline, candidate)
    if ours is None or theirs is None or pooled is None:
        return None
    unit_spread, df = pooled
    alike = Error(unit_spread * math.sqrt(1 / baseline.n + 1 / candidate.n), df)
    return max(combined(ours, theirs), alike, key=Error.half_width)


def _pair_residuals(baseline: Sample, candidate: Sample) -> Series | None:
    """How far each pair lies from the ratio of the means, in its logarithm to first order.

    None for unequal numbers, fewer than two, or a mean of 0.
    """
    if baseline.n != candidate.n or baseline.n < 2 or min(baseline.mean, candidate.mean) <= 0:
        return None
    return candidate.units / candidate.mean - baseline.units / baseline.mean


def _spread_error(side: Sample) -> Error | None:
    unit_spread = spread(side)
    return None if unit_spread is None else Error(unit_spread / float(np.sqrt(side.n)), side.n - 1)


def _within(baseline: Sample, candidate: Sample) -> Error | None:
    """Of both sides' steps; a side with so many units that its steps were not read speaks by those."""
    errors = [_steps_error(side) or _spread_error(side) for side in (baseline, candidate)]
    known = [error for error in errors if error]
    return combined(*known) if len(known) == 2 and (baseline.steps or candidate.steps) else None


def _steps_error(side: Sample) -> Error | None:
    if not side.steps or side.mean <= 0:
        return None
    errors = []
    for unit, repeats in zip(side.units, side.steps, strict=True):
        weight = float(unit) / side.mean / side.n / len(repeats)  # its part of the side's mean
        for repeat in repeats:
            if repeat.error is None:
                return None
            errors.append(Error(repeat.error.size * weight, repeat.error.df))
    return combined(*errors)


def _resampled_interval(baseline: Sample, candidate: Sample, within: Error) -> NDArray[np.float64]:
    """Percentiles of the logarithm of the resampled ratio, about 0, widened from the normal's to Student's."""
    rng = np.random.default_rng(SEED)
    logs = np.log(_resampled_means(candidate, rng)) - np.log(_resampled_means(baseline, rng))
    if not (deviation := logs.std()):
        return np.zeros(2)
    edges = (np.quantile(logs, _TAILS) - logs.mean()) / deviation
    normal = float(stdtrit(np.inf, _TAILS[1]))
    return np.asarray(edges * within.half_width() / normal)


def _resampled_means(side: Sample, rng: np.random.Generator) -> Series:
    """RESAMPLES means of the side, relative to its own."""
    if not side.steps:
        draws = rng.integers(0, side.n, (RESAMPLES, side.n))
        return np.asarray(side.units[draws].mean(axis=1) / side.mean)
    total = np.zeros(RESAMPLES)
    for unit, repeats in zip(side.units, side.steps, strict=True):
        for repeat in repeats:
            relative = stats.block_resample(repeat.values, RESAMPLES, rng) / repeat.values.mean()
            total += float(unit) / len(repeats) * relative
    return total / side.n / side.mean
