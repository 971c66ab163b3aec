"""Why the device had nothing to do: each instant of idle time is given to one cause.

A gap between works is cut where the launch call of the work that ends it returned. From there on the host cannot be
the cause, whatever it did:

1. queued: the work had been launched, and stood in a queue, or behind work that was not recorded. Work without a launch
   in the trace was launched no later than the work behind it on its stream.
2. backlog: the work has no launch in the trace, and of the works only later ones have one: launched before the trace
   began.

A copy to the host is asked for by a call that returns when the copy is done. It counts as launched ISSUING after the
call began and the device was free.

Until then the cause is what the host did at that instant, the first of these that holds on threads that drive the
device: those that launch kernels or memsets, and the one with the steps. A thread that only copies ahead of use, or
runs collectives or a loader for others, drives nothing: what it holds up shows on those that do.

3. data_loader: it fetched a batch.
4. allocator: it was in a call such as cudaMalloc or cudaFree.
5. pageable_copy: it was in the call of a copy to the device from memory that is not page-locked, or in the wait that
   is part of such a copy: the blocking call that follows next within the same aten::copy_.
6. communication_wait: it waited for other ranks.
7. recording: it was in a wait for the device that only the recording makes; see `recorder`.
8. synchronisation: it was in another call that waits for the device, among them copies to memory that is not
   page-locked.

What is left follows from the work that ends the gap:

9. Its launch came later, and a wait of kind 5, 7 or 8 was under way as the gap began: the host could go on only then.
   Had it not waited, it would have come to the launch earlier by the time of the wait; so the gap is the wait's for as
   long as the wait took, from the gap's beginning, and python_and_launch's from there.
10. Its launch came later: python_and_launch. So is time before no work at all, where the trace shows the host.
11. unknown: no launch is known, or nothing follows and the host does not show.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpubench.trace.columns import MISSING, HostKind, Ids, Mask, Ns, Trace, WorkKind
from gpubench.trace.intervals import EMPTY, Spans, clip, complement, intersect, join, overlap, subtract, union
from gpubench.trace.launches import by_stream
from gpubench.trace.links import launchers
from gpubench.trace.names import Lexicon
from gpubench.trace.profile import CAUSES, Cause
from gpubench.trace.recorder import recorder_waits
from gpubench.trace.windows import Window

ISSUING = 20_000
"""Nanoseconds: no call takes longer to begin a copy once the device is free. A launch takes about half of that."""
LATER = np.iinfo(np.int64).max // 2

_COPYING = ("aten::copy_", "aten::_to_copy", "aten::to")


def idle_causes(trace: Trace, lexicon: Lexicon, links: Ids, window: Window) -> dict[Cause, Spans]:
    """Disjoint sets for all causes, whose union is the time in the window without any work of the device."""
    host = trace.host
    pageable, waits = pageable_calls(trace, lexicon, links), waiting_calls(trace, lexicon, links)
    recording = waits & recorder_waits(trace, lexicon, links, window)
    driving, gaps = drivers(trace, lexicon, links), _gaps(trace, lexicon, links, window)
    opened = _opened(trace, gaps, pageable | waits)
    shown = union(host.start, host.end)
    in_order: list[tuple[Cause, Spans]] = [
        ("backlog", gaps.behind(gaps.backlog)),
        ("queued", gaps.behind(~gaps.backlog)),
        ("data_loader", _when(trace, driving & lexicon.data_loader[host.name])),
        ("allocator", _when(trace, driving & (host.kind == HostKind.RUNTIME) & lexicon.allocator[host.name])),
        ("pageable_copy", _when(trace, pageable)),
        ("communication_wait", _when(trace, driving & lexicon.communication_wait[host.name])),
        ("recording", _when(trace, recording)),
        ("synchronisation", _when(trace, waits)),
        ("pageable_copy", opened.by(pageable)),
        ("recording", opened.by(recording)),
        ("synchronisation", opened.by(~pageable & ~recording)),
        ("python_and_launch", join(gaps.before(gaps.linked), intersect(gaps.before(gaps.last), shown))),
    ]
    rest = clip(union(gaps.start, gaps.end), window.start, window.end)
    found = dict.fromkeys(CAUSES, EMPTY)
    for cause, spans in in_order:
        found[cause] = join(found[cause], intersect(rest, spans))
        rest = subtract(rest, spans)
    return found | {"unknown": rest}


def idle_within(causes: Mapping[Cause, Spans], windows: Sequence[tuple[int, int]]) -> list[dict[Cause, int]]:
    """Nanoseconds of each cause in each [start, end)."""
    bounds = np.array(windows, np.int64).reshape(-1, 2)
    columns = [overlap(bounds[:, 0], bounds[:, 1], spans).tolist() for spans in causes.values()]
    return [dict(zip(causes, row, strict=True)) for row in zip(*columns, strict=True)]


def pageable_calls(trace: Trace, lexicon: Lexicon, links: Ids) -> Mask:
    """Over `Trace.host`: calls of copies from pageable memory to the device, and the waits that are part of them.

    Of driving threads, as `waiting_calls` are.
    """
    host = trace.host
    calls = _calls_of(trace, links, lexicon.pageable_upload)
    found = np.zeros(len(host), np.bool_)
    found[calls] = True
    runtime = np.flatnonzero(host.kind == HostKind.RUNTIME)
    following = np.searchsorted(runtime, calls) + 1
    calls, following = calls[following < len(runtime)], runtime[following[following < len(runtime)]]
    waits = _of_one_copy(trace, calls, following) & lexicon.blocking[host.name[following]]
    found[following[waits]] = True
    return found & drivers(trace, lexicon, links)


def _of_one_copy(trace: Trace, calls: NDArray[np.intp], following: NDArray[np.intp]) -> Mask:
    """Whether the same aten::copy_ is around both."""
    host = trace.host
    named = np.fromiter((name in _COPYING for name in trace.names), np.bool_, len(trace.names))
    copying = np.flatnonzero(named[host.name] & (host.kind == HostKind.OPERATOR))
    place = np.searchsorted(copying, calls) - 1
    known = place >= 0
    around = copying[place[known]]
    same = np.zeros(len(calls), np.bool_)
    same[known] = (host.thread[around] == host.thread[following[known]]) & (
        host.end[around] >= host.end[following[known]]
    )
    return same


def drivers(trace: Trace, lexicon: Lexicon, links: Ids) -> Mask:
    """Over `Trace.host`: slices of threads that launch kernels or memsets, or go through the steps.

    Others, such as one that page-locks batches ahead of their use, hold nothing up. Without any such thread all count.
    """
    host = trace.host
    launches = links[(links != MISSING) & (trace.device.kind != WorkKind.COPY)]
    driving = np.zeros(len(trace.threads), np.bool_)
    driving[host.thread[launches]] = True
    driving[host.thread[lexicon.profiler_step[host.name]]] = True
    found: Mask = driving[host.thread] if driving.any() else np.ones(len(host), np.bool_)
    return found


def waiting_calls(trace: Trace, lexicon: Lexicon, links: Ids) -> Mask:
    """Over `Trace.host`: calls that return when the device is done."""
    host = trace.host
    found: Mask = lexicon.blocking[host.name] & (host.kind == HostKind.RUNTIME)
    found[_calls_of(trace, links, lexicon.pageable_download)] = True
    return found & drivers(trace, lexicon, links)


def idle_by_call(trace: Trace, lexicon: Lexicon, causes: Mapping[Cause, Spans]) -> Ns:
    """For each slice of the host the nanoseconds of `synchronisation` that it opened or covered: 0 but for waits.

    An instant counts for the wait that began last before it, so that all sum to the whole.
    """
    links, host, spans = launchers(trace), trace.host, causes["synchronisation"]
    calls = np.flatnonzero(waiting_calls(trace, lexicon, links) & ~pageable_calls(trace, lexicon, links))
    calls = calls[np.argsort(host.start[calls], kind="stable")]
    found = np.zeros(len(host), np.int64)
    if len(calls) and len(spans):
        start = host.start[calls]
        found[calls] = overlap(start, np.append(start[1:], max(spans.end[-1], start[-1])), spans)
    return found


def _when(trace: Trace, chosen: Mask) -> Spans:
    return union(trace.host.start[chosen], trace.host.end[chosen])


def _calls_of(trace: Trace, links: Ids, names: Mask) -> NDArray[np.intp]:
    """Indices into `Trace.host` of the calls that brought device work of such names."""
    return np.unique(links[names[trace.device.name] & (links != MISSING)]).astype(np.intp)


@dataclass(frozen=True)
class _Gaps:
    """Times without work, as they are and not cut to the window, with what ends each."""

    start: Ns
    launched: Ns
    """When the work that ends the gap had been launched, within the gap: its end where that is later or not known."""
    end: Ns
    backlog: Mask
    linked: Mask
    """The work's launch is in the trace."""
    last: Mask
    """Before no work."""

    def before(self, chosen: Mask) -> Spans:
        """The parts in which the work was not launched, as far as is known."""
        return union(self.start[chosen], self.launched[chosen])

    def behind(self, chosen: Mask) -> Spans:
        """The parts in which it was."""
        return union(self.launched[chosen], self.end[chosen])


