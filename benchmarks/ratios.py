"""Ratios of what was measured side by side, with their intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import bars

from gpubench.runs.stats import student_interval


@dataclass(frozen=True)
class Ratio:
    """The geometric mean of paired ratios, with its 95 % interval, which is None for fewer than two ratios."""

    estimate: float
    interval: tuple[float, float] | None

    @classmethod
    def of(cls, logs: Sequence[float]) -> "Ratio":
        interval = student_interval(logs)
        return cls(math.exp(fmean(logs)), interval and (math.exp(interval[0]), math.exp(interval[1])))

    @classmethod
    def of_pairs(cls, pairs: Sequence[tuple[float, float]]) -> "Ratio":
        """Return the ratio of the first of each pair to the second."""
        return cls.of([math.log(one / other) for one, other in pairs])

    def __str__(self) -> str:
        interval = f" [{self.interval[0]:.4f}, {self.interval[1]:.4f}]" if self.interval else ""
        return f"{self.estimate:.4f}{interval}"

    def bar(self, what: str, margin: float) -> bars.Bar:
        return bars.near_one(what, self.estimate, self.interval, margin)
