"""Asks CUDA devices for marks on their timelines, the times between marks, values, counters and peaks.

No other module of the probe asks a device, except for the uuids in `gpus`. No error of a query reaches the program:
`ask` catches it and keeps its text in UNANSWERED, for the warnings of the run. Times are then those of the CPU's clock.

The timeline is that of the device that computes the results: the losses of a training, or the outputs of an inference.
A result depends on what all devices compute for it, so that this device waits for the others.
"""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from typing import Any, Callable, Iterable, NamedTuple, Sequence, Tuple, TypeVar, Union
from weakref import ref

import torch

from .clock import unreplaced_clock

Answer = TypeVar("Answer")

LARGEST = 1e60
"""The largest value that is sent, so that the sum of many is finite. A larger one counts as not finite."""
MOST_AWAY = 16
"""The parts of the loop without a result on the timeline's device after which another one takes its place. Optimizers
that take turns have their results on several devices, each of which waits for the others."""
RECORD, STATE, TIME, WAIT = "the record of an event", "the state of an event", "the time between events", "an event"
"""The queries that the timeline of a device depends on."""
AT_ONCE = 50_000
"""The nanoseconds of the CPU in which a program issues next to nothing to a device, such as a kernel or two."""
EXACT = 1e-9
"""The seconds by which the times of phases may exceed the whole because of rounding."""
ON_CPU = -1
"""Stands for the CPU's clock in place of a device."""
OVERWRITTEN = "overwritten"
"""A word of the error for the output of a CUDA graph that was replayed since, which is not a failure of a query."""

UNANSWERED: dict[str, str] = {}
"""The errors of this process by the query that has raised each."""


def ask(query: str, call: Callable[..., Answer], *args: Any) -> Answer | None:
    """Returns what a call of torch returns; None if it raises an error, which the program never sees."""
    try:
        return call(*args)
    except (AssertionError, RuntimeError, ValueError) as error:  # what torch raises; a signal's handler raises others
        UNANSWERED.setdefault(query, (str(error).strip() or type(error).__name__).splitlines()[0][:200])
        return None


class Mark(NamedTuple):
    """A point on a device's timeline, which is passed when all work issued before it on its stream is done."""

    ns: int
    """When it was set, by `time.monotonic_ns`."""
    event: Any = None
    place: tuple[int, int] = (0, 0)
    """The device and the stream."""


Point = Union[int, Mark]
"""A mark, or the value of `time.monotonic_ns` where the time is that of the CPU."""


Loss = Union[float, None, Tuple[torch.Tensor, int]]
"""What a CPU has computed, infinite if it is not finite and None if it cannot be read; or what a device may still
compute: the tensor, detached, and its version."""


def ns_of(point: Point) -> int:
    """Returns when a mark was set, by `time.monotonic_ns`."""
    return point.ns if isinstance(point, Mark) else point


