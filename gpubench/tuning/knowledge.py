"""What follows from the runs that a search has made so far."""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gpubench.gain import Gain
from gpubench.tuning.combination import Combination
from gpubench.tuning.designs import MOST_CANDIDATES, highest, space
from gpubench.tuning.limits import DOES_NOT_RUN, LIKELY, MEMORY, KnownRun, Limits
from gpubench.tuning.model import EffectTerms, posterior
from gpubench.tuning.noises import Noises

Stage = Literal["noise", "alone", "screening", "choosing", "confirming"]

USUAL_SIGMA = 0.02  # of the log throughput between equal runs, until it is measured
USUAL_RUNS = 50
NO_MATTER = 0.001  # a gain in log throughput for which no setting is kept
WORTH_CHANGING = 0.004  # an expected gain in log throughput for which a confirmation begins again
CLEAR_GAIN = 2.0  # a gain of at least so many of its standard deviations is confirmed


@dataclass(frozen=True)
class Result:
    """What a run gave."""

    rate: float | None
    """The natural logarithm of the throughput; None if the combination does not run."""
    peak: float | None = None
    """The peak memory in bytes, if it is known."""
    rejected: str = ""
    """Why the combination must not be kept although it runs; empty if it may."""
    seconds: float = 0.0
    """The time that the run took; 0 if it is unknown."""
    refused: bool = False
    """Whether the combination was refused before the run was started, as it would be again."""


@dataclass(frozen=True)
class TriedRun:
    """A run that was made."""

    block: int
    stage: Stage
    combination: Combination
    result: Result


class Knowledge:
    """What follows from the runs made so far."""

    def __init__(
        self, terms: EffectTerms, levels: Sequence[int], runs: Sequence[TriedRun], most_peak: float | None, seed: int
    ):
        self.baseline: Combination = (0,) * len(levels)
        self.limits = Limits([_outcome(run, most_peak) for run in runs], most_peak)
        rng = np.random.default_rng([seed, len(runs)])
        timed = [(time, run) for time, run in enumerate(runs) if run.result.rate is not None]
        self.posterior = posterior(
            terms,
            [run.combination for _, run in timed],
            [run.result.rate for _, run in timed if run.result.rate is not None],
            [time / max(USUAL_RUNS, len(runs)) for time, _ in timed],
            lambda noises: sigma_of_equals(runs, noises) or USUAL_SIGMA,
            rng,
        )
        self.open = [
            [0, *(level for level in range(1, count) if not self.limits.level(place, level))]
            for place, count in enumerate(levels)
        ]
        known = list(dict.fromkeys([self.baseline, *(run.combination for run in runs)]))
        if math.prod(map(len, self.open)) > MOST_CANDIDATES:
            known += highest(self.open, self.posterior, self.baseline)
        self.candidates = self.limits.allowed(space(self.open, known, rng)) or [self.baseline]
        self.rates = self.posterior.rates(self.candidates)
        self.chances = self.limits.chances(self.candidates)
        safe = self.chances >= 1 - LIKELY
        if not safe.any():
            self.candidates, safe = [self.baseline], np.array([True])
            self.rates, self.chances = self.posterior.rates(self.candidates), np.ones(1)
        self._means = np.where(safe, self.rates.mean(axis=0), -math.inf)
        self._safe = {one for one, likely in zip(self.candidates, safe, strict=True) if likely}
        self.best = self.best_of(self._safe)

    def gain(self, one: Combination, other: Combination) -> tuple[float, float]:
        """Returns the expected logarithm of the ratio of two combinations and its standard deviation."""
        rates = self.posterior.rates([one, other])
        difference = rates[:, 0] - rates[:, 1]
        return float(difference.mean()), float(difference.std())

    def estimate(self, one: Combination, other: Combination) -> Gain:
        """Returns the gain of `one` over `other`, as far as it is known."""
        mean, deviation = self.gain(one, other)
        return interval_of(mean, 1.96 * deviation)

    def interaction(self, one: Combination, other: Combination, both: Combination) -> Gain:
        """Returns the gain of `both` divided by the product of the gains of `one` and `other`."""
        rates = self.posterior.rates([both, one, other, self.baseline])
        found = rates[:, 0] - rates[:, 1] - rates[:, 2] + rates[:, 3]
        return interval_of(float(found.mean()), 1.96 * float(found.std()))

    @property
    def regret(self) -> float:
        """How much faster than `best` the fastest combination is expected to be, in log throughput."""
        best = self.rates[:, self.candidates.index(self.best)]
        return float((self.rates[:, np.isfinite(self._means)].max(axis=1) - best).mean())

    @property
    def daring(self) -> Combination | None:
        """A combination that would be faster than the best if it ran, which other failures make doubtful."""
        means = self.rates.mean(axis=0)
        doubtful = np.where(self.chances < 1 - LIKELY, means, -math.inf)
        first = int(doubtful.argmax())
        better = doubtful[first] - means[self.candidates.index(self.best)] > WORTH_CHANGING
        return self.candidates[first] if better else None

    @property
    def clear_gain(self) -> bool:
        """Whether the best combination is expected to be faster than the baseline by more than chance, or is needed."""
        gain, deviation = self.gain(self.best, self.baseline)
        return gain > CLEAR_GAIN * deviation or bool(self.limits.why_not(self.baseline))

    def best_of(self, some: Container[Combination]) -> Combination:
        """Returns the combination with the highest expected rate, without the levels that do not matter to it."""
        possible = [one in some for one in self.candidates]
        best = self.candidates[int(np.where(possible, self._means, -math.inf).argmax())]
        while True:
            simpler = [one for one in without_each(best) if one in self._safe]
            if not simpler:
                return best
            losses = [self.gain(best, one)[0] for one in simpler]
            least = int(np.argmin(losses))
            if losses[least] > NO_MATTER:
                return best
            best = simpler[least]


