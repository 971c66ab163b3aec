"""Turns the marks that the hooks set into steps, without waiting for the device.

Marks are those of `device`. Phases nest: a forward pass inside of an optimizer's closure counts as forward. Each update
of an optimizer ends a part of the loop. Which parts make a step is decided by `rhythm`.
"""

from __future__ import annotations

import functools
import math
import sys
from collections import deque
from typing import Any, Callable, Iterable, Iterator

import torch

from .cost import cost
from .device import Loss, Point, Timing, ns_of
from .rhythm import Rhythm

OTHER, EVALUATION = "other", "evaluation"
OF_UPDATES = frozenset({"backward", "optimizer", "end"})
"""The phases that evaluation does not have."""
LEFT = ""
"""Stands for a phase that ended before the phases inside of it."""
LONGEST_PERIOD = 16
"""The largest length of a sequence for which `period` looks."""


class LoopPart:
    """The loop from one update of an optimizer to the next. The last mark is the first one of the next part.

    The attributes of the class are their values at first, because each step makes a part, and few steps change many.
    """

    optimizer = 0
    """The identity of the optimizer whose update ends the part."""
    infinities: torch.Tensor | None = None
    """What a fused optimizer reads to decide whether it skips the update; None without a gradient scaler."""
    drawn = 0
    """The samples that came from a DataLoader, as far as it is decided that they train."""
    first = 0
    """The identity of the outermost module that is called first; 0 before that."""
    forwarded = 0
    """The samples that went through that module, or through another one that the update is of."""
    skipped = False
    evaluates = False
    """Whether any of its time may be evaluation."""
    graphs = 0
    """The graphs that torch.compile had compiled in this process at the end of the part."""
    replay: tuple[Any, int] | None = None
    """The graph whose replay has computed the losses, with the number of its replays: its last one overwrites them."""
    token: int | None = None
    """The number of the host's newest token when the part was the current one; None if there was no newer one."""
    updates = 1
    """The number of updates that a graph has made at the end of the part, each of which has a share of its time."""
    undrawn = False
    """Whether its samples are not those of the DataLoaders, which are not drawn from any more."""
    passes: list[tuple[int, int, int, int]] | None = None
    """The marks, the samples drawn and forwarded, and the losses at the end of each backward pass of the first part."""
    whole: LoopPart | None = None
    """The part that the update of this one has a share of."""
    phases: dict[str, int]
    """The time of the phases in nanoseconds, where other updates have a share of it."""

    def __init__(self, marks: list[tuple[str, Point]], device_idle: bool | None = None) -> None:
        self.marks = marks
        self.losses: list[Loss] = []
        """What the backward passes were called on."""
        self.device_idle = device_idle
        """Whether the device was idle when the part began; None without a device."""

    @property
    def began(self) -> int:
        """When it began, by `time.monotonic_ns`."""
        return ns_of(self.marks[0][1])

    @property
    def ended(self) -> int:
        """When it ended, by `time.monotonic_ns`."""
        return ns_of(self.marks[-1][1])

    def evaluate(self, began: int, until: int) -> None:
        """Makes evaluation of the time between two marks, without that of an update in it."""
        self.evaluates = True
        self._rename(began, until, lambda phase: phase not in OF_UPDATES, EVALUATION)

    def evaluate_not(self, began: int, until: int) -> None:
        """Makes no evaluation of the time between two marks."""
        self._rename(began, until, lambda phase: phase == EVALUATION, OTHER)

    def _rename(self, began: int, until: int, which: Callable[[str], bool], name: str) -> None:
        for number in range(began, min(until, len(self.marks))):
            phase, mark = self.marks[number]
            if which(phase):
                self.marks[number] = name, mark


class PhaseContext:
    """A context whose time is a phase. Unlike one made by `contextlib.contextmanager` it is made once for all steps."""

    def __init__(self, timeline: Timeline, name: str) -> None:
        self._timeline = timeline
        self._name = name

    def __enter__(self) -> None:
        self._timeline.enter(self._name)

    def __exit__(self, *error: object) -> None:
        self._timeline.leave()


class FirstPart:
    """Begins the first part of a timeline with its first use. From then on the attribute of the instance is found."""

    def __get__(self, timeline: Timeline, _: type) -> LoopPart:
        mark = timeline.timing.mark()
        timeline.began = ns_of(mark)
        timeline.part = part = timeline._new_part(mark)
        return part


