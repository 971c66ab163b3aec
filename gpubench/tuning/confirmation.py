"""The ratios of a few combinations that were run in interleaved rounds, from the rounds' own runs alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpubench.compare.intervals import Error
from gpubench.tuning.model import Combination


@dataclass(frozen=True)
class Measured:
    """A run of the confirmation that gave a rate."""

    round: int
    combination: Combination
    rate: float


class Confirmation:
    """Least squares with an effect of each combination and of each round, so that a drift between rounds plays no part.

    `spread` are sums of squares with their degrees of freedom, of equal runs of the same machine before the
    confirmation: they make the estimate of the noise better where rounds are few.
    """

    def __init__(self, runs: Sequence[Measured], spread: tuple[float, int]) -> None:
        self._arms = list(dict.fromkeys(run.combination for run in runs))
        rounds = sorted({run.round for run in runs})
        matrix = np.zeros((len(runs), len(self._arms) + len(rounds)))
        for row, run in enumerate(runs):
            matrix[row, self._arms.index(run.combination)] = 1
            matrix[row, len(self._arms) + rounds.index(run.round)] = 1
        rates = np.array([run.rate for run in runs])
        self._inverse = np.linalg.pinv(matrix.T @ matrix)
        self._effects = self._inverse @ matrix.T @ rates
        residuals = rates - matrix @ self._effects
        rank = len(self._arms) + len(rounds) - 1
        self.df = len(runs) - rank + spread[1]
        self.sigma = math.sqrt((float(residuals @ residuals) + spread[0]) / self.df) if self.df > 0 else math.nan

    def log_ratio(self, one: Combination, other: Combination) -> tuple[float, Error] | None:
        """Returns the logarithm of the ratio of two combinations with its error; None if it is unknown."""
        if one not in self._arms or other not in self._arms or self.df <= 0 or one == other:
            return None
        contrast = np.zeros(len(self._effects))
        contrast[self._arms.index(one)], contrast[self._arms.index(other)] = 1, -1
        size = self.sigma * math.sqrt(float(contrast @ self._inverse @ contrast))
        return float(contrast @ self._effects), Error(size, self.df)

    def half_width(self, one: Combination, other: Combination, sigma: float) -> float:
        """Returns the half-width that the 95 % interval of the logarithm of their ratio has with this noise.

        A confirmation that ended once its own estimate of the noise made the interval narrow would end with intervals
        that are too narrow. Returns infinity for a combination without runs.
        """
        found = self.log_ratio(one, other)
        return Error(found[1].size / self.sigma * sigma, found[1].df).half_width() if found and self.sigma else math.inf
