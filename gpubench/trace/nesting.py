"""Which slice of the host stands in which: by thread and containment, as a profiler's spans are meant."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from gpubench.trace.columns import MISSING, HostKind, Ids, Mask, Ns, Trace

_EVER = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Nest:
    """The forest of a trace's host slices, each thread apart. All arrays are aligned with `Trace.host`."""

    parent: Ids
    """Index of the slice around it, -1 for a root; always less than its own."""
    end: Ns
    """Where it ends, no later than its parent."""
    own: Ns
    """Nanoseconds in it and in none of its children; over a tree they sum to the length of the root."""


@dataclass(frozen=True)
class Segments:
    """A tiling of some nanoseconds of one thread, each piece with the innermost slice that is open then, or -1."""

    start: Ns
    end: Ns
    slice: Ids

    def only(self, mask: Mask) -> "Segments":
        return Segments(self.start[mask], self.end[mask], self.slice[mask])


def nest(trace: Trace) -> Nest:
    """The forest of `trace`.

    Where a slice outlasts the one it began in, no nesting is right: it is cut to that one, or if most of it lies
    beyond, the earlier one ends where it begins. An annotation is always cut to the operator it began in: an exception
    may leave it open, while operators close whatever happens.
    """
    host = trace.host
    starts, ends, kinds = host.start.tolist(), host.end.tolist(), host.kind.tolist()
    parents = [MISSING] * len(host)
    edges = np.searchsorted(host.thread, np.arange(len(trace.threads) + 1)).tolist()
    for first, beyond in pairwise(edges):
        _nest_thread(range(first, beyond), starts, ends, kinds, parents)
    parent, end = np.array(parents, np.int32), np.array(ends, np.int64)
    own = end - host.start
    inner = np.flatnonzero(parent >= 0)
    np.subtract.at(own, parent[inner], end[inner] - host.start[inner])
    return Nest(parent, end, own)


def _nest_thread(slices: range, starts: list[int], ends: list[int], kinds: list[int], parents: list[int]) -> None:
    open_: list[int] = []
    for index in slices:
        start, end = starts[index], ends[index]
        while open_:
            around = open_[-1]
            inside = ends[around] - start
            left_open = kinds[index] == HostKind.ANNOTATION and kinds[around] == HostKind.OPERATOR
            if inside > 0 and (2 * inside >= end - start or left_open):
                parents[index] = around
                ends[index] = min(end, ends[around])
                break
            ends[around] = min(ends[around], start)
            open_.pop()
        open_.append(index)


def nearest(nest: Nest, mask: Mask) -> Ids:
    """For each slice the innermost one of `mask` that is it or around it, else -1."""
    found = np.where(mask, np.arange(len(mask), dtype=np.int32), nest.parent)
    # Each round every open search doubles its reach, since those it jumps to have jumped as far.
    searching = np.flatnonzero((found >= 0) & ~mask[found])
    while len(searching):
        found[searching] = found[found[searching]]
        reached = found[searching]
        searching = searching[(reached >= 0) & ~mask[reached]]
    return found


def nearest_around(nest: Nest, found: Ids) -> Ids:
    """For each slice what `found`, made by `nearest`, has for its parent: the innermost one that is not itself."""
    return np.where(nest.parent >= 0, found[nest.parent], np.int32(MISSING))


def outermost(nest: Nest, mask: Mask) -> Ids:
    """For each slice the outermost one of `mask` that is it or around it, else -1."""
    found = nearest(nest, mask)
    roots = mask & (nearest_around(nest, found) < 0)
    return nearest(nest, roots)


def reaching(nest: Nest, slices: Ids) -> Mask:
    """Over all slices: those that are one of `slices`, or around one."""
    found = np.zeros(len(nest.parent), np.bool_)
    rising = np.unique(slices)
    while len(rising):
        found[rising] = True
        around = nest.parent[rising]
        around = around[around >= 0]
        rising = np.unique(around[~found[around]])
    return found


def innermost(trace: Trace, nest: Nest, thread: int, start: int, end: int) -> Segments:
    """What `thread` did in each part of [start, end), which the segments tile."""
    if end <= start:
        return Segments(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int32))
    here = np.flatnonzero((trace.host.thread == thread) & (nest.end > trace.host.start)).astype(np.int32)
    times = np.concatenate(([_EVER], nest.end[here], trace.host.start[here]))
    opens = np.repeat([0, 0, 1], (1, len(here), len(here)))
    opened = np.concatenate(([MISSING], nest.parent[here], here)).astype(np.int32)
    # At one instant slices end before others start, the inner ones first; of those that start, the outer ones first.
    order = np.lexsort((np.concatenate(([0], -here, here)), opens, times))
    times, opened = np.clip(times[order], start, end), opened[order]
    edges = np.append(times, end)
    real = edges[1:] > edges[:-1]
    return Segments(edges[:-1][real], edges[1:][real], opened[real])


def of_pieces(pieces: Segments, column: NDArray[np.int8], otherwise: int) -> NDArray[np.int8]:
    """What a column beside the slices says of each piece; `otherwise` where none is open."""
    if not len(column):
        return np.full(len(pieces.slice), otherwise, np.int8)
    return np.where(pieces.slice >= 0, column[pieces.slice], np.int8(otherwise))


def owner_slice(trace: Trace, nest: Nest, links: Ids) -> Ids:
    """For each work of the device the innermost operator its launch stands in, as an index of `Trace.host`, or -1."""
    operators = nearest(nest, trace.host.kind == HostKind.OPERATOR)
    return np.where(links >= 0, operators[links], np.int32(MISSING)) if len(operators) else links


def owner(trace: Trace, nest: Nest, links: Ids) -> Ids:
    """The same as an index of `Trace.names`."""
    slices = owner_slice(trace, nest, links)
    return np.where(slices >= 0, trace.host.name[slices], np.int32(MISSING)) if len(trace.host) else slices