class Timeline:
    """The marks of the program's loop so far, and the steps that they make."""

    part: LoopPart = FirstPart()  # type: ignore[assignment]
    """The current part."""

    def __init__(self) -> None:
        self.timing = Timing()
        self.open: list[str] = []
        """The phases that are running, the outermost first."""
        self._contexts: dict[str, PhaseContext] = {}
        self._parts: deque[LoopPart] = deque()
        self.rhythm = Rhythm()
        self.base = OTHER
        self.began = 0
        """The CPU's time of the first mark in nanoseconds; 0 before it."""
        self.ended = 0
        """The number of parts so far."""
        self.partial_first = False
        """Whether the first part begins with its backward pass: the modules that are called are not known before it."""
        self._dropped: list[tuple[Point, Point]] = []
        """The beginnings and the ends of the times that belong to no part."""

    @property
    def current(self) -> str:
        """The phase that is running. It can be asked for in another thread, which may be told of the one before."""
        return (self.open[-1:] or [self.base])[0]

    def phase(self, name: str) -> PhaseContext:
        """Returns a context that measures what runs in it as a phase."""
        if name not in self._contexts:
            self._contexts[name] = PhaseContext(self, name)
        return self._contexts[name]

    def enter(self, phase: str, *, on_host: bool = False) -> None:
        """Begins a phase inside of the current one. One that is `on_host` issues nothing to a device."""
        timing = self.timing
        self.part.marks.append((phase, timing.now() if on_host else timing.mark()))
        self.open.append(phase)

    def enter_after(self, phase: str) -> None:
        """Begins a phase as `enter` does, right after another one: see `Timing.mark_after`."""
        marks = self.part.marks
        marks.append((phase, self.timing.mark_after(marks[-1][1] if marks else 0)))  # a capture begins without one
        self.open.append(phase)

    def leave(self, *, on_host: bool = False) -> None:
        """Ends the phase that was entered last."""
        running, timing = self.open, self.timing
        if running:
            running.pop()
        phase = running[-1] if running else self.base
        if phase == LEFT:
            phase = self._end_left()
        self.part.marks.append((phase, timing.now() if on_host else timing.mark()))

    def _end_left(self) -> str:
        """Ends the innermost phases that are left already, and returns the one that runs then."""
        while self.open and self.open[-1] == LEFT:
            self.open.pop()
        return self.current

    def leave_at(self, depth: int, phase: str) -> None:
        """Ends the phase that was entered at this depth, if it is running.

        If phases inside of it still run, it ends after them, and takes no time in between.
        """
        if self.open[depth : depth + 1] != [phase]:
            return
        if len(self.open) == depth + 1:
            self.leave()
        else:
            self.open[depth] = LEFT

    def leave_all_but(self, depth: int) -> None:
        """Ends the innermost phases, so that at most `depth` are left."""
        while len(self.open) > depth:
            self.leave()

    def rebase(self, base: str) -> None:
        """Sets the phase of the time outside of all others."""
        if base != self.base:
            self.base = base
            self.part.evaluates = self.part.evaluates or base == EVALUATION
            if not self.open:
                self.part.marks.append((base, self.timing.mark()))

    def divide(self) -> int:
        """Sets a mark within the time outside of all phases. Returns the number of marks before it."""
        marks = self.part.marks
        if not self.open:
            marks.append((self.base, self.timing.mark()))
        return len(marks) - 1

    def end_part(self, optimizer: int, *, skipped: bool = False, alone: bool = True) -> None:
        """Ends the current part at its last mark: with an update of `optimizer`, or one that the scaler has skipped.

        `alone` means that the program has made no other optimizer.
        """
        part, timing = self.part, self.timing
        if not self.ended:
            phases = (name for name, _ in part.marks if name not in (OTHER, EVALUATION))
            self.partial_first = next(phases, "") == "backward"
        mark = part.marks[-1][1]
        idle = None if type(mark) is int else timing.passed([mark])
        timing.end_part()
        part.optimizer, part.skipped = optimizer, skipped
        if len(part.marks) == 1:
            part.marks.append(("end", mark))
        self._parts.append(part)
        self.ended += 1
        self.rhythm.add(optimizer, alone=alone)
        self.part = self._new_part(mark, idle)

    def _new_part(self, mark: Point, idle: bool | None = None) -> LoopPart:
        part = LoopPart([(self.open[-1] if self.open else self.base, mark)], idle)
        part.evaluates = self.base == EVALUATION
        return part

    def end_pass(self) -> None:
        """Notes a backward pass of the first part, which may turn out to be all of a step."""
        part = self.part
        if not self.ended:
            now = len(part.marks), part.drawn, part.forwarded, len(part.losses)
            part.passes = [*(part.passes or ()), now]

    def divide_first(self, passes: int) -> None:
        """Makes parts of so many backward passes each of the first part, in which no update was known as such.

        It stays as it is if they do not make whole parts.
        """
        whole = self._parts[0] if len(self._parts) == self.ended else None
        if whole is None or not whole.passes or not passes or len(whole.passes) % passes:
            return
        parts: list[LoopPart] = []
        began = 0, 0, 0, 0
        ended = len(whole.marks), whole.drawn, whole.forwarded, len(whole.losses)
        for until in [*whole.passes[passes - 1 :: passes][:-1], ended]:
            part = LoopPart(whole.marks[max(0, began[0] - 1) : until[0]], None if parts else whole.device_idle)
            part.optimizer, part.evaluates, part.graphs = whole.optimizer, whole.evaluates, whole.graphs
            part.drawn, part.forwarded = until[1] - began[1], until[2] - began[2]
            part.losses = whole.losses[began[3] : until[3]]
            parts.append(part)
            began = until
        self._parts.popleft()
        self._parts.extendleft(reversed(parts))
        self.ended += len(parts) - 1
        for part in parts[1:]:
            self.rhythm.add(part.optimizer)

    def restart(self) -> None:
        """Begins the current part again, now: the time since the last part belongs to none."""
        mark = self.timing.mark()
        if self.ended:
            self._dropped.append((self.part.marks[0][1], mark))
        else:
            self.began = ns_of(mark)
        self.part = self._new_part(mark)

    def replace(self, part: LoopPart) -> LoopPart:
        """Makes another part the current one, without a mark. Returns the one that was."""
        before, self.part = self.part, part
        return before

    @property
    def complete(self) -> int:
        """The number of complete steps so far, without the parts of which it is unknown whether they make some."""
        return self.rhythm.complete

    def held(self) -> list[float]:
        """Returns the CPU times of the parts so far in seconds, while it is unknown which ones make a step."""
        return [(part.ended - part.began) / 1e9 for part in self._parts]

    def steps(self, *, ended: bool = False) -> Iterator[list[LoopPart]]:
        """Yields the steps that the device has finished since the last call; `ended` after the last one."""
        if ended:
            self.rhythm.end()
        sizes = self.rhythm.steps
        known = not self.timing.has_marks  # the CPU's clock has passed all of them
        while sizes and (known or self._passed([self._parts[place] for place in range(sizes[0])])):
            yield [self._parts.popleft() for _ in range(sizes.popleft())]

    def pending(self) -> Iterator[list[LoopPart]]:
        """Yields the finished steps that the held updates would make if they were the last ones."""
        first = sum(self.rhythm.steps)
        for size in self.rhythm.pending():
            parts = [self._parts[place] for place in range(first, first + size)]
            if not self._passed(parts):
                return
            yield parts
            first += size

    def _passed(self, parts: Iterable[LoopPart]) -> bool:
        return self.timing.passed(mark for part in parts for _, mark in part.marks)

    def keep(self, steps: int) -> None:
        """Forgets what follows the first `steps` steps, taken until it was known which parts make a step."""
        for _ in range(self.rhythm.keep(steps)):
            self.part = self._parts.pop()
            self.ended -= 1
        last = self.part.began
        self._dropped = [(start, end) for start, end in self._dropped if ns_of(start) < last]

    def measure(self, step: list[LoopPart], *, held: bool = False) -> tuple[dict[str, int], float | None, bool]:
        """Returns (phases in nanoseconds, loss, whether the update was skipped) of a step that the device has finished.

        The loss is the sum of what the backward passes were called on, and infinite if one of it is not finite. It is
        None if it is unknown: if no backward pass was seen in the step, or if its loss cannot be read any more. A step
        of updates that are still `held` can be measured again.
        """
        timing = self.timing
        phases: dict[str, int] = {}
        known: list[float | None] = []
        losses, infinities, unchanged, skipped = [], [], True, False
        for part in step:
            shares = part.whole is not None or part.updates > 1
            place = self._share(part, phases) if shares else timing.add(part.marks, phases)
            if not held:
                timing.measured[place] += 1
                if place != timing.place:
                    timing.place, timing.is_new = place, True
                if timing.has_marks:
                    self._free(part.marks)
            for loss in part.losses:
                if isinstance(loss, tuple):
                    losses.append(loss[0])
                    unchanged = unchanged and loss[0]._version == loss[1]
                else:
                    known.append(loss)
            if part.replay and part.losses:
                unchanged = unchanged and part.replay[0].replays == part.replay[1]
            if part.infinities is not None:
                infinities.append(part.infinities)
            skipped = skipped or part.skipped
        if losses or infinities:
            values = timing.read(losses + infinities)
            known += values[: len(losses)]
            skipped = skipped or any(values[len(losses) :])
        total = math.fsum(known) if known and unchanged and None not in known else None  # type: ignore[arg-type]
        return phases, total, skipped

    def _free(self, marks: list[tuple[str, Point]]) -> None:
        """Allows the events of marks to be reused, but for the last one, which is the first one of the next part."""
        for _, mark in marks:
            if mark is not marks[-1][1]:
                self.timing.release(mark)

    def _share(self, part: LoopPart, phases: dict[str, int]) -> int:
        """Adds the time of a part whose end is that of several updates, or one of these: the share of one of them."""
        part.phases = {}
        place = self.timing.add(part.marks, part.phases)
        for source in (part, part.whole) if part.whole else (part,):
            for phase, ns in source.phases.items():
                phases[phase] = phases.get(phase, 0) + round(ns / source.updates)
        return place

    def end(self) -> float:
        """Waits for the device, and returns the time from the first step to the end of the last one in seconds.

        The updates of a turn that is not complete are forgotten, as they are no step.
        """
        self.rhythm.end()
        self.keep(self.complete)
        timing = self.timing
        now, last = timing.mark(), self.part.marks[0][1]
        timing.wait([*(mark for part in (*self._parts, self.part) for _, mark in part.marks), now])
        dropped = sum(timing.between(start, end) for start, end in self._dropped)
        ended = self.part.began
        if timing.is_on_device(last, now):
            ended = timing.now() - timing.between(last, now)
        return (ended - self.began - dropped) / 1e9


