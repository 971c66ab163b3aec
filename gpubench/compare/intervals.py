"""The ratio of two sides with its interval and p-values, and Holm's method.

Intervals and p-values of ratios rest on the variation between repeats or runs, and only where nothing is known of it on
the steps inside them. Each comes from Student's t and one `Error`, so an interval excludes exactly the values that the
test rejects. Errors are those of the natural logarithm of a mean, that is relative, so that a ratio and its inverse get
the same verdict. docs/statistics.md describes the methods and their measured coverage.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from gpubench.distributions import student_t_cdf, student_t_quantile
from gpubench.runs.stats import Series, mean_error

CONFIDENCE = 0.95
SIGNIFICANT = (1 - CONFIDENCE) / 2  # level of a one-sided test, so that it agrees with the two-sided interval
POWER = 0.8
MOST_REPEATS = 1000  # a larger number is reported as unknown
FEWEST_PAIRS = 3
"""The pairs of repeats from which on pairs are compared: two have a single degree of freedom."""
ROUNDING = 1e-12  # fraction of a mean below which a difference is rounding error
LARGEST = 700.0  # largest logarithm whose exponential is finite

Basis = Literal["runs", "units", "steps"]
"""The variation behind an error: of equal runs on record, of the sides' units, or of the steps inside them."""


@dataclass(frozen=True)
class Steps:
    """The steady steps of one repeat."""

    values: Series

    @cached_property
    def error(self) -> "Error | None":
        """The error of the logarithm of their mean, with autocorrelation; None for fewer than 4 or a mean of 0."""
        found = mean_error(self.values)
        return Error(*found) if found else None


@dataclass(frozen=True)
class MetricSample:
    """One metric on one side of a comparison."""

    units: Series
    """One estimate per independent unit: per repeat, or per run if there are several runs."""
    steps: Sequence[Sequence[Steps]] | None = None
    """The steps of each repeat of each unit; None if the metric has no steps, or they are not needed."""

    @property
    def n(self) -> int:
        return len(self.units)

    @property
    def mean(self) -> float:
        return float(self.units.mean())


@dataclass(frozen=True)
class Error:
    """The standard error of the logarithm of a mean, and its degrees of freedom."""

    size: float
    df: float

    def half_width(self, level: float = SIGNIFICANT) -> float:
        """Returns the half-width of Student's interval of the logarithm, with `level` on each side (default: 95 %)."""
        return -student_t_quantile(self.df, level) * self.size

    def above(self, distance: float) -> float:
        """Returns the one-sided p-value of "larger than the bound" for an estimate `distance` above the bound."""
        if self.size == 0:
            return 0.0 if distance > 0 else 1.0
        return student_t_cdf(self.df, -distance / self.size)


@dataclass(frozen=True)
class Known:
    """What is known of the variation of equal units besides what is measured: a relative standard deviation."""

    spread: float
    df: float
    """The degrees of freedom with which it is known."""
    beside: float
    """Those that do not come from the measured units themselves, as far as it is known; see `moderated`."""
    of_runs: bool = False
    """Whether it is the variation of whole runs and each side is a single run, which varies at least that much."""


USUAL = Known(0.0015, 0.5, 0.5)
"""How the speed of processes that train on accelerators usually differs, in public logs of MLPerf.

It helps where both sides have several units, and says nothing of single ones.

Of the values that were tried, with 0 to 2 degrees of freedom, these find the most changes there while intervals cover
93 % whatever the noise is. docs/statistics.md has the figures.
"""
MOST_DF_OF_RECORD = 4
"""The degrees of freedom that a record has at most beside what is measured, as noise differs from day to day."""
NOISIER = 3
"""So many times the known spread, what is known counts half."""


