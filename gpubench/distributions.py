"""Student's t and the binomial distribution, computed from the regularised incomplete beta function.

scipy has these functions, but importing it takes longer than most commands that need a few of their values.
"""

import math
from functools import lru_cache

_TINY = 1e-300  # in place of a zero denominator (Lentz's method)
_PRECISION = 1e-15
_MOST_TERMS = 100_000


def student_t_cdf(df: float, t: float) -> float:
    """The probability that Student's t with `df` degrees of freedom (not necessarily whole) is at most `t`."""
    square = t * t
    tail = _regularised_beta(df / 2, 0.5, df / (df + square), square / (df + square)) / 2
    return tail if t < 0 else 1 - tail


@lru_cache(maxsize=4096)
def student_t_quantile(df: float, probability: float) -> float:
    """The quantile of Student's t, by Newton's method.

    Left of the median the distribution function is convex. So each step from the median towards a quantile there ends
    between the two, and the first one that would turn back is due to rounding.
    """
    if not df > 0 or not 0 < probability < 1:
        raise ValueError(f"Student's t has no quantile at {probability} with {df} degrees of freedom")
    if probability > 0.5:
        return -student_t_quantile(df, 1 - probability)
    peak = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
    found, t = math.inf, 0.0
    while t < found:
        found = t
        density = peak * (1 + t * t / df) ** (-(df + 1) / 2)
        t -= (student_t_cdf(df, t) - probability) / density
    return found


def binomial_tail(least: int, trials: int, probability: float) -> float:
    """The probability of at least `least` successes in `trials` trials, each with `probability`."""
    return 1.0 if least <= 0 else _regularised_beta(least, trials - least + 1, probability, 1 - probability)


def _regularised_beta(a: float, b: float, x: float, rest: float) -> float:
    """I_x(a, b) by the continued fraction 8.17.22 of the NIST Digital Library of Mathematical Functions.

    `rest` is 1 - x, which the caller may know more precisely.
    """
    if x <= 0 or rest <= 0:
        return float(rest <= 0)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly
        return 1 - _regularised_beta(b, a, rest, x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(rest)) / a
    upper, lower = 1.0, 1 / _nonzero(1 - (a + b) * x / (a + 1))
    value = lower
    for m in range(1, _MOST_TERMS):
        for coefficient in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            lower = 1 / _nonzero(1 + coefficient * lower)
            upper = _nonzero(1 + coefficient / upper)
            value *= lower * upper
        if abs(lower * upper - 1) < _PRECISION:
            break
    return front * value


def _nonzero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