class Timing:
    """The marks of a program, on the timeline of the device that computes its results."""

    captures = 0
    """The CUDA graphs that this process is capturing. Meanwhile no event is queried, which would end the capture."""
    now = staticmethod(unreplaced_clock())
    """The CPU's clock, also where the program, or a library for its tests, has replaced that of the module `time`."""

    def __init__(self) -> None:
        self.mark: Callable[[], Point] = self._mark
        """Returns a mark of now. On the CPU's clock it is the bare clock, because it is called many times a step."""
        self._index: int | None = None
        """The device of the timeline; None for the CPU, or for the current device while it is unknown."""
        self._known = False
        """Whether a result has told the device."""
        self._next: int | None = None
        """The device of the last result, if it is another one; `_away` is the number of parts since."""
        self._away = 0
        self._expected: int | None = None
        """The device of parameters that came after the first result; None once another result has come."""
        self._lost = False
        """Whether a query has failed, so that the CPU's clock is used from then on."""
        self.has_marks = False
        """Whether there are any marks but those of the CPU's clock, whose times need no query."""
        self._spare: dict[int, list[Any]] = {}
        self._streams: dict[tuple[int, int, int], Any] = {}
        """The streams so far by what identifies them."""
        self._readers: dict[int, Reader] = {}
        self.measured: Counter[int] = Counter()
        """The measured parts by the device whose timeline they are on; ON_CPU for the CPU's clock."""
        self.place: int | None = None
        """Where the last of them is, in the same way; None before the first one."""
        self.is_new = False
        """Whether that has changed since it was asked last, or the times of the phases have not made up the whole."""

    # Which timeline it is.

    def expect(self, tensors: Iterable[torch.Tensor]) -> None:
        """Notes the parameters of an optimizer or a module: the device of the last one holds until a result is known.

        The layers of a model over several devices are used in the order of their parameters, and the last ones compute
        its result. Later ones are those of a program that moves to another device, if its next result is there.
        """
        index = None
        for each in tensors:
            index = each.device.index if each.is_cuda else index
        if not self._known:
            self._index = self._index if index is None else index
        elif index is not None:
            self._expected = index

    def result(self, device: torch.device | None) -> None:
        """Notes the device of a result; None for the CPU, where it may be a copy of one on the device that is known."""
        index = device.index if device is not None and device.type == "cuda" else None
        if index == self._index and self._known:
            self._away, self._next = 0, None
        elif not self._known:
            self._known, self._index = True, self._index if index is None else index
            self._choose()
        elif index is not None:
            self._next = index
            if index == self._expected:
                self._away = MOST_AWAY
        self._expected = None

    def end_part(self) -> None:
        """Notes the end of a part of the loop, before its last mark."""
        if self._next is not None:
            self._away += 1
            if self._away > MOST_AWAY:
                self._index, self._next, self._away = self._next, None, 0
                self._choose()

    def _choose(self) -> None:
        on_cpu = self._lost or (self._known and self._index is None)
        self.mark = self.now if on_cpu else self._mark

    @property
    def is_on_cpu(self) -> bool:
        """Whether the marks are those of the CPU's clock, as a result has shown."""
        return self._known and self._index is None and self._next is None and not self.has_marks

    def _lose(self) -> None:
        """Leaves the timeline of the device after a query that has failed."""
        self._lost = True
        self._choose()

    # Marks.

    def _mark(self) -> Point:
        """Returns a mark on the current stream of the timeline's device, or of the current device until it is known."""
        recorded = ask(RECORD, self._record)
        if recorded:
            self.has_marks = True
            return Mark(self.now(), *recorded)
        if RECORD in UNANSWERED:
            self._lose()
        return self.now()

    def mark_after(self, last: Point) -> Point:
        """Returns a mark of now, the current phase having begun with the mark `last`.

        If that was just now, next to nothing was issued to the device in between, and the CPU's clock tells the border
        well enough: it divides the time between two marks of the device.
        """
        if type(last) is int:
            return self.mark()
        now = self.now()
        return now if now - ns_of(last) < AT_ONCE else self.mark()

    def _record(self) -> tuple[Any, tuple[int, int]] | None:
        """Returns an event and its place; None without a device, and in a capture, whose graph it would join."""
        if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return None
        index = torch.cuda.current_device() if self._index is None else self._index
        stream = self._stream(index)
        spare = self._spare.get(index)
        event = spare.pop() if spare else torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event, (index, stream.cuda_stream)

    def _stream(self, index: int) -> Any:
        """Returns the current stream of a device. To make the object of one takes as long as to record an event."""
        current = getattr(torch._C, "_cuda_getCurrentStream", None)  # a function of torch's own
        if current is None:
            return torch.cuda.current_stream(index)
        identity = current(index)
        found = self._streams.get(identity)
        if found is None:
            found = self._streams[identity] = torch.cuda.current_stream(index)
        return found

    def release(self, point: Point) -> None:
        """Allows the event of a mark to be reused."""
        if isinstance(point, Mark):
            self._spare.setdefault(point.place[0], []).append(point.event)

    def passed(self, points: Iterable[Point]) -> bool:
        """Tells whether the device has passed all marks. It is not asked, or waited for, in a capture."""
        for event in _last_on_each_stream(points):
            if self._lost:
                return True
            if Timing.captures:
                return False
            found = ask(STATE, event.query)
            if found is None:
                self._lose()
            elif not found:
                return False
        return True

    def wait(self, points: Iterable[Point]) -> None:
        """Waits until the device has passed all marks."""
        for event in _last_on_each_stream(points):
            if not self._lost:
                ask(WAIT, event.synchronize)
                if WAIT in UNANSWERED:
                    self._lose()

    def add(self, marks: Sequence[tuple[str, Point]], phases: dict[str, int]) -> int:
        """Adds the nanoseconds of each phase between the marks, which have been passed, to `phases`.

        Returns the device on whose timeline they are, or ON_CPU. A mark of the CPU between those of a device begins or
        ends a phase that issues no work to the device.
        """
        by_cpu: Any = marks
        if self.has_marks:
            points = [point for _, point in marks]
            first = points[0]
            if isinstance(first, Mark) and self.is_on_device(*points):
                known = ask(TIME, _on_device, marks)
                if known is not None:
                    times, whole = known
                    for phase, seconds in times.items():
                        phases[phase] = phases.get(phase, 0) + round(seconds * 1e9)
                    if sum(times.values()) > whole + EXACT:  # marks on several streams were not passed in their order
                        self.is_new = True
                    return first.place[0]
                self._lose()
            by_cpu = [(phase, ns_of(point)) for phase, point in marks]
        running, began = by_cpu[0]
        for phase, ns in by_cpu:
            phases[running] = phases.get(running, 0) + ns - began
            running, began = phase, ns
        return ON_CPU

    def is_on_device(self, first: Point, *points: Point) -> bool:
        """Tells whether marks are on one device: the first, the last, and those between that are not the CPU's."""
        if self._lost or not isinstance(first, Mark) or not isinstance(points[-1], Mark):
            return False
        return all(isinstance(point, int) or point.place[0] == first.place[0] for point in points)

    def between(self, start: Point, end: Point) -> int:
        """Returns the nanoseconds between two passed marks: on the device if both are on the same one."""
        found: dict[str, int] = {}
        self.add([("", start), ("", end)], found)
        return found[""]

    def read(self, values: Sequence[torch.Tensor]) -> list[float | None]:
        """Returns the values of scalars that have been computed; None for those that cannot be read.

        A value that is not finite is infinite.
        """
        if not self.has_marks and not any(value.is_cuda for value in values):
            return list(map(_value, values))
        found: list[float | None] = [None] * len(values)
        on_devices: dict[int, list[int]] = {}
        for number, value in enumerate(values):
            if value.is_cuda:
                on_devices.setdefault(value.device.index, []).append(number)
            else:
                found[number] = _value(value)
        for index, numbers in on_devices.items():
            reader = self._readers.get(index) or self._readers.setdefault(index, Reader(index))
            read = ask("the values of losses", reader.read, [values[number] for number in numbers])
            for number, value_read in zip(numbers, read or ()):
                found[number] = _number(value_read)
        return found

    def facts(self) -> dict[str, Any]:
        """Returns what the times are from, and the peaks of the memory, as fields of `gpubench.events.RepeatDone`."""
        peaks = [found for index in _used() if (found := _peaks(index))]
        names = [f"cuda:{index}" for index, *_ in peaks]
        return {
            "peak_allocated": max((allocated for _, allocated, _ in peaks), default=None),
            "peak_reserved": max((reserved for *_, reserved in peaks), default=None),
            "timed_by": self._timed_by(names),
            "unanswered": dict(UNANSWERED),
        }

    def _timed_by(self, used: Sequence[str]) -> str:
        """Returns what the times are from, as a part of a sentence; empty where no CUDA device is used."""
        timed = {f"cuda:{place}": count for place, count in self.measured.items() if place != ON_CPU}
        if not used and not timed:
            return ""
        said = [f"the events of {name}" for name in timed]
        if by_cpu := self.measured[ON_CPU]:
            said.append(f"the CPU's clock in {by_cpu} of {sum(self.measured.values())} updates")
        if others := [name for name in used if name not in timed]:
            said.append(f"the waits for the work on {' and '.join(others)}")
        return ", and ".join(said)


