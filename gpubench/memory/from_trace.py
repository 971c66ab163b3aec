"""Reads allocations from the [memory] events of a Chrome trace: one event per allocation or free.

The keys of their `args` are those of libkineto's output_json.cpp; traces from before 2022 lack addresses and totals.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw, Struct, field

from gpubench import units
from gpubench.errors import DataError
from gpubench.memory.allocation_log import (
    LARGEST,
    Allocation,
    AllocatorMove,
    DeviceLog,
    Held,
    Phase,
    assembled,
    classify,
    filled,
    steps,
)
from gpubench.memory.analysis import footprints
from gpubench.memory.footprint import Footprint
from gpubench.trace import file
from gpubench.trace import phases as known_phases
from gpubench.trace.columns import MISSING, Ids, Mask, Ns, Trace, at
from gpubench.trace.file import UNREADABLE, TraceDocument
from gpubench.trace.load import LONGEST, nanoseconds
from gpubench.trace.load import read as read_trace
from gpubench.trace.names import step_runs
from gpubench.trace.phases import Phases, phase_of
from gpubench.trace.slices import ProgramSlices, UserFrames, innermost, nearest

NAME = "[memory]"
CPU = 0
"""The value of c10::DeviceType::CPU."""


class About(Struct, gc=False):
    change: int = field(name="Bytes")
    """The bytes of an allocation; negative for a free."""
    kind: int = field(name="Device Type")
    """The device's c10::DeviceType: 0 is the CPU, 1 CUDA or HIP."""
    device: int = field(default=-1, name="Device Id")
    address: int | None = field(default=None, name="Addr")
    allocated: int | None = field(default=None, name="Total Allocated")
    """The bytes that the device's allocator has allocated, including those of this event."""
    reserved: int | None = field(default=None, name="Total Reserved")


class MemoryEvent(Struct, gc=False):
    thread: tuple[str, str]
    """The (process, thread), with the trace's numbers."""
    at: float
    """The time in microseconds."""
    about: About


class _Any(Struct, gc=False):
    """An event of any kind. Fields that are not used are not decoded, so that they may be invalid."""

    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    args: Raw = Raw()


_events = msgspec.json.Decoder(list[_Any])
_about = msgspec.json.Decoder(About, strict=False)


class _Arguments:
    """The position of an event in the file, and its undecoded arguments."""

    def strictly(self, text: bytes) -> tuple[list[_Any], int] | None:
        try:
            return _events.decode(text), 0
        except UNREADABLE:
            return None

    def leniently(self, text: bytes) -> tuple[list[_Any], int] | None:
        return self.strictly(file.decodable(text).encode())


def memory_events(path: Path) -> Iterator[MemoryEvent]:
    """Yields the events in the order of the file, which need not be ordered by time.

    Raises DataError for a file that is not a trace, or is incomplete.
    """
    for batch in TraceDocument(path, _Arguments()).batches():
        for event in batch:
            if event.name == NAME and (found := _read(event)):
                yield found


def _read(event: _Any) -> MemoryEvent | None:
    """Decodes an event; None if its values are invalid."""
    try:
        about, at = _about.decode(event.args), float(event.ts)
    except (*UNREADABLE, TypeError, ValueError):
        return None
    sizes = (abs(about.change), about.allocated or 0, about.reserved or 0)
    if not (0 <= at < LONGEST and all(0 <= size < LARGEST for size in sizes)):
        return None
    return MemoryEvent((str(event.pid), str(event.tid)), at, about)


_PHASES: dict[int, Phase] = {
    known_phases.DATA_WAIT: "data",
    known_phases.HOST_TO_DEVICE: "data",
    known_phases.FORWARD: "forward",
    known_phases.BACKWARD: "backward",
    known_phases.OPTIMIZER: "optimizer",
}
_ALLOCATING = ("aten::empty", "aten::new_empty", "aten::resize_")
"""The operators that only request memory, which the operator around them needs."""


