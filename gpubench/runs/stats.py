"""Statistics of the steps and repeats of one run: effective sample size, steady state, quantiles, interval of a mean.

Every function takes values in seconds or any other unit, returns the same unit, and leaves its input unchanged. Values
that are not finite raise ValueError: a NaN in a step time is a bug in the caller. `compare.intervals` has the
statistics of two sides. docs/statistics.md describes the methods.
"""

import math
import sys
from collections.abc import Sequence
from statistics import fmean

import numpy as np
from numpy.typing import ArrayLike, NDArray

from gpubench.distributions import student_t_quantile
from gpubench.metrics import RATES, Distribution, definition_of

Series = NDArray[np.float64]

MOST_VALUES = 1 << 16  # a longer series is reduced to this before its autocorrelation is computed
MOST_BLOCKS = 500  # more blocks do not improve the error
OUTSIDE = 3  # ranges of the settled half; a steady drift through the whole series reaches half of that
A_RANGE = 10  # number of values from which a range is estimated
LARGEST_LOGARITHM = 700.0  # of an interval's bound: a float can represent its exponential
FALSE_ALARM = 0.01  # probability that a warm-up, or a change of the level, is found in steady, uncorrelated steps
USUAL = 0.75  # share of settled steps that a step of the warm-up is slower than, and of such steps in the warm-up
LEVEL = 1.05  # smallest factor between two levels of a series
FEWEST_OF_A_LEVEL = 5  # steps
MOST_NEAR = 50  # steps on each side of a change of the level that show it
AT_ONCE = 1 / 3  # share of a change of the level that the steps around it have to show; of a drift it is a tenth


def effective_size(x: ArrayLike) -> float:
    """Returns how many independent values give the mean the same error: n / (1 + 2 sum of autocorrelations).

    The sum runs over pairs of neighbouring lags while a pair is positive: Geyer's initial positive sequence (Geyer
    1992, Practical Markov Chain Monte Carlo, section 3.3). The result is held within [1, n]; a constant series gives n.
    """
    values = _series(x)
    n = len(values)
    if n < 3 or np.ptp(values) == 0:
        return float(n)
    padded = 1 << (2 * n - 1).bit_length()  # long enough to avoid wrap-around in the circular correlation
    spectrum = np.fft.rfft(values - values.mean(), padded)
    covariance = np.fft.irfft(np.abs(spectrum) ** 2, padded)[: n - n % 2]
    pairs = (covariance / covariance[0]).reshape(-1, 2).sum(axis=1)
    ends = np.flatnonzero(pairs <= 0)
    kept = pairs[: ends[0]] if len(ends) else pairs
    return float(n / np.clip(2 * kept.sum() - 1, 1, n))


