"""Computes a footprint from a log of allocations: peak, usage over time, and what the allocator adds.

A moment is a state of the log: what is held then, by category and by the allocator's counts. A phase has a moment for
each of its states, including the one that it starts with, and one more for its end, because the allocator's readings of
a phase's peak and of its end may be of the same state.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from typing import get_args

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from gpubench import units
from gpubench.errors import DataError
from gpubench.memory.allocation_log import (
    Allocation,
    AllocationLog,
    AllocatorReading,
    Category,
    Counts,
    DeviceLog,
    Phase,
)
from gpubench.memory.allocator import Replayed, Rules, replay
from gpubench.memory.footprint import (
    CATEGORIES,
    OTHERS,
    Amounts,
    Footprint,
    FootprintPeak,
    Holder,
    Level,
    MemoryShortage,
    MemoryTimeline,
    ModuleFootprint,
    PhaseFootprint,
    Source,
    Stage,
    TimelineMark,
)

Bytes = NDArray[np.int64]
Places = NDArray[np.int64]

HELD: tuple[Category, ...] = get_args(Category)
BEYOND: dict[Source, str] = {
    "measured": "workspaces",
    "predicted": "fragmentation",
    "snapshot": "fragmentation",
    "trace": "unknown",
}
"""The category of what the allocator counts beyond the blocks of the log, by source. A run is recorded by a
dispatch mode, so that only the allocator sees what kernels allocate themselves. A snapshot and the model of the
allocator know every request, so that the difference is the rounding of blocks. For a trace it is unknown."""


@dataclass(frozen=True)
class PhaseSpan:
    """One occurrence of a phase, from one mark to the next, as moments, both inclusive."""

    phase: Phase
    step: int | None
    first: int
    last: int

    @property
    def moments(self) -> slice:
        return slice(self.first, self.last + 1)

    @property
    def events(self) -> int:
        """The number of allocations and frees."""
        return self.last - self.first - 1


@dataclass(frozen=True)
class Lives:
    """The allocations as columns, in their order."""

    size: Bytes
    """The sizes of the blocks, or those requested if the allocator has no blocks."""
    begin: Places
    end: Places
    """The positions of the ends; the log's length for what is held at its end."""
    category: Places
    """The index of the category in `HELD`."""

    def sums(self, states: Places) -> Bytes:
        """Bytes held in some states, by category: (categories, states). State i follows i events."""
        sorted_, place = np.unique(states, return_inverse=True)
        change = np.zeros((len(HELD), len(sorted_) + 1), np.int64)
        np.add.at(change, (self.category, np.searchsorted(sorted_, self.begin + 1)), self.size)
        np.subtract.at(change, (self.category, np.searchsorted(sorted_, self.end + 1)), self.size)
        return np.cumsum(change, axis=1)[:, place.reshape(-1)]


@dataclass(frozen=True)
class Moments:
    spans: list[PhaseSpan]
    """The spans, in order; together they contain each moment once."""
    state: Places
    """The number of events before each moment. This and the next four arrays have one element per moment."""
    requested: Bytes
    known: Bytes
    """The bytes of the blocks of what the log holds."""
    allocated: Bytes
    reserved: Bytes | None
    lives: Lives
    counts: Counts
    beyond: str
    """The category of what is allocated beyond the log."""
    other: int

    def __len__(self) -> int:
        return len(self.state)

    def level(self, moment: int) -> Level:
        allocated = int(self.allocated[moment])
        reserved = None if self.reserved is None else int(self.reserved[moment])
        return Level(
            requested=int(self.requested[moment]),
            allocated=allocated,
            reserved=reserved,
            total=(allocated if reserved is None else reserved) + self.other,
        )

    def series(self, chosen: Places) -> dict[str, Bytes]:
        """Bytes by category at each of the chosen moments; they add up to the level's total."""
        found = {category: np.zeros(len(chosen), np.int64) for category in CATEGORIES}
        found |= zip(HELD, self.lives.sums(self.state[chosen]), strict=True)
        found[self.beyond] = found[self.beyond] + self.allocated[chosen] - self.known[chosen]
        if self.reserved is not None:
            found["fragmentation"] = found["fragmentation"] + self.reserved[chosen] - self.allocated[chosen]
        found["other"] = found["other"] + self.other
        return found

    def amounts(self, chosen: Sequence[int]) -> list[Amounts]:
        """Bytes by category, as one dict per chosen moment."""
        series = self.series(np.array(chosen, np.int64))
        rows = zip(*(column.tolist() for column in series.values()), strict=True)
        return [{name: size for name, size in zip(series, row, strict=True) if size} for row in rows]

    def held(self, moment: int) -> Places:
        """Indices of the allocations that are held at a moment."""
        state = self.state[moment]
        return np.flatnonzero((self.lives.begin < state) & (state <= self.lives.end))

    def top(self, span: PhaseSpan) -> int:
        """The moment of a span at which most is allocated; the first one if several are equal."""
        return span.first + int(np.argmax(self.allocated[span.moments]))


