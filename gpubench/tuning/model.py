"""What the runs so far say about every combination of levels: a regression averaged over its possible terms.

The logarithm of the throughput is a sum of effects of levels and of pairs of levels, of which few are not zero, and of
a slow drift of the machine. Which effects are zero is not known: the posterior is averaged over the sets of effects.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Combination = tuple[int, ...]

MAIN_SIZE, PAIR_SIZE = 0.08, 0.08  # standard deviation of an effect that is not zero, in log throughput
MAIN_CHANCE = 0.85  # of an effect not to be zero
PAIRS_EXPECTED = 3.0  # number of interactions that are not zero, in a search with eight settings
MOST_PAIR_CHANCE = 0.11
DRIFT = (2.0, 1.0, 0.7)  # standard deviations of a linear, quadratic and cubic drift, in those of the noise
SAMPLES = 128
JUMPS = 160
ROUNDING = 1e-9
LEAST_SIGMA = 0.001  # runs that agree better than this agree by chance


class Terms:
    """The effects that a model may have: of each level above the one before it, and of each pair of these."""

    def __init__(self, levels: Sequence[int]) -> None:
        self.mains = [(place, level) for place, count in enumerate(levels) for level in range(1, count)]
        self.pairs = [
            (one, other)
            for one, other in combinations(range(len(self.mains)), 2)
            if self.mains[one][0] != self.mains[other][0]
        ]
        self._places = np.array([place for place, _ in self.mains], dtype=int)
        self._least = np.array([level for _, level in self.mains], dtype=int)
        self._ones = np.array([one for one, _ in self.pairs], dtype=int)
        self._others = np.array([other for _, other in self.pairs], dtype=int)

    def columns(self, wanted: Sequence[Combination] | NDArray[np.int_]) -> Array:
        """Returns a row for each combination and a column for each effect: 1 where it applies, otherwise 0."""
        table = np.asarray(wanted, dtype=int).reshape(len(wanted), -1)
        mains = (table[:, self._places] >= self._least).astype(float)
        return np.hstack([mains, mains[:, self._ones] * mains[:, self._others]])

    @cached_property
    def sizes(self) -> Array:
        return np.array([MAIN_SIZE] * len(self.mains) + [PAIR_SIZE] * len(self.pairs))

    @cached_property
    def chances(self) -> Array:
        pair = min(MOST_PAIR_CHANCE, PAIRS_EXPECTED / max(1, len(self.pairs)))
        return np.array([MAIN_CHANCE] * len(self.mains) + [pair] * len(self.pairs))


@dataclass(frozen=True)
class Posterior:
    """Equally likely sets of effects, given the runs."""

    terms: Terms
    effects: Array
    """A row for each sample."""
    sigmas: Array
    """The standard deviation of the noise in each sample."""
    certainty: Array
    """The chance of each effect not to be zero."""

    def rates(self, wanted: Sequence[Combination]) -> Array:
        """Returns the log throughput above that of the baseline: a row for each sample, a column per combination."""
        return self.effects @ self.terms.columns(wanted).T

    @property
    def sigma(self) -> float:
        """The expected standard deviation of the noise."""
        return float(np.sqrt(np.mean(self.sigmas**2)))


def posterior(
    terms: Terms,
    runs: Sequence[Combination],
    rates: Sequence[float],
    times: Sequence[float],
    sigma: float,
    rng: np.random.Generator,
) -> Posterior:
    """Samples the effects given the log throughput of the runs.

    `times` says when each run was made, between 0 and about 1; `sigma` is a first estimate of the noise.
    """
    sigma = max(sigma, LEAST_SIGMA)
    columns, values = _without_drift(terms.columns(runs), np.asarray(rates, dtype=float), np.asarray(times))
    spread = (terms.sizes / sigma) ** 2
    joined = np.column_stack([columns, values])
    swept = joined.T @ joined
    swept[np.diag_indices(len(spread))] += 1 / spread
    swept[-1, -1] += 2 * sigma**2  # weighs as much as two runs
    chain = _Chain(swept, spread, np.log(terms.chances / (1 - terms.chances)), df=len(rates) - 1 + 2)
    return Posterior(terms, *chain.sample(rng))


def _without_drift(columns: Array, values: Array, times: Array) -> tuple[Array, Array]:
    """Returns columns and values in units in which a drift of the machine and the mean play no part."""
    centred = 2 * times - 1
    shapes = np.column_stack([centred, 1.5 * centred**2 - 0.5, 2.5 * centred**3 - 1.5 * centred])
    root = np.linalg.cholesky(np.eye(len(values)) + (shapes * np.square(DRIFT)) @ shapes.T)
    whitened = np.linalg.solve(root, np.column_stack([np.ones(len(values)), columns, values]))
    mean = whitened[:, 0] / np.linalg.norm(whitened[:, 0])
    rest = whitened[:, 1:] - np.outer(mean, mean @ whitened[:, 1:])
    return rest[:, :-1], rest[:, -1]


class _Chain:
    """A walk over sets of effects whose time in each set is proportional to the set's probability.

    All neighbours of a set, which differ from it in one effect, are weighed at once by the sweep operator, and the walk
    always moves (Zanella 2020, Journal of the American Statistical Association 115, 852).
    """

    def __init__(self, matrix: Array, spread: Array, odds: Array, df: int) -> None:
        self._matrix = matrix
        self._prior = odds - 0.5 * np.log(spread)
        self._df = df
        self._included = np.zeros(len(spread), dtype=bool)

    def sample(self, rng: np.random.Generator) -> tuple[Array, Array, Array]:
        """Returns samples of the effects and of the noise's deviation, and the chance of each effect not to be zero."""
        while (gains := self._gains()).max() > ROUNDING:
            self._flip(int(gains.argmax()))
        weights, visited = [], []
        draws = rng.random((2, JUMPS))
        for jump in range(JUMPS):
            rates = 1 / (1 + np.exp(np.clip(-self._gains(), -50, 50)))
            total = np.cumsum(rates)
            weights.append(1 / total[-1])
            visited.append((np.flatnonzero(self._included), self._matrix.copy()))
            self._flip(int(np.searchsorted(total, draws[0, jump] * total[-1])))
        shares = np.array(weights) / math.fsum(weights)
        certain = np.zeros(len(self._prior))
        for share, (which, _) in zip(shares, visited, strict=True):
            certain[which] += share
        steps = (np.arange(SAMPLES) + rng.random()) / SAMPLES
        places = np.minimum(np.searchsorted(np.cumsum(shares), steps), JUMPS - 1)
        effects, sigmas = np.zeros((SAMPLES, len(self._prior))), np.empty(SAMPLES)
        normal = rng.standard_normal((SAMPLES, len(self._prior)))
        squares = rng.chisquare(self._df, SAMPLES)
        for place in np.unique(places):
            drawn, (which, matrix) = np.flatnonzero(places == place), visited[place]
            sigmas[drawn] = np.sqrt(matrix[-1, -1] / squares[drawn])
            if len(which):
                root = np.linalg.cholesky(-matrix[np.ix_(which, which)])
                noise = normal[drawn, : len(which)] @ root.T
                effects[np.ix_(drawn, which)] = matrix[which, -1] + sigmas[drawn, None] * noise
        return effects, sigmas, certain

    def _gains(self) -> Array:
        """Returns by how much the logarithm of the set's probability changes if each effect is flipped."""
        diagonal = np.diagonal(self._matrix)[:-1]
        pivots = np.where(self._included, -1 / diagonal, diagonal)
        squares = self._matrix[-1, -1] - self._matrix[:-1, -1] ** 2 / diagonal
        change = np.where(self._included, 1, -1) * (0.5 * np.log(pivots) - self._prior)
        return np.asarray(change - 0.5 * self._df * np.log(squares / self._matrix[-1, -1]))

    def _flip(self, index: int) -> None:
        row = self._matrix[index].copy()
        pivot = row[index]
        self._matrix -= np.outer(row, row / pivot)
        scaled = row / abs(pivot)
        self._matrix[index] = scaled
        self._matrix[:, index] = scaled
        self._matrix[index, index] = -1 / pivot
        self._included[index] = not self._included[index]
