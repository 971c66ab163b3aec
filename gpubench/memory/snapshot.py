"""Read memory histories from a file of torch.cuda.memory._dump_snapshot, and footprints from snapshots and traces.

A snapshot holds the allocator's events since the recording began, as far back as its ring buffer of max_entries
reaches, and its state at the end. What was allocated before the first event follows from both.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from gpubench import units
from gpubench.errors import DataError
from gpubench.memory import from_trace
from gpubench.memory.analysis import footprint
from gpubench.memory.footprint import Footprint, Source
from gpubench.memory.history import (
    Allocation,
    Counts,
    DeviceHistory,
    Held,
    Move,
    Phase,
    assembled,
    classify,
    filled,
    steps,
)
from gpubench.memory.snapshot_format import Block, Event, Segment, Snapshot, StackInfo, Stacks, announced, load
from gpubench.memory.unpickling import HOW

BLOCK = 512
"""Bytes of which every block's size is a multiple: kMinBlockSize of c10/core/AllocatorConfig.h."""

FEWEST = 100
"""Events: a smaller count is round too often by chance, and nobody limits a recording to fewer."""

_GIVEN, _REQUESTED, _COMPLETED = "alloc", "free_requested", "free_completed"
_RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


def read(path: Path) -> list[DeviceHistory]:
    """Return a history of each device with events in the snapshot at `path`, with the categories of `classify`.

    Sizes are those requested. Readings are of blocks: the sizes of blocks held at the end are known; others are the
    requested sizes, rounded up to 512 bytes. Raises DataError for a file that is not a snapshot, is damaged, holds
    code, does not fit in memory, or has no history.
    """
    found, stacks = load(path), Stacks(path)
    devices = [
        _history(number, events, found, stacks)
        for number, events in enumerate(found.device_traces)
        if any(event.action == _GIVEN for event in events)
    ]
    if not devices:
        raise DataError(f"{path} has no history: it has what is allocated, but no events", HOW)
    return devices


def _history(number: int, events: Sequence[Event], found: Snapshot, stacks: Stacks) -> DeviceHistory:
    segments = [one for one in found.segments if one.device == number]
    held = {address: block for one in segments for address, block in _held(one)}
    reserved = sum(one.total_size for one in segments)
    moving = list(_moving(events))
    last = {events[index].addr: index for index in moving}
    there = [_there(block, stacks) for address, block in held.items() if address not in last]
    blocks = {last[address]: block.size for address, block in held.items() if address in last}
    phases = _phases([events[index] for index in moving], found, stacks)
    levels = _levels(events, reserved)
    moves = [
        _move(events[index], phase, step, blocks.get(index), levels[index + 1], stacks)
        for index, phase, step in zip(moving, phases, steps(phases), strict=True)
    ]
    history = assembled(moves, there, levels[0])
    classify(history)
    before = sum(one.size for one in history.allocations if one.category == "before")
    proof = _overwritten(number, found)
    sign = proof or (_full(number, found) if before or levels[0] else "")
    history.truncated, history.truncation_proven, history.late = bool(sign), bool(proof), bool(before) and not sign
    history.counts = _counts(events, segments)
    lost = sum(events[index].action == _GIVEN for address, index in last.items() if address not in held)
    history.notes = [*_beginning(number, found, before, sign), *_unreleased(lost), *_failures(events)]
    return DeviceHistory(number, history)


def _counts(events: Sequence[Event], segments: Sequence[Segment]) -> Counts:
    """Return the counts of the recording. A retry leaves no event that distinguishes it from empty_cache()."""
    actions = Counter(event.action for event in events)
    free = [block.size for one in segments for block in one.blocks if block.state == "inactive"]
    return Counts(
        allocations=actions[_GIVEN],
        frees=actions[_REQUESTED] or actions[_COMPLETED],
        ooms=actions["oom"],
        largest_free=max(free, default=0),
    )


def _held(segment: Segment) -> Iterator[tuple[int, Block]]:
    """Yield the allocated blocks of a segment, by address."""
    address = segment.address
    for block in segment.blocks:
        if block.state != "inactive":
            yield address, block
        address += block.size


def _there(block: Block, stacks: Stacks) -> Held:
    where = stacks.told(block.frames).where
    return Allocation(block.asked, begin=0, category="before", phase="start", where=where), block.size


def _moving(events: Sequence[Event]) -> list[int]:
    """Return the indices of the events that allocate or free memory.

    A block is free when its free is completed, as other streams may still use it; if completions are not recorded, when
    it was requested.
    """
    found, completed = [], set()
    for index in range(len(events) - 1, -1, -1):
        action, address = events[index].action, events[index].addr
        if action == _COMPLETED:
            completed.add(address)
        moves = action in (_GIVEN, _COMPLETED) or (action == _REQUESTED and address not in completed)
        if action in (_GIVEN, _REQUESTED):
            completed.discard(address)
        if moves:
            found.append(index)
    return found[::-1]


def _levels(events: Sequence[Event], reserved: int) -> list[int]:
    """Return the bytes of segments before the first event and after each one; after the last one it is `reserved`."""
    level = reserved
    levels = [level]
    for event in reversed(events):
        level = max(0, level - _RESERVES.get(event.action, 0) * event.size)
        levels.append(level)
    return levels[::-1]