@dataclass(frozen=True)
class Ratio:
    """The ratio candidate / baseline of the means of their units, with its error."""

    estimate: float
    error: Error
    rests_on: Basis = "units"
    bias: float = 0.0
    """The fraction by which the ratio may also be off, in either direction: what single units are assumed to differ by.

    Interval and tests allow for it in full, beside the error.
    """
    moderated_by: Known | None = None
    """What was known of the variation before, if that is part of the error."""

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval."""
        factor = math.exp(min(self.error.half_width() + math.log1p(self.bias), LARGEST))
        return self.estimate / factor, self.estimate * factor

    def rounded(self, baseline: float, candidate: float) -> "Ratio":
        """Returns the ratio with the error of means that may be off by these fractions, as their values were rounded.

        How far they are off is taken to be equally likely anywhere between.
        """
        size = math.sqrt(self.error.size**2 + (baseline**2 + candidate**2) / 3)
        return replace(self, error=Error(size, self.error.df))

    def beyond(self, limit: float) -> float:
        """Returns the one-sided p-value of "changed by more than `limit`" (a fraction) in the estimate's direction."""
        return self.above(math.log1p(limit)) if self.estimate > 1 else self.below(-math.log1p(limit))

    def within(self, limit: float) -> float:
        """Returns the p-value of "changed by less than `limit` in either direction": that of the nearer limit."""
        slack = math.log1p(limit) - abs(math.log(self.estimate)) - math.log1p(self.bias)
        return self.error.above(slack) if self.error.size else float(slack < 0)

    def above(self, edge: float) -> float:
        """Returns the one-sided p-value of "the logarithm of the ratio is above `edge`"."""
        return self.error.above(math.log(self.estimate) - math.log1p(self.bias) - edge)

    def below(self, edge: float) -> float:
        """Returns the one-sided p-value of "the logarithm of the ratio is below `edge`"."""
        return self.error.above(edge - math.log(self.estimate) - math.log1p(self.bias))


@dataclass(frozen=True)
class MeanDifference:
    """The difference candidate - baseline and its error, both in their unit. The error is None if it is unknown."""

    estimate: float
    error: Error | None
    bias: float = 0.0
    """By how much the difference may also be off, in its unit; see `Ratio.bias`."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval."""
        if self.error is None:
            return None
        half = self.error.half_width() + self.bias
        return self.estimate - half, self.estimate + half

    @property
    def p_value(self) -> float | None:
        """The one-sided p-value of "not 0" in the direction of the estimate; None without an error."""
        return self.error.above(abs(self.estimate) - self.bias) if self.error else None


def ratio(
    baseline: MetricSample,
    candidate: MetricSample,
    *,
    paired: bool = False,
    known: Known | None = None,
    assumed: float = 0.0,
) -> Ratio | None:
    """Returns the ratio of two means with its error; None if the error is unknown or a mean is 0.

    The error is Student's, with the spread between units that both sides share, moderated by what is `known`. It
    already contains the noise of the steps, and Student's t allows for few units that agree by chance. The error of the
    steps is not a lower bound for it: if the time of a step follows a schedule that all units share, as with growing
    sequences or the lengths of an epoch, steps differ far more than their mean does. `paired` units were interleaved,
    the i-th of one side next to the i-th of the other, and are compared in pairs if there are FEWEST_PAIRS.

    Single units on both sides vary as equal ones on record. If none are, the error is that of the steps, and the ratio
    may also be off by the fraction `assumed`. It is that of the steps, too, if all units agree to the last digit.
    """
    if baseline.mean <= 0 or candidate.mean <= 0:
        return None
    estimate = candidate.mean / baseline.mean
    own, between = pooled_spread(baseline, candidate, paired=paired), None
    prior = None if known and known.of_runs else known
    if own or prior:
        spread, df = moderated(own, prior)
        between = Error(spread * math.sqrt(1 / baseline.n + 1 / candidate.n), df)
    by_steps = between is None or (own is not None and own[0] <= ROUNDING)
    found = (_within(baseline, candidate) if by_steps else None) or between
    rests_on: Basis = "steps" if between is None else "units"
    moderated_by = prior if found is between and prior and prior.beside else None
    if known and known.of_runs:
        runs = Error(known.spread * math.sqrt(2), known.df)
        if found is None or found.half_width() < runs.half_width():
            found, rests_on, moderated_by = runs, "runs", None
    bias = assumed if rests_on == "steps" else 0.0
    return Ratio(estimate, found, rests_on, bias, moderated_by) if found else None


