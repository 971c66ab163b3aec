"""What the runs so far say about every combination of levels: a regression averaged over its possible terms.

The logarithm of the throughput is a sum of effects of levels and of pairs of levels, of which few are not zero, and of
a slow drift of the machine. Which effects are zero is not known: the posterior is averaged over the sets of effects.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from gpubench.tuning.combination import Array, Combination
from gpubench.tuning.noises import Noises, compared

MAIN_SIZE, INTERACTION_SIZE = 0.08, 0.08  # standard deviation of an effect that is not zero, in log throughput
MAIN_CHANCE = 0.85  # of an effect not to be zero
PAIRS_EXPECTED = 3.0  # number of interactions that are not zero, in a search with eight settings
MOST_PAIR_CHANCE = 0.11
TRIPLES_EXPECTED = 0.5  # number of interactions of three settings, likewise
MOST_TRIPLE_CHANCE = 0.02
MOST_TRIPLES = 400  # interactions of three settings that are considered, so that the model takes a second at most
DRIFT = (2.0, 1.0, 0.7)  # standard deviations of a linear, quadratic and cubic drift, in those of the noise
SAMPLES = 128
JUMPS = 640  # of a walk that begins at the most probable set: a quarter as many leave out others that are likely too
SIZINGS = 3  # times that the effects are estimated before their sizes are taken from the estimates
ROUNDING = 1e-9
LEAST_SIGMA = 0.001  # runs that agree better than this agree by chance


class EffectTerms:
    """The effects that a model may have: of each level above the one before it, and of two or three of these together.

    With many settings, three are considered together only if they are among the first, which matter most.
    """

    def __init__(self, levels: Sequence[int]) -> None:
        self.mains = [(place, level) for place, count in enumerate(levels) for level in range(1, count)]
        self.pairs = self._together(2, len(levels))
        triples = (self._together(3, first) for first in range(len(levels), 0, -1))
        self.triples = next((some for some in triples if len(some) <= MOST_TRIPLES), [])
        self._places = np.array([place for place, _ in self.mains], dtype=int)
        self._least = np.array([level for _, level in self.mains], dtype=int)
        self._ones, self._others = np.array(self.pairs, dtype=int).reshape(-1, 2).T
        self._threes = np.array(self.triples, dtype=int).reshape(-1, 3).T

    def columns(self, wanted: Sequence[Combination] | NDArray[np.int_]) -> Array:
        """Returns a row for each combination and a column for each effect: 1 where it applies, otherwise 0."""
        table = np.asarray(wanted, dtype=int).reshape(len(wanted), -1)
        mains = (table[:, self._places] >= self._least).astype(float)
        first, second, third = self._threes
        triples = mains[:, first] * mains[:, second] * mains[:, third]
        return np.hstack([mains, mains[:, self._ones] * mains[:, self._others], triples])

    @cached_property
    def together(self) -> Sequence[tuple[int, ...]]:
        """The places in `mains` of the levels of each interaction, in the order of its columns after those of mains."""
        return [*self.pairs, *self.triples]

    @cached_property
    def sizes(self) -> Array:
        return np.array([MAIN_SIZE] * len(self.mains) + [INTERACTION_SIZE] * len(self.together))

    @cached_property
    def chances(self) -> Array:
        pair = min(MOST_PAIR_CHANCE, PAIRS_EXPECTED / max(1, len(self.pairs)))
        triple = min(MOST_TRIPLE_CHANCE, TRIPLES_EXPECTED / max(1, len(self.triples)))
        chances = [[MAIN_CHANCE] * len(self.mains), [pair] * len(self.pairs), [triple] * len(self.triples)]
        return np.concatenate(chances)

    def _together(self, count: int, first: int) -> list[tuple[int, ...]]:
        """Returns every choice of `count` levels of different settings among the `first` settings."""
        among = [index for index, (place, _) in enumerate(self.mains) if place < first]
        return [some for some in combinations(among, count) if len({self.mains[index][0] for index in some}) == count]


@dataclass(frozen=True)
class Posterior:
    """Equally likely sets of effects, given the runs."""

    terms: EffectTerms
    noises: Noises
    """How much noisier or quieter levels are than the baseline."""
    effects: Array
    """A row for each sample."""
    sigmas: Array
    """The standard deviation of the baseline's noise in each sample."""
    certainty: Array
    """The chance of each effect not to be zero."""

    def rates(self, wanted: Sequence[Combination]) -> Array:
        """Returns the log throughput above that of the baseline: a row for each sample, a column per combination."""
        return self.effects @ self.terms.columns(wanted).T

    @property
    def sigma(self) -> float:
        """The expected standard deviation of the baseline's noise."""
        return float(np.sqrt(np.mean(self.sigmas**2)))

    def sigmas_of(self, wanted: Sequence[Combination]) -> Array:
        """Returns the expected standard deviation of the noise of each combination."""
        return self.sigma * self.noises.of(wanted)


