"""The critical path: the chain of work of which each waited for the one before, from the window's end to its beginning.

It is walked backwards. A work of the device waited for whichever came last of three: its launch, the end of the
work before it on its stream, and the end of a work on another stream that lies between those and its start (an event
it must have waited for, as nothing else explains that it did not start earlier). The host waited for the
device where a call that waits has a work's end inside it; else it went on by itself, back to the window's beginning.
Work whose launch the trace lacks waited for the device alone. A window that ends in a gap ends as the next work waits.

Limits: what one host thread gives another, and one rank another, is not followed; of two streams whose works end
between a launch and a start, the later one counts, needed or not.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpubench.trace.breakdown import communication_work
from gpubench.trace.columns import MISSING, HostKind, Ids, Mask, Ns, Trace, WorkKind
from gpubench.trace.idle import drivers, pageable_calls, waiting_calls
from gpubench.trace.intervals import Spans, intersect, subtract, union
from gpubench.trace.launches import NEVER, previous_on_stream, ready
from gpubench.trace.names import Lexicon
from gpubench.trace.windows import Window

WORK_CLASSES = ("compute", "communication", "copies")
GAP_CLASSES = ("launch_delay", "queue")
"""From the end of a launch call to the work's start; between works that stand in line."""
HOST_CLASSES = ("data_loader", "allocator", "synchronisation", "operators", "python")
"""The first that the host shows at an instant: `operators`, which are calls into the runtime too, on any thread, those
before it on threads that drive the device."""


def critical_path(trace: Trace, lexicon: Lexicon, links: Ids, window: Window) -> dict[str, int]:
    """Nanoseconds of each class on the path; they sum to the window."""
    waits = waiting_calls(trace, lexicon, links) | pageable_calls(trace, lexicon, links)
    found = dict.fromkeys(WORK_CLASSES + GAP_CLASSES + HOST_CLASSES, 0)
    rest = _walk(_works(trace, lexicon, links), _waits(trace, waits), window, found)
    for name, spans in _host_spans(trace, lexicon, links, waits).items():
        found[name] += intersect(rest, spans).length
        rest = subtract(rest, spans)
    found["python"] += rest.length
    return found


@dataclass(frozen=True)
class _Works:
    """The works of the device, each with what it waited for. Lists, since the walk takes one at a time."""

    kind: list[str]
    start: list[int]
    end: list[int]
    after: list[int]
    """The work it waited for, -1 for the host."""
    since: list[int]
    """When that ended, or the launch call."""
    gap: list[str]


@dataclass(frozen=True)
class _Waits:
    """Calls in which the host waited for a work, in the order of their ends."""

    end: list[int]
    work: list[int]


def _walk(works: _Works, waits: _Waits, window: Window, found: dict[str, int]) -> Spans:
    """Adds the device's part of the path to `found`; the host's part is returned."""
    now, work = window.end, _last(works, window.end)
    host_start, host_end = [], []
    while now > window.start:
        if work != MISSING:
            start = max(min(works.start[work], now), window.start)
            since = max(min(works.since[work], start), window.start)
            found[works.kind[work]] += now - start
            found[works.gap[work]] += start - since
            now, work = since, works.after[work]
        else:
            place = bisect_right(waits.end, now) - 1
            work = waits.work[place] if place >= 0 else MISSING
            since = max(works.end[work] if place >= 0 else window.start, window.start)
            host_start.append(since)
            host_end.append(now)
            now = since
    return union(np.array(host_start, np.int64), np.array(host_end, np.int64))


def _last(works: _Works, at: int) -> int:
    """The first work that goes on until then or longer; in a gap, the next work, if what it waited for was over.

    -1 where the device had nothing to do.
    """
    spans = enumerate(zip(works.start, works.end, strict=True))
    running = next((work for work, (start, end) in spans if start < at <= end), MISSING)
    following = bisect_left(works.start, at)
    if running != MISSING or following == len(works.start):
        return running
    return following if works.since[following] < at else MISSING


def _works(trace: Trace, lexicon: Lexicon, links: Ids) -> _Works:
    device = trace.device
    kind = np.where(device.kind == WorkKind.COPY, 2, communication_work(trace, lexicon).astype(np.int8))
    previous, ended = previous_on_stream(trace)
    ended = np.where(previous == MISSING, NEVER, np.minimum(ended, device.start))
    launched = ready(trace, links)
    other, other_end = _last_ended(trace, device.start)
    elsewhere = other_end > np.maximum(launched, ended)
    late = ~elsewhere & (launched > ended)
    since = np.where(elsewhere, other_end, np.where(late, launched, ended))
    after = np.where(elsewhere, other, np.where(late, MISSING, previous))
    return _Works(
        kind=[WORK_CLASSES[one] for one in kind.tolist()],
        start=device.start.tolist(),
        end=device.end.tolist(),
        after=after.tolist(),
        since=np.where(since == NEVER, device.start, since).tolist(),
        gap=[GAP_CLASSES[one] for one in (~late).astype(np.int8).tolist()],
    )


def _waits(trace: Trace, waits: Mask) -> _Waits:
    calls = np.flatnonzero(waits)
    calls = calls[np.argsort(trace.host.end[calls], kind="stable")]
    work, end = _last_ended(trace, trace.host.end[calls])
    waited = end > trace.host.start[calls]
    return _Waits(trace.host.end[calls][waited].tolist(), work[waited].tolist())


def _last_ended(trace: Trace, at: Ns) -> tuple[NDArray[np.intp], Ns]:
    """The work that ended last until each instant, and when; -1 where none did. Work of no length counts as none."""
    device = trace.device
    real = np.flatnonzero(device.end > device.start)
    if not len(real):
        return np.full(len(at), MISSING), np.full(len(at), NEVER)
    real = real[np.argsort(device.end[real], kind="stable")]
    place = np.searchsorted(device.end[real], at, side="right") - 1
    work = real[np.maximum(place, 0)]
    return np.where(place < 0, MISSING, work), np.where(place < 0, NEVER, device.end[work])


def _host_spans(trace: Trace, lexicon: Lexicon, links: Ids, waits: Mask) -> dict[str, Spans]:
    host = trace.host
    runtime, driving = host.kind == HostKind.RUNTIME, drivers(trace, lexicon, links)
    masks = {
        "data_loader": driving & lexicon.data_loader[host.name],
        "allocator": driving & runtime & lexicon.allocator[host.name],
        "synchronisation": waits,
        "operators": runtime | (host.kind == HostKind.OPERATOR),
    }
    return {name: union(host.start[mask], host.end[mask]) for name, mask in masks.items()}
