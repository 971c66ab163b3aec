"""The ratios of a few combinations that were run in interleaved rounds, from the rounds' own runs alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpubench.compare.intervals import Error
from gpubench.tuning.combination import Combination

Arm = tuple[Combination, bool]
"""A combination, and whether its runs are those that prove the gain, which are compared with each other alone."""


@dataclass(frozen=True)
class ConfirmingRun:
    """A run of the confirmation that gave a rate."""

    round: int
    combination: Combination
    rate: float
    noise: float = 1.0
    """The noise of its combination, in units of the baseline's."""
    proves: bool = False
    """Whether it was made to prove the gain, after everything had been chosen."""

    @property
    def arm(self) -> Arm:
        return self.combination, self.proves


class Confirmation:
    """Least squares with an effect of each arm and of each round, so that a drift between rounds plays no part.

    Runs of noisier combinations weigh less.

    `spread` are sums of squares with their degrees of freedom, of equal runs of the same machine before the
    confirmation. They make the estimate of the noise better where rounds are few, but a machine can become noisier.
    Intervals therefore rest on the estimate with or without them, whichever is wider. An interval from the first one
    alone would be far too narrow if the rounds agree by chance; one from the second alone is very wide for few rounds.
    """

    def __init__(self, runs: Sequence[ConfirmingRun], spread: tuple[float, int]) -> None:
        self._arms = list(dict.fromkeys(run.arm for run in runs))
        rounds = sorted({run.round for run in runs})
        matrix = np.zeros((len(runs), len(self._arms) + len(rounds)))
        for row, run in enumerate(runs):
            matrix[row, self._arms.index(run.arm)] = 1
            matrix[row, len(self._arms) + rounds.index(run.round)] = 1
        units = np.array([run.noise for run in runs])
        matrix /= units[:, None]
        rates = np.array([run.rate for run in runs]) / units
        self._inverse = np.linalg.pinv(matrix.T @ matrix)
        self._effects = self._inverse @ matrix.T @ rates
        residuals = rates - matrix @ self._effects
        rank = int(np.linalg.matrix_rank(matrix))
        squares, self.own_df = float(residuals @ residuals), len(runs) - rank
        """Degrees of freedom of the rounds' own estimate of the noise."""
        self._noises = [(squares + spread[0], self.own_df + spread[1]), (squares, self.own_df)]
        self._counts = {arm: sum(run.arm == arm for run in runs) for arm in self._arms}

    def log_ratio(self, one: Arm, other: Arm) -> tuple[float, Error] | None:
        """Returns the logarithm of the ratio of two arms, with its error; None without two runs of each."""
        if one == other or min(self._counts.get(arm, 0) for arm in (one, other)) < 2 or self.own_df <= 0:
            return None
        contrast = self._contrast(one, other)
        scale = self._scale(contrast)
        errors = [Error(scale * math.sqrt(squares / df), df) for squares, df in self._noises]
        return float(contrast @ self._effects), max(errors, key=Error.half_width)

    @property
    def combinations(self) -> list[Combination]:
        """The combinations that were run for the choice, in their order."""
        return [combination for combination, proves in self._arms if not proves]

    def half_width(self, one: Arm, other: Arm, sigma: float) -> float:
        """Returns the half-width of the 95 % interval of the logarithm of their ratio if the noise is `sigma`.

        The noise is given, and not estimated from the rounds: rounds that end as soon as they agree by chance would
        give intervals that are too narrow. Infinity for an arm without runs.
        """
        if one not in self._counts or other not in self._counts:
            return math.inf
        _, df = self._noises[0]
        return Error(sigma * self._scale(self._contrast(one, other)), df).half_width() if df > 0 else math.inf

    def _contrast(self, one: Arm, other: Arm) -> NDArray[np.float64]:
        contrast = np.zeros(len(self._effects))
        contrast[self._arms.index(one)], contrast[self._arms.index(other)] = 1, -1
        return contrast

    def _scale(self, contrast: NDArray[np.float64]) -> float:
        """Returns the standard error of a contrast in units of the noise."""
        return math.sqrt(float(contrast @ self._inverse @ contrast))
