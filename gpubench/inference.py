"""How sure a ratio is: intervals and p-values that rest on whatever varies most, repeats or the steps inside them.

Every interval and every p-value is Student's, made from one `Error`: an interval excludes a value where the test
rejects it. Errors are of the natural logarithm of a mean, that is relative ones, so that a ratio and its inverse get
the same verdict. Methods and their measured coverage are in docs/statistics.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
from scipy.special import stdtr, stdtrit

from gpubench import stats
from gpubench.stats import Series

CONFIDENCE = 0.95
SIGNIFICANT = (1 - CONFIDENCE) / 2  # of a one-sided test, which then says what the two-sided interval says
POWER = 0.8
MOST_REPEATS = 1000  # beyond this a question is as good as open
ROUNDING = 1e-12  # of a mean: what is less comes from the arithmetic
LARGEST = 700.0  # logarithm that still has an exponential

Basis = Literal["runs", "units", "steps"]
"""Whose variation an error rests on: that of equal runs on record, of the sides' units, or of the steps inside them."""


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

    def half_width(self, level: float = SIGNIFICANT) -> float:
        """Of Student's interval, in the logarithm, with a chance of `level` on either side: 95 % by default."""
        return -float(stdtrit(self.df, level)) * self.size

    def above(self, distance: float) -> float:
        """One-sided p-value of "it is larger than the bound", for an estimate that lies `distance` above the bound."""
        if self.size == 0:
            return 0.0 if distance > 0 else 1.0
        return float(stdtr(self.df, -distance / self.size))


@dataclass(frozen=True)
class Known:
    """What is known from elsewhere of how equal units vary: relative standard deviation and degrees of freedom."""

    spread: float
    df: float
    of_runs: bool = False
    """It is that of whole runs, and each side is a single one: however well its repeats agree, it varies that much."""


@dataclass(frozen=True)
class Ratio:
    """candidate / baseline, of the means of their units."""

    estimate: float
    error: Error
    rests_on: Basis = "units"

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval."""
        factor = math.exp(min(self.error.half_width(), LARGEST))
        return self.estimate / factor, self.estimate * factor

    def beyond(self, limit: float) -> float:
        """One-sided p-value of "it changed by more than the fraction `limit`", in the direction of the estimate."""
        return self.error.above(abs(math.log(self.estimate)) - math.log1p(limit))

    def within(self, limit: float) -> float:
        """p-value of "it changed by less than `limit`, up or down": of the nearer edge, which is the larger one."""
        room = math.log1p(limit) - abs(math.log(self.estimate))
        return self.error.above(room) if self.error.size else float(room < 0)


@dataclass(frozen=True)
class Change:
    """candidate - baseline in their unit, with its error in that unit, None where nothing tells it."""

    estimate: float
    error: Error | None

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval."""
        if self.error is None:
            return None
        half = self.error.half_width()
        return self.estimate - half, self.estimate + half

    @property
    def p_value(self) -> float | None:
        """One-sided, of "it is not 0", in the direction of the estimate."""
        return self.error.above(abs(self.estimate)) if self.error else None


def ratio(baseline: Sample, candidate: Sample, *, paired: bool = False, known: Known | None = None) -> Ratio | None:
    """The ratio of two means with its error; None where nothing tells how far to trust it, or a mean is 0.

    Two units or more on each side: Welch's error (1947, Biometrika 34, 28) with the spread between units, or that of
    the steps inside them, whichever has the wider interval. The spread between units contains the steps' noise already;
    the second is there for the few units that agree by chance. The larger error alone would not do: where a spread with
    one degree of freedom happens to be small, the steps' error with its many would make the interval narrower. Where
    the sides have unequal numbers Welch's is too narrow if the smaller side's few units happen to agree, so that the
    error with the pooled spread is taken if its interval is wider. `paired` units were measured in turn, the i-th of
    one side beside the i-th of the other, and are taken by pairs.

    One unit on a side: it is taken to vary as the other side's units do, or as `known`. Where no spread is known at
    all, the error is that of the steps alone, which knows nothing of how processes differ.
    """
    if baseline.mean <= 0 or candidate.mean <= 0:
        return None
    estimate = candidate.mean / baseline.mean
    between, within = _between(baseline, candidate, paired, known), _within(baseline, candidate)
    found = max(between, within, key=Error.half_width) if between and within else between or within
    if known and known.of_runs:
        runs = Error(known.spread * math.sqrt(2), known.df)
        if found is None or found.half_width() < runs.half_width():
            return Ratio(estimate, runs, "runs")
    return Ratio(estimate, found, "units" if between else "steps") if found else None