def _phases(events: Sequence[Event], found: Snapshot, stacks: Stacks) -> list[Phase]:
    """Return the phases, from stacks, else from annotations, else from the neighbouring events.

    Autograd's own threads have no Python frames: if other events of the same kind have a stack, one without any is of
    the backward pass.
    """
    stacked = {event.action for event in events if event.frames}
    by_name = announced([event.time_us for event in events], found.external_annotations)
    told: list[Phase | None] = []
    for event, name in zip(events, by_name, strict=True):
        bare = not event.frames and event.action in stacked
        told.append(stacks.told(event.frames).phase or name or ("backward" if bare else None))
    return filled(told)


def _move(event: Event, phase: Phase, step: int | None, block: int | None, reserved: int, stacks: Stacks) -> Move:
    size = -(-event.size // BLOCK) * BLOCK if block is None else block
    if event.action != _GIVEN:
        return Move(event.addr, size, phase, step, size=event.size, reserved=reserved)
    return Move(event.addr, size, phase, step, _given(event, phase, step, stacks.told(event.frames)), reserved=reserved)


def _given(event: Event, phase: Phase, step: int | None, told: StackInfo) -> Allocation:
    return Allocation(
        event.size,
        begin=0,
        category="workspaces" if told.workspace else "unknown",
        phase=phase,
        step=step,
        operator=told.operator,
        where=told.where,
    )


def _overwritten(number: int, found: Snapshot) -> str:
    """Return what proves that events are missing; an empty string if nothing does.

    A block keeps the stack of its allocation, and a segment that of its own, only if the allocator was recording
    (context_when_allocated of c10/cuda/CUDACachingAllocator.cpp): then their events were recorded too.
    """
    given, reserved = (
        {event.addr for event in found.device_traces[number] if event.action in actions}
        for actions in ([_GIVEN], [action for action, change in _RESERVES.items() if change > 0])
    )
    mine = [one for one in found.segments if one.device == number]
    blocks = sum(bool(block.frames) and address not in given for one in mine for address, block in _held(one))
    segments = sum(bool(one.frames) and one.address not in reserved for one in mine)
    known = [units.counted(count, name) for count, name in ((blocks, "block"), (segments, "segment")) if count]
    return f"the allocation of {' and '.join(known)} was recorded, but is missing from the events" if known else ""


def _full(number: int, found: Snapshot) -> str:
    """Return what suggests that the ring buffer was full. All devices share max_entries, which is not in the file."""
    counts = [len(events) for events in found.device_traces]
    count = counts[number]
    if count < max(counts) or count < FEWEST:
        return ""
    if counts.count(count) > 1:
        return f"several devices have {count:,} events each, probably max_entries"
    return f"it has {count:,} events, probably max_entries" if _is_round(count) else ""


def _is_round(count: int) -> bool:
    """Say whether a count looks like a limit that a user set: a digit and zeros, whole thousands, a power of two."""
    digits, power = count % 10 ** (len(str(count)) - 1) == 0, count & (count - 1) == 0
    return digits or power or count % 1000 == 0


def _beginning(number: int, found: Snapshot, before: int, sign: str) -> Iterator[str]:
    """Yield what is missing before the first event, and how to record it."""
    counts = [len(events) for events in found.device_traces]
    there = f"{units.size(before)} were allocated before the first of its {counts[number]:,} events"
    if sign:
        said = f"{sign}; {there}" if before else sign
        yield f"{said}; record with a larger max_entries, or fewer steps"
    elif before:
        whole = "no event was lost" if counts[number] < max(counts) else "nothing suggests that events were lost"
        yield (
            f"the recording began late: {there}, and {whole}; call torch.cuda.memory._record_memory_history before the "
            "model is built to see what they hold"
        )


def _unreleased(lost: int) -> Iterator[str]:
    if lost:
        yield f"no free was recorded of {units.counted(lost, 'allocation')}: assumed to be held to the end"


def _failures(events: Sequence[Event]) -> Iterator[str]:
    for number, event in enumerate(events, 1):
        if event.action == "oom":
            left = "" if event.device_free is None else f", with {units.size(event.device_free)} left on the device"
            yield f"out of memory at event {number:,} of {len(events):,}: {units.size(event.size)} requested{left}"


def of_snapshot(path: Path) -> list[Footprint]:
    """Return the footprint of each device in a snapshot of the CUDA allocator. Raises DataError."""
    return _footprints(read(path), "snapshot")


def of_trace_file(path: Path) -> list[Footprint]:
    """Return the footprint of each device with [memory] events in a trace. Raises DataError."""
    return _footprints(from_trace.read(path), "trace")


def _footprints(devices: Sequence[DeviceHistory], source: Source) -> list[Footprint]:
    return [
        footprint(
            one.history,
            source=source,
            device=one.name or ("cpu" if one.device < 0 else f"GPU {one.device}"),
            capacity=one.capacity,
            rank=one.rank or 0,
        )
        for one in devices
    ]
