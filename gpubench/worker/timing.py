"""Measures the times of steps and phases without synchronising the loop.

A mark is a point on the device's timeline: a CUDA event, or a value of `perf_counter_ns` on a CPU. The loop sets a mark
at the start of every phase. The times between marks are read when the device has passed them, possibly several steps
later. Each step ends where the next one begins, so the phases of a step sum to its time, and the steps sum to the
elapsed time.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from gpubench.channel import Activity
from gpubench.events import OTHER, Step

Mark = TypeVar("Mark")

HIGH = -1
"""The priority of CUDA streams for small kernels that should not wait for the program's own; see torch.cuda.Stream."""

EXPOSED_COMMUNICATION = "exposed_communication"
PHASES = (
    "data_wait",
    "host_to_device",
    "forward",
    "backward",
    EXPOSED_COMMUNICATION,
    "optimizer",
    OTHER,
)


class Clock(Protocol[Mark]):
    """The timeline of a device, whose marks are of type `Mark`."""

    def mark(self) -> Mark:
        """Sets a mark that the device passes when all work issued so far is done."""

    def passed(self, mark: Mark) -> bool:
        """Whether the device has passed `mark`, without waiting."""

    def idle_after(self, mark: Mark) -> bool | None:
        """Whether the device is idle if `mark` was the last work issued; None on a CPU."""

    def seconds(self, start: Mark, end: Mark) -> float:
        """The time between two passed marks in seconds."""

    def read(self, values: Sequence[Tensor]) -> list[float]:
        """The values of scalars that were computed before a passed mark, without waiting for later work."""

    def release(self, mark: Mark) -> None:
        """Allows `mark` to be reused. The caller must not use it again."""

    def synchronize(self) -> None:
        """Waits until all work issued so far is done."""


class CpuClock:
    """The timeline of a CPU, where work is done when its call returns. Marks are values of `perf_counter_ns`."""

    def mark(self) -> int:
        return time.perf_counter_ns()

    def passed(self, mark: int) -> bool:
        return True

    def idle_after(self, mark: int) -> bool | None:
        return None

    def seconds(self, start: int, end: int) -> float:
        return (end - start) / 1e9

    def read(self, values: Sequence[Tensor]) -> list[float]:
        return [float(value) for value in values]

    def release(self, mark: int) -> None:
        pass

    def synchronize(self) -> None:
        pass


class CudaClock:
    """The timeline of a CUDA device. Marks are events on the current stream, which are reused."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spare: list[torch.cuda.Event] = []
        # `read` launches conversion kernels and waits for them. At default priority they would not start before every
        # block of the program's current kernel is scheduled. Copies have no priority.
        self._read_stream = torch.cuda.Stream(device, priority=HIGH)

    def mark(self) -> torch.cuda.Event:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def passed(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())

    def idle_after(self, mark: torch.cuda.Event) -> bool | None:
        return self.passed(mark)

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1e3

    def read(self, values: Sequence[Tensor]) -> list[float]:
        if not values:
            return []
        with torch.cuda.stream(self._read_stream):  # on the current stream the copy would wait for later work
            return [float(value) for value in torch.stack([value.float() for value in values]).cpu().tolist()]

    def release(self, mark: torch.cuda.Event) -> None:
        self._spare.append(mark)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


def clock_of(device: torch.device) -> Clock[Any]:
    return CudaClock(device) if device.type == "cuda" else CpuClock()


@dataclass
class _UnfinishedStep(Generic[Mark]):
    """A step that the device has not finished yet. `starved` is whether the device was idle when the step began."""

    step: int
    marks: list[tuple[str, Mark]]
    issued_at: int
    starved: bool | None
    issue_time: float = 0.0
    epoch: int = 0
    samples: int = 0
    readings: list[Tensor] = field(default_factory=list)


class StepTimer(Generic[Mark]):
    """Collects the marks of a loop, and computes the times of the steps that the device has finished."""

    def __init__(self, clock: Clock[Mark], activity: Activity, repeat: int, rank: int) -> None:
        self._clock = clock
        self._activity = activity
        self._repeat = repeat
        self._rank = rank
        self._steps: deque[_UnfinishedStep[Mark]] = deque()
        self._current: _UnfinishedStep[Mark] | None = None
        self._time = 0.0

    def start(self, now: float) -> None:
        """Begins the loop at `now`, in seconds since the epoch. The device must be idle."""
        self._time = now

    def begin(self, step: int) -> None:
        """Ends the current step and begins `step`, with the phase `data_wait`."""
        starved = self._clock.idle_after(self._current.marks[-1][1]) if self._current else None
        mark = self._close()
        self._activity.step = step
        self._activity.doing = PHASES[0]
        self._current = _UnfinishedStep(step, [(PHASES[0], mark)], time.perf_counter_ns(), starved)

    def enter(self, phase: str) -> None:
        """Ends the current phase and begins `phase`. If a step enters a phase several times, their times are added."""
        assert self._current
        self._activity.doing = phase
        self._current.marks.append((phase, self._clock.mark()))

    def issued(self, epoch: int, samples: int, readings: list[Tensor]) -> None:
        """Ends the issuing of the step's work. `readings` are device scalars, which are read when they are computed."""
        assert self._current
        self.enter(OTHER)
        self._current.epoch = epoch
        self._current.samples = samples
        self._current.readings = readings
        self._current.issue_time = (time.perf_counter_ns() - self._current.issued_at) / 1e9

    def synchronize(self) -> None:
        self._clock.synchronize()

    def end_setup(self) -> None:
        """Ends the steps that may compile and tune: the run's time limit applies to every later step."""
        self._activity.patience_factor = 1.0

    def stop(self) -> None:
        """Ends the last step and waits for the device."""
        self._close()  # the mark is not released, because the last step needs it until it is collected
        self._activity.doing, self._activity.step = "closing", None
        self._clock.synchronize()

    def collect(self) -> Iterator[tuple[Step, list[float]]]:
        """Yields the steps that the device has finished since the last call, each with its readings."""
        finished = []
        while self._steps and self._clock.passed(self._steps[0].marks[-1][1]):
            finished.append(self._steps.popleft())
        if not finished:
            return
        values = iter(self._clock.read([value for step in finished for value in step.readings]))
        for step in finished:
            yield self._record(step), [next(values) for _ in step.readings]

    def _close(self) -> Mark:
        mark = self._clock.mark()
        if self._current:
            self._current.marks.append(("end", mark))
            self._steps.append(self._current)
            self._current = None
        return mark

    def _record(self, step: _UnfinishedStep[Mark]) -> Step:
        phases: dict[str, float] = {}
        for (phase, start), (_, end) in zip(step.marks, step.marks[1:], strict=False):
            phases[phase] = phases.get(phase, 0.0) + self._clock.seconds(start, end)
        for _, mark in step.marks[:-1]:  # the last mark is the first mark of the next step
            self._clock.release(mark)
        total = sum(phases.values())
        began, self._time = self._time, self._time + total
        return Step(
            repeat=self._repeat,
            rank=self._rank,
            epoch=step.epoch,
            step=step.step,
            time=began,
            total=total,
            phases=phases,
            host=step.issue_time,
            starved=step.starved,
            samples=step.samples,
        )
