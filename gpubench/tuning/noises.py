"""Finds which settings make equal runs differ more, or less, than those of the baseline do.

A level multiplies the standard deviation of the noise by a factor, which is 1 unless the runs say otherwise: a few
factors are compared by the probability of the runs, with the effects and the drift averaged out (restricted maximum
likelihood), and levels whose noise differs are added one after the other, the clearest first.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gpubench.tuning.combination import Array, Combination, Level

FACTORS = (1 / 3, 1 / 2, 3 / 2, 2.0, 3.0, 5.0, 8.0)
OTHER_NOISE = 0.02  # chance that the noise of a level differs: with eight settings, one does in a seventh of searches
MOST_OTHERS = 4  # levels whose noise differs
LEAST_RUNS = 3  # runs with a level and without it that tell whether their noise differs


@dataclass(frozen=True)
class Noises:
    """The factors by which levels multiply the standard deviation of the noise; 1 for those that are not named."""

    factors: Mapping[Level, float] = field(default_factory=dict)

    def of(self, wanted: Sequence[Combination]) -> Array:
        """Returns the noise of each combination, in units of the baseline's."""
        return np.array([self.of_one(one) for one in wanted])

    def of_one(self, combination: Combination) -> float:
        return math.prod(self.factors.get(level, 1.0) for level in enumerate(combination))


def compared(runs: Sequence[Combination], rates: Array, smooth: Array, sigma: float) -> Noises:
    """Returns the noise of each level, from the logarithms of the rates of runs.

    `smooth` is the covariance of what is not noise, and `sigma` is a first estimate of the baseline's noise,
    which is the unit of `smooth`.
    """
    table = np.array(runs)
    levels = [
        (place, level) for place in range(table.shape[1]) for level in np.unique(table[:, place]).tolist() if level
    ]
    has = {(place, level): table[:, place] == level for place, level in levels}
    open_ = [one for one in levels if LEAST_RUNS <= has[one].sum() <= len(runs) - LEAST_RUNS]
    noises, found = np.ones(len(runs)), dict[Level, float]()
    choices = np.log([1.0, *FACTORS])
    prior = np.log([1 - OTHER_NOISE, *([OTHER_NOISE / len(FACTORS)] * len(FACTORS))])
    while open_ and len(found) < MOST_OTHERS:
        tried = [np.where(has[one], noises * math.exp(choice), noises) for one in open_ for choice in choices]
        fits = _log_likelihoods(np.array(tried), rates, smooth, sigma).reshape(len(open_), -1) + prior
        odds = np.logaddexp.reduce(fits[:, 1:], axis=1) - fits[:, 0]
        clearest = int(np.argmax(odds))
        if odds[clearest] <= 0:
            break
        chances = np.exp(fits[clearest] - np.logaddexp.reduce(fits[clearest]))
        level = open_.pop(clearest)
        found[level] = math.exp(float(chances @ choices))
        noises = np.where(has[level], noises * found[level], noises)
    return Noises(found)


def _log_likelihoods(noises: Array, rates: Array, smooth: Array, sigma: float) -> Array:
    """Returns the log-likelihood of the rates for each row of `noises`, with any mean and any sigma."""
    covariances = smooth + noises[:, :, None] ** 2 * np.eye(len(rates))
    roots = np.linalg.cholesky(covariances)
    whitened = np.linalg.solve(roots, np.column_stack([np.ones(len(rates)), rates]))
    ones, values = whitened[:, :, 0], whitened[:, :, 1]
    weights = (ones**2).sum(axis=1)
    squares = (values**2).sum(axis=1) - (ones * values).sum(axis=1) ** 2 / weights
    volumes = 2 * np.log(np.diagonal(roots, axis1=1, axis2=2)).sum(axis=1)
    df = len(rates) - 1 + 2  # the first estimate weighs as much as two runs
    return np.asarray(-0.5 * (volumes + np.log(weights) + df * np.log(squares + 2 * sigma**2)))
