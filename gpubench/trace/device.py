"""Computes what the device did: a partition of wall time, the causes of idle time, and the critical path.

Partition: if several kinds of work overlap, the time counts for the first of compute, communication, copies. What
counts for the latter two is therefore what a perfect overlap could save.

Causes of idle time: each instant of idle time has one cause. A gap between works is split where the launch call of the
work that ends it returned. After that, the cause is not the CPU:

1. queued: the work had been launched, and was in a queue, or behind work that was not recorded. Work without a launch
   in the trace was launched no later than the work after it on its stream.
2. backlog: the work has no launch in the trace, and only later works have one: it was launched before the trace began.

A copy to the CPU is requested by a call that returns when the copy is done. It counts as launched ISSUING after the
call began and the device was free.

Before that, the cause is what the CPU did at that instant, the first of the following that holds on threads that drive
the device: those that launch kernels or memsets, and the one with the steps. A thread that only copies ahead of use, or
runs collectives or a loader for others, does not drive the device: its delays show on the threads that do.

3. first_calls: it did what a program does only once, such as loading code; see `first_calls`.
   data_loader: the CPU fetched a batch.
4. allocator: it was in a call such as cudaMalloc or cudaFree.
5. pageable_copy: it was in the call of a copy to the device from memory that is not page-locked, or in the wait that is
   part of such a copy: the blocking call that follows next within the same aten::copy_.
6. communication_wait: it waited for other ranks.
7. recording: it was in a wait for the device that only the recording makes; see `recorder`.
8. synchronisation: it was in another call that waits for the device, including copies to memory that is not
   page-locked.

The rest depends on the work that ends the gap:

9. Its launch came later, and a wait of kind 5, 7 or 8 was open when the gap began. Without the wait, the CPU would
   have launched the work earlier by the length of the wait. So the gap is the wait's for that long, from the gap's
   beginning, and python_and_launch's after that.
10. Its launch came later: python_and_launch. Time before no work at all has the same cause, if the trace shows the
    CPU.
11. unknown: no launch is known, or nothing follows and the CPU is not in the trace.

Critical path: the chain of work in which each piece waited for the previous one, followed backwards from the window's
end to its beginning. A work of the device waited for the last of three events: its launch, the end of the previous work
on its stream, and the end of a work on another stream between those and its start (an event that it must have waited
for, since nothing else explains why it did not start earlier). The CPU waited for the device where a blocking call
contains the end of a work; otherwise it ran by itself, back to the window's beginning. Work without a launch in the
trace waited for the device only. If the window ends in a gap, it ends like the wait of the next work.

Limits: dependencies between CPU threads and between ranks are not followed; if works of two streams end between a
launch and a start, the later one counts, whether it was needed or not.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from gpubench.trace.columns import (
    EMPTY,
    MISSING,
    Mask,
    Ns,
    SliceKind,
    Spans,
    Trace,
    WorkKind,
    clip,
    complement,
    intersect,
    join,
    overlap,
    subtract,
    union,
)
from gpubench.trace.first_calls import captures, first_calls
from gpubench.trace.names import Lexicon, Window
from gpubench.trace.profile import CAUSES, Cause, Held, WallBreakdown
from gpubench.trace.slices import NEVER, ProgramSlices, by_stream, previous_on_stream, ready


@dataclass(frozen=True)
class Sets:
    """When the device did what, over the whole trace."""

    compute: Spans
    """Kernels other than communication, and memsets."""
    communication: Spans
    copies: Spans
    busy: Spans
    exposed_communication: Spans
    """Communication while nothing computes."""
    exposed_copies: Spans
    """Copies while nothing computes or communicates."""


def device_spans(trace: Trace, lexicon: Lexicon) -> Sets:
    device = trace.device
    communicates = communication_work(trace, lexicon)
    copies = device.kind == WorkKind.COPY
    compute = device.spans(~communicates & ~copies)
    communication = device.spans(communicates)
    copied = device.spans(copies)
    busy_without_copies = join(compute, communication)
    return Sets(
        compute=compute,
        communication=communication,
        copies=copied,
        busy=join(busy_without_copies, copied),
        exposed_communication=subtract(communication, compute),
        exposed_copies=subtract(copied, busy_without_copies),
    )


def communication_work(trace: Trace, lexicon: Lexicon) -> Mask:
    """A mask over `Trace.device` of the kernels that communicate."""
    communicates: Mask = lexicon.communication_kernel[trace.device.name]
    communicates &= trace.device.kind == WorkKind.KERNEL
    return communicates


def breakdowns(sets: Sets, windows: Sequence[tuple[int, int]]) -> list[WallBreakdown]:
    bounds = np.array(windows, np.int64).reshape(-1, 2)
    start, end = bounds[:, 0], bounds[:, 1]
    parts = (sets.compute, sets.exposed_communication, sets.exposed_copies, sets.communication, sets.copies)
    found = np.stack([end - start, *(overlap(start, end, part) for part in parts)], axis=1)
    return [_breakdown(*row) for row in found.tolist()]


def _breakdown(wall: int, compute: int, exposed: int, exposed_copies: int, together: int, copies: int) -> WallBreakdown:
    return WallBreakdown(
        wall=wall,
        compute=compute,
        exposed_communication=exposed,
        exposed_copies=exposed_copies,
        idle=wall - compute - exposed - exposed_copies,
        communication=together,
        copies=copies,
        hidden_communication=together - exposed,
    )


ISSUING = 20_000
"""The longest time in nanoseconds that a call takes to begin a copy once the device is free. A launch takes half of
it."""
LATER = np.iinfo(np.int64).max // 2

_COPYING = ("aten::copy_", "aten::_to_copy", "aten::to")


def idle_causes(program: ProgramSlices) -> dict[Cause, Spans]:
    """Disjoint sets for all causes; their union is the time in the window without device work."""
    cpu, lexicon, window = program.trace.cpu, program.lexicon, program.window
    pageable, waits = pageable_calls(program), waiting_calls(program)
    recording = waits & program.recorder_waits
    driving, gaps = drivers(program), _gaps(program)
    opened = _opened(program.trace, gaps, pageable | waits)
    shown = union(cpu.start, cpu.end)
    in_order: list[tuple[Cause, Spans]] = [
        ("backlog", gaps.behind(gaps.backlog)),
        ("queued", gaps.behind(~gaps.backlog)),
        ("first_calls", join(EMPTY, *(one.spans for one in first_calls(program, driving)))),
        ("data_loader", cpu.spans(driving & lexicon.data_loader[cpu.name])),
        ("allocator", cpu.spans(driving & (cpu.kind == SliceKind.RUNTIME) & lexicon.allocator[cpu.name])),
        ("pageable_copy", cpu.spans(pageable)),
        ("communication_wait", cpu.spans(driving & lexicon.communication_wait[cpu.name])),
        ("recording", cpu.spans(recording)),
        ("synchronisation", cpu.spans(waits)),
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
    """The nanoseconds of each cause in each [start, end)."""
    bounds = np.array(windows, np.int64).reshape(-1, 2)
    columns = [overlap(bounds[:, 0], bounds[:, 1], spans).tolist() for spans in causes.values()]
    return [dict(zip(causes, row, strict=True)) for row in zip(*columns, strict=True)]


def pageable_calls(program: ProgramSlices) -> Mask:
    """A mask over `Trace.cpu`: copies from pageable memory to the device, and waits that are part of them.

    Only driving threads count, as in `waiting_calls`.
    """
    cpu = program.trace.cpu
    calls = _calls_of(program, program.lexicon.pageable_upload)
    found = np.zeros(len(cpu), np.bool_)
    found[calls] = True
    runtime = np.flatnonzero(cpu.kind == SliceKind.RUNTIME)
    following = np.searchsorted(runtime, calls) + 1
    calls, following = calls[following < len(runtime)], runtime[following[following < len(runtime)]]
    waits = _of_one_copy(program.trace, calls, following) & program.lexicon.blocking[cpu.name[following]]
    found[following[waits]] = True
    return found & drivers(program)


def _of_one_copy(trace: Trace, calls: NDArray[np.intp], following: NDArray[np.intp]) -> Mask:
    """Whether the same aten::copy_ contains both slices."""
    cpu = trace.cpu
    named = trace.names_where(_COPYING.__contains__)
    copying = np.flatnonzero(named[cpu.name] & (cpu.kind == SliceKind.OPERATOR))
    place = np.searchsorted(copying, calls) - 1
    known = place >= 0
    around = copying[place[known]]
    same = np.zeros(len(calls), np.bool_)
    same[known] = (cpu.thread[around] == cpu.thread[following[known]]) & (cpu.end[around] >= cpu.end[following[known]])
    return same


def drivers(program: ProgramSlices) -> Mask:
    """A mask over `Trace.cpu`: slices of threads that launch kernels or memsets, or contain the steps.

    Other threads, such as one that page-locks batches in advance, delay nothing. If there is no such thread, all count.
    """
    trace, links, cpu = program.trace, program.links, program.trace.cpu
    launches = links[(links != MISSING) & (trace.device.kind != WorkKind.COPY)]
    driving = np.zeros(len(trace.threads), np.bool_)
    driving[cpu.thread[launches]] = True
    driving[cpu.thread[program.lexicon.profiler_step[cpu.name]]] = True
    found: Mask = driving[cpu.thread] if driving.any() else np.ones(len(cpu), np.bool_)
    return found


def waiting_calls(program: ProgramSlices) -> Mask:
    """A mask over `Trace.cpu`: calls that return when the device is done."""
    cpu = program.trace.cpu
    found: Mask = program.lexicon.blocking[cpu.name] & (cpu.kind == SliceKind.RUNTIME)
    found[_calls_of(program, program.lexicon.pageable_download)] = True
    return found & drivers(program)


def idle_by_call(program: ProgramSlices, causes: Mapping[Cause, Spans]) -> Ns:
    """For each CPU slice, the nanoseconds of `synchronisation` that it caused; 0 except for waits.

    An instant counts for the last wait that began before it, so that the sum is the whole.
    """
    cpu, spans = program.trace.cpu, causes["synchronisation"]
    calls = np.flatnonzero(waiting_calls(program) & ~pageable_calls(program))
    calls = calls[np.argsort(cpu.start[calls], kind="stable")]
    found = np.zeros(len(cpu), np.int64)
    if len(calls) and len(spans):
        start = cpu.start[calls]
        found[calls] = overlap(start, np.append(start[1:], max(spans.end[-1], start[-1])), spans)
    return found


LONG_WAIT = 1_000_000
"""Nanoseconds: a hundred times what a launch takes. The cost of launching alone makes no wait as long."""
WAITS = 1000  # the longest: what is said of them is about most of the time


def held(program: ProgramSlices, waits: Spans) -> list[Held]:
    """The waits of LONG_WAIT and more within the window, by the calls of the CPU that take most of them."""
    trace, cpu = program.trace, program.trace.cpu
    here = intersect(waits, union(np.array([program.window.start]), np.array([program.window.end])))
    length = here.end - here.start
    longest = np.argsort(-length, kind="stable")[:WAITS]
    longest = longest[length[longest] >= LONG_WAIT]
    time = program.nest.end - cpu.start
    known = np.flatnonzero(
        drivers(program) & (program.operators | (cpu.kind == SliceKind.RUNTIME)) & (2 * time >= LONG_WAIT)
    )
    known = known[np.argsort(time[known], kind="stable")]
    found: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for start, end in zip(here.start[longest].tolist(), here.end[longest].tolist(), strict=True):
        left = end - start
        for call, spent in _slow_calls(program, known, start, end):
            one, spent = found[trace.names[cpu.name[call]]], min(spent, left)
            one[0] += 1
            one[1] += spent
            left -= spent
        if left:
            found[""][0] += 1
            found[""][1] += left
    return [Held(name, *one) for name, one in sorted(found.items(), key=lambda each: (-each[1][1], each[0]))]


def _slow_calls(program: ProgramSlices, calls: NDArray[np.intp], start: int, end: int) -> list[tuple[int, int]]:
    """The calls that take half of LONG_WAIT and more of [start, end), each with its time there.

    `calls` are ordered by their time, so that inner ones come first. A call is left out if inner ones take most of it.
    """
    cpu, ends = program.trace.cpu, program.nest.end
    within = np.minimum(ends[calls], end) - np.maximum(cpu.start[calls], start)
    found: list[tuple[int, int]] = []
    for call, spent in zip(calls[2 * within >= LONG_WAIT].tolist(), within[2 * within >= LONG_WAIT], strict=True):
        inner = [
            time
            for one, time in found
            if cpu.thread[one] == cpu.thread[call] and cpu.start[one] >= cpu.start[call] and ends[one] <= ends[call]
        ]
        own = int(spent) - sum(inner)
        if 2 * own >= spent:
            found.append((call, own))
    return found


def _calls_of(program: ProgramSlices, names: Mask) -> NDArray[np.intp]:
    """Indices into `Trace.cpu` of the calls that launched device work with such names."""
    links = program.links
    return np.unique(links[names[program.trace.device.name] & (links != MISSING)]).astype(np.intp)


@dataclass(frozen=True)
class _Gaps:
    """The times without work, not cut to the window, with the work that ends each of them."""

    start: Ns
    launched: Ns
    """The time within the gap at which the work that ends it had been launched; the gap's end if later or unknown."""
    end: Ns
    backlog: Mask
    linked: Mask
    """Whether the work's launch is in the trace."""
    last: Mask
    """Whether no work follows."""

    def before(self, chosen: Mask) -> Spans:
        """The parts in which the work was not launched, as far as is known."""
        return union(self.start[chosen], self.launched[chosen])

    def behind(self, chosen: Mask) -> Spans:
        """The parts in which the work had been launched."""
        return union(self.launched[chosen], self.end[chosen])