def block_length(x: ArrayLike) -> int:
    """Returns the length of the blocks for `mean_error`, in steps, within [1, max(1, n // 5)].

    The length is four times the integrated autocorrelation time n / effective_size. The rule of Carlstein (1986, Annals
    of Statistics 14, 1171) is optimal for the variance alone; its blocks are shorter and its intervals too narrow. A
    block has at most a fifth of the series, because fewer than five blocks do not determine how blocks vary. A long
    series has at most MOST_BLOCKS blocks. docs/statistics.md gives the cost of these choices.
    """
    values = _series(x)
    n = len(values)
    wanted = max(4 * n / effective_size(values), n / MOST_BLOCKS) if n else 1
    return max(1, min(n // 5, round(wanted)))


def mean_error(x: ArrayLike) -> tuple[float, float] | None:
    """Returns the relative standard error of the mean of autocorrelated values, and its degrees of freedom.

    The method is overlapping batch means (Meketon and Schmeiser 1984, Winter Simulation Conference, 227): the spread of
    the means of all blocks of `block_length` consecutive values. The series is closed to a circle, as in the circular
    bootstrap (Politis and Romano 1992, in Exploring the Limits of Bootstrap, 263), so that every value is in equally
    many blocks. Otherwise the first and the last value would be in one block each, and a slow last step would move the
    mean but not the error. The degrees of freedom are those of blocks that do not overlap, n / block - 1. Overlapping
    blocks have up to 1.5 times as many, but few blocks underestimate the spread, and the smaller number compensates for
    most of that. Returns None for fewer than 4 values or a mean that is not positive.
    """
    values = coarsened(x)
    n, mean = len(values), float(values.mean()) if len(values) else 0.0
    if n < 4 or mean <= 0:
        return None
    length = block_length(values)
    around = np.concatenate([[0.0], np.cumsum(np.concatenate([values, values[: length - 1]]))])
    departures = (around[length:] - around[:-length]) / length - mean
    variance = float(departures @ departures) * length / (n * (n - length))
    return float(np.sqrt(variance)) / mean, max(1.0, n / length - 1)


def coarsened(x: ArrayLike) -> Series:
    """Reduces a series to at most MOST_VALUES means of neighbours, which have the same mean and the same error.

    If the length is not a multiple of the group size, the last few values are left out.
    """
    values, group = _series(x), coarseness(x)
    if group <= 1:
        return values
    return np.asarray(values[: len(values) // group * group].reshape(-1, group).mean(axis=1))


def coarseness(x: ArrayLike) -> int:
    """Returns how many neighbours of a series make one value of `coarsened`."""
    return max(1, -(-len(np.asarray(x)) // MOST_VALUES))


def describe(groups: Sequence[ArrayLike]) -> Distribution:
    """Returns the distribution of all values; each group holds the values of one repeat.

    effective_n is the sum over the groups, because the steps of two processes are not neighbours. Raises ValueError if
    there is no value.
    """
    series = [_series(group) for group in groups]
    pooled = np.concatenate(series) if series else np.empty(0)
    if not len(pooled):
        raise ValueError("no values to describe")
    median, p95, p99 = np.quantile(pooled, [0.5, 0.95, 0.99])
    return Distribution(
        mean=float(pooled.mean()),
        std=float(pooled.std(ddof=1)) if len(pooled) > 1 else None,
        median=float(median),
        p95=float(p95),
        p99=float(p99),
        min=float(pooled.min()),
        max=float(pooled.max()),
        n=len(pooled),
        effective_n=sum(effective_size(one) for one in series),
    )


def quantile(x: ArrayLike, share: float) -> float | None:
    """Returns the quantile of one repeat's values that `share` of them do not exceed.

    Returns None for fewer than `least_values(share)`, of which even the largest may well lie below the quantile.
    """
    values = _series(x)
    return float(np.quantile(values, share)) if len(values) >= least_values(share) else None


def least_values(share: float) -> int:
    """Returns how many independent values include, with a probability of 95 %, at least one beyond the quantile.

    That is the smallest n for which 1 - share^n >= 0.95: 5 for the median, 59 for 0.95 and 299 for 0.99.
    """
    return math.ceil(math.log(0.05) / math.log(share))


def student_interval(values: ArrayLike) -> tuple[float, float] | None:
    """Returns the 95 % interval of the mean of independent values (Student's t, n - 1 degrees of freedom).

    Returns None for fewer than 2 values. Use it for one value per repeat: steps are not independent, so an interval
    over steps would be far too narrow.
    """
    sample = _series(values)
    if len(sample) < 2:
        return None
    half, mean = student_half_width(sample), float(sample.mean())
    return mean - half, mean + half


def student_half_width(values: ArrayLike) -> float:
    """Returns half the width of `student_interval` for two or more values; 0 if they are all equal."""
    sample = _series(values)
    n = len(sample)
    return float(student_t_quantile(n - 1, 0.975) * sample.std(ddof=1) / np.sqrt(n)) if np.ptp(sample) else 0.0


def mean_and_interval(name: str, repeats: Sequence[float]) -> tuple[float, tuple[float, float] | None]:
    """Returns the mean of a metric over its repeats, and its 95 % interval; None for one repeat.

    The mean of a rate is harmonic (see `metrics.RATES`). The interval is Student's t on a scale without limits, around
    the mean: on the logarithm of positive values, so that a rate and its time get inverse intervals, and on the log
    odds of shares. So no time is below 0 and no share outside 0 to 1. Values without a logarithm, such as a count of 0,
    stay on their own scale, and the interval is clipped to the same limits.
    """
    rate, share = name in RATES and min(repeats) > 0, definition_of(name).unit == "fraction"
    mean = 1 / fmean([1 / value for value in repeats]) if rate else fmean(repeats)
    if len(repeats) < 2:
        return mean, None
    most = max(1.0, mean) if share else sys.float_info.max  # JSON has no infinity
    if min(repeats) <= 0:
        half = student_half_width(repeats)
        least = 0.0 if min(repeats) == 0 else -math.inf
        return mean, (max(least, mean - half), min(most, mean + half))
    if share and not rate and max(repeats) < 1:
        factor = _factor([value / (1 - value) for value in repeats])
        return mean, (mean / (mean + (1 - mean) * factor), mean * factor / (mean * factor + 1 - mean))
    factor = _factor(repeats)
    return mean, (max(sys.float_info.min, mean / factor), min(most, mean * factor))


def _factor(values: Sequence[float]) -> float:
    """Returns the factor by which the mean of positive values may be off in either direction, at 95 %."""
    return math.exp(min(student_half_width([math.log(value) for value in values]), LARGEST_LOGARITHM))


def warmup_length(x: ArrayLike) -> int:
    """Returns how many leading steps are warm-up, at most n // 2. n // 2 means that the series may never settle.

    Warm-up is slow: leading steps that are faster than the rest are not warm-up, and neither is a pause after steps at
    the usual speed. The second half of the series counts as settled. A leading run of steps is warm-up if more than
    three quarters of them are slower than three quarters of the settled steps, and if their mean exceeds the settled
    one by more than Student's t allows at FALSE_ALARM, divided by the n // 2 possible ends (Bonferroni). The run whose
    mean deviates most is cut, and the search is repeated on the rest (binary segmentation of the CUSUM statistic at the
    left end, Vostrikova 1981, Soviet Mathematics Doklady 24, 55). Autocorrelation enters through the effective size of
    the settled half: d steps count as d n_eff / n, and at least as one. Values are first clipped to twice that limit
    around the settled median, in units of 1.4826 MAD, so that a single outlier does not decide. Leading steps that are
    slower than that median by more than OUTSIDE times the whole range of the settled half are cut first: a half that
    drifts counts as so few steps that the limit would not detect a first step of nine times the others.

    Of 300 simulated runs of 200 steps with noise of 1 % and autocorrelation 0.8, fewer than 1 % were cut without cause,
    and 30 steps that were 10 % slower were found exactly in 98 %. An exponential warm-up is cut where it falls below
    the noise, which is earlier for more strongly correlated noise.
    """
    values = _series(x)
    half = len(values) // 2
    if half < 2:
        return 0
    values = values - np.median(values[half:])
    settled = values[half:]
    outside = (values[:half] > OUTSIDE * np.ptp(settled)) & (len(settled) >= A_RANGE)
    start = half if outside.all() else int(np.argmin(outside))
    slower = values[:half] > np.quantile(settled, USUAL)
    effective = effective_size(settled)
    limit = -student_t_quantile(max(1.0, effective - 1), FALSE_ALARM / half)
    deviation = 1.4826 * float(np.median(np.abs(settled)))
    reach = 2 * limit * deviation * (1 + 4 / len(settled))  # the MAD of a few values is often far too small
    if reach > 0:
        values = np.clip(values, -reach, reach)
        settled = values[half:]

    lengths = np.arange(1, half + 1)
    precision = 1 / np.sqrt(1 / np.maximum(1, lengths * effective / len(settled)) + 1 / effective)
    leading = values[:half] - settled.mean()
    threshold = limit * settled.std(ddof=1)
    while start < half:
        left = half - start
        departure = np.cumsum(leading[start:]) / lengths[:left] * precision[:left]
        departure[np.cumsum(slower[start:]) <= USUAL * lengths[:left]] = -np.inf
        most = int(np.argmax(departure))
        if departure[most] <= threshold:
            break
        start += most + 1
    return start


def is_settled(needed: int, first: int, steps: int) -> bool:
    """Tells whether a repeat of so many steps is past its warm-up at step `first`; see `warmup_length` for `needed`."""
    return needed <= first and needed < max(1, steps // 2)


def common_warmup(sides: Sequence[Sequence[int]]) -> int:
    """Returns the one warm-up of all repeats: the largest that more than half of the repeats of some side need.

    `sides` has for each side the number of steps that each of its repeats needs. A single disturbed repeat therefore
    cuts no other one, and a side that warms up for longer is not compared with its warm-up.
    """
    return max((sorted(needed, reverse=True)[len(needed) // 2] for needed in sides if needed), default=0)


def level_change(x: ArrayLike) -> tuple[int, float] | None:
    """Returns where the level of a series changes most, as (first value after it, factor); None if it does not.

    The place is where the means of the values just before and after differ most, near the largest CUSUM of ranks
    (Pettitt 1979, Applied Statistics 28, 126), with at least FEWEST_OF_A_LEVEL values on both sides. The factor is that
    of the medians of both sides, so that outliers and short pauses are no change, and at least LEVEL in either
    direction. A change is established if the values just before and after are further apart than OUTSIDE times their
    range, leaving a tenth out at each end; or by Student's t on the ranks, with as many independent values as the
    effective size of the ranks around both levels, so that what wanders does not change its level. In a steady drift
    the values just before and after differ by a small part of the factor, and it is no change.
    """
    values = _series(x)
    n = len(values)
    if n < 2 * FEWEST_OF_A_LEVEL or values.min() <= 0:
        return None
    ends = np.arange(FEWEST_OF_A_LEVEL, n - FEWEST_OF_A_LEVEL + 1)
    ranks, logs = _ranks(values), np.log(values)
    ranks -= ranks.mean()
    size = np.abs(np.cumsum(ranks)[ends - 1]) / np.sqrt(ends * (n - ends) / n)
    near = min(max(FEWEST_OF_A_LEVEL, n // 8), MOST_NEAR)
    sums = np.concatenate([[0.0], np.cumsum(logs)])
    close = ends[np.abs(ends - ends[np.argmax(size)]) <= near]
    low, high = np.maximum(0, close - near), np.minimum(n, close + near)
    jumps = (sums[high] - sums[close]) / (high - close) - (sums[close] - sums[low]) / (close - low)
    place = int(close[np.argmax(np.abs(jumps))])
    change = float(np.median(logs[place:]) - np.median(logs[:place]))
    before, after = logs[max(0, place - near) : place], logs[place : place + near]
    if abs(change) < math.log(LEVEL) or float(np.median(after) - np.median(before)) / change < AT_ONCE:
        return None
    lower, upper = (np.quantile(part, [0.1, 0.9]) for part in ((before, after) if change > 0 else (after, before)))
    apart = float(upper[0] - lower[1]) > OUTSIDE * max(float(np.ptp(lower)), float(np.ptp(upper)))
    rest = ranks - np.where(np.arange(n) < place, ranks[:place].mean(), ranks[place:].mean())
    effective = effective_size(rest)
    limit = -student_t_quantile(max(1.0, effective - 2), FALSE_ALARM / 2 / len(ends))
    established = float(size.max()) > limit * math.sqrt(float(rest @ rest) / effective)
    return (place, math.exp(change)) if established or apart else None


def _ranks(values: Series) -> Series:
    """Returns the ranks of the values, equal ones sharing the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[place], dtype=np.float64)


def _series(x: ArrayLike) -> Series:
    values = np.asarray(x, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"expected a flat series of numbers, got shape {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError("the series holds a value that is not finite")
    return values
