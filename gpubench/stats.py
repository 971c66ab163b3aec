"""Statistics of step times: what autocorrelated steps are worth, when they are steady, and intervals over repeats.

Every function takes seconds or any other unit and gives the same back; none of them changes its input. Values that
are not finite raise ValueError: a NaN in a step time is a bug upstream, not something to average over.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

from gpubench.metrics import Distribution

Series = NDArray[np.float64]

MOST_VALUES = 1 << 16  # what a series of any length is reduced to before its autocorrelation is taken
MOST_BLOCKS = 500  # more would make nothing better
OUTSIDE = 3  # ranges of the settled half; a steady drift through the whole series reaches half of that
A_RANGE = 10  # values whose range tells how far such values go
FALSE_ALARM = 0.01  # chance that a steady run of uncorrelated steps is said to have a warm-up


def effective_size(x: ArrayLike) -> float:
    """How many independent values would fix the mean as well as these n do: n / (1 + 2 sum of autocorrelations).

    The sum runs over pairs of neighbouring lags while a pair is positive: Geyer's initial positive sequence (Geyer
    1992, Practical Markov Chain Monte Carlo, section 3.3). The result is held within [1, n]; a constant series gives n.
    """
    values = _series(x)
    n = len(values)
    if n < 3 or np.ptp(values) == 0:
        return float(n)
    padded = 1 << (2 * n - 1).bit_length()  # long enough that the circular correlation does not wrap round
    spectrum = np.fft.rfft(values - values.mean(), padded)
    covariance = np.fft.irfft(np.abs(spectrum) ** 2, padded)[: n - n % 2]
    pairs = (covariance / covariance[0]).reshape(-1, 2).sum(axis=1)
    ends = np.flatnonzero(pairs <= 0)
    kept = pairs[: ends[0]] if len(ends) else pairs
    return float(n / np.clip(2 * kept.sum() - 1, 1, n))


def block_length(x: ArrayLike) -> int:
    """Length of the blocks that carry the autocorrelation of a series, in steps, within [1, max(1, n // 5)].

    Four times the integrated autocorrelation time n / effective_size. The rule of Carlstein (1986, Annals of Statistics
    14, 1171), optimal for the variance alone, gives shorter blocks and intervals that are too narrow. A fifth of the
    series is the most, because fewer than five blocks say too little of how blocks vary; docs/statistics.md has what
    either choice costs. A long series is cut into MOST_BLOCKS at the most.
    """
    values = _series(x)
    n = len(values)
    wanted = max(4 * n / effective_size(values), n / MOST_BLOCKS) if n else 1
    return max(1, min(n // 5, round(wanted)))


def mean_error(x: ArrayLike) -> tuple[float, float] | None:
    """Relative standard error of the mean of autocorrelated values, and its degrees of freedom.

    From overlapping batch means (Meketon and Schmeiser 1984, Winter Simulation Conference, 227): the spread of the
    means of all blocks of `block_length` consecutive values. The series is closed to a circle, as in the circular
    bootstrap (Politis and Romano 1992, in Exploring the Limits of Bootstrap, 263), so that every value is in equally
    many blocks: without that the first and the last value are in one block each, and a slow last step would move the
    mean but not the error. The degrees of freedom are those of blocks that do not overlap, n / block - 1: overlapping
    ones have up to 1.5 times as many, but few blocks also underestimate the spread, and this makes up for most of
    that. None for fewer than 4 values or a mean that is not positive.
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
    """A series of at most MOST_VALUES: means of neighbours, with the same mean and the same error of it.

    The last few values are left out where the length does not divide.
    """
    values = _series(x)
    group = -(-len(values) // MOST_VALUES)
    if group <= 1:
        return values
    return np.asarray(values[: len(values) // group * group].reshape(-1, group).mean(axis=1))


def describe(groups: Sequence[Sequence[float]]) -> Distribution:
    """The distribution of all values of all groups, one group per repeat.

    effective_n is the sum over the groups, because the steps of two processes are not neighbours. ValueError if there
    is no value at all.
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


def student_interval(values: ArrayLike) -> tuple[float, float] | None:
    """95 % interval of the mean of independent values by Student's t, n - 1 degrees of freedom; None for fewer than 2.

    Meant for one value per repeat. Steps are not independent, so an interval over steps is far too narrow.
    """
    sample = _series(values)
    if len(sample) < 2:
        return None
    half, mean = student_half_width(sample), float(sample.mean())
    return mean - half, mean + half


def student_half_width(values: ArrayLike) -> float:
    """Half the width of `student_interval`, of two values or more; 0 where all are the same."""
    sample = _series(values)
    n = len(sample)
    return float(stdtrit(n - 1, 0.975) * sample.std(ddof=1) / np.sqrt(n)) if np.ptp(sample) else 0.0


def warmup_length(x: ArrayLike) -> int:
    """How many leading steps are not steady, at most n // 2; n // 2 itself says that the series may never settle.

    Sequential change-point detection against the second half of the series, which is taken as settled: the leading
    run of steps whose mean stands out most is cut, and the search starts again behind it until no run stands out
    (binary segmentation of the CUSUM statistic, Vostrikova 1981, Soviet Mathematics Doklady 24, 55, looking only at
    the left end). A run stands out when its mean differs from the settled mean by more than Student's t allows at
    FALSE_ALARM, shared among the n // 2 possible ends (Bonferroni). Autocorrelation counts through the effective size
    of the settled half: d steps are worth d n_eff / n, and one at the least. Values are first drawn in to twice that
    limit around the settled median, in units of 1.4826 MAD, so that no outlier in mid-series decides alone.
    Leading steps that lie further from that median than OUTSIDE times the whole range of the settled half are cut
    first: a half that drifts is worth so few steps that the limit would not tell even a first step of nine times the
    others.

    A change in the second half is never warm-up, and neither is a drift through the whole series: both give 0. Of 300
    simulated runs of 200 steps with noise of 1 % and autocorrelation 0.8, 1 % were cut without cause, and 30 slower
    steps of 10 % were found to the step in 98 %. An exponential warm-up is cut where it sinks into the noise, which is
    sooner the more the noise is correlated.
    """
    values = _series(x)
    half = len(values) // 2
    if half < 2:
        return 0
    values = values - np.median(values[half:])
    settled = values[half:]
    outside = (np.abs(values[:half]) > OUTSIDE * np.ptp(settled)) & (len(settled) >= A_RANGE)
    start = half if outside.all() else int(np.argmin(outside))
    effective = effective_size(settled)
    limit = float(-stdtrit(max(1.0, effective - 1), FALSE_ALARM / 2 / half))
    deviation = 1.4826 * float(np.median(np.abs(settled)))
    reach = 2 * limit * deviation * (1 + 4 / len(settled))  # the MAD of a handful of values is often far too small
    if reach > 0:
        values = np.clip(values, -reach, reach)
        settled = values[half:]

    lengths = np.arange(1, half + 1)
    precision = 1 / np.sqrt(1 / np.maximum(1, lengths * effective / len(settled)) + 1 / effective)
    leading = values[:half] - settled.mean()
    threshold = limit * settled.std(ddof=1)
    while start < half:
        left = half - start
        departure = np.abs(np.cumsum(leading[start:])) / lengths[:left] * precision[:left]
        most = int(np.argmax(departure))
        if departure[most] <= threshold:
            break
        start += most + 1
    return start


def _series(x: ArrayLike) -> Series:
    values = np.asarray(x, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"expected a flat series of numbers, got shape {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError("the series holds a value that is not finite")
    return values
