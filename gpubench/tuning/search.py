"""Which combinations of settings to run next, and what follows from the results.

`Search` is a dialogue: `next()` returns a block of runs, `record()` takes their results, and `conclude()` says what is
known, at any time. It starts no process, reads no clock and touches no file. The same results lead to the same blocks.
docs/statistics.md describes the method and its measured error rates.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpubench.compare.intervals import Error

Combination = tuple[int, ...]
"""The level of each factor. Level 0 is the value before the search, so zeros are the baseline."""
Stage = Literal["noise", "alone", "screening", "choosing", "confirming"]
STAGES: tuple[Stage, ...] = ("noise", "alone", "screening", "choosing", "confirming")
Reason = Literal["slower", "no gain", "does not run", "rejected", "memory"]
Array = NDArray[np.float64]

NOISE_RUNS = 4
MOST_RUNS = 51
ROUNDS = 3


@dataclass(frozen=True)
class Factor:
    """A treatment with its number of levels."""

    name: str
    levels: int = 2


@dataclass(frozen=True)
class Result:
    """What a run gave."""

    rate: float | None
    """The natural logarithm of the throughput; None if the combination does not run."""
    peak: float | None = None
    """The peak memory in bytes, if it is known."""
    rejected: str = ""
    """Why the combination must not be kept although it runs; empty if it may."""


@dataclass(frozen=True)
class Block:
    """Runs to make next, in this order."""

    stage: Stage
    runs: Sequence[Combination]
    why: str
    """One plain sentence for the user."""


@dataclass(frozen=True)
class Plan:
    """The runs of each stage, those made and those still to come."""

    runs: Mapping[Stage, int]
    """Expected number of runs of each stage, in all."""
    done: int
    """Runs made so far."""
    most: int
    """The number of runs that is never exceeded."""

    @property
    def total(self) -> int:
        """The expected number of runs."""
        return sum(self.runs.values())


class Estimate(NamedTuple):
    """A ratio of throughputs with its 95 % interval."""

    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class Standing:
    """What is known so far of one level of a factor: its gain beside the others of the best combination so far."""

    factor: str
    level: int
    gain: Estimate | None
    """None before the first result, and for a level that does not run."""
    kept: bool
    """Whether it is part of the best combination so far."""
    excluded: str = ""
    """Why it cannot be kept: it does not run, is rejected, or needs too much memory."""


@dataclass(frozen=True)
class Contribution:
    """What one kept level contributes."""

    factor: str
    level: int
    with_others: Estimate | None
    """Its gain with all other kept levels: best against best without it, from the confirmation's runs alone."""
    alone: Estimate | None
    """Its gain alone against the baseline."""


@dataclass(frozen=True)
class Pair:
    """An established interaction of two levels: the gain of both divided by the product of their own gains."""

    factors: tuple[str, str]
    levels: tuple[int, int]
    effect: Estimate


@dataclass(frozen=True)
class Dropped:
    """A factor of which no level is kept, or another level than this one."""

    factor: str
    level: int
    reason: Reason
    gain: Estimate | None
    """Its estimated gain beside the kept levels; None if it does not run."""
    detail: str = ""
    """The reason of a rejection, in the words of who rejected it."""


@dataclass(frozen=True)
class Tried:
    """A combination with the results of its runs."""

    combination: Combination
    runs: int
    rate: float | None
    """Mean of the logarithms of the throughput; None if it does not run."""
    peak: float | None
    """The largest peak memory in bytes."""
    rejected: str


@dataclass(frozen=True)
class Noise:
    """The standard deviation of the logarithm of the throughput between equal runs."""

    sigma: float
    df: float


@dataclass(frozen=True)
class Conclusion:
    """What follows from the results."""

    best: Combination
    proved: bool
    """Whether `best` is faster than the baseline, by a two-sided test at 95 % on the confirmation's runs alone."""
    gain: Estimate | None
    """best / baseline, from the confirmation's runs alone; None without a confirmation."""
    contributions: Sequence[Contribution]
    pairs: Sequence[Pair]
    dropped: Sequence[Dropped]
    tried: Sequence[Tried]
    noise: Noise | None


@dataclass(frozen=True)
class _Run:
    block: int
    stage: Stage
    combination: Combination
    result: Result


