"""Sets of nanoseconds as arrays of half-open intervals, in exact integer arithmetic.

A `Spans` is sorted and disjoint, and no two of its intervals touch; `union` makes one of anything.
"""

from dataclasses import dataclass

import numpy as np

from gpubench.trace.columns import Ns


@dataclass(frozen=True)
class Spans:
    start: Ns
    end: Ns

    def __len__(self) -> int:
        return len(self.start)

    @property
    def length(self) -> int:
        """Nanoseconds in the set."""
        return int((self.end - self.start).sum())


EMPTY = Spans(np.empty(0, np.int64), np.empty(0, np.int64))


def span(start: int, end: int) -> Spans:
    """One interval; nothing where it has no length."""
    if end <= start:
        return EMPTY
    return Spans(np.array([start], np.int64), np.array([end], np.int64))


def union(start: Ns, end: Ns) -> Spans:
    """Of any intervals, in any order; those of no length vanish."""
    real = end > start
    start, end = start[real], end[real]
    if not len(start):
        return EMPTY
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate(([True], start[1:] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return Spans(start[first], reach[last])


def join(*sets: Spans) -> Spans:
    return union(np.concatenate([one.start for one in sets]), np.concatenate([one.end for one in sets]))


def intersect(a: Spans, b: Spans) -> Spans:
    if not len(a) or not len(b):
        return EMPTY
    # Each interval of `a` meets those of `b` from the first that ends after it starts to the last that starts before
    # it ends; `b` is disjoint, so both ends are sorted.
    first = np.searchsorted(b.end, a.start, side="right")
    beyond = np.searchsorted(b.start, a.end, side="left")
    count = np.maximum(beyond - first, 0)
    ours = np.repeat(np.arange(len(a)), count)
    theirs = np.arange(len(ours)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
    return Spans(np.maximum(a.start[ours], b.start[theirs]), np.minimum(a.end[ours], b.end[theirs]))


def subtract(a: Spans, b: Spans) -> Spans:
    """What is in `a` and not in `b`."""
    if not len(a) or not len(b):
        return a
    low, high = min(int(a.start[0]), int(b.start[0])), max(int(a.end[-1]), int(b.end[-1]))
    return intersect(a, complement(b, low, high))


def complement(a: Spans, start: int, end: int) -> Spans:
    """What of [start, end) is not in `a`."""
    edges_start = np.concatenate(([start], np.clip(a.end, start, end)))
    edges_end = np.concatenate((np.clip(a.start, start, end), [end]))
    real = edges_end > edges_start
    return Spans(edges_start[real], edges_end[real])


def clip(a: Spans, start: int, end: int) -> Spans:
    """What of `a` lies in [start, end)."""
    return intersect(a, span(start, end))


def overlap(start: Ns, end: Ns, a: Spans) -> Ns:
    """Nanoseconds that each of the intervals [start, end) has in common with `a`."""
    return _measured_until(a, end) - _measured_until(a, start)


def _measured_until(a: Spans, at: Ns) -> Ns:
    """Length of the part of `a` before each instant."""
    if not len(a):
        return np.zeros(len(at), np.int64)
    before = np.concatenate(([0], np.cumsum(a.end - a.start)))
    place = np.searchsorted(a.start, at, side="right")
    inside = np.where(place > 0, np.minimum(at, a.end[np.maximum(place - 1, 0)]) - a.start[np.maximum(place - 1, 0)], 0)
    return before[np.maximum(place - 1, 0)] + np.maximum(inside, 0)
