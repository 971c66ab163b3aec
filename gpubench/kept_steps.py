"""The steps of one rank as its host keeps them to the end of the run: in columns, a fifth of the size of records."""

from array import array
from collections.abc import Iterator, Sequence
from itertools import compress
from typing import overload

from gpubench.events import Step

ABSENT = float("nan")  # of a phase, whose time is never that
FLAGS = {None: -1, False: 0, True: 1}
MEANINGS = {flag: meaning for meaning, flag in FLAGS.items()}


class KeptSteps(Sequence[Step]):
    """Takes steps and gives them back as they were; a slice is one too. About 80 bytes a step, and 8 for each phase."""

    def __init__(self) -> None:
        self._counts = [array("q") for _ in range(5)]  # repeat, rank, epoch, step, samples
        self._times = [array("d") for _ in range(4)]  # time, total, host, loss
        self._flags = [array("b") for _ in range(3)]  # whether it has a loss, starved, skipped
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
        """Seconds of each step."""
        return self._times[1]

    @property
    def phases(self) -> Sequence[str]:
        """The names of all that any step has."""
        return list(self._phases)

    def phase(self, name: str) -> list[float]:
        """Seconds of each step in a phase, 0 where it has none of that name."""
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