def _gaps(trace: Trace, lexicon: Lexicon, links: Ids, window: Window) -> _Gaps:
    device = trace.device
    busy = union(device.start, device.end)
    first, behind = (int(busy.start[0]), int(busy.end[-1])) if len(busy) else (window.start, window.end)
    idle = complement(busy, min(first, window.start), max(behind, window.end))
    real = np.flatnonzero(device.end > device.start)
    starts, groups = np.unique(device.start[real], return_index=True)
    place = np.searchsorted(starts, idle.end)
    last = place == len(starts)
    ended_by = np.minimum(place, len(starts) - 1)[~last]
    linked, launched = np.zeros(len(idle), np.bool_), idle.end.copy()
    if len(real):  # of works that begin at one instant, the one launched first
        linked[~last] = np.maximum.reduceat(links[real], groups)[ended_by] != MISSING
        known = np.minimum.reduceat(_launched(trace, lexicon, links, busy)[real], groups)[ended_by]
        launched[~last] = np.clip(known, idle.start[~last], idle.end[~last])
    followed = device.start[links != MISSING]
    backlog = ~linked & ~last & (idle.end <= (followed.min() if len(followed) else MISSING))
    return _Gaps(idle.start, np.where(backlog, idle.start, launched), idle.end, backlog, linked, last)


