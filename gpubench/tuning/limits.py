"""Which combinations are known, or expected, not to run or not to be allowed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from gpubench.tuning.model import Combination

Part = tuple[tuple[int, int], ...]
"""Levels that occur together, as (place, level)."""
DOES_NOT_RUN = "does not run"
MEMORY = "memory"
LIKELY = 0.5  # chance of a failure from which on a combination is not run


@dataclass(frozen=True)
class Outcome:
    """What is known of a combination that was run."""

    combination: Combination
    bad: str
    """Why it must not be kept: DOES_NOT_RUN, MEMORY or the reason of its rejection; empty if it may."""
    peak: float | None


class Limits:
    """Tells which combinations may be run, and why others may not.

    A combination that fails although each of its levels is fine has at least one pair of levels to blame, or, if a
    combination that runs contains each of its pairs, a larger part. Every part that may be to blame is equally suspect.
    """

    def __init__(self, outcomes: Sequence[Outcome], most_peak: float | None) -> None:
        self._bad = {one.combination: one.bad for one in outcomes if one.bad}
        self._good = {one.combination for one in outcomes if not one.bad} - set(self._bad)
        self._cleared = {part for one in self._good for size in (1, 2) for part in combinations(_active(one), size)}
        self._suspects: dict[Part, tuple[float, str]] = {}
        for combination, why in self._bad.items():
            self._suspect(combination, why)
        self._log_limit = math.log(most_peak) if most_peak else math.inf
        self._peaks = _PeakModel(outcomes) if most_peak else None

    def level(self, place: int, level: int) -> str:
        """Returns why a level may not be kept whatever the others are; empty if it may."""
        chance, why = self._suspects.get(((place, level),), (0.0, ""))
        return why if chance > LIKELY else ""

    def why_not(self, combination: Combination) -> str:
        """Returns why a combination must not be kept, or is expected not to be; empty if it may."""
        if combination in self._bad:
            return self._bad[combination]
        if combination in self._good:
            return ""
        if self._peaks and self._peaks.log_peak(combination) > self._log_limit:
            return MEMORY
        chance, why = self._blame(combination)
        return why if chance > LIKELY else ""

    def allowed(self, wanted: Sequence[Combination]) -> list[Combination]:
        """Returns those of the combinations that may be run."""
        return [one for one in wanted if not self.why_not(one)]

    def chances(self, wanted: Sequence[Combination]) -> NDArray[np.float64]:
        """Returns the chance of each combination to run."""
        return np.array([1.0 if one in self._good else 1 - self._blame(one)[0] for one in wanted])

    def _suspect(self, combination: Combination, why: str) -> None:
        active = _active(combination)
        for size in (1, 2):
            parts = [part for part in combinations(active, size) if part not in self._cleared]
            if parts:
                break
        else:
            parts = [active]
        for part in parts:
            chance, first = self._suspects.get(part, (0.0, why))
            self._suspects[part] = (1 - (1 - chance) * (1 - 1 / len(parts)), first)

    def _blame(self, combination: Combination) -> tuple[float, str]:
        """Returns the chance of a failure and its most likely reason."""
        if not self._suspects:
            return 0.0, ""
        active = set(_active(combination))
        found = [suspicion for part, suspicion in self._suspects.items() if active.issuperset(part)]
        return 1 - math.prod(1 - chance for chance, _ in found), max(found, default=(0.0, ""))[1]


class _PeakModel:
    """The logarithm of the peak memory as a sum of effects of levels, fitted to the peaks measured so far."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
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