class EventPlaces:
    """The place in the program of each event of a trace; `slices` has the index of its slice, or -1."""

    def __init__(self, trace: Trace, events: Sequence[MemoryEvent]) -> None:
        """Takes `events`, ordered by time."""
        self._program = ProgramSlices.of(trace)
        self._known = phase_of(self._program)
        self._frames = UserFrames.of(self._program)
        times = nanoseconds(np.array([event.at for event in events], np.float64))
        threads = {name: number for number, name in enumerate(trace.threads)}
        thread = np.array([threads.get(event.thread, MISSING) for event in events], np.int64)
        self.slices = _slices(self._program, thread, times)
        self.phases = filled(_known_phases(self._program, self._known, self.slices, thread))
        self.steps = _steps(self._program, times, self.phases)
        self._operator = nearest(self._program.nest, _requesting(self._program))
        self._module = _module(self._program, self._known)

    def operator(self, event: int) -> str:
        slice_ = self._at(self._operator, event)
        trace = self._program.trace
        return trace.names[trace.cpu.name[slice_]] if slice_ >= 0 else ""

    def module(self, event: int) -> str:
        """The module's path if modules were annotated, else the profiler's name, such as "Conv2d_3"."""
        module = self._at(self._module, event)
        return self._known.calls.names[module] if module >= 0 else ""

    def where(self, event: int) -> str:
        slice_ = int(self.slices[event])
        place = self._frames.at(slice_) if slice_ >= 0 else None
        return place.rpartition(" in ")[0] if place else ""

    def _at(self, column: Ids, event: int) -> int:
        slice_ = self.slices[event]
        return int(column[slice_]) if slice_ >= 0 else MISSING


def _slices(program: ProgramSlices, thread: Ns, times: Ns) -> Ns:
    """The innermost slice that is open at each event, on the event's own thread."""
    found = np.full(len(times), MISSING, np.int64)
    for number in np.unique(thread[thread >= 0]).tolist():
        here = np.flatnonzero(thread == number)
        pieces = innermost(program.trace, program.nest, number, int(times[here[0]]), int(times[here[-1]]) + 1)
        found[here] = pieces.slice[np.searchsorted(pieces.start, times[here], side="right") - 1]
    return found


def _known_phases(program: ProgramSlices, known: Phases, slices: Ns, thread: Ns) -> list[Phase | None]:
    """The phase of each event, from its slice, or between slices from its thread if that is autograd's.

    No slice marks the loss. In a trace with modules, events of the forward phase outside all modules get no phase.
    """
    zero_grad = nearest(program.nest, program.lexicon.zero_grad[program.trace.cpu.name]) >= 0
    calls = known.calls.mask
    around = nearest(program.nest, calls) >= 0
    open_ = calls.any() & (known.of == known_phases.FORWARD) & ~around
    by_slice: list[Phase | None] = [_PHASES.get(phase) for phase in known.of.tolist()]
    for slice_ in np.flatnonzero(zero_grad).tolist():
        by_slice[slice_] = "zero_grad"
    for slice_ in np.flatnonzero(open_).tolist():
        by_slice[slice_] = None
    autograd = {*np.unique(program.trace.cpu.thread[known.of == known_phases.BACKWARD]).tolist()} - {
        program.main_thread
    }
    return [
        by_slice[slice_] if slice_ >= 0 else "backward" if number in autograd else None
        for slice_, number in zip(slices.tolist(), thread.tolist(), strict=True)
    ]


def _steps(program: ProgramSlices, times: Ns, phases: Sequence[Phase]) -> list[int | None]:
    """The step of each event, from 0, by ProfilerStep; in a trace without it by the optimizer."""
    marked = [step.start for run in step_runs(program.trace, program.lexicon) for step in run]
    if not marked:
        return list(steps(phases))
    found = np.searchsorted(np.array(marked, np.int64), times, side="right") - 1
    return [number if number >= 0 else None for number in found.tolist()]


def _requesting(program: ProgramSlices) -> Mask:
    named = program.trace.names_where(lambda name: not name.startswith(_ALLOCATING))
    found: Mask = named[program.trace.cpu.name] & program.operators
    return found


def _module(program: ProgramSlices, known: Phases) -> Ids:
    """The module of each slice, or -1; in the backward pass it is the forward operator's module."""
    around = nearest(program.nest, known.calls.mask)
    return at(known.calls.of, np.where(around < 0, at(around, known.evaluated), around))


HOW = "record it with torch.profiler.profile(profile_memory=True), or gpubench profile --profiling.profile_memory=true"


