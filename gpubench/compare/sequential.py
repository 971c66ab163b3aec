"""Tests after each round of repeats whether a change gains more than a margin, with one error rate for all looks.

A round is one repeat of each side, in fresh processes next to each other. Its gain is the logarithm of the factor by
which the candidate is better. Student's t over the rounds is computed after each of them from the third on, at a level
that is the same at every look (Pocock 1977, Biometrika 64, 191) and so small that all looks together have the level
SIGNIFICANT. The interval at that level holds the true gain at all looks at once with a probability of CONFIDENCE: it is
a repeated confidence interval (Jennison and Turnbull 1989, Journal of the Royal Statistical Society B 51, 305).

If no change is made, the path of t does not depend on the noise, which therefore need not be known. LEVEL is from a
simulation of such paths. docs/decisions.md has the error rates, also with other noise than normal one.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from gpubench.distributions import student_t_cdf, student_t_quantile

FEWEST = 3
"""The rounds before the first look. Two can agree by chance on a machine with two clocks too often."""
MOST = 30
"""The rounds after which a test ends. The error rates are those of all looks until then."""
LEVEL = 0.0031
"""The level of a one-sided test at one look. The looks from FEWEST to MOST have 2.45 % together."""
POWERED = 0.84
"""The quantile of the normal distribution that belongs to a power of 80 %."""
HOPELESS, UNLIKELY = 0.03, 0.1
"""A test ends early if, by the rounds so far, the last one that may be made is less likely than this to prove a gain
above the margin, and one below it. It ends undecided, so that it makes no false verdict more frequent."""
MOST_FORESEEN = 1000
"""The largest number of rounds that is foreseen; a larger one is unknown."""
LARGEST = 1e100
"""The largest factor, and the inverse of the smallest, to which wider intervals are cut."""


@dataclass(frozen=True)
class Look:
    """What some rounds show. Gains are factors: 1.03 is better by 3 %."""

    rounds: int
    gain: float | None
    """The geometric mean over the rounds; None without rounds."""
    interval: tuple[float, float] | None
    """The repeated 95 % confidence interval; None before FEWEST rounds."""
    spread: float | None
    """The standard deviation of the logarithm of a round's gain; None with fewer than two rounds."""

    def exceeds(self, margin: float) -> bool | None:
        """Returns whether the gain is larger than 1 + margin; None if that is not established yet."""
        if self.interval is None:
            return None
        low, high = self.interval
        return True if low > 1 + margin else False if high < 1 + margin else None

    @property
    def is_noise(self) -> bool:
        """Whether the rounds differ by more than their gain, and are too few for an interval that shows it."""
        if self.gain is None or self.spread is None or self.interval is not None:
            return False
        return self.spread > abs(math.log(self.gain))

    def is_hopeless(self, margin: float, most: int = MOST) -> bool:
        """Returns whether `most` rounds will hardly prove that the gain exceeds the margin, nor that it does not."""
        if most < FEWEST or self.rounds >= most:
            return True
        if self.gain is None or not self.spread or self.rounds < FEWEST:
            return False
        ahead = math.log(self.gain) - math.log1p(margin)
        return self._chance(ahead, most) < HOPELESS and self._chance(-ahead, most) < UNLIKELY

    def _chance(self, ahead: float, most: int) -> float:
        """Returns the predictive probability that a mean gain of `ahead` is significant after `most` rounds.

        The rounds to come are taken to be like those so far, whose mean is known with its error only.
        """
        assert self.spread
        to_come = self.spread * math.sqrt((most - self.rounds) / (most * self.rounds))
        distance = ahead - _critical(most) * self.spread / math.sqrt(most)
        return student_t_cdf(self.rounds - 1, distance / to_come)

    def needed(self, margin: float) -> int | None:
        """Returns the rounds in all after which a gain of the estimated size is told from the margin.

        It is told with a probability of about 80 %. Before FEWEST rounds these are foreseen, as fewer tell nothing.
        Returns None for more than MOST_FORESEEN, or without rounds.
        """
        if self.gain is None or self.spread is None or self.rounds < FEWEST:
            return FEWEST if self.rounds else None
        distance, spread = abs(math.log(self.gain) - math.log1p(margin)), self.spread

        def suffice(rounds: int) -> bool:
            return (_critical(rounds) + POWERED) * spread / math.sqrt(rounds) < distance

        found = bisect_left(range(MOST_FORESEEN + 1), True, lo=max(FEWEST, self.rounds), key=suffice)
        return found if found <= MOST_FORESEEN else None


def look(gains: Sequence[float]) -> Look:
    """Returns what the gains of rounds show, each the logarithm of a factor."""
    rounds = len(gains)
    if not rounds:
        return Look(0, None, None, None)
    mean = fmean(gains)
    if rounds < 2:
        return Look(rounds, factor(mean), None, None)
    spread = math.sqrt(math.fsum((gain - mean) ** 2 for gain in gains) / (rounds - 1))
    if rounds < FEWEST:
        return Look(rounds, factor(mean), None, spread)
    half = _critical(rounds) * spread / math.sqrt(rounds)
    return Look(rounds, factor(mean), (factor(mean - half), factor(mean + half)), spread)


def factor(logarithm: float) -> float:
    """Returns the factor with this natural logarithm, or the nearest one up to `LARGEST`."""
    return min(max(math.exp(min(logarithm, math.log(LARGEST))), 1 / LARGEST), LARGEST)


def _critical(rounds: int) -> float:
    return -student_t_quantile(rounds - 1, LEVEL)