def inverse(ratio: Ratio) -> Ratio:
    """Of the rates, given that of the times."""
    return replace(ratio, estimate=1 / ratio.estimate)


def difference(baseline: Sample, candidate: Sample, *, paired: bool = False, known: Known | None = None) -> Change:
    """candidate - baseline in their unit, with an error made of the same parts as that of `ratio`.

    Errors of both means are absolute here, so that a mean of 0, a phase that one side lacks, is as good as any.
    """
    scale = max(abs(baseline.mean), abs(candidate.mean))
    error = _difference_error(baseline, candidate, paired, known)
    if error and known and known.of_runs:
        runs = Error(known.spread * math.hypot(baseline.mean, candidate.mean), known.df)
        error = max(error, runs, key=Error.half_width)
    exact = error and Error(_exact(error.size, scale), error.df)
    return Change(_exact(candidate.mean - baseline.mean, scale), exact)


def _difference_error(baseline: Sample, candidate: Sample, paired: bool, known: Known | None) -> Error | None:
    if paired and baseline.n == candidate.n > 1:
        pairs = candidate.units - baseline.units
        return Error(float(pairs.std(ddof=1)) / math.sqrt(len(pairs)), len(pairs) - 1)
    lone = _spread_of_the_lone(baseline, candidate, known) if min(baseline.n, candidate.n) == 1 else None
    sides = [(side.mean, side_error(side, lone)) for side in (baseline, candidate)]
    if any(error is None and mean for mean, error in sides):
        return None
    errors = [Error(error.size * mean, error.df) for mean, error in sides if error and mean]
    found = combined(*errors) if errors else Error(0.0, 1)
    return Error(found.size, min(found.df, lone.df)) if lone else found  # one spread speaks for both sides


def side_error(side: Sample, lone: Known | None = None) -> Error | None:
    """Of one side's mean: between its units or within them, whichever is larger; None where neither is known.

    `lone` is how a single unit varies, where that is known from elsewhere.
    """
    between = Error(lone.spread, lone.df) if lone and side.n == 1 else _spread_error(side)
    known = [error for error in (between, _steps_error(side)) if error]
    return max(known, key=lambda e: e.size) if known else None


def spread(side: Sample) -> float | None:
    """Standard deviation between the units as a fraction of their mean; None for fewer than two or a mean of 0."""
    if side.n < 2 or side.mean <= 0:
        return None
    return float(side.units.std(ddof=1)) / side.mean


def pooled_spread(baseline: Sample, candidate: Sample, *, paired: bool = False) -> tuple[float, int] | None:
    """Spread of a unit, from both sides together, and its degrees of freedom; None where each side has only one."""
    if paired and (pairs := _pair_residuals(baseline, candidate)) is not None:
        return float(pairs.std(ddof=1)) / math.sqrt(2), len(pairs) - 1
    known = [(value, side.n - 1) for side in (baseline, candidate) if (value := spread(side)) is not None]
    df = sum(weight for _, weight in known)
    return (float(np.sqrt(sum(value**2 * weight for value, weight in known) / df)), df) if known else None


