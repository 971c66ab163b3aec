"""The steady part of a repeat: the steps that count, after the warm-up and over all ranks."""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean

import msgspec

from gpubench import stats
from gpubench.events import ModelBuilt, RepeatDone
from gpubench.kept_steps import KeptSteps


@dataclass
class Repeat:
    """What one repeat said."""

    number: int
    steps: dict[int, KeptSteps] = field(default_factory=lambda: defaultdict(KeptSteps))
    """By rank, in order."""
    built: ModelBuilt | None = None
    done: dict[int, RepeatDone] = field(default_factory=dict)
    yardstick: float | None = None
    """Seconds of a fixed piece of work beside the steps, on rank 0."""


class SteadyWindow(msgspec.Struct, frozen=True):
    """The steps of one repeat that count."""

    repeat: int
    first: int
    steps: int
    settled: bool
    """False if the warm-up may reach beyond half of the steps."""
    start: float
    end: float
    """Seconds since the epoch, on the timeline of the rank that speaks for the run."""


@dataclass(frozen=True)
class Measured:
    """One repeat's steady steps, ready to be averaged."""

    repeat: Repeat
    window: SteadyWindow
    ranks: dict[int, KeptSteps]
    speaker: int
    """The rank whose steady window took longest."""

    @property
    def steps(self) -> KeptSteps:
        return self.ranks[self.speaker]

    @cached_property
    def totals(self) -> list[float]:
        """Seconds of each step: the slowest rank's."""
        return _slowest(self.ranks)

    @cached_property
    def wall(self) -> float:
        return sum(self.steps.totals)

    @cached_property
    def samples(self) -> int:
        """Of all ranks; a step that the gradient scaler skipped did no work."""
        return sum(step.samples for steps in self.ranks.values() for step in steps if not step.skipped)

    @property
    def throughput(self) -> float:
        return self.samples / self.wall

    def phase(self, name: str) -> float:
        return fmean(self.steps.phase(name))


def measure(repeat: Repeat, warmup_steps: int) -> Measured | None:
    """The steady part of a repeat; None if it has none, as when it was interrupted in its warm-up."""
    length = min((len(steps) for steps in repeat.steps.values()), default=0)
    if length <= warmup_steps:
        return None
    unsettled = stats.warmup_length(_slowest(_cut(repeat.steps, 0, length)))
    first = max(warmup_steps, unsettled)
    ranks = _cut(repeat.steps, first, length)
    speaker = max(ranks, key=lambda rank: sum(ranks[rank].totals))
    steps = ranks[speaker]
    window = SteadyWindow(
        repeat=repeat.number,
        first=first,
        steps=length - first,
        settled=unsettled <= max(warmup_steps, length // 2 - 1),
        start=steps[0].time,
        end=steps[-1].time + steps[-1].total,
    )
    return Measured(repeat, window, ranks, speaker)


def _slowest(ranks: dict[int, KeptSteps]) -> list[float]:
    """Of each step, the seconds that the slowest rank took."""
    return [max(totals) for totals in zip(*(steps.totals for steps in ranks.values()), strict=True)]


def _cut(steps: dict[int, KeptSteps], first: int, last: int) -> dict[int, KeptSteps]:
    return {rank: own[first:last] for rank, own in sorted(steps.items())}
