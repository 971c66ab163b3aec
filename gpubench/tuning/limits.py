"""Which combinations are known, or expected, not to run or not to be allowed."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from gpubench.tuning.combination import Combination, Level

Part = tuple[Level, ...]
"""Levels that occur together."""
DOES_NOT_RUN = "does not run"
MEMORY = "memory"
SHARINGS = 30
LIKELY = 0.5  # chance of a failure above which a combination cannot be the best
HOPELESS = 0.95  # chance of a failure above which a combination is not run


@dataclass(frozen=True)
class KnownRun:
    """What is known of one run."""

    combination: Combination
    bad: str
    """Why its combination must not be kept: DOES_NOT_RUN, MEMORY or the reason of its rejection; empty if it may."""
    peak: float | None


class Limits:
    """Tells which combinations may be run, and why others may not.

    A combination does not run if most of its runs fail. Of one that fails although each of its levels is fine,
    a pair of levels is to blame, or a larger part if some combination that runs contains each of its pairs.
    """

    def __init__(self, outcomes: Sequence[KnownRun], most_peak: float | None) -> None:
        failures = Counter(one.combination for one in outcomes if one.bad == DOES_NOT_RUN)
        runs = Counter(one.combination for one in outcomes)
        self._bad = {
            one.combination: one.bad
            for one in outcomes
            if one.bad and (one.bad != DOES_NOT_RUN or 2 * failures[one.combination] > runs[one.combination])
        }
        self._good = {one.combination for one in outcomes if not one.bad} - set(self._bad)
        self._cleared = {part for one in self._good for size in (1, 2) for part in combinations(_active(one), size)}
        self._suspects = self._blamed()
        self._log_limit = math.log(most_peak) if most_peak else math.inf
        self._peaks = _PeakModel(outcomes) if most_peak else None

    def level(self, place: int, level: int) -> str:
        """Returns why a level may not be kept whatever the others are; empty if it may."""
        chance, why = self._suspects.get(((place, level),), (0.0, ""))
        return why if chance > LIKELY else ""

    def why_not(self, combination: Combination, most: float = LIKELY) -> str:
        """Returns why a combination must not be kept, or will not be by a chance above `most`; empty if it may."""
        if combination in self._bad:
            return self._bad[combination]
        if combination in self._good:
            return ""
        if self._peaks and self._peaks.log_peak(combination) > self._log_limit:
            return MEMORY
        chance, why = self._blame(combination)
        return why if chance > most else ""

    def allowed(self, wanted: Sequence[Combination]) -> list[Combination]:
        """Returns the combinations that may be run."""
        return [one for one in wanted if not self.why_not(one, HOPELESS)]

    def chances(self, wanted: Sequence[Combination]) -> NDArray[np.float64]:
        """Returns the chance that each combination runs."""
        return np.array([1.0 if one in self._good else 1 - self._blame(one)[0] for one in wanted])

    def _blamed(self) -> dict[Part, tuple[float, str]]:
        """Returns the chance of each suspect part to be to blame for a failure, with its reason.

        Each failure is shared out among its suspects in proportion to the failures that each has a share of, again and
        again, so that few parts account for all failures.
        """
        failures = [
            (self._suspects_of(combination), why)
            for combination, why in self._bad.items()
            if any(combination) and why != MEMORY  # which the peaks explain
        ]
        reasons = {part: why for parts, why in failures for part in parts}
        weights = dict.fromkeys(reasons, 1.0)
        shares: list[dict[Part, float]] = []
        for _ in range(SHARINGS):
            totals = [math.fsum(weights[part] for part in parts) for parts, _ in failures]
            shares = [
                {part: weights[part] / total for part in parts}
                for (parts, _), total in zip(failures, totals, strict=True)
            ]
            weights = {part: math.fsum(share.get(part, 0.0) for share in shares) for part in weights}
        return {part: (max(share.get(part, 0.0) for share in shares), why) for part, why in reasons.items()}

    def _suspects_of(self, combination: Combination) -> list[Part]:
        """Returns the levels, or else the pairs, or else the whole, that no combination that runs contains."""
        active = _active(combination)
        for size in (1, 2):
            parts = [part for part in combinations(active, size) if part not in self._cleared]
            if parts:
                return parts
        return [active]

    def _blame(self, combination: Combination) -> tuple[float, str]:
        """Returns the chance of a failure and its most likely reason."""
        if not self._suspects:
            return 0.0, ""
        active = set(_active(combination))
        found = [suspicion for part, suspicion in self._suspects.items() if active.issuperset(part)]
        return 1 - math.prod(1 - chance for chance, _ in found), max(found, default=(0.0, ""))[1]


class _PeakModel:
    """The logarithm of the peak memory as a sum of effects of levels, fitted to the peaks measured so far."""

    def __init__(self, outcomes: Sequence[KnownRun]) -> None:
        known = [(one.combination, math.log(one.peak)) for one in outcomes if one.peak]
        self._columns = sorted({part for combination, _ in known for part in _active(combination)})
        self._effects = np.zeros(len(self._columns) + 1)
        if known:
            matrix = np.array([self._row(combination) for combination, _ in known])
            values = np.array([value for _, value in known])
            ridge = 1e-3 * np.eye(matrix.shape[1])
            ridge[0, 0] = 1e-9
            self._effects = np.linalg.solve(matrix.T @ matrix + ridge, matrix.T @ values)

    def log_peak(self, combination: Combination) -> float:
        return float(np.dot(self._row(combination), self._effects))

    def _row(self, combination: Combination) -> list[float]:
        return [1.0, *(float(combination[place] == level) for place, level in self._columns)]


def _active(combination: Combination) -> Part:
    return tuple((place, level) for place, level in enumerate(combination) if level)
