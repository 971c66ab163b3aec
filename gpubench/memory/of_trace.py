"""Histories from a Chrome trace that torch.profiler wrote with profile_memory."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from gpubench import units
from gpubench.errors import DataError
from gpubench.memory.history import Allocation
from gpubench.memory.lifetimes import classify
from gpubench.memory.memory_events import HOST, About, memory_events
from gpubench.memory.moves import DeviceHistory, Held, Move, assembled
from gpubench.memory.trace_places import Places
from gpubench.trace.columns import Trace
from gpubench.trace.reading import read as read_trace

HOW = "record it with torch.profiler.profile(profile_memory=True), or gpubench profile --profiling.profile_memory=true"


def read(path: Path) -> list[DeviceHistory]:
    """A history of each device that the trace at `path` has [memory] events of, with the categories of `classify`.

    Of the host only where no other device has any. Sizes are those of the allocator's blocks. What was there before
    the first event and is not given back is one allocation, where the trace tells totals. Raises DataError for a file
    that is no trace, is not whole, does not fit in memory, or has no such events.
    """
    trace = read_trace(path)
    events = sorted((event for event in memory_events(path) if event.about.change), key=lambda event: event.at)
    devices: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, event in enumerate(events):
        devices[event.about.kind, event.about.device].append(number)
    if not devices:
        raise DataError(f"{path} has no [memory] events: memory was not recorded", HOW)
    places = Places(trace, events)
    return [
        _history(trace, [events[number].about for number in numbers], numbers, places)
        for (kind, _), numbers in sorted(devices.items())
        if kind != HOST or len(devices) == 1
    ]


def _history(trace: Trace, abouts: Sequence[About], numbers: Sequence[int], places: Places) -> DeviceHistory:
    moves = [
        _move(about, address, number, places)
        for about, address, number in zip(abouts, _addresses(abouts), numbers, strict=True)
    ]
    reserved = abouts[-1].reserved or None
    before = _before(abouts)
    history = assembled(moves, _there(moves, before or 0), (abouts[0].reserved or 0) if reserved else None)
    classify(history)
    held = sum(one.size for one in history.allocations if one.category == "before")
    history.notes = list(_notes(abouts, before, held))
    device = abouts[0].device
    about = trace.described(device) if abouts[0].kind != HOST else None
    return DeviceHistory(
        device,
        history,
        name=about.name if about else None,
        capacity=about.memory if about else None,
        rank=trace.rank,
    )


def _move(about: About, address: int, number: int, places: Places) -> Move:
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
    return Move(address, size, phase, step, given, size, about.reserved)


def _addresses(abouts: Sequence[About]) -> list[int]:
    """Where the trace has none, what is given back is taken to be the newest of its size."""
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
    """Bytes that the allocator had given out before the first event; None of a trace without totals."""
    first = abouts[0]
    return None if first.allocated is None else first.allocated - first.change


def _there(moves: Sequence[Move], before: int) -> list[Held]:
    """Of `before` what `moves` do not give back."""
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
        yield f"{units.size(held)} were allocated before the recording began: nothing tells what they hold"
    if before is None:
        yield "the trace has no totals: what was there all along is missing"
    elif drift := _drift(abouts, before):
        yield f"the trace's own totals differ by up to {units.size(drift)} from what its events sum to"
    if any(about.address is None for about in abouts):
        yield "the trace has no addresses: what is given back is taken to be the newest of its size"


def _drift(abouts: Sequence[About], before: int) -> int:
    sums = before + np.cumsum([about.change for about in abouts], dtype=np.int64)
    told = np.array([-1 if about.allocated is None else about.allocated for about in abouts], np.int64)
    return int(np.abs(sums - told)[told >= 0].max(initial=0))