def _gaps(program: ProgramSlices) -> _Gaps:
    device, links, window = program.trace.device, program.links, program.window
    busy = union(device.start, device.end)
    first, behind = (int(busy.start[0]), int(busy.end[-1])) if len(busy) else (window.start, window.end)
    idle = complement(busy, min(first, window.start), max(behind, window.end))
    real = np.flatnonzero(device.end > device.start)
    starts, groups = np.unique(device.start[real], return_index=True)
    place = np.searchsorted(starts, idle.end)
    last = place == len(starts)
    ended_by = np.minimum(place, len(starts) - 1)[~last]
    linked, launched = np.zeros(len(idle), np.bool_), idle.end.copy()
    if len(real):  # of works that begin at the same instant, take the one launched first
        linked[~last] = np.maximum.reduceat(links[real], groups)[ended_by] != MISSING
        known = np.minimum.reduceat(_launched(program, busy)[real], groups)[ended_by]
        launched[~last] = np.clip(known, idle.start[~last], idle.end[~last])
    launched = np.minimum(launched, _unrecorded_launch(program, idle))
    followed = device.start[links != MISSING]
    backlog = ~linked & ~last & (idle.end <= (followed.min() if len(followed) else MISSING))
    return _Gaps(idle.start, np.where(backlog, idle.start, launched), idle.end, backlog, linked, last)