class Search:
    """Finds the fastest combination of the factors' levels in few runs."""

    def __init__(
        self,
        factors: Sequence[Factor],
        *,
        most_runs: int | None = None,
        most_peak: float | None = None,
        seed: int = 0,
    ) -> None:
        self._factors = tuple(factors)
        self._most_runs = most_runs
        self._most_peak = most_peak
        self._seed = seed
        self._runs: list[_Run] = []
        self._blocks: list[Block] = []
        self._pending: Block | None = None
        self._baseline = (0,) * len(self._factors)
        self._chosen: Combination | None = None

    def next(self) -> Block | None:
        """Returns the runs to make next; None if the search is over. The same block until `record` is called."""
        if self._pending is None:
            self._pending = self._following()
        return self._pending

    def record(self, block_results: Sequence[Result]) -> None:
        """Takes the results of the block that `next` returned, in its order; fewer if it was interrupted."""
        block = self._pending
        if block is None or len(block_results) > len(block.runs):
            raise ValueError("there are more results than runs of the last block")
        number = len(self._blocks)
        self._runs += [
            _Run(number, block.stage, combination, result)
            for combination, result in zip(block.runs, block_results, strict=False)
        ]
        left = block.runs[len(block_results) :]
        self._pending = Block(block.stage, left, block.why) if left else None
        if not left:
            self._blocks.append(block)

    def limit(self, most_runs: int | None) -> None:
        """Sets the number of runs that is never exceeded, because time is short; None for the default."""
        self._most_runs = most_runs

    def planned(self) -> Plan:
        """Returns the runs of each stage, as far as they are known now."""
        expected: dict[Stage, int] = {
            "noise": NOISE_RUNS,
            "alone": sum(factor.levels - 1 for factor in self._factors),
            "screening": 16,
            "choosing": 0,
            "confirming": 15,
        }
        for stage in STAGES:
            made = sum(run.stage == stage for run in self._runs)
            later = any(STAGES.index(run.stage) > STAGES.index(stage) for run in self._runs)
            expected[stage] = made if later else max(made, expected[stage])
        return Plan(expected, len(self._runs), self._most)

    def standing(self) -> Sequence[Standing]:
        """Returns what is known of each level of each factor, for a table that is updated as results come in."""
        best = self._best()
        found = []
        for place, factor in enumerate(self._factors):
            for level in range(1, factor.levels):
                why = self._excluded(place, level)
                gain = None if why else self._effect(place, level)
                found.append(Standing(factor.name, level, gain, best[place] == level, why))
        return found

    def conclude(self) -> Conclusion:
        """Returns what follows from the results so far."""
        best = self._chosen or self._best()
        gain = self._ratio(best, self._baseline)
        return Conclusion(
            best=best,
            proved=gain is not None and gain.low > 1,
            gain=gain,
            contributions=[
                Contribution(
                    self._factors[place].name,
                    level,
                    self._ratio(best, _without(best, place)),
                    self._effect(place, level),
                )
                for place, level in enumerate(best)
                if level
            ],
            pairs=[],
            dropped=[
                Dropped(one.factor, one.level, _reason(one), one.gain, one.excluded)
                for one in self.standing()
                if not one.kept
            ],
            tried=self._tried(),
            noise=self._noise(),
        )

    @property
    def _most(self) -> int:
        return MOST_RUNS if self._most_runs is None else self._most_runs

    def _following(self) -> Block | None:
        stages = [block.stage for block in self._blocks]
        rng = np.random.default_rng([self._seed, len(stages)])
        left = self._most - len(self._runs)
        if "noise" not in stages:
            runs = [self._baseline] * NOISE_RUNS
            return Block("noise", runs[:left], "The settings as they are, to see how much equal runs differ.")
        if "alone" not in stages:
            alone = [
                _with(self._baseline, place, level)
                for place, factor in enumerate(self._factors)
                for level in range(1, factor.levels)
            ]
            return self._block("alone", alone, left, rng, "Each setting alone, to see whether it runs.")
        if "screening" not in stages:
            shown = [
                [0, *(level for level in range(1, factor.levels) if not self._excluded(place, level))]
                for place, factor in enumerate(self._factors)
            ]
            mixed = [tuple(int(rng.choice(levels)) for levels in shown) for _ in range(16)]
            return self._block("screening", mixed, left, rng, "Many settings at once, to separate their effects.")
        if stages.count("confirming") < ROUNDS:
            self._chosen = self._chosen or self._best()
            if self._chosen == self._baseline:
                return None
            runs = self._confirming(self._chosen)
            why = "The best combination against the settings as they are and without each of its parts."
            return self._block("confirming", runs, left, rng, why) if len(runs) <= left else None
        return None

    def _block(
        self, stage: Stage, runs: Sequence[Combination], left: int, rng: np.random.Generator, why: str
    ) -> Block | None:
        order = [runs[index] for index in rng.permutation(len(runs))][:left]
        return Block(stage, order, why) if order else None

    def _confirming(self, best: Combination) -> list[Combination]:
        without = [_without(best, place) for place, level in enumerate(best) if level]
        return list(dict.fromkeys([self._baseline, best, *without]))

    def _excluded(self, place: int, level: int) -> str:
        alone = _with(self._baseline, place, level)
        for run in self._runs:
            if run.combination == alone:
                if run.result.rate is None:
                    return "does not run"
                if run.result.rejected:
                    return run.result.rejected
                if self._most_peak and run.result.peak and run.result.peak > self._most_peak:
                    return "memory"
        return ""

    def _best(self) -> Combination:
        effects = self._effects()
        best = list(self._baseline)
        for place, factor in enumerate(self._factors):
            gains = {level: effects.get((place, level), (0.0, 0.0))[0] for level in range(1, factor.levels)}
            for level, gain in gains.items():
                if not self._excluded(place, level) and gain > max(0.0, gains.get(best[place], 0.0)):
                    best[place] = level
        found = tuple(best)
        failed = {run.combination for run in self._runs if run.result.rate is None or run.result.rejected}
        return self._baseline if found in failed else found

    def _effects(self) -> dict[tuple[int, int], tuple[float, float]]:
        """Returns the effect of each level on the log throughput with its standard error, by least squares."""
        runs = [run for run in self._runs if run.result.rate is not None]
        columns = [(place, level) for place, factor in enumerate(self._factors) for level in range(1, factor.levels)]
        if len(runs) < 2:
            return {}
        matrix = np.array([[1.0, *(run.combination[p] == level for p, level in columns)] for run in runs])
        rates = np.array([run.result.rate for run in runs])
        ridge = matrix.T @ matrix + 1e-3 * np.eye(len(columns) + 1)
        inverse = np.linalg.inv(ridge)
        found = inverse @ matrix.T @ rates
        residual = rates - matrix @ found
        sigma = math.sqrt(float(residual @ residual) / max(1, len(runs) - len(columns) - 1))
        return {
            column: (float(found[index]), sigma * math.sqrt(float(inverse[index, index])))
            for index, column in enumerate(columns, 1)
        }

    def _effect(self, place: int, level: int) -> Estimate | None:
        found = self._effects().get((place, level))
        return None if found is None else _estimate(found[0], 1.96 * found[1])

    def _ratio(self, one: Combination, other: Combination) -> Estimate | None:
        """Returns the ratio of two combinations from the confirmation's runs alone."""
        rates = {
            combination: [
                run.result.rate
                for run in self._runs
                if run.stage == "confirming" and run.combination == combination and run.result.rate is not None
            ]
            for combination in (one, other)
        }
        noise = self._noise()
        if one == other or noise is None or not all(rates.values()):
            return None
        size = noise.sigma * math.sqrt(sum(1 / len(values) for values in rates.values()))
        difference = float(np.mean(rates[one]) - np.mean(rates[other]))
        return _estimate(difference, Error(size, noise.df).half_width())

    def _noise(self) -> Noise | None:
        groups: dict[tuple[Combination, bool], list[float]] = {}
        for run in self._runs:
            if run.result.rate is not None:
                groups.setdefault((run.combination, run.stage == "confirming"), []).append(run.result.rate)
        df = sum(len(values) - 1 for values in groups.values())
        square = sum(float(np.var(values)) * len(values) for values in groups.values())
        return Noise(math.sqrt(square / df), df) if df else None

    def _tried(self) -> list[Tried]:
        found = []
        for combination in dict.fromkeys(run.combination for run in self._runs):
            results = [run.result for run in self._runs if run.combination == combination]
            rates = [one.rate for one in results if one.rate is not None]
            peaks = [one.peak for one in results if one.peak is not None]
            found.append(
                Tried(
                    combination,
                    len(results),
                    float(np.mean(rates)) if rates else None,
                    max(peaks, default=None),
                    next((one.rejected for one in results if one.rejected), ""),
                )
            )
        return found


def _with(combination: Combination, place: int, level: int) -> Combination:
    return (*combination[:place], level, *combination[place + 1 :])


def _without(combination: Combination, place: int) -> Combination:
    return _with(combination, place, 0)


def _estimate(logarithm: float, half: float) -> Estimate:
    return Estimate(math.exp(logarithm), math.exp(logarithm - half), math.exp(logarithm + half))


def _reason(standing: Standing) -> Reason:
    if standing.excluded in ("does not run", "memory"):
        return "does not run" if standing.excluded == "does not run" else "memory"
    if standing.excluded:
        return "rejected"
    return "slower" if standing.gain and standing.gain.high < 1 else "no gain"