def moderated(own: tuple[float, float] | None, known: Known | None) -> tuple[float, float]:
    """Returns (spread of a unit, degrees of freedom) from what was measured and what was known; one of them must be.

    It is the moderated variance of Smyth (2004, Statistical Applications in Genetics and Molecular Biology 3, 3): the
    mean of both variances, weighted by their degrees of freedom, which add up. What is known counts less where the
    measured spread is far above it, as after Phipson et al. (2016, Annals of Applied Statistics 10, 946): such noise
    is of another kind. A record has at most MOST_DF_OF_RECORD beside what was measured.
    """
    if own is None:
        assert known
        return known.spread, known.df
    spread, df = own
    if known is None:
        return own
    prior = min(known.beside, MOST_DF_OF_RECORD)
    prior *= known.spread**2 / (known.spread**2 + (spread / NOISIER) ** 2) if spread else 1.0
    return math.sqrt((prior * known.spread**2 + df * spread**2) / (prior + df)), prior + df


def inverse(ratio: Ratio) -> Ratio:
    """Returns the ratio of the rates from that of the times."""
    return replace(ratio, estimate=1 / ratio.estimate)


def difference(
    baseline: MetricSample,
    candidate: MetricSample,
    *,
    paired: bool = False,
    known: Known | None = None,
    assumed: float = 0.0,
) -> MeanDifference:
    """Returns candidate - baseline in their unit, with an error made of the same parts as that of `ratio`.

    The spread is absolute, so that a mean may be 0, as for a phase that one side lacks, and is not moderated.
    """
    scale, bias = max(abs(baseline.mean), abs(candidate.mean)), 0.0
    error = _between_units(baseline, candidate, paired=paired)
    if error is None and known:
        error = Error(known.spread * math.hypot(baseline.mean, candidate.mean), known.df)
    elif error is None:
        error, bias = _of_steps(baseline, candidate), assumed * scale
    elif error.size <= ROUNDING * scale:
        error = _of_steps(baseline, candidate) or error
    if error and known and known.of_runs:
        runs = Error(known.spread * math.hypot(baseline.mean, candidate.mean), known.df)
        error = max(error, runs, key=Error.half_width)
    exact = error and Error(_exact(error.size, scale), error.df)
    return MeanDifference(_exact(candidate.mean - baseline.mean, scale), exact, bias)


def _between_units(baseline: MetricSample, candidate: MetricSample, *, paired: bool) -> Error | None:
    """Returns the error of a difference from the spread between units; None if each side has one."""
    if paired and baseline.n == candidate.n >= FEWEST_PAIRS:
        pairs = candidate.units - baseline.units
        return Error(float(pairs.std(ddof=1)) / math.sqrt(len(pairs)), len(pairs) - 1)
    df = baseline.n + candidate.n - 2
    squares = sum(float(((side.units - side.mean) ** 2).sum()) for side in (baseline, candidate))
    return Error(math.sqrt(squares / df * (1 / baseline.n + 1 / candidate.n)), df) if df else None


def _of_steps(baseline: MetricSample, candidate: MetricSample) -> Error | None:
    """Returns the error of a difference from both sides' steps; None if it is unknown on a side that is not 0."""
    errors = [(side.mean, _steps_error(side)) for side in (baseline, candidate) if side.mean]
    known = [Error(error.size * mean, error.df) for mean, error in errors if error]
    if len(known) < len(errors):
        return None
    return combined(*known) if known else Error(0.0, 1)


def spread(side: MetricSample) -> float | None:
    """Returns the standard deviation of the units as a fraction of their mean; None for fewer than 2 or a mean of 0."""
    if side.n < 2 or side.mean <= 0:
        return None
    return float(side.units.std(ddof=1)) / side.mean