def _unrecorded_launch(program: ProgramSlices, idle: Spans) -> Ns:
    """For each gap, the instant at which the CPU had launched work that the trace lacks; the gap's end if it had not.

    Such a launch follows that of the work before the gap, so that its work ran, or waited, within the gap.
    """
    device, cpu, links = program.trace.device, program.trace.cpu, program.links
    known = np.flatnonzero(links != MISSING)
    ends = np.sort(cpu.end[unrecorded_launches(program)])
    if not len(ends) or not len(known):
        return idle.end
    before = np.searchsorted(device.start[known], idle.start) - 1
    reached = np.maximum.accumulate(cpu.end[links[known]])
    previous = np.where(before >= 0, reached[before], cpu.end.max())
    following = np.append(ends, LATER)[np.searchsorted(ends, previous, side="right")]
    found: Ns = np.clip(following, idle.start, idle.end)
    return found


def unrecorded_launches(program: ProgramSlices) -> NDArray[np.intp]:
    """The launches whose work is not in the trace, without those that a CUDA graph captures.

    Launches after the last one with work may have run after the end of the recording.
    """
    cpu, links = program.trace.cpu, program.links
    launching = (cpu.kind == SliceKind.RUNTIME) & program.lexicon.launching[cpu.name] & (cpu.correlation > 0)
    linked = links[links != MISSING]
    if not len(linked):
        return np.empty(0, np.intp)
    launching &= (cpu.start < cpu.start[linked].max()) & ~np.isin(cpu.correlation, cpu.correlation[linked])
    captured = captures(program, np.ones(len(cpu), np.bool_)).spans
    found = np.flatnonzero(launching)
    alone: NDArray[np.intp] = found[overlap(cpu.start[found], np.maximum(cpu.end, cpu.start + 1)[found], captured) == 0]
    return alone


