"""The steps of a repeat: stored in columns during the repeat, and reduced to the steady part afterwards."""

from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from statistics import fmean
from typing import overload

import msgspec

from gpubench.events import ModelBuilt, RepeatDone, Step
from gpubench.runs import stats

ABSENT = float("nan")  # marks a phase that a step does not have
FLAGS = {None: -1, False: 0, True: 1}
MEANINGS = {flag: meaning for meaning, flag in FLAGS.items()}


class KeptSteps(Sequence[Step]):
    """A sequence of steps stored in columns, with about 80 bytes per step and 8 per phase. A slice is one too."""

    def __init__(self) -> None:
        self._counts = [array("q") for _ in range(5)]  # repeat, rank, epoch, step, samples
        self._times = [array("d") for _ in range(4)]  # time, total, host, loss
        self._flags = [array("b") for _ in range(3)]  # whether it has a loss; `starved`; `skipped`
        self._phases: dict[str, array[float]] = {}

    def append(self, step: Step) -> None:
        known = len(self)
        for name in step.phases:  # in their order
            if name not in self._phases:
                self._phases[name] = array("d", [ABSENT]) * known
        for name, phase in self._phases.items():
            phase.append(step.phases.get(name, ABSENT))
        for column, count in zip(
            self._counts, (step.repeat, step.rank, step.epoch, step.step, step.samples), strict=True
        ):
            column.append(count)
        loss = ABSENT if step.loss is None else step.loss
        for times, seconds in zip(self._times, (step.time, step.total, step.host, loss), strict=True):
            times.append(seconds)
        flags = (step.loss is not None, FLAGS[step.starved], step.skipped)
        for marks, flag in zip(self._flags, flags, strict=True):
            marks.append(flag)

    @property
    def totals(self) -> Sequence[float]:
        """The time of each step, in seconds."""
        return self._times[1]

    @property
    def phases(self) -> Sequence[str]:
        """Returns the names of all phases that any step has."""
        return list(self._phases)

    def phase(self, name: str) -> list[float]:
        """Returns the time of the phase in each step, in seconds; 0 if the step does not have the phase."""
        return [seconds if seconds == seconds else 0.0 for seconds in self._phases.get(name, [0.0] * len(self))]

    def __len__(self) -> int:
        return len(self._times[0])

    def __iter__(self) -> Iterator[Step]:
        names = tuple(self._phases)
        columns = (zip(*group, strict=True) for group in (self._counts, self._times, self._flags))
        rows = zip(*self._phases.values(), strict=True) if names else iter([()] * len(self))
        for counts, times, flags, phases in zip(*columns, rows, strict=True):
            repeat, rank, epoch, number, samples = counts
            time, total, host, loss = times
            has_loss, starved, skipped = flags
            known = [seconds == seconds for seconds in phases]
            named = dict(compress(zip(names, phases, strict=True), known))
            yield Step(
                repeat,
                rank,
                epoch,
                number,
                time,
                total,
                named,
                host,
                samples,
                loss if has_loss else None,
                MEANINGS[starved],
                bool(skipped),
            )

    @overload
    def __getitem__(self, place: int) -> Step: ...

    @overload
    def __getitem__(self, place: slice) -> "KeptSteps": ...

    def __getitem__(self, place: int | slice) -> "Step | KeptSteps":
        if isinstance(place, int):
            place = range(len(self))[place]
            return next(iter(self[place : place + 1]))
        cut = KeptSteps()
        cut._counts = [column[place] for column in self._counts]
        cut._times = [column[place] for column in self._times]
        cut._flags = [column[place] for column in self._flags]
        cut._phases = {name: phase[place] for name, phase in self._phases.items()}
        return cut


@dataclass
class Repeat:
    """The events of one repeat."""

    number: int
    steps: dict[int, KeptSteps] = field(default_factory=lambda: defaultdict(KeptSteps))
    """The steps of each rank, in order."""
    built: ModelBuilt | None = None
    done: dict[int, RepeatDone] = field(default_factory=dict)
    reference_time: float | None = None
    """The time of the reference workload on rank 0, in seconds. Its metric is persisted as `yardstick_time`."""


class SteadyWindow(msgspec.Struct, frozen=True):
    """The steady steps of one repeat, which the metrics are computed from."""

    repeat: int
    first: int
    steps: int
    settled: bool
    """False if the warm-up may reach beyond half of the steps."""
    start: float
    end: float
    """The end in seconds since the epoch, on the timeline of the rank with the longest window."""


@dataclass(frozen=True)
class Measured:
    """The steady steps of one repeat."""

    repeat: Repeat
    window: SteadyWindow
    ranks: dict[int, KeptSteps]
    slowest_rank: int
    """The rank whose steady window took the most time. Its phases and step times represent the run."""

    @property
    def steps(self) -> KeptSteps:
        return self.ranks[self.slowest_rank]

    @cached_property
    def totals(self) -> list[float]:
        """The time of each step on the rank that was slowest in it, in seconds."""
        return _slowest(self.ranks)

    @cached_property
    def wall(self) -> float:
        return sum(self.steps.totals)

    @cached_property
    def samples(self) -> int:
        """The number of samples of all ranks. A step that the gradient scaler skipped counts no samples."""
        return sum(step.samples for steps in self.ranks.values() for step in steps if not step.skipped)

    @property
    def throughput(self) -> float:
        return self.samples / self.wall

    def phase(self, name: str) -> float:
        return fmean(self.steps.phase(name))


def measure(repeat: Repeat, warmup_steps: int) -> Measured | None:
    """Returns the steady part of a repeat; None if there is none, for example after an interruption in the warm-up."""
    length = min((len(steps) for steps in repeat.steps.values()), default=0)
    if length <= warmup_steps:
        return None
    unsettled = stats.warmup_length(_slowest(_cut(repeat.steps, 0, length)))
    first = max(warmup_steps, unsettled)
    ranks = _cut(repeat.steps, first, length)
    slowest_rank = max(ranks, key=lambda rank: sum(ranks[rank].totals))
    steps = ranks[slowest_rank]
    window = SteadyWindow(
        repeat=repeat.number,
        first=first,
        steps=length - first,
        settled=unsettled <= max(warmup_steps, length // 2 - 1),
        start=steps[0].time,
        end=steps[-1].time + steps[-1].total,
    )
    return Measured(repeat, window, ranks, slowest_rank)


def _slowest(ranks: dict[int, KeptSteps]) -> list[float]:
    """Returns the time of each step on the rank that was slowest in it, in seconds."""
    return [max(totals) for totals in zip(*(steps.totals for steps in ranks.values()), strict=True)]


def _cut(steps: dict[int, KeptSteps], first: int, last: int) -> dict[int, KeptSteps]:
    return {rank: own[first:last] for rank, own in sorted(steps.items())}
