"""Turns the marks that the hooks set into steps, without waiting for the device.

A mark holds the host's time and, in a process that uses CUDA, an event on the current stream. Phases nest: a forward
pass inside of an optimizer's closure counts as forward. Each update of an optimizer ends a part of the loop. Which
parts make a step is decided by `rhythm`.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any, Callable, Iterable, Iterator, NamedTuple

import torch

from .rhythm import Rhythm

OTHER, EVALUATION = "other", "evaluation"
LEFT = ""
"""Stands for a phase that ended before the phases inside of it."""
LONGEST_PERIOD = 16
"""The largest length of a sequence for which `period` looks."""
LARGEST = 1e60
"""The largest loss that is sent, so that the sum of many is finite. A larger one counts as not finite."""


class Mark(NamedTuple):
    """A point in time: `ns` by `time.monotonic_ns`, and on the device's timeline if there is an event."""

    ns: int
    event: Any = None


@dataclass
class Part:
    """The loop from one update of an optimizer to the next. The last mark is the first one of the next part."""

    marks: list[tuple[str, Mark]]
    optimizer: int = 0
    """The identity of the optimizer whose update ends the part."""
    losses: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """What the backward passes were called on, detached, each with its version at that time."""
    infinities: torch.Tensor | None = None
    """What a fused optimizer reads to decide whether it skips the update; None without a gradient scaler."""
    drawn: int = 0
    """The samples that came from a DataLoader, as far as it is decided that they train."""
    first: int = 0
    """The identity of the outermost module that is called first; 0 before that."""
    forwarded: int = 0
    """The samples that went through that module, or through another one that the update is of."""
    skipped: bool = False
    graphs: int = 0
    """The graphs that torch.compile had compiled in this process at the end of the part."""
    device_idle: bool | None = None
    """Whether the device was idle when the part began; None without a device."""


class Clock:
    """Sets marks, and reads the times between them."""

    def __init__(self) -> None:
        self._spare: list[Any] = []
        self._stream: Any = None

    def mark(self) -> Mark:
        if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return Mark(monotonic_ns())
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return Mark(monotonic_ns(), event)

    def release(self, mark: Mark) -> None:
        """Allows the event of a mark to be reused."""
        if mark.event is not None:
            self._spare.append(mark.event)

    @staticmethod
    def passed(mark: Mark) -> bool:
        return mark.event is None or bool(mark.event.query())

    @staticmethod
    def add_seconds(marks: list[tuple[str, Mark]], phases: dict[str, float]) -> None:
        """Adds the duration of each phase: on the device if all marks have an event, and otherwise on the host."""
        on_device = marks[0][1].event is not None and all(mark.event is not None for _, mark in marks)
        phase, start = marks[0]
        for following, end in marks[1:]:
            seconds = start.event.elapsed_time(end.event) / 1e3 if on_device else (end.ns - start.ns) / 1e9
            phases[phase] = phases.get(phase, 0.0) + seconds
            phase, start = following, end

    def read(self, values: list[torch.Tensor]) -> list[float | None]:
        """Returns the values of scalars that the device has computed; None for those that cannot be read.

        A value that is not finite is infinite.
        """
        if not any(value.is_cuda for value in values):
            return [_item(value) for value in values]
        self._stream = self._stream or torch.cuda.Stream(priority=-1)  # does not wait for later work
        with torch.cuda.stream(self._stream):
            return [_item(value) for value in values]


def _item(value: torch.Tensor) -> float | None:
    try:
        number = float(value.item())
    except RuntimeError:  # the output of a CUDA graph that has been replayed since
        return None
    return number if abs(number) <= LARGEST else math.inf


class Phase:
    """A context whose time is a phase. Unlike one made by `contextlib.contextmanager` it is made once for all steps."""

    def __init__(self, timeline: Timeline, name: str) -> None:
        self._timeline = timeline
        self._name = name

    def __enter__(self) -> None:
        self._timeline.enter(self._name)

    def __exit__(self, *error: object) -> None:
        self._timeline.leave()