class Reader:
    """Reads scalars of one device while it computes, without a device-wide wait and without memory of the device.

    Each is copied into the same pinned memory, on a stream that waits for no later work of the program, and one event
    tells the end of all copies. Stacking them first would take one copy, but also a kernel, and memory of the
    program's allocator, which empties its cache if there is none left.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._on: tuple[Any, Any] | None = None
        """The stream of the copies, and the event that tells the end of them."""
        self._buffers: dict[torch.dtype, torch.Tensor] = {}

    def read(self, values: Sequence[torch.Tensor]) -> list[float | None]:
        self._on = self._on or (torch.cuda.Stream(self._index, priority=-1), torch.cuda.Event())
        stream, copied = self._on
        places: list[torch.Tensor | None] = []
        used: Counter[torch.dtype] = Counter()
        sizes = Counter(value.dtype for value in values)
        with torch.cuda.stream(stream):
            for value in values:
                place = self._buffer(value.dtype, sizes[value.dtype])[used[value.dtype]]
                used[value.dtype] += 1
                try:
                    place.copy_(value.reshape(()), non_blocking=True)
                except RuntimeError as error:
                    if OVERWRITTEN not in str(error):
                        raise
                    places.append(None)
                else:
                    places.append(place)
            copied.record(stream)
        copied.synchronize()
        return [None if place is None else place.item() for place in places]

    def _buffer(self, dtype: torch.dtype, size: int) -> torch.Tensor:
        buffer = self._buffers.get(dtype)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers[dtype] = torch.empty(2 * size, dtype=dtype, device="cpu", pin_memory=True)
        return buffer


def counters(device: torch.device) -> tuple[int, int, int, int] | None:
    """Returns (allocated, reserved, peak allocated, peak reserved) in bytes, and begins new peaks.

    The CPU holds these counters of the allocator, so this does not synchronise. None if there are none.
    """
    if device.type != "cuda":
        return None
    where = device if device.index is not None else None

    def read() -> tuple[int, int, int, int]:
        found = (
            torch.cuda.memory_allocated(where),
            torch.cuda.memory_reserved(where),
            torch.cuda.max_memory_allocated(where),
            torch.cuda.max_memory_reserved(where),
        )
        torch.cuda.reset_peak_memory_stats(where)
        return found

    return ask("the counters of the allocator", read)


def about(device: torch.device) -> dict[str, Any]:
    """Returns what is known about a device, with the fields of `gpubench.memory.allocation_log.DeviceLog`."""
    if device.type != "cuda":
        return {"device": -1, "name": device.type}
    name = ask("the name of a device", torch.cuda.get_device_name, device)
    found: dict[str, Any] = {"device": device.index, "name": name or "cuda"}
    if memory := ask("the memory of a device", torch.cuda.mem_get_info, device):
        free, found["capacity"] = memory
        reserved = ask("the memory that the allocator holds", torch.cuda.memory_reserved, device)
        found["other"] = max(0, found["capacity"] - free - (reserved or 0))
    return found


def visible_gpus() -> int:
    """Returns the number of GPUs that this process may use; 0 if it cannot be known."""
    return ask("the number of devices", torch.cuda.device_count) or 0


def _used() -> range:
    """Returns the visible devices; none in a process that does not use CUDA."""
    number = ask("the number of devices", lambda: torch.cuda.device_count() if torch.cuda.is_initialized() else 0)
    return range(number or 0)


def _peaks(index: int) -> tuple[int, int, int] | None:
    """Returns (device, peak allocated, peak reserved) in bytes; None for a device that has held nothing."""
    found = ask(
        "the peak of the memory",
        lambda: (index, torch.cuda.max_memory_allocated(index), torch.cuda.max_memory_reserved(index)),
    )
    return found if found and found[1] else None


IN_MEMORY = {
    dtype: (kind.from_address, ctypes.sizeof(kind))
    for dtype, kind in ((torch.float32, ctypes.c_float), (torch.float64, ctypes.c_double))
}
"""The types of tensors whose values are read from their memory on the CPU: the reader of each, and its bytes."""


def keeps_storages() -> bool:
    """Tells whether the Python object of a storage lives as long as the storage, as from PyTorch 2.2 on."""
    tensor = torch.empty(1)
    return ref(tensor.untyped_storage())() is not None


def stored(tensor: torch.Tensor, place: int) -> float | None:
    """Returns an element of a contiguous tensor on the CPU, of a type in IN_MEMORY; None if its memory has none.

    A sharded parameter that is freed has an empty storage, and a DTensor, as any tensor that stands for others, none.
    Reading beyond a storage would end the program.
    """
    read, size = IN_MEMORY[tensor.dtype]
    storage = tensor.untyped_storage()
    address, begin = storage.data_ptr(), (int(tensor.storage_offset()) + place) * size
    return float(read(address + begin).value) if address and begin + size <= storage.nbytes() else None


def _value(scalar: torch.Tensor) -> float | None:
    """Returns the value of a scalar on the CPU as `_number` does; None if it has none, as inside torch.func.

    It is read from its memory, because an operator of the probe would be part of the program's profile.
    """
    try:
        kind = IN_MEMORY.get(scalar.dtype)
        value: float | None
        if kind is None or scalar.is_neg():
            value = float(scalar.item())
        elif scalar.storage_offset():
            value = stored(scalar, 0)
        else:  # most losses, of which no Python object of the storage is made, which takes longer
            address = scalar.data_ptr()
            value = float(kind[0](address).value) if address else None  # it has room for an element if it has any
    except RuntimeError:
        return None
    return _number(value)


def loss_of(tensor: torch.Tensor) -> Loss:
    """Returns what is known now of a scalar that a backward pass is called on."""
    if tensor.is_cpu:
        return _value(tensor)
    found = tensor.detach()
    return found, found._version


def _number(value: float | None) -> float | None:
    """Returns a value that can be sent, infinite for one that is not finite."""
    return value if value is None or abs(value) <= LARGEST else math.inf


def _last_on_each_stream(points: Iterable[Point]) -> list[Any]:
    """Returns the events of the last mark on each stream."""
    return list({point.place: point.event for point in points if isinstance(point, Mark)}.values())


def _on_device(marks: Sequence[tuple[str, Point]]) -> tuple[dict[str, float], float]:
    """Returns the seconds of each phase, and of the whole, on the timeline of the device that all events are on.

    Those of the phase with most marks are what is left of the whole time, which takes fewer queries.
    """
    events = [(number, phase, point) for number, (phase, point) in enumerate(marks) if isinstance(point, Mark)]
    (most, _), *_ = Counter(phase for _, phase, _ in events[:-1]).most_common(1)
    found = {phase: 0.0 for phase, _ in marks[:-1]}
    for (number, phase, start), (until, _, end) in zip(events, events[1:]):
        if phase == most and until == number + 1:
            continue
        seconds = start.event.elapsed_time(end.event) / 1e3
        waited = max(end.ns - start.ns, 1) / 1e9
        for (name, one), (_, other) in zip(marks[number + 1 : until], marks[number + 2 : until + 1]):
            if name != phase:  # it issued nothing: the device has waited for it in its share of the time at most
                took = (ns_of(other) - ns_of(one)) / 1e9
                idle = min(took, seconds * min(took / waited, 1.0))
                found[name] += idle
                seconds -= idle
        found[phase] += max(0.0, seconds)
    whole = events[0][2].event.elapsed_time(events[-1][2].event) / 1e3
    found[most] += max(0.0, whole - sum(found.values()))
    return found, whole