def _launched(trace: Trace, lexicon: Lexicon, links: Ids, busy: Spans) -> Ns:
    """For each work the instant at which it had been launched for certain; LATER where nothing tells."""
    device, host = trace.device, trace.host
    linked = links != MISSING
    found = np.full(len(device), LATER)
    found[linked] = host.end[links[linked]]
    waited = np.flatnonzero(linked & lexicon.download[device.name])
    waited = waited[waiting_calls(trace, lexicon, links)[links[waited]]]
    free = np.concatenate(([-LATER], busy.end))[np.searchsorted(busy.end, device.start[waited], side="right")]
    found[waited] = np.minimum(found[waited], np.maximum(host.start[links[waited]], free) + ISSUING)
    for works in by_stream(trace):
        followed_by = np.minimum.accumulate(found[works[::-1]])[::-1]
        found[works] = np.where(linked[works] | (device.stream[works] == MISSING), found[works], followed_by)
    return found


@dataclass(frozen=True)
class _Opened:
    """The parts of gaps that go back to a wait, and the slice that waited."""

    start: Ns
    end: Ns
    call: NDArray[np.intp]

    def by(self, chosen: Mask) -> Spans:
        mask = chosen[self.call]
        return union(self.start[mask], self.end[mask])


def _opened(trace: Trace, gaps: _Gaps, waits: Mask) -> _Opened:
    """Of gaps whose end the host was yet to bring about as they began, by the wait that was under way then."""
    calls = np.flatnonzero(waits)
    calls = calls[np.argsort(trace.host.start[calls], kind="stable")]
    start, end = trace.host.start[calls], trace.host.end[calls]
    # Of the waits that began before the gap, the one that ends last.
    furthest = np.maximum.accumulate(np.where(end == np.maximum.accumulate(end), np.arange(len(calls)), 0))
    late = gaps.before(gaps.linked | gaps.last)
    place = np.searchsorted(start, late.start) - 1
    began = place >= 0
    found = furthest[place[began]]
    waiting = end[found] >= late.start[began]
    found, gap_start, gap_end = found[waiting], late.start[began][waiting], late.end[began][waiting]
    return _Opened(gap_start, np.minimum(gap_end, gap_start + end[found] - start[found]), calls[found])