def without_each(combination: Combination) -> list[Combination]:
    """Returns the combination without each of its levels in turn."""
    return [with_level(combination, place, 0) for place, level in enumerate(combination) if level]


def with_level(combination: Combination, place: int, level: int) -> Combination:
    return (*combination[:place], level, *combination[place + 1 :])


def interval_of(logarithm: float, half: float) -> Gain:
    """Returns the estimate of a ratio from its logarithm and the half-width of the interval of that."""
    return Gain(math.exp(logarithm), math.exp(logarithm - half), math.exp(logarithm + half))


def _outcome(run: TriedRun, most_peak: float | None) -> KnownRun:
    result = run.result
    over = most_peak is not None and result.peak is not None and result.peak > most_peak
    why = DOES_NOT_RUN if result.rate is None else result.rejected or (MEMORY if over else "")
    return KnownRun(run.combination, why, result.peak)


def spread_of_equals(runs: Sequence[TriedRun], noises: Noises | None = None) -> tuple[float, int]:
    """Returns the sum of squares of equal runs of a stage about their means, and its degrees of freedom.

    With `noises`, the squares of each combination are in units of its noise.
    """
    groups: dict[tuple[Combination, Stage], list[float]] = {}
    for run in runs:
        if run.result.rate is not None:
            groups.setdefault((run.combination, run.stage), []).append(run.result.rate)
    units = (noises or Noises()).of([combination for combination, _ in groups])
    squares = sum(
        float(np.var(rates)) * len(rates) / float(unit) ** 2 for rates, unit in zip(groups.values(), units, strict=True)
    )
    return squares, sum(len(rates) - 1 for rates in groups.values())


def sigma_of_equals(runs: Sequence[TriedRun], noises: Noises | None = None) -> float:
    """Returns the standard deviation of the baseline's noise, from equal runs; 0 without such runs."""
    squares, df = spread_of_equals(runs, noises)
    return math.sqrt(squares / df) if df else 0.0
