"""What was held at each moment of a history, by category and by the allocator's counts.

A phase has a moment for each state that it goes through, the one in which it finds the memory included, and one more
for its end: what a device's allocator says of the phase's peak and of its end may be of the same state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from typing import get_args

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from gpubench.memory.allocator import Replayed, Rules, replay
from gpubench.memory.footprint import CATEGORIES, Amounts, Level, Source
from gpubench.memory.history import Allocation, Category, Counts, History, Phase, Reading

Bytes = NDArray[np.int64]
Places = NDArray[np.int64]

HELD: tuple[Category, ...] = get_args(Category)
BEYOND: dict[Source, str] = {
    "measured": "workspaces",
    "predicted": "fragmentation",
    "snapshot": "fragmentation",
    "trace": "unknown",
}
"""What it is that the allocator counts beyond the blocks of the history. A run is followed at the dispatcher, and what
kernels take for themselves is seen by the allocator alone; a snapshot and the allocator's own rules know every request,
so that it is what a block has over; of a trace nothing tells."""


@dataclass(frozen=True)
class Span:
    """A phase once: from one mark to the next, as moments, both inclusive."""

    phase: Phase
    step: int | None
    first: int
    last: int

    @property
    def moments(self) -> slice:
        return slice(self.first, self.last + 1)

    @property
    def events(self) -> int:
        """Allocations and releases."""
        return self.last - self.first - 1


@dataclass(frozen=True)
class Lives:
    """The allocations as columns, in their order."""

    size: Bytes
    """In blocks, where there is an allocator that has them."""
    begin: Places
    end: Places
    """The history's length where it is held when the history ends."""
    category: Places
    """Index into `HELD`."""

    def sums(self, states: Places) -> Bytes:
        """Bytes held in each of some states, by category: (categories, states). State i is that after i events."""
        sorted_, place = np.unique(states, return_inverse=True)
        change = np.zeros((len(HELD), len(sorted_) + 1), np.int64)
        np.add.at(change, (self.category, np.searchsorted(sorted_, self.begin + 1)), self.size)
        np.subtract.at(change, (self.category, np.searchsorted(sorted_, self.end + 1)), self.size)
        return np.cumsum(change, axis=1)[:, place.reshape(-1)]


@dataclass(frozen=True)
class Moments:
    spans: list[Span]
    """In order; together they hold each moment once."""
    state: Places
    """How many events were before, for each moment; so are the next four."""
    requested: Bytes
    known: Bytes
    """The blocks of what the history holds."""
    allocated: Bytes
    reserved: Bytes | None
    lives: Lives
    counts: Counts
    beyond: str
    """Category of what is allocated and not known."""
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
        """Bytes by category at each of the chosen moments; they sum to the level's total."""
        found = {category: np.zeros(len(chosen), np.int64) for category in CATEGORIES}
        found |= zip(HELD, self.lives.sums(self.state[chosen]), strict=True)
        found[self.beyond] = found[self.beyond] + self.allocated[chosen] - self.known[chosen]
        if self.reserved is not None:
            found["fragmentation"] = found["fragmentation"] + self.reserved[chosen] - self.allocated[chosen]
        found["other"] = found["other"] + self.other
        return found

    def amounts(self, chosen: Sequence[int]) -> list[Amounts]:
        """The same, one for each of the chosen moments."""
        series = self.series(np.array(chosen, np.int64))
        rows = zip(*(column.tolist() for column in series.values()), strict=True)
        return [{name: size for name, size in zip(series, row, strict=True) if size} for row in rows]

    def held(self, moment: int) -> Places:
        """Which allocations are held, as indices."""
        state = self.state[moment]
        return np.flatnonzero((self.lives.begin < state) & (state <= self.lives.end))

    def top(self, span: Span) -> int:
        """The moment of a span when most is allocated; the first of equals."""
        return span.first + int(np.argmax(self.allocated[span.moments]))