class WatchedTimeline(Timeline):
    """A timeline that tells which phase runs."""

    def __init__(self, watch: Callable[[str], object]) -> None:
        """`watch` is called with the name of each phase that begins or goes on."""
        super().__init__()
        self._watch = watch

    def enter(self, phase: str, *, on_host: bool = False) -> None:
        super().enter(phase, on_host=on_host)
        self._watch(phase)

    def enter_after(self, phase: str) -> None:
        super().enter_after(phase)
        self._watch(phase)

    def leave(self, *, on_host: bool = False) -> None:
        super().leave(on_host=on_host)
        self._watch(self.current)


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
    "graph_capture", "graph_replay",
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
        """The number of the part in which a name was seen first. A name that changes in every step is not a phase."""
        self._open: dict[int, list[tuple[Timeline, int, str] | None]] = {}
        """For each region object that has been entered, where its phases are on the timeline; None for no phase."""

    def install(self) -> None:
        """Finds the regions of the program. Torch's own, of which there are several a step, take little time."""
        region_class: Any = torch.autograd.profiler.record_function
        begin, end, opened = region_class.__enter__, region_class.__exit__, self._open
        own: set[Any] = set()

        @functools.wraps(begin)
        def enter(region: Any) -> Any:
            found = begin(region)
            entered = cost.is_timed and cost.enter()
            try:
                name = sys._getframe(1).f_globals.get("__name__")
                if name not in own:
                    if str(name).startswith(_OWN):
                        own.add(name)
                    else:
                        self._enter(region)
            finally:
                if entered:
                    cost.leave()
            return found

        @functools.wraps(end)
        def leave(region: Any, *error: Any) -> Any:
            if opened:
                entered = cost.is_timed and cost.enter()
                try:
                    self._leave(region)
                finally:
                    if entered:
                        cost.leave()
            return end(region, *error)

        region_class.__enter__, region_class.__exit__ = enter, leave

    def _enter(self, region: Any) -> None:
        timeline = self._timeline()
        phase = self._phase(region, timeline) if timeline else None
        if timeline and phase:
            self._open.setdefault(id(region), []).append((timeline, len(timeline.open), phase))
            timeline.enter(phase)
        elif id(region) in self._open:
            self._open[id(region)].append(None)

    def _leave(self, region: Any) -> None:
        if entered := self._open.get(id(region)):
            place = entered.pop()
            if not entered:
                del self._open[id(region)]
            if place:
                timeline, depth, phase = place
                timeline.leave_at(depth, phase)

    @staticmethod
    def cut(timeline: Timeline) -> None:
        """Ends the regions that run at the end of a part: one around the whole loop is not a phase of its steps."""
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


_OWN = ("torch.", f"{(__package__ or '').partition('.')[0]}.")
"""How the names of modules begin whose regions are none of the program."""