def moments(log: AllocationLog, source: Source, rules: Rules | None, other: int) -> Moments:
    """Makes the moments of a log: two more per phase than it has events.

    With `rules`, allocated and reserved bytes come from a replay, otherwise from the log's levels or readings; without
    any of them they equal the requested bytes. `other` bytes are added to each moment.
    """
    spans = _spans(log)
    first = np.array([span.first for span in spans])
    number = np.repeat(np.arange(len(spans)), np.diff([*first, spans[-1].last + 1]))
    ends = np.array([end for _, end in _borders(log)], np.int64)
    state = np.minimum(np.arange(len(number)) - 2 * number, ends[number])
    block = (rules or Rules()).block if rules or log.readings else 1
    size = np.fromiter((one.size for one in log.allocations), np.int64, len(log.allocations))
    lives = _lives(log, -(-size // block) * block)
    requested, known = (_held(one, lives, log.length)[state] for one in (size, lives.size))
    allocated, reserved, counts = known, None, log.counts or _counted(log)
    if rules is not None:
        replayed = _replayed(log, rules)
        allocated, reserved = (np.insert(one, 0, 0)[state] for one in (replayed.allocated, replayed.reserved))
        counts = replayed.counts
    elif log.levels:
        allocated = np.maximum(log.levels[0][state], known)
        reserved = np.maximum(log.levels[1][state], allocated)
    elif log.readings:
        allocated, reserved = _read(spans, known, log.readings)
    return Moments(spans, state, requested, known, allocated, reserved, lives, counts, BEYOND[source], other)


def shortfall(found: Moments, readings: Sequence[AllocatorReading]) -> tuple[int, PhaseSpan]:
    """The largest number of bytes by which a reading is below the log, with its span; 0 if none is."""
    pairs = zip(found.spans, readings[1:], strict=False)
    lacking = [(int(found.known[span.moments].max()) - one.peak_allocated, span) for span, one in pairs]
    return max([(0, found.spans[0]), *lacking], key=lambda one: one[0])


def _borders(log: AllocationLog) -> list[tuple[int, int]]:
    """The (start, end) of each phase, as positions."""
    return list(pairwise([*(mark.at for mark in log.marks), log.length]))


def _spans(log: AllocationLog) -> list[PhaseSpan]:
    return [
        PhaseSpan(mark.phase, mark.step, start + 2 * place, end + 2 * place + 1)
        for place, (mark, (start, end)) in enumerate(zip(log.marks, _borders(log), strict=True))
    ]


def _lives(log: AllocationLog, size: Bytes) -> Lives:
    allocations, number = log.allocations, {category: place for place, category in enumerate(HELD)}

    def end(one: Allocation) -> int:
        return log.length if one.end is None else one.end

    return Lives(
        size=size,
        begin=np.fromiter((one.begin for one in allocations), np.int64, len(allocations)),
        end=np.fromiter((end(one) for one in allocations), np.int64, len(allocations)),
        category=np.fromiter((number[one.category] for one in allocations), np.int64, len(allocations)),
    )


def _held(size: Bytes, lives: Lives, length: int) -> Bytes:
    """Bytes held in all states: (length + 1,)."""
    change = np.zeros(length + 2, np.int64)
    np.add.at(change, lives.begin + 1, size)
    np.subtract.at(change, lives.end + 1, size)
    return np.cumsum(change[:-1])


def _counted(log: AllocationLog) -> Counts:
    given = sum(one.category != "before" for one in log.allocations)
    return Counts(given, sum(one.end is not None for one in log.allocations))


def _replayed(log: AllocationLog, rules: Rules) -> Replayed:
    """Replays the log on a device without a limit, so that it also shows what a smaller device lacks.

    Retries and failures are counted on a device of the rules' capacity, up to the first failed allocation.
    """
    whole = replay(log, replace(rules, capacity=None))
    if rules.capacity is None:
        return whole
    short = whole.reserved.max(initial=0) > rules.capacity
    limited = replay(log, rules).counts if short else Counts(0, 0, retries=0, ooms=0)
    return replace(whole, counts=structs.replace(whole.counts, retries=limited.retries, ooms=limited.ooms))


def _read(spans: Sequence[PhaseSpan], known: Bytes, readings: Sequence[AllocatorReading]) -> tuple[Bytes, Bytes]:
    """Allocated and reserved bytes of all moments, from the allocator's readings between them.

    A phase's peak is at the moment at which the log holds most; the next mark's reading has the value of the peak and
    that of the phase's end. In between, the bytes beyond the log are the lesser of those at the two moments, and
    reserved grows as far as necessary. A phase without a reading continues with the values at the end of the previous
    one.
    """
    allocated, reserved = known.copy(), np.zeros(len(known), np.int64)
    beyond, kept = 0, readings[0].reserved
    for span, reading in zip_longest(spans, readings[1 : len(spans) + 1]):
        held, here, kept_here = known[span.moments], allocated[span.moments], reserved[span.moments]
        if reading is None:
            here += beyond
            kept_here[:] = np.maximum(np.maximum.accumulate(here), kept)
        else:
            top = int(np.argmax(held))
            at_peak = max(reading.peak_allocated - int(held[top]), 0)
            beyond = max(reading.allocated - int(held[-1]), 0)
            here += min(at_peak, beyond)
            here[top], here[-1] = held[top] + at_peak, held[-1] + beyond
            kept_here[:top] = np.maximum(np.maximum.accumulate(here[:top]), min(kept, reading.peak_reserved))
            kept_here[top] = reading.peak_reserved
            kept_here[top + 1 :] = reading.reserved
            np.maximum(kept_here, here, out=kept_here)
        kept = int(kept_here[-1])
    return allocated, reserved


POINTS = 800
"""The number of points of a timeline, more than a plot has pixels."""


def timeline(moments: Moments, peaks: Iterable[int]) -> tuple[MemoryTimeline, dict[int, int]]:
    """Reduces a log to about `POINTS` points, and says which of them each of the moments `peaks` is.

    The moments are divided into stretches of equal length, and each stretch keeps the moment with most allocated. The
    first and last moment, the one with most reserved, and `peaks` are kept too.
    """
    kept = _kept(moments, peaks)
    series = {name: column.tolist() for name, column in moments.series(kept).items() if column.any()}
    drawn = MemoryTimeline(
        amounts=series,
        reserved=None if moments.reserved is None else moments.reserved[kept].tolist(),
        marks=_marks(moments.spans, kept),
    )
    return drawn, {int(moment): place for place, moment in enumerate(kept)}


def _kept(moments: Moments, peaks: Iterable[int]) -> Places:
    """Indices of the moments to keep, sorted."""
    stretches = min(POINTS, len(moments))
    borders = np.arange(stretches + 1) * len(moments) // stretches
    starts = borders[:-1]
    highest = np.maximum.reduceat(moments.allocated, starts)
    as_high = np.flatnonzero(moments.allocated == np.repeat(highest, np.diff(borders)))
    found = as_high[np.searchsorted(as_high, starts)]
    most_reserved = [] if moments.reserved is None else [int(np.argmax(moments.reserved))]
    return np.union1d(found, np.array([0, len(moments) - 1, *most_reserved, *peaks], np.int64))


def _marks(spans: Sequence[PhaseSpan], kept: Places) -> list[TimelineMark]:
    """Moves each mark to the first kept moment that is not before it."""
    return [
        TimelineMark(at=int(at), phase=span.phase, step=span.step)
        for span, at in zip(spans, np.searchsorted(kept, [span.first for span in spans]), strict=True)
    ]


MODULES = 200
HOLDERS = 30
KEEPERS = 3
HOLDERS_SHORT = 5
"""The holders that are named where memory was short."""
NOTABLE = 0.01
"""The fraction of the peak above which a note reports that readings are below the log."""

_Times = dict[tuple[Stage, Phase], list[PhaseSpan]]


def footprint(
    log: AllocationLog,
    *,
    source: Source,
    device: str | None,
    capacity: int | None,
    rank: int = 0,
    rules: Rules | None = None,
    other: int = 0,
    notes: Sequence[str] = (),
) -> Footprint:
    """Computes the footprint of a log, in bytes. Raises DataError for a log without allocations.

    With `rules`, for a prediction, allocated and reserved bytes follow from them, otherwise from the log's readings.
    `other` is what the device holds outside the allocator; `capacity` is the device's memory. The peak is the first
    moment at which most is allocated.
    """
    if not log.allocations:
        raise DataError(
            f"no allocations were recorded (source: {source})",
            "record from before the model is built until after the second step",
        )
    found = moments(log, source, rules, other)
    stages = _stages(found.spans)
    times = _times(found.spans, stages)
    tops = [max((found.top(span) for span in spans), key=found.allocated.__getitem__) for spans in times.values()]
    ends = [spans[-1].last for spans in times.values()]
    highest = int(np.argmax(found.allocated))
    drawn, places = timeline(found, [highest, *tops])
    [amounts] = found.amounts([highest])
    stage, span = next(pair for pair in zip(stages, found.spans, strict=True) if highest <= pair[1].last)
    held = [log.allocations[place] for place in found.held(highest)]
    sizes = found.lives.size[found.held(highest)].tolist()
    kept = _kept_by_step(log)
    keepers = [one for pieces in kept.values() for one in pieces]
    return Footprint(
        source=source,
        device=device,
        capacity=capacity,
        rank=rank,
        phases=[
            PhaseFootprint(stage, phase, peak, found.level(top), end)
            for (stage, phase), top, peak, end in zip(
                times, tops, found.amounts(tops), found.amounts(ends), strict=True
            )
        ],
        peak=FootprintPeak(stage, span.phase, amounts, found.level(highest), places[highest]),
        modules=_modules(held, sizes),
        holders=_holders(held, sizes),
        timeline=drawn,
        allocator=found.counts,
        late=log.late,
        truncated=log.truncated,
        truncation_proven=log.truncation_proven,
        kept=[sum(one.size for one in pieces) for pieces in kept.values()],
        keepers=_holders(keepers, [one.size for one in keepers])[:KEEPERS],
        notes=[*log.notes, *notes, *_doubts(log, found, rules)],
        out_of_memory=_out_of_memory(log, found),
        is_state=log.is_state,
    )


def _out_of_memory(log: AllocationLog, found: Moments) -> MemoryShortage | None:
    """Returns the last request that failed, with what was held before it."""
    if not log.failed:
        return None
    last = log.failed[-1]
    moment = int(np.searchsorted(found.state, last.at))
    held = found.held(moment)
    return MemoryShortage(
        requested=last.size,
        left=last.left,
        operator=last.operator,
        where=last.where,
        level=found.level(moment),
        largest_free=found.counts.largest_free if last.at == log.length else None,
        holders=_holders([log.allocations[place] for place in held], found.lives.size[held].tolist())[:HOLDERS_SHORT],
    )


def footprints(devices: Sequence[DeviceLog], source: Source) -> list[Footprint]:
    """The footprint of each device in a file. Raises what `footprint` does."""
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


def _stages(spans: Sequence[PhaseSpan]) -> list[Stage]:
    """The stage of each span; spans outside a step count for the step before them."""
    found: list[Stage] = []
    step = None
    for span in spans:
        step = step if span.step is None else span.step
        found.append("setup" if step is None else "first" if step == 0 else "steady")
    return found


def _times(spans: Sequence[PhaseSpan], stages: Sequence[Stage]) -> _Times:
    """The reported phases in order, with their occurrences in the set-up, in step 0 and in the last complete step.

    A mark after the last event only closes the log.
    """
    reported, found = (0, _steady_step(spans)), defaultdict(list)
    for stage, span in zip(stages, spans, strict=True):
        belongs = stage == "setup" if span.step is None else span.step in reported
        if belongs and (span.events or span.phase != "unknown"):
            found[stage, span.phase].append(span)
    return found


def _kept_by_step(log: AllocationLog) -> dict[int, list[Allocation]]:
    """What each step allocates and is still held at the end of the second step after it.

    A loop may fetch a batch one step before it is used, and free it one step after that. The first and the last two
    steps are left out.
    """
    starts: dict[int, int] = {}
    for mark in log.marks:
        if mark.step is not None:
            starts.setdefault(mark.step, mark.at)
    ends = dict(zip(starts, [*list(starts.values())[1:], log.length], strict=False))
    kept: dict[int, list[Allocation]] = {step: [] for step in starts if step and step + 2 in ends}
    for one in log.allocations:
        if one.step in kept and (one.end is None or one.end >= ends[one.step + 2]):
            kept[one.step].append(one)
    return kept


def _steady_step(spans: Iterable[PhaseSpan]) -> int | None:
    """The last step, or the one before it if the last one does not reach the phase in which that one ended."""
    phases: dict[int, list[Phase]] = defaultdict(list)
    for span in spans:
        if span.step is not None:
            phases[span.step] += [span.phase] if span.phase != "unknown" else []
    steps = list(phases)
    if len(steps) > 1 and not set(phases[steps[-2]][-1:]) <= set(phases[steps[-1]]):
        steps.pop()
    return steps[-1] if steps else None


def _modules(held: Iterable[Allocation], sizes: Iterable[int]) -> list[ModuleFootprint]:
    by_path: dict[str, Counter[str]] = defaultdict(Counter)
    for one, size in zip(held, sizes, strict=True):
        by_path[one.module][one.category] += size
    paths = sorted(by_path, key=lambda path: by_path[path].total(), reverse=True)
    found = [(path, by_path[path]) for path in paths[:MODULES]]
    rest = sum((by_path[path] for path in paths[MODULES:]), Counter[str]())
    found += [(OTHERS, rest)] if rest else []
    return [
        ModuleFootprint(path, {category: amounts[category] for category in CATEGORIES if amounts[category]})
        for path, amounts in found
        if amounts.total()
    ]


def _holders(held: Iterable[Allocation], sizes: Iterable[int]) -> list[Holder]:
    groups: dict[tuple[str, str, str, str, str], list[int]] = defaultdict(list)
    for one, size in zip(held, sizes, strict=True):
        if size:
            groups[one.category, one.module, one.operator, one.shape, one.where].append(size)
    found = sorted(
        (Holder(*alike, count=len(group), size=sum(group)) for alike, group in groups.items()),
        key=lambda holder: holder.size,
        reverse=True,
    )
    rest = found[HOLDERS:]
    if not rest:
        return found
    count, size = sum(holder.count for holder in rest), sum(holder.size for holder in rest)
    return [*found[:HOLDERS], Holder("", "", "", "", "", count=count, size=size)]


def _doubts(log: AllocationLog, found: Moments, rules: Rules | None) -> Iterator[str]:
    lacking, span = shortfall(found, [] if rules else log.readings)
    if lacking > NOTABLE * found.allocated.max():
        yield (
            f"in a {span.phase} phase the recorded allocations hold {units.size(lacking)} more than the allocator "
            "counted; the footprint shows the recorded allocations"
        )