def noise_floor(unit_spread: float, df: float, baseline_units: int, candidate_units: int) -> float:
    """Smallest relative difference that so many units a side tell from noise, as a fraction.

    The half-width of Student's two-sample interval, with a spread that was learned with `df` degrees of freedom.
    """
    size = unit_spread * np.sqrt(1 / baseline_units + 1 / candidate_units)
    return float(np.expm1(Error(size, df).half_width()))


def resolvable(error: Error, margin: float, level: float = SIGNIFICANT) -> float:
    """Smallest change that is found to be beyond the margin in POWER of all comparisons, tested at `level`."""
    return float(np.expm1(np.log1p(margin) + error.half_width(level) + float(stdtrit(error.df, POWER)) * error.size))


def repeats_for(
    change: float, unit_spread: float, margin: float, *, paired: bool = False, level: float = SIGNIFICANT
) -> int | None:
    """Units a side after which a change of this size has its verdict in POWER of all cases; None beyond MOST_REPEATS.

    `change` is |ratio - 1|. The interval at `level`, and the estimate's own scatter, have to fit between it and the
    margin's edge.
    """
    gap = abs(abs(np.log1p(change)) - np.log1p(margin))
    n = np.arange(2, MOST_REPEATS + 1)
    df = n - 1 if paired else 2 * n - 2
    enough = np.flatnonzero((stdtrit(df, POWER) - stdtrit(df, level)) * unit_spread * np.sqrt(2 / n) < gap)
    return int(n[enough[0]]) if len(enough) else None


def combined(*errors: Error) -> Error:
    """Of a sum or difference of independent terms; degrees of freedom after Satterthwaite (1946, Biometrics 2, 110)."""
    variance = sum(error.size**2 for error in errors)
    if variance == 0:
        return Error(0.0, min(error.df for error in errors))
    weights = sum(error.size**4 / error.df for error in errors)
    return Error(float(np.sqrt(variance)), float(variance**2 / weights))


def holm(p_values: Sequence[float], weights: Sequence[float] = ()) -> list[float]:
    """Adjusted p-values in the given order: rejecting those below a level errs at all with at most that chance.

    Holm (1979, Scandinavian Journal of Statistics 6, 65); with `weights`, which are equal by default, his weighted
    procedure: a hypothesis with twice the weight of another is tested at twice its level.
    """
    shares = list(weights) or [1.0] * len(p_values)
    order = sorted(range(len(p_values)), key=lambda index: p_values[index] / shares[index])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for place, index in enumerate(order):
        left = math.fsum(shares[other] for other in order[place:])
        largest = max(largest, min(1.0, p_values[index] * left / shares[index]))
        adjusted[index] = largest
    return adjusted


def _between(baseline: Sample, candidate: Sample, paired: bool, known: Known | None) -> Error | None:
    if paired and (pairs := _pair_residuals(baseline, candidate)) is not None:
        return Error(float(pairs.std(ddof=1) / np.sqrt(len(pairs))), len(pairs) - 1)
    scale = math.sqrt(1 / baseline.n + 1 / candidate.n)
    if min(baseline.n, candidate.n) == 1:
        lone = _spread_of_the_lone(baseline, candidate, known)
        return Error(lone.spread * scale, lone.df) if lone else None
    ours, theirs = _spread_error(baseline), _spread_error(candidate)
    pooled = pooled_spread(baseline, candidate)
    if ours is None or theirs is None or pooled is None:
        return None
    return max(combined(ours, theirs), Error(pooled[0] * scale, pooled[1]), key=Error.half_width)


def _spread_of_the_lone(baseline: Sample, candidate: Sample, known: Known | None) -> Known | None:
    """How a single unit varies: as the other side's do, or as is known, whichever was learned from more units."""
    others = pooled_spread(baseline, candidate)
    sources = [Known(*others)] if others else []
    return max([*sources, *([known] if known else [])], key=lambda source: source.df, default=None)


def _exact(value: float, scale: float) -> float:
    """The value, or 0 where it is nothing but the rounding of numbers as large as `scale`."""
    return value if abs(value) > ROUNDING * scale else 0.0


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