def moments(history: History, source: Source, rules: Rules | None, other: int) -> Moments:
    """All moments of a history: of each phase two more than it has events.

    With `rules` allocated and reserved follow from a replay; else from the history's readings; without either nothing
    is kept back, and what was asked for is what was allocated. `other` bytes come on top of each moment.
    """
    spans = _spans(history)
    first = np.array([span.first for span in spans])
    number = np.repeat(np.arange(len(spans)), np.diff([*first, spans[-1].last + 1]))
    ends = np.array([end for _, end in _borders(history)], np.int64)
    state = np.minimum(np.arange(len(number)) - 2 * number, ends[number])
    block = (rules or Rules()).block if rules or history.readings else 1
    size = np.fromiter((one.size for one in history.allocations), np.int64, len(history.allocations))
    lives = _lives(history, -(-size // block) * block)
    requested, known = (_held(one, lives, history.length)[state] for one in (size, lives.size))
    allocated, reserved, counts = known, None, history.counts or _counted(history)
    if rules is not None:
        replayed = _replayed(history, rules)
        allocated, reserved = (np.insert(one, 0, 0)[state] for one in (replayed.allocated, replayed.reserved))
        counts = replayed.counts
    elif history.readings:
        allocated, reserved = _read(spans, known, history.readings)
    return Moments(spans, state, requested, known, allocated, reserved, lives, counts, BEYOND[source], other)


def shortfall(found: Moments, readings: Sequence[Reading]) -> tuple[int, Span]:
    """By how many bytes the readings say less than the history holds, where that is most; 0 where none does."""
    pairs = zip(found.spans, readings[1:], strict=False)
    lacking = [(int(found.known[span.moments].max()) - one.peak_allocated, span) for span, one in pairs]
    return max([(0, found.spans[0]), *lacking], key=lambda one: one[0])


def _borders(history: History) -> list[tuple[int, int]]:
    """Of each phase, as positions."""
    return list(pairwise([*(mark.at for mark in history.marks), history.length]))


def _spans(history: History) -> list[Span]:
    return [
        Span(mark.phase, mark.step, start + 2 * place, end + 2 * place + 1)
        for place, (mark, (start, end)) in enumerate(zip(history.marks, _borders(history), strict=True))
    ]


def _lives(history: History, size: Bytes) -> Lives:
    allocations, number = history.allocations, {category: place for place, category in enumerate(HELD)}

    def end(one: Allocation) -> int:
        return history.length if one.end is None else one.end

    return Lives(
        size=size,
        begin=np.fromiter((one.begin for one in allocations), np.int64, len(allocations)),
        end=np.fromiter((end(one) for one in allocations), np.int64, len(allocations)),
        category=np.fromiter((number[one.category] for one in allocations), np.int64, len(allocations)),
    )


def _held(size: Bytes, lives: Lives, length: int) -> Bytes:
    """Of all states, (length + 1)."""
    change = np.zeros(length + 2, np.int64)
    np.add.at(change, lives.begin + 1, size)
    np.subtract.at(change, lives.end + 1, size)
    return np.cumsum(change[:-1])


def _counted(history: History) -> Counts:
    """Of what the history itself holds."""
    given = sum(one.category != "before" for one in history.allocations)
    return Counts(given, sum(one.end is not None for one in history.allocations))


def _replayed(history: History, rules: Rules) -> Replayed:
    """As on a device without an end, so that what a smaller one lacks is to be seen; what runs short is counted on one
    of the rules' capacity, up to where an allocation fails."""
    whole = replay(history, replace(rules, capacity=None))
    if rules.capacity is None:
        return whole
    short = whole.reserved.max(initial=0) > rules.capacity
    limited = replay(history, rules).counts if short else Counts(0, 0, retries=0, ooms=0)
    return replace(whole, counts=structs.replace(whole.counts, retries=limited.retries, ooms=limited.ooms))


def _read(spans: Sequence[Span], known: Bytes, readings: Sequence[Reading]) -> tuple[Bytes, Bytes]:
    """Allocated and reserved of all moments, from what the allocator said between them.

    The peak of a phase is at the moment when the history holds most, and is what the reading at the next mark says;
    its end is as well. In between, what is counted beyond the history is the lesser of what it is at these two, and
    reserved grows as it must. A phase without a reading behind it goes on as the one before ended.
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
