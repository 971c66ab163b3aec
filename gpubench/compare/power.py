"""The change that a number of repeats finds, and the repeats that a change needs.

The noise is known only from earlier repeats, often few, and those to come have a spread of their own. Both are random
here: the promised POWER is the share of new measurements that keep the promise, on average over what the noise may be.
Earlier repeats that agree by chance therefore do not promise too much.
"""

import math
import sys
from bisect import bisect_left
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gpubench.compare.intervals import FEWEST_PAIRS, MOST_REPEATS, POWER, SIGNIFICANT, Error
from gpubench.distributions import student_t_quantile
from gpubench.metrics import TOO_WIDE

Draws = NDArray[np.float64]

DRAWS = 4000
SEED = 20_180_401  # seed of the draws, so that results are reproducible
LARGEST = TOO_WIDE - 1
"""The largest change that is named, as a fraction. Noise that hides more than a factor of two says nothing."""


def telling(change: float) -> float | None:
    """Returns a change that noise can make or hide; None if it is above LARGEST, which tells nothing."""
    return change if change <= LARGEST else None


def resolvable(error: Error, margin: float, level: float = SIGNIFICANT) -> float | None:
    """Returns the smallest change beyond the margin that another such test finds, at `level`, with probability POWER.

    `error` is that of the first test. Returns None for a change above LARGEST.
    """
    half_width = error.half_width(level) / error.size * _spread(error.df, 1) if error.size else np.zeros(DRAWS)
    distance = float(np.quantile((half_width + _estimate()) / _spread(error.df, 0), POWER)) * error.size
    return _beyond(margin, distance)


def resolvable_by(
    unit_spread: float, df: float, per_side: int, margin: float
) -> tuple[float, tuple[float, float]] | None:
    """Returns the smallest change beyond the margin that this many units a side find with probability POWER.

    The spread of a unit is known with `df` degrees of freedom. The second value is the 95 % range of that change: what
    would be found if the spread were known to be at either end of its own range, at most LARGEST. Returns None if the
    change is larger than that.
    """
    needed = _half_width(per_side, False, SIGNIFICANT) + _estimate()
    scale = unit_spread * math.sqrt(2 / per_side)
    expected = float(np.quantile(needed / _spread(df, 0), POWER))
    known = float(np.quantile(needed, POWER))
    low, high = (known / end for end in reversed(_range(df)))
    change, least, most = (_beyond(margin, distance * scale) for distance in (expected, low, high))
    if change is None or least is None:
        return None
    return change, (least, LARGEST if most is None else most)


def repeats_for(
    change: float, unit_spread: float, df: float, margin: float, *, paired: bool = False, level: float = SIGNIFICANT
) -> int | None:
    """Returns the units per side with which a change gets its verdict with probability POWER.

    Returns None for more than MOST_REPEATS. `change` is |ratio - 1|. The spread of a unit is known with `df` degrees
    of freedom, infinitely many if it is certain.
    """
    size, band = abs(math.log1p(change)), math.log1p(margin)

    def suffice(n: int) -> bool:
        scale = unit_spread * math.sqrt(2 / n) / _spread(df, 0)
        half_width, off = _half_width(n, paired, level), _estimate()
        settled = (half_width + off) * scale < abs(size - band)
        if size < band:  # equivalent only if the interval stays within the other edge too
            settled &= (half_width - off) * scale < size + band
        return bool(np.mean(settled) >= POWER)

    n = bisect_left(range(MOST_REPEATS + 1), True, lo=2, key=suffice)
    return n if n <= MOST_REPEATS else None


def repeats_range(change: float, unit_spread: float, df: float, margin: float) -> tuple[int | None, int | None]:
    """Returns the repeats that `repeats_for` would name if the spread were known to be at an end of its 95 % range."""
    ends = [unit_spread / end for end in reversed(_range(df))]
    return repeats_for(change, ends[0], math.inf, margin), repeats_for(change, ends[1], math.inf, margin)


def _beyond(margin: float, distance: float) -> float | None:
    """Returns the change at this distance beyond the margin, on the logarithmic scale; None if it is not telling."""
    size = math.log1p(margin) + distance
    return telling(math.expm1(size)) if size < math.log(sys.float_info.max) else None


def _range(df: float) -> tuple[float, float]:
    """Returns the 95 % range of an estimated spread, relative to the true one."""
    low, high = np.quantile(_spread(df, 0), [SIGNIFICANT, 1 - SIGNIFICANT])
    return float(low), float(high)


@lru_cache(maxsize=1)
def _estimate() -> Draws:
    """Returns draws of how far an estimate is off, in standard errors."""
    return np.random.default_rng([SEED, 0]).standard_normal(DRAWS)


@lru_cache(maxsize=256)
def _spread(df: float, which: int) -> Draws:
    """Returns draws of a spread that is estimated with `df` degrees of freedom, relative to the true one.

    Draws of different `which` are independent.
    """
    if math.isinf(df):
        return np.ones(DRAWS)
    drawn = np.random.default_rng([SEED, 1 + which]).gamma(df / 2, size=DRAWS)
    return np.sqrt(np.maximum(drawn, np.finfo(float).tiny) / (df / 2))


@lru_cache(maxsize=64)
def _half_width(n: int, paired: bool, level: float) -> Draws:
    """Returns draws of the half-width of the interval of `n` units a side, in standard errors of the estimate."""
    df = n - 1 if paired and n >= FEWEST_PAIRS else 2 * (n - 1)
    return -student_t_quantile(df, level) * _spread(df, 1)