STRAY = 0.01  # of the work's time: less of it beyond a hole is not what the trace was recorded for
HOLE = 0.1  # of the window: the smallest hole that is cut off


def recorded(program: ProgramSlices) -> ProgramSlices:
    """Cuts the program's window where recorded work begins and ends.

    Beyond a cut is stray work, and then a hole: a gap that ends with work that had been launched when it began, so that
    the device did something in it that was not recorded. With steps, those with a hole are left out.
    """
    window, device = program.window, program.trace.device
    if program.trace.cpu_only or window.wall <= 0:
        return program
    busy, gaps = union(device.start, device.end), _gaps(program)
    start, end = np.maximum(gaps.start, window.start), np.minimum(gaps.end, window.end)
    waited = np.minimum(gaps.launched, end) - start
    holes = np.flatnonzero((end - start >= HOLE * window.wall) & (waited <= HOLE * (end - start)) & ~gaps.last)
    first, last = window.start, window.end
    stray = STRAY * overlap(np.array([first]), np.array([last]), busy)[0]
    for hole in holes.tolist():
        edges = np.array([window.start]), np.array([start[hole]]), np.array([end[hole]]), np.array([window.end])
        if overlap(edges[0], edges[1], busy)[0] <= stray:
            first = max(first, int(end[hole]))
        elif overlap(edges[2], edges[3], busy)[0] <= stray:
            last = min(last, int(start[hole]))
    kept = _kept(window, first, last)
    return replace(program, window=kept) if kept else program