class Timeline:
    """The marks of the program's loop so far, and the steps that they make."""

    def __init__(self, watch: Callable[[str], object] | None = None) -> None:
        """`watch` is called with the name of each phase that begins or goes on."""
        self._watch = watch
        self._clock = Clock()
        self._open: list[str] = []
        self._phases: dict[str, Phase] = {}
        self._parts: deque[Part] = deque()
        self.rhythm = Rhythm()
        self._part: Part | None = None
        self.base = OTHER
        self.began = 0
        """The host's time of the first mark in nanoseconds; 0 before it."""
        self.ended = 0
        """The number of parts so far."""
        self._dropped: list[tuple[Mark, Mark]] = []
        """The beginnings and the ends of the times that belong to no part."""

    @property
    def part(self) -> Part:
        """The current part. The first one begins with its first use."""
        if self._part is None:
            mark = self._clock.mark()
            self.began = mark.ns
            self._part = Part([(self.base, mark)])
        return self._part

    def is_in(self, phase: str) -> bool:
        """Returns whether a phase is running, also if it is not the innermost one."""
        return phase in self._open

    def phase(self, name: str) -> Phase:
        """Returns a context that measures what runs in it as a phase."""
        if name not in self._phases:
            self._phases[name] = Phase(self, name)
        return self._phases[name]

    def enter(self, phase: str) -> None:
        """Begins a phase, inside of the current one if there is one."""
        part = self._part or self.part  # the property alone would take longer, at every border of every step
        part.marks.append((phase, self._clock.mark()))
        self._open.append(phase)
        if self._watch:
            self._watch(phase)

    def leave(self) -> None:
        """Ends the phase that was entered last."""
        if self._open:
            self._open.pop()
        while self._open and self._open[-1] == LEFT:
            self._open.pop()
        phase = self._open[-1] if self._open else self.base
        (self._part or self.part).marks.append((phase, self._clock.mark()))
        if self._watch:
            self._watch(phase)

    def leave_at(self, depth: int, phase: str) -> None:
        """Ends the phase that was entered at this depth, if it is running.

        If phases inside of it still run, it ends after them, and takes no time in between.
        """
        if self._open[depth : depth + 1] != [phase]:
            return
        if len(self._open) == depth + 1:
            self.leave()
        else:
            self._open[depth] = LEFT

    @property
    def open(self) -> tuple[str, ...]:
        """The phases that are running, the outermost first."""
        return tuple(self._open)

    @property
    def depth(self) -> int:
        """The number of phases that are running, one inside of the other."""
        return len(self._open)

    def leave_all_but(self, depth: int) -> None:
        """Ends the innermost phases, so that at most `depth` are left."""
        while len(self._open) > depth:
            self.leave()

    def rebase(self, base: str) -> None:
        """Sets the phase of the time outside of all others."""
        if base != self.base:
            self.base = base
            if not self._open:
                self.part.marks.append((base, self._clock.mark()))

    def divide(self) -> int:
        """Sets a mark within the time outside of all phases. Returns the number of marks before it."""
        marks = self.part.marks
        if not self._open:
            marks.append((self.base, self._clock.mark()))
        return len(marks) - 1

    def end_part(self, optimizer: int, *, skipped: bool = False, alone: bool = True) -> None:
        """Ends the current part with an update of `optimizer`, or with its place where the scaler has skipped it.

        `alone` means that the program has made no other optimizer.
        """
        part, before = self.part, self.part.marks[-1][1]
        idle = self._clock.passed(before) if before.event is not None else None
        mark = self._clock.mark()
        part.optimizer, part.skipped = optimizer, skipped
        part.marks.append(("end", mark))
        self._parts.append(part)
        self.ended += 1
        self.rhythm.add(optimizer, alone=alone)
        self._part = Part([(self._open[-1] if self._open else self.base, mark)], device_idle=idle)

    def restart(self) -> None:
        """Begins the current part again, now: the time since the last part belongs to none."""
        mark = self._clock.mark()
        if self.ended:
            self._dropped.append((self.part.marks[0][1], mark))
        else:
            self.began = mark.ns
        self._part = Part([(self._open[-1] if self._open else self.base, mark)])

    @property
    def complete(self) -> int:
        """The number of complete steps so far, without the parts of which it is unknown whether they make some."""
        return self.rhythm.complete

    def held(self) -> list[float]:
        """Returns the host's times of the parts so far in seconds, while it is unknown which ones make a step."""
        return [(part.marks[-1][1].ns - part.marks[0][1].ns) / 1e9 for part in self._parts]

    def steps(self, *, ended: bool = False) -> Iterator[list[Part]]:
        """Yields the steps that the device has finished since the last call; `ended` after the last one."""
        if ended:
            self.rhythm.end()
        sizes = self.rhythm.steps
        while sizes and self._clock.passed(self._parts[sizes[0] - 1].marks[-1][1]):
            yield [self._parts.popleft() for _ in range(sizes.popleft())]

    def pending(self) -> Iterator[list[Part]]:
        """Yields the steps that the device has finished, and that the held updates would make if they were the last."""
        first = sum(self.rhythm.steps)
        for size in self.rhythm.pending():
            parts = [self._parts[place] for place in range(first, first + size)]
            if not self._clock.passed(parts[-1].marks[-1][1]):
                return
            yield parts
            first += size

    def keep(self, steps: int) -> None:
        """Forgets what follows the first `steps` steps, taken until it was known which parts make a step."""
        for _ in range(self.rhythm.keep(steps)):
            self._part = self._parts.pop()
            self.ended -= 1
        last = self.part.marks[0][1]
        self._dropped = [(start, end) for start, end in self._dropped if start.ns < last.ns]

    def measure(self, step: list[Part], *, held: bool = False) -> tuple[dict[str, float], float | None, bool]:
        """Returns (phases in seconds, loss, whether the update was skipped) of a step that the device has finished.

        The loss is the sum of what the backward passes were called on, and infinite if one of it is not finite. It is
        None if it is unknown: if no backward pass was seen in the step, or if its loss cannot be read any more. A step
        of updates that are still `held` can be measured again.
        """
        phases: dict[str, float] = {}
        for part in step:
            self._clock.add_seconds(part.marks, phases)
            for _, mark in (
                part.marks[:-1] if part.marks[0][1].event and not held else ()
            ):  # the last one is the first one of the next part
                self._clock.release(mark)
        losses = [loss for part in step for loss, _ in part.losses]
        infinities = [part.infinities for part in step if part.infinities is not None]
        values = self._clock.read(losses + infinities)
        known = [value for value in values[: len(losses)] if value is not None]
        unchanged = all(loss._version == version for part in step for loss, version in part.losses)
        loss = math.fsum(known) if losses and unchanged and len(known) == len(losses) else None
        return phases, loss, any(part.skipped for part in step) or any(values[len(losses) :])

    def end(self) -> float:
        """Waits for the device, and returns the time from the first part to the end of the last one in seconds."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now, last = self._clock.mark(), self.part.marks[0][1]
        dropped = sum(_seconds(start, end) for start, end in self._dropped)
        if now.event is None or last.event is None:
            return (last.ns - self.began) / 1e9 - dropped
        now.event.synchronize()
        return (now.ns - self.began) / 1e9 - float(last.event.elapsed_time(now.event)) / 1e3 - dropped


def _seconds(start: Mark, end: Mark) -> float:
    """Returns the time between two passed marks: on the device if both have an event, and otherwise on the host."""
    if start.event is None or end.event is None:
        return (end.ns - start.ns) / 1e9
    return float(start.event.elapsed_time(end.event)) / 1e3


def period(order: Iterable[int]) -> int:
    """Returns the length of the shortest sequence that `order` repeats; 1 without one of at most LONGEST_PERIOD.

    For example it is 2 for the updates of two optimizers in turns, and 6 for five of one and then one of the other.
    """
    sequence = list(order)
    for length in range(1, min(LONGEST_PERIOD, len(sequence) // 2) + 1):
        if all(one == other for one, other in zip(sequence, sequence[length:])):
            return length
    return 1


MOST_NAMES = 16
"""The largest number of regions that become phases."""
MOST_WAITING = 256
"""The largest number of names of which one region has been seen."""
LONGEST_NAME = 40
MEASURED = frozenset({
    "data_wait", "host_to_device", "forward", "backward", "exposed_communication", "optimizer", EVALUATION, "other",
})  # fmt: skip
"""The names of the other phases. A region with one of them is left to that phase."""


class Regions:
    """Makes phases of the program's own `torch.profiler.record_function` regions, in the thread that trains.

    A region splits the time outside of the phases that the probe finds itself: what runs in the forward or backward
    pass, a loader or an optimizer belongs to these, also inside of a region.
    """

    def __init__(self, timeline: Callable[[], Timeline | None]) -> None:
        """`timeline` returns the current timeline; None if the calling thread is not measured."""
        self._timeline = timeline
        self._names: dict[str, str] = {}
        """The phases by the names of their regions."""
        self._waiting: dict[str, int] = {}
        """The number of the part in which a name was seen first. A name that changes in every step is no phase."""
        self._open: dict[int, list[tuple[Timeline, int, str] | None]] = {}
        """For each region object that has been entered, where its phases are on the timeline; None for no phase."""

    def enter(self, call: Callable[..., Any], region: Any) -> Any:
        found = call(region)
        if sys._getframe(2).f_globals.get("__name__", "").partition(".")[0] not in _OWN:
            timeline = self._timeline()
            phase = self._phase(region, timeline) if timeline else None
            if timeline and phase:
                self._open.setdefault(id(region), []).append((timeline, timeline.depth, phase))
                timeline.enter(phase)
            elif id(region) in self._open:
                self._open[id(region)].append(None)
        return found

    def leave(self, call: Callable[..., Any], region: Any, *error: Any) -> Any:
        if self._open and (entered := self._open.get(id(region))):
            place = entered.pop()
            if not entered:
                del self._open[id(region)]
            if place:
                timeline, depth, phase = place
                timeline.leave_at(depth, phase)
        return call(region, *error)

    @staticmethod
    def cut(timeline: Timeline) -> None:
        """Ends the regions that run at the end of a part: one around the whole loop is no phase of its steps."""
        for depth, phase in reversed(list(enumerate(timeline.open))):
            if phase not in MEASURED:
                timeline.leave_at(depth, phase)

    def _phase(self, region: Any, timeline: Timeline) -> str | None:
        """Returns the phase of a region that begins now; None if its time belongs to another phase."""
        if timeline.base == EVALUATION or any(name in MEASURED for name in timeline.open):
            return None
        name = region.name
        if name not in self._names:
            if not isinstance(name, str) or len(self._names) >= MOST_NAMES or len(self._waiting) >= MOST_WAITING:
                return None
            phase = "".join(each if each.isprintable() else " " for each in name).strip()[:LONGEST_NAME]
            if not phase or phase in MEASURED or self._waiting.setdefault(name, timeline.ended) == timeline.ended:
                return None
            self._names[name] = phase
            del self._waiting[name]
        return self._names[name]


_OWN = ("torch", (__package__ or "").partition(".")[0])
"""The packages whose regions are none of the program."""