def read(path: Path) -> list[DeviceLog]:
    """Reads the log of each device with [memory] events in the trace at `path`, with the categories of `classify`.

    Events of CPU memory count only if no other device has any. Sizes are those of the allocator's blocks. Memory from
    before the first event that is not freed is one allocation, if the trace has totals. Raises DataError for a file
    that is not a trace, is incomplete, does not fit in memory, or has no such events.
    """
    trace = read_trace(path)
    events = sorted((event for event in memory_events(path) if event.about.change), key=lambda event: event.at)
    devices: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, event in enumerate(events):
        devices[event.about.kind, event.about.device].append(number)
    if not devices:
        raise DataError(f"{path} has no [memory] events: memory was not recorded", HOW)
    places = EventPlaces(trace, events)
    return [
        _history(trace, [events[number].about for number in numbers], numbers, places)
        for (kind, _), numbers in sorted(devices.items())
        if kind != CPU or len(devices) == 1
    ]


def _history(trace: Trace, abouts: Sequence[About], numbers: Sequence[int], places: EventPlaces) -> DeviceLog:
    moves = [
        _move(about, address, number, places)
        for about, address, number in zip(abouts, _addresses(abouts), numbers, strict=True)
    ]
    reserved = abouts[-1].reserved or None
    before = _before(abouts)
    log = assembled(moves, _there(moves, before or 0), (abouts[0].reserved or 0) if reserved else None)
    classify(log)
    held = sum(one.size for one in log.allocations if one.category == "before")
    log.notes = list(_notes(abouts, before, held))
    device = abouts[0].device
    about = trace.described(device) if abouts[0].kind != CPU else None
    return DeviceLog(
        device,
        log,
        name=about.name if about else None,
        capacity=about.memory if about else None,
        rank=trace.rank,
    )


def _move(about: About, address: int, number: int, places: EventPlaces) -> AllocatorMove:
    size, phase, step = abs(about.change), places.phases[number], places.steps[number]
    given = None
    if about.change > 0:
        given = Allocation(
            size,
            begin=0,
            phase=phase,
            step=step,
            module=places.module(number),
            operator=places.operator(number),
            where=places.where(number),
        )
    return AllocatorMove(address, size, phase, step, given, size, about.reserved)


def _addresses(abouts: Sequence[About]) -> list[int]:
    """Matches frees with allocations; without addresses, a free ends the newest allocation of its size."""
    if all(about.address is not None for about in abouts):
        return [about.address or 0 for about in abouts]
    newest: dict[int, list[int]] = defaultdict(list)
    found = []
    for number, about in enumerate(abouts):
        alike = newest[abs(about.change)]
        if about.change > 0:
            alike.append(number)
        found.append(number if about.change > 0 or not alike else alike.pop())
    return found


def _before(abouts: Sequence[About]) -> int | None:
    """The bytes that the allocator had allocated before the first event; None for a trace without totals."""
    first = abouts[0]
    return None if first.allocated is None else first.allocated - first.change


def _there(moves: Sequence[AllocatorMove], before: int) -> list[Held]:
    """The bytes of `before` that `moves` do not free, as one allocation."""
    given: set[int] = set()
    for move in moves:
        if move.given is not None:
            given.add(move.address)
        elif move.address in given:
            given.discard(move.address)
        else:
            before -= move.size
    return [(Allocation(before, begin=0, category="before", phase="start"), before)] if before > 0 else []


def _notes(abouts: Sequence[About], before: int | None, held: int) -> Iterator[str]:
    if held:
        yield f"{units.size(held)} were allocated before the recording began: their contents are unknown"
    if before is None:
        yield "the trace has no totals: memory that was allocated throughout is missing"
    elif drift := _drift(abouts, before):
        yield f"the trace's own totals differ by up to {units.size(drift)} from the sum of its events"
    if any(about.address is None for about in abouts):
        yield "the trace has no addresses: a free is assumed to end the newest allocation of its size"


def _drift(abouts: Sequence[About], before: int) -> int:
    sums = before + np.cumsum([about.change for about in abouts], dtype=np.int64)
    totals = np.array([-1 if about.allocated is None else about.allocated for about in abouts], np.int64)
    return int(np.abs(sums - totals)[totals >= 0].max(initial=0))


def of_trace_file(path: Path) -> list[Footprint]:
    """The footprint of each device with [memory] events in a trace. Raises what `read` does."""
    return footprints(read(path), "trace")
