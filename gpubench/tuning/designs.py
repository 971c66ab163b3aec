"""Which combinations to run so that few runs tell much."""

import math
from collections.abc import Sequence
from itertools import product

import numpy as np

from gpubench.tuning.combination import Array, Combination
from gpubench.tuning.model import Posterior

MOST_CANDIDATES = 600  # combinations that are considered, where there are more
PAIR_WEIGHT = 0.2  # variance of an interaction in units of that of an effect, where nothing is known
NOISE_WEIGHT = 0.1  # variance of the noise in the same units


def space(levels: Sequence[Sequence[int]], known: Sequence[Combination], rng: np.random.Generator) -> list[Combination]:
    """Returns all combinations of these levels; if there are too many, `known` and random others."""
    if math.prod(len(some) for some in levels) <= MOST_CANDIDATES:
        return list(product(*levels))
    drawn = zip(*(rng.choice(some, MOST_CANDIDATES).tolist() for some in levels), strict=True)
    return list(dict.fromkeys([*known, *drawn]))


def highest(levels: Sequence[Sequence[int]], found: Posterior, start: Combination) -> list[Combination]:
    """Returns the fastest combination in each sample, found by changing one level at a time."""
    samples = len(found.effects)
    table = np.tile(np.array(start), (samples, 1))
    rates = (found.effects * found.terms.columns(table)).sum(axis=1)
    for _ in range(3):
        for place, some in enumerate(levels):
            for level in some:
                changed = table.copy()
                changed[:, place] = level
                new = (found.effects * found.terms.columns(changed)).sum(axis=1)
                better = new > rates
                table[better], rates[better] = changed[better], new[better]
    return list(dict.fromkeys(tuple(row) for row in table.tolist()))


def least_alike(
    candidates: Sequence[Combination], made: Sequence[Combination], count: int, rng: np.random.Generator
) -> list[Combination]:
    """Returns the runs that tell most about all effects and pairs, given the runs made, if no effect is known.

    Each next run is the one whose rate the others predict worst, which makes the design nearly D-optimal.
    """
    pool = [candidates[index] for index in rng.permutation(len(candidates))]
    together = np.array([*pool, *made])
    covariance = _covariance(together)
    for index in range(len(pool), len(together)):
        _learn(covariance, index)
    chosen = []
    for _ in range(min(count, len(pool))):
        index = int(np.argmax(np.diagonal(covariance)[: len(pool)].round(9)))
        chosen.append(pool[index])
        _learn(covariance, index)
    return chosen


def informative(
    candidates: Sequence[Combination],
    rates: Array,
    best: int,
    chances: Array,
    sigmas: Array,
    count: int,
) -> list[Combination]:
    """Returns runs that tell most about which combination is the best.

    `rates` are samples of the rate of each candidate and `best` is the index of the best on average. In each sample
    some combination is better by a regret: the runs reduce the variance of these differences, weighted by regret.
    `sigmas` is the noise of each candidate.
    """
    rivals = rates.argmax(axis=1)
    regrets = np.take_along_axis(rates, rivals[:, None], axis=1)[:, 0] - rates[:, best]
    which, places = np.unique(rivals, return_inverse=True)
    weights = np.bincount(places, weights=regrets)
    centred = rates - rates.mean(axis=0)
    differences = centred[:, which] - centred[:, [best]]
    inner = np.eye(len(rates)) / len(rates)
    chosen = []
    for _ in range(count):
        known = inner @ centred
        variances = (centred * known).sum(axis=0)
        gains = ((differences.T @ known) ** 2 * weights[:, None]).sum(axis=0) / (variances + sigmas**2)
        index = int(np.argmax(gains * chances))
        chosen.append(candidates[index])
        inner -= np.outer(known[:, index], known[:, index]) / (variances[index] + sigmas[index] ** 2)
    return chosen


def _covariance(table: Array) -> Array:
    """Returns the covariance of rates if all effects are equally likely, and all pairs are."""
    first, squares = np.zeros((len(table), len(table))), np.zeros((len(table), len(table)))
    for column in table.T:
        levels = len(np.unique(column))
        alike = np.where(column[:, None] == column, 1.0, -1 / max(1, levels - 1))
        first += alike
        squares += alike**2
    return np.asarray(100.0 + first + PAIR_WEIGHT * (first**2 - squares) / 2)


def _learn(covariance: Array, index: int) -> None:
    """Conditions the covariance, in place, on a run of the combination with this index."""
    row = covariance[index] / math.sqrt(covariance[index, index] + NOISE_WEIGHT)
    covariance -= np.outer(row, row)
