"""How long the runs of a search take, and which of them the time left allows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

from gpubench.tuning.combination import Combination
from gpubench.tuning.knowledge import TriedRun

LEAST_SHARE = 0.2  # of the time of the baseline that a run takes at least: no setting starts a process faster


@dataclass(frozen=True)
class Limit:
    """What a search may use from now on."""

    runs: int | None = None
    """Its number of runs in all, those made included; None without a limit."""
    seconds: float | None = None
    """The time left; None without a limit."""
    each: float = 1.0
    """The seconds that a run is expected to take while none has been made."""


class Durations:
    """The expected time of runs in seconds, with the start of their processes.

    A combination that has run takes the mean of its runs. Any other takes the time of the baseline, and in addition
    what each of its levels needed alone: a compiled model, for example, takes long to start.
    """

    def __init__(self, runs: Sequence[TriedRun], usual: float) -> None:
        times: dict[Combination, list[float]] = {}
        for run in runs:
            if run.result.seconds:
                times.setdefault(run.combination, []).append(run.result.seconds)
        self._means: Mapping[Combination, float] = {one: fmean(some) for one, some in times.items()}
        self._baseline = next((mean for one, mean in self._means.items() if not any(one)), usual)
        alone = {one: mean for one, mean in self._means.items() if sum(map(bool, one)) == 1}
        self._more = {
            (place, level): mean - self._baseline
            for one, mean in alone.items()
            for place, level in enumerate(one)
            if level
        }

    def expected(self, combination: Combination) -> float:
        if combination in self._means:
            return self._means[combination]
        more = sum(self._more.get((place, level), 0.0) for place, level in enumerate(combination) if level)
        return max(LEAST_SHARE * self._baseline, self._baseline + more)

    def fitting(self, runs: Sequence[Combination], seconds: float | None) -> list[Combination]:
        """Returns the first of these runs, as many as there is time for: all of them if `seconds` is None."""
        if seconds is None:
            return list(runs)
        ends = accumulate(map(self.expected, runs))
        return [one for one, end in zip(runs, ends, strict=True) if end <= seconds]