def _kept(window: Window, first: int, last: int) -> Window | None:
    """The part of the window between two instants, in whole steps if it has steps; None if it is all of it."""
    steps = [step for step in window.steps if step.start >= first and step.end <= last]
    if (first, last) == (window.start, window.end) or first >= last or (window.steps and not steps):
        return None
    if steps:
        first, last = steps[0].start, steps[-1].end
    return Window(first, last, steps, before=first - window.start, after=window.end - last)


def _launched(program: ProgramSlices, busy: Spans) -> Ns:
    """The instant by which each work had certainly been launched; LATER if unknown."""
    device, cpu, links = program.trace.device, program.trace.cpu, program.links
    linked = links != MISSING
    found = np.full(len(device), LATER)
    found[linked] = cpu.end[links[linked]]
    waited = np.flatnonzero(linked & program.lexicon.download[device.name])
    waited = waited[waiting_calls(program)[links[waited]]]
    free = np.concatenate(([-LATER], busy.end))[np.searchsorted(busy.end, device.start[waited], side="right")]
    found[waited] = np.minimum(found[waited], np.maximum(cpu.start[links[waited]], free) + ISSUING)
    for works in by_stream(program.trace):
        followed_by = np.minimum.accumulate(found[works[::-1]])[::-1]
        found[works] = np.where(linked[works] | (device.stream[works] == MISSING), found[works], followed_by)
    return found


@dataclass(frozen=True)
class _Opened:
    """The parts of gaps that waits caused, each with the slice that waited."""

    start: Ns
    end: Ns
    call: NDArray[np.intp]

    def by(self, chosen: Mask) -> Spans:
        mask = chosen[self.call]
        return union(self.start[mask], self.end[mask])


def _opened(trace: Trace, gaps: _Gaps, waits: Mask) -> _Opened:
    """The gaps whose end the CPU had not launched when they began, by the wait that was open then."""
    calls = np.flatnonzero(waits)
    calls = calls[np.argsort(trace.cpu.start[calls], kind="stable")]
    start, end = trace.cpu.start[calls], trace.cpu.end[calls]
    # Of the waits that began before the gap, take the one that ends last.
    furthest = np.maximum.accumulate(np.where(end == np.maximum.accumulate(end), np.arange(len(calls)), 0))
    late = gaps.before(gaps.linked | gaps.last)
    place = np.searchsorted(start, late.start) - 1
    began = place >= 0
    found = furthest[place[began]]
    waiting = end[found] >= late.start[began]
    found, gap_start, gap_end = found[waiting], late.start[began][waiting], late.end[began][waiting]
    return _Opened(gap_start, np.minimum(gap_end, gap_start + end[found] - start[found]), calls[found])