def posterior(
    terms: EffectTerms,
    runs: Sequence[Combination],
    rates: Sequence[float],
    times: Sequence[float],
    estimated: Callable[[Noises], float],
    rng: np.random.Generator,
) -> Posterior:
    """Samples the effects given the log throughput of the runs.

    `times` says when each run was made, between 0 and about 1; `estimated` returns a first estimate of the baseline's
    noise, given how much noisier the levels are.
    """
    columns, values, drift = terms.columns(runs), np.asarray(rates, dtype=float), _drift(np.asarray(times))
    odds = np.log(terms.chances / (1 - terms.chances))
    sizes, noises = terms.sizes, Noises()
    for again in reversed(range(1 + SIZINGS)):
        sigma = max(estimated(noises), LEAST_SIGMA)
        whitened = _whitened(columns, values, drift, noises.of(runs))
        products = whitened.T @ whitened
        products[-1, -1] += 2 * sigma**2  # weighs as much as two runs
        chain = _Chain(products, (sizes / sigma) ** 2, odds, df=len(rates) - 1 + 2)
        found = chain.climb()
        if again:
            sizes = np.maximum(terms.sizes, np.abs(found))
            some = columns[:, found != 0] * (sizes / sigma)[found != 0]
            noises = noises if again > 1 else compared(runs, values, drift @ drift.T + some @ some.T, sigma)
    return Posterior(terms, noises, *chain.sample(rng))


def _drift(times: Array) -> Array:
    """Returns a column for each shape of a drift, scaled to its expected size in units of the noise."""
    centred = 2 * times - 1
    return np.column_stack([centred, 1.5 * centred**2 - 0.5, 2.5 * centred**3 - 1.5 * centred]) * DRIFT


def _whitened(columns: Array, values: Array, drift: Array, noises: Array) -> Array:
    """Returns columns and values without drift and mean, in units that make all runs equally noisy."""
    root = np.linalg.cholesky(np.diag(noises**2) + drift @ drift.T)
    whitened = np.linalg.solve(root, np.column_stack([np.ones(len(values)), columns, values]))
    mean = whitened[:, 0] / np.linalg.norm(whitened[:, 0])
    return np.asarray(whitened[:, 1:] - np.outer(mean, mean @ whitened[:, 1:]))


class _Chain:
    """A walk over sets of effects whose time in each set is proportional to the set's probability.

    All neighbours of a set, which differ from it in one effect, are weighed at once by the sweep operator, and the walk
    always moves (Zanella 2020, Journal of the American Statistical Association 115, 852).
    """

    def __init__(self, products: Array, spread: Array, odds: Array, df: int) -> None:
        """`products` are those of the columns and the values with each other; `spread` are the variances of effects."""
        self._matrix = products.copy()
        self._matrix[np.diag_indices(len(spread))] += 1 / spread
        self._prior = odds - 0.5 * np.log(spread)
        self._df = df
        self._kept = np.append(np.zeros(len(spread), dtype=bool), True)  # the values too
        self._included = self._kept[:-1]  # shares its memory

    def climb(self) -> Array:
        """Moves to a set more probable than its neighbours, and returns its effects: 0 for those outside it."""
        while (gains := self._gains()).max() > ROUNDING:
            self._flip(int(gains.argmax()))
        return np.where(self._included, self._matrix[:-1, -1], 0.0)

    def sample(self, rng: np.random.Generator) -> tuple[Array, Array, Array]:
        """Returns samples of the effects and of sigma, and the probability that each effect is not zero."""
        weights, visited = [], []
        draws = rng.random((2, JUMPS))
        for jump in range(JUMPS):
            rates = 1 / (1 + np.exp(np.clip(-self._gains(), -50, 50)))
            total = rates.cumsum()
            weights.append(1 / total[-1])
            kept = self._kept.nonzero()[0]
            visited.append((kept[:-1], self._matrix[kept[:, None], kept]))
            self._flip(int(total.searchsorted(draws[0, jump] * total[-1])))
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
                root = np.linalg.cholesky(-matrix[:-1, :-1])
                noise = normal[drawn, : len(which)] @ root.T
                effects[np.ix_(drawn, which)] = matrix[:-1, -1] + sigmas[drawn, None] * noise
        return effects, sigmas, certain

    def _gains(self) -> Array:
        """Returns how much flipping each effect changes the logarithm of the probability of the set."""
        diagonal = np.diagonal(self._matrix)[:-1]
        pivots = np.where(self._included, -1 / diagonal, diagonal)
        squares = self._matrix[-1, -1] - self._matrix[:-1, -1] ** 2 / diagonal
        change = np.where(self._included, 1, -1) * (0.5 * np.log(pivots) - self._prior)
        return np.asarray(change - 0.5 * self._df * np.log(squares / self._matrix[-1, -1]))

    def _flip(self, index: int) -> None:
        row = self._matrix[index].copy()
        pivot = row[index]
        self._matrix -= row[:, None] * (row / pivot)
        scaled = row / abs(pivot)
        self._matrix[index] = scaled
        self._matrix[:, index] = scaled
        self._matrix[index, index] = -1 / pivot
        self._included[index] = not self._included[index]