def pooled_spread(baseline: MetricSample, candidate: MetricSample, *, paired: bool = False) -> tuple[float, int] | None:
    """Returns (spread of a unit, degrees of freedom) from both sides together; None if each side has one unit."""
    if paired and (pairs := _pair_residuals(baseline, candidate)) is not None:
        return float(pairs.std(ddof=1)) / math.sqrt(2), len(pairs) - 1
    known = [(value, side.n - 1) for side in (baseline, candidate) if (value := spread(side)) is not None]
    df = sum(weight for _, weight in known)
    return (float(np.sqrt(sum(value**2 * weight for value, weight in known) / df)), df) if known else None


def noise_floor(unit_spread: float, df: float, baseline_units: int, candidate_units: int) -> float:
    """Returns the smallest difference that these numbers of units distinguish from noise, as a fraction.

    This is the half-width of Student's two-sample interval, for a spread with `df` degrees of freedom.
    """
    size = unit_spread * np.sqrt(1 / baseline_units + 1 / candidate_units)
    return float(np.expm1(Error(size, df).half_width()))


def combined(*errors: Error) -> Error:
    """Returns the error of a sum or difference of independent terms.

    The degrees of freedom follow Satterthwaite (1946, Biometrics 2, 110).
    """
    variance = sum(error.size**2 for error in errors)
    if variance == 0:
        return Error(0.0, min(error.df for error in errors))
    weights = sum(error.size**4 / error.df for error in errors)
    return Error(float(np.sqrt(variance)), float(variance**2 / weights))


def two_sided(p_value: float | None) -> float | None:
    """Returns the p-value of a two-sided test, as every report gives it; below 1 - CONFIDENCE it is significant."""
    return None if p_value is None else min(1.0, 2 * p_value)


def holm(p_values: Sequence[float], weights: Sequence[float] = ()) -> list[float]:
    """Returns the p-values adjusted after Holm (1979, Scandinavian Journal of Statistics 6, 65), in the given order.

    If those below a level are rejected, the probability of any false rejection is at most that level. `weights`, equal
    by default, select Holm's weighted procedure: a hypothesis with twice the weight is tested at twice the level.
    """
    shares = list(weights) or [1.0] * len(p_values)
    order = sorted(range(len(p_values)), key=lambda index: p_values[index] / shares[index])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for place, index in enumerate(order):
        left = math.fsum(shares[other] for other in order[place:])
        largest = max(largest, min(1.0, p_values[index] * left / shares[index]))
        adjusted[index] = largest
    return adjusted


def _exact(value: float, scale: float) -> float:
    """Returns the value, or 0 if it is only the rounding error of numbers as large as `scale`."""
    return value if abs(value) > ROUNDING * scale else 0.0


def _pair_residuals(baseline: MetricSample, candidate: MetricSample) -> Series | None:
    """Returns the deviation of each pair from the ratio of the means, as a logarithm to first order.

    Returns None for unequal numbers, fewer than FEWEST_PAIRS, or a mean of 0.
    """
    if baseline.n != candidate.n or baseline.n < FEWEST_PAIRS or min(baseline.mean, candidate.mean) <= 0:
        return None
    return candidate.units / candidate.mean - baseline.units / baseline.mean


def _within(baseline: MetricSample, candidate: MetricSample) -> Error | None:
    """Returns the error from both sides' steps; None if it is unknown on a side."""
    errors = [_steps_error(side) for side in (baseline, candidate)]
    known = [error for error in errors if error]
    return combined(*known) if len(known) == 2 else None


def _steps_error(side: MetricSample) -> Error | None:
    if not side.steps or side.mean <= 0:
        return None
    errors = []
    for unit, repeats in zip(side.units, side.steps, strict=True):
        weight = float(unit) / side.mean / side.n / len(repeats)  # its weight in the side's mean
        for repeat in repeats:
            if repeat.error is None:
                return None
            errors.append(Error(repeat.error.size * weight, repeat.error.df))
    return combined(*errors)