WORK_CLASSES = ("compute", "communication", "copies")
GAP_CLASSES = ("launch_delay", "queue")
"""The classes of time from the end of a launch call to the work's start, or between queued works."""
CPU_CLASSES = ("data_loader", "allocator", "synchronisation", "operators", "python")
"""Classes of CPU time, of which the first one that applies to an instant counts. `operators` includes runtime calls,
on any thread; the classes before it are of threads that drive the device."""


def critical_path(program: ProgramSlices) -> dict[str, int]:
    """The nanoseconds of each class on the path; they add up to the window."""
    waits = waiting_calls(program) | pageable_calls(program)
    found = dict.fromkeys(WORK_CLASSES + GAP_CLASSES + CPU_CLASSES, 0)
    rest = _walk(_works(program), _waits(program.trace, waits), program.window, found)
    for name, spans in _cpu_spans(program, waits).items():
        found[name] += intersect(rest, spans).length
        rest = subtract(rest, spans)
    found["python"] += rest.length
    return found


@dataclass(frozen=True)
class _Works:
    """The works of the device with what each waited for, as lists, because the walk takes one at a time."""

    kind: list[str]
    start: list[int]
    end: list[int]
    after: list[int]
    """The index of the work it waited for, -1 for the CPU."""
    since: list[int]
    """When that work, or the launch call, ended."""
    gap: list[str]


@dataclass(frozen=True)
class _Waits:
    """Calls in which the CPU waited for a work, ordered by their ends."""

    end: list[int]
    work: list[int]


def _walk(works: _Works, waits: _Waits, window: Window, found: dict[str, int]) -> Spans:
    """Adds the device's part of the path to `found`, and returns the CPU's part."""
    now, work = window.end, _last(works, window.end)
    cpu_start, cpu_end = [], []
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
            cpu_start.append(since)
            cpu_end.append(now)
            now = since
    return union(np.array(cpu_start, np.int64), np.array(cpu_end, np.int64))


def _last(works: _Works, at: int) -> int:
    """The first work that ends at that instant or later, or in a gap the next work if what it waited for is over.

    -1 means that the device had nothing to do.
    """
    spans = enumerate(zip(works.start, works.end, strict=True))
    running = next((work for work, (start, end) in spans if start < at <= end), MISSING)
    following = bisect_left(works.start, at)
    if running != MISSING or following == len(works.start):
        return running
    return following if works.since[following] < at else MISSING


def _works(program: ProgramSlices) -> _Works:
    trace, device = program.trace, program.trace.device
    kind = np.where(device.kind == WorkKind.COPY, 2, communication_work(trace, program.lexicon).astype(np.int8))
    previous, ended = previous_on_stream(trace)
    ended = np.where(previous == MISSING, NEVER, np.minimum(ended, device.start))
    launched = ready(trace, program.links)
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
    calls = calls[np.argsort(trace.cpu.end[calls], kind="stable")]
    work, end = _last_ended(trace, trace.cpu.end[calls])
    waited = end > trace.cpu.start[calls]
    return _Waits(trace.cpu.end[calls][waited].tolist(), work[waited].tolist())


def _last_ended(trace: Trace, at: Ns) -> tuple[NDArray[np.intp], Ns]:
    """The last work that ended by each instant, and when; -1 if none did. Work without length is ignored."""
    device = trace.device
    real = np.flatnonzero(device.end > device.start)
    if not len(real):
        return np.full(len(at), MISSING), np.full(len(at), NEVER)
    real = real[np.argsort(device.end[real], kind="stable")]
    place = np.searchsorted(device.end[real], at, side="right") - 1
    work = real[np.maximum(place, 0)]
    return np.where(place < 0, MISSING, work), np.where(place < 0, NEVER, device.end[work])


def _cpu_spans(program: ProgramSlices, waits: Mask) -> dict[str, Spans]:
    cpu, lexicon = program.trace.cpu, program.lexicon
    runtime, driving = cpu.kind == SliceKind.RUNTIME, drivers(program)
    masks = {
        "data_loader": driving & lexicon.data_loader[cpu.name],
        "allocator": driving & runtime & lexicon.allocator[cpu.name],
        "synchronisation": waits,
        "operators": runtime | (cpu.kind == SliceKind.OPERATOR),
    }
    return {name: cpu.spans(mask) for name, mask in masks.items()}
