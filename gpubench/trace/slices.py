"""A trace with what every analysis needs: its window, nested slices, launches, and Python frames."""

import re
import sys
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

from gpubench.trace.columns import MISSING, Ids, Mask, Ns, SliceKind, Trace, WorkKind, at, sum_at
from gpubench.trace.names import Lexicon, Window, recorder_waits, window
from gpubench.trace.profile import SHORT_KERNEL, Launches

NEVER = np.iinfo(np.int64).min
"""Before all times of a trace."""


@dataclass(frozen=True)
class Nest:
    """The forest of a trace's CPU slices, by thread. All arrays are aligned with `Trace.cpu`."""

    parent: Ids
    """Index of the slice around it, -1 for a root; always less than its own index."""
    end: Ns
    """The end of the slice, at most its parent's."""
    own: Ns
    """Nanoseconds in the slice and in none of its children; over a tree they add up to the root's length."""


@dataclass(frozen=True)
class Segments:
    """A tiling of some time of one thread, each piece with the innermost open slice, or -1."""

    start: Ns
    end: Ns
    slice: Ids

    def only(self, mask: Mask) -> "Segments":
        return Segments(self.start[mask], self.end[mask], self.slice[mask])


def nest(trace: Trace) -> Nest:
    """Builds the forest of `trace`.

    A slice that outlasts the one in which it began has no right nesting: it is cut to that one, or if most of it is
    beyond, the earlier one ends where it begins. An annotation is always cut to the operator in which it began: an
    exception may leave it open, while operators always close.
    """
    cpu = trace.cpu
    starts, ends, kinds = cpu.start.tolist(), cpu.end.tolist(), cpu.kind.tolist()
    parents = [MISSING] * len(cpu)
    edges = np.searchsorted(cpu.thread, np.arange(len(trace.threads) + 1)).tolist()
    for first, beyond in pairwise(edges):
        _nest_thread(range(first, beyond), starts, ends, kinds, parents)
    parent, end = np.array(parents, np.int32), np.array(ends, np.int64)
    own = end - cpu.start
    inner = np.flatnonzero(parent >= 0)
    np.subtract.at(own, parent[inner], end[inner] - cpu.start[inner])
    return Nest(parent, end, own)


def _nest_thread(slices: range, starts: list[int], ends: list[int], kinds: list[int], parents: list[int]) -> None:
    open_: list[int] = []
    for index in slices:
        start, end = starts[index], ends[index]
        while open_:
            around = open_[-1]
            inside = ends[around] - start
            left_open = kinds[index] == SliceKind.ANNOTATION and kinds[around] == SliceKind.OPERATOR
            if inside > 0 and (2 * inside >= end - start or left_open):
                parents[index] = around
                ends[index] = min(end, ends[around])
                break
            ends[around] = min(ends[around], start)
            open_.pop()
        open_.append(index)


def nearest(nest: Nest, mask: Mask) -> Ids:
    """For each slice, the innermost one of `mask` at or around it, else -1."""
    found = np.where(mask, np.arange(len(mask), dtype=np.int32), nest.parent)
    # Each round doubles the distance of every open search, because the slices that it jumps to have jumped as far.
    searching = np.flatnonzero((found >= 0) & ~mask[found])
    while len(searching):
        found[searching] = found[found[searching]]
        reached = found[searching]
        searching = searching[(reached >= 0) & ~mask[reached]]
    return found


def nearest_around(nest: Nest, found: Ids) -> Ids:
    """For each slice, its parent's value in `found`, made by `nearest`: the innermost one around it."""
    return at(found, nest.parent)


def outermost(nest: Nest, mask: Mask) -> Ids:
    """For each slice, the outermost one of `mask` at or around it, else -1."""
    found = nearest(nest, mask)
    roots = mask & (nearest_around(nest, found) < 0)
    return nearest(nest, roots)


def reaching(nest: Nest, slices: Ids) -> Mask:
    """A mask over all slices: those that are in `slices`, or around one of them."""
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
    here = np.flatnonzero((trace.cpu.thread == thread) & (nest.end > trace.cpu.start)).astype(np.int32)
    times = np.concatenate(([NEVER], nest.end[here], trace.cpu.start[here]))
    opens = np.repeat([0, 0, 1], (1, len(here), len(here)))
    opened = np.concatenate(([MISSING], nest.parent[here], here)).astype(np.int32)
    # At one instant slices end before others start: inner ones end first, and outer ones start first.
    order = np.lexsort((np.concatenate(([0], -here, here)), opens, times))
    times, opened = np.clip(times[order], start, end), opened[order]
    edges = np.append(times, end)
    real = edges[1:] > edges[:-1]
    return Segments(edges[:-1][real], edges[1:][real], opened[real])


def owner_slice(trace: Trace, nest: Nest, links: Ids) -> Ids:
    """For each work of the device, the innermost operator of its launch, as an index of `Trace.cpu`, or -1."""
    return at(nearest(nest, trace.cpu.kind == SliceKind.OPERATOR), links)


def owner(trace: Trace, nest: Nest, links: Ids) -> Ids:
    """The name of the same operator for each work, as an index of `Trace.names`, or -1."""
    return at(trace.cpu.name, owner_slice(trace, nest, links))


def launches(trace: Trace, links: Ids, window: Window) -> Launches | None:
    """The launches of work that starts in the window; None if there is none.

    Work is in the queue from the end of its launch call, when the CPU is free for the next call, to its start.
    """
    device, cpu = trace.device, trace.cpu
    inside = started_in(trace, window)
    if not inside.any():
        return None
    linked = inside & (links != MISSING)
    unlinked = inside & (links == MISSING)
    duration = device.end - device.start
    short = inside & (device.kind == WorkKind.KERNEL) & (duration < SHORT_KERNEL)
    launched = cpu.end[links[linked]]
    started = np.maximum(device.start[linked], launched)
    delay = started - launched
    calls = np.unique(links[linked])
    mean, longest = _queue(launched, started, window)
    return Launches(
        calls=len(calls),
        host=int((cpu.end[calls] - cpu.start[calls]).sum()),
        delay_median=_quantile(delay, 0.5),
        delay_p95=_quantile(delay, 0.95),
        late=int((_launched_late(trace, links) & linked).sum()),
        queue_mean=mean,
        queue_longest=longest,
        short=int(short.sum()),
        short_total=int(duration[short].sum()),
        unlinked=int(unlinked.sum()),
        unlinked_total=int(duration[unlinked].sum()),
        works=int(linked.sum()),
    )


def started_in(trace: Trace, window: Window) -> Mask:
    """A mask over `Trace.device`: work belongs to the window, and to the step, in which it starts."""
    inside: Mask = (trace.device.start >= window.start) & (trace.device.start < window.end)
    return inside


def ready(trace: Trace, links: Ids) -> Ns:
    """For each work, the instant after which the CPU did not delay it: the end of its launch call.

    If the work began earlier, it is the beginning of the call, and without a launch in the trace the least integer.
    """
    times = np.full(len(links), NEVER)
    linked = links != MISSING
    start, end = trace.cpu.start[links[linked]], trace.cpu.end[links[linked]]
    began = trace.device.start[linked]
    times[linked] = np.where(end <= began, end, np.minimum(start, began))
    return times


def previous_on_stream(trace: Trace) -> tuple[Ids, Ns]:
    """For each work, the previous one on its stream that ended last (-1: none), and that end."""
    device = trace.device
    previous = np.full(len(device), MISSING, np.int32)
    ended = np.zeros(len(device), np.int64)
    for works in by_stream(trace):
        reach = np.maximum.accumulate(device.end[works])
        last = np.maximum.accumulate(np.where(device.end[works] == reach, np.arange(len(works)), 0))
        previous[works[1:]], ended[works[1:]] = works[last[:-1]], reach[:-1]
    return previous, ended


def by_stream(trace: Trace) -> list[NDArray[np.intp]]:
    """The works of each stream of each device, as indices into `Trace.device`, ordered by start."""
    device = trace.device
    order = np.lexsort((np.arange(len(device)), device.stream, device.device))
    borders = (np.diff(device.stream[order]) != 0) | (np.diff(device.device[order]) != 0)
    return np.split(order, np.flatnonzero(borders) + 1)


def _launched_late(trace: Trace, links: Ids) -> Mask:
    """Work whose stream was empty when it was launched."""
    previous, ended = previous_on_stream(trace)
    late: Mask = links != MISSING
    late[late] = (ready(trace, links)[late] >= ended[late]) | (previous[late] == MISSING)
    return late


def _queue(launched: Ns, started: Ns, window: Window) -> tuple[float, int]:
    """The queue's mean length over the window, and its largest length."""
    times = np.concatenate((launched, started))
    changes = np.repeat((1, -1), (len(launched), len(started)))
    order = np.lexsort((changes, times))  # at one instant, starts leave the queue before launches enter it
    depth = np.cumsum(changes[order])
    waited = np.minimum(started, window.end) - np.maximum(launched, window.start)
    mean = int(np.maximum(waited, 0).sum()) / window.wall
    return mean, int(depth.max(initial=0))


def _quantile(values: Ns, part: float) -> int:
    """The nearest of the values; 0 if there are none."""
    return int(np.quantile(values, part, method="nearest")) if len(values) else 0


@dataclass(frozen=True)
class ProgramSlices:
    """A trace within its window, with the nesting of the CPU's slices and the links to the work they launched."""

    trace: Trace
    lexicon: Lexicon
    window: Window
    nest: Nest
    links: Ids
    """The runtime slice that launched each work of the device, or -1."""

    @classmethod
    def of(cls, trace: Trace) -> Self:
        lexicon = Lexicon.of(trace)
        return cls(trace, lexicon, window(trace, lexicon), nest(trace), trace.launchers)

    @cached_property
    def operators(self) -> Mask:
        return np.equal(self.trace.cpu.kind, SliceKind.OPERATOR)

    def named(self, names: Collection[str]) -> Mask:
        known = self.trace.names_where(lambda name: name in names)
        found: Mask = known[self.trace.cpu.name] & self.operators
        return found

    @cached_property
    def recorder_waits(self) -> Mask:
        """The waits for the device that only the recording makes."""
        return recorder_waits(self.trace, self.lexicon, self.links, self.window)

    @cached_property
    def operator(self) -> Ids:
        """The innermost operator at or around each slice, or -1."""
        return nearest(self.nest, self.operators)

    @cached_property
    def owner(self) -> Ids:
        """The operator that launched each work of the device, as a slice, or -1."""
        return owner_slice(self.trace, self.nest, self.links)

    @cached_property
    def inside(self) -> Mask:
        """The slices that begin in the window."""
        start = self.trace.cpu.start
        return (start >= self.window.start) & (start < self.window.end)

    @cached_property
    def started(self) -> Mask:
        """The works of the device that start in the window. Exactly these count, each as a whole."""
        return started_in(self.trace, self.window)

    @cached_property
    def launching(self) -> Mask:
        """The slices from which work of the device was launched, at any depth."""
        return reaching(self.nest, self.links[self.links >= 0])

    @cached_property
    def counted(self) -> Mask:
        """The slices whose calls count: they launched work that counts, or launched none and begin in the window.

        A device may be far behind the CPU, so that calls and device time are of the same work.
        """
        counting = reaching(self.nest, self.links[(self.links >= 0) & self.started])
        return np.where(self.launching, counting, self.inside)

    @cached_property
    def work_time(self) -> Ns:
        """The nanoseconds of each work of the device, 0 if it does not count."""
        return np.where(self.started, self.trace.device.end - self.trace.device.start, 0)

    @cached_property
    def launched_time(self) -> Ns:
        """The time of the counted work that each slice launched itself."""
        return sum_at(self.links, self.work_time, len(self.trace.cpu))

    @cached_property
    def own_time(self) -> Ns:
        """The own time of each slice that begins in the window."""
        return np.where(self.inside, self.nest.own, 0)

    @cached_property
    def effort(self) -> Ns:
        """The time attributed to each slice: of the work that it launched, or on a CPU its own."""
        return np.where(self.operators, self.own_time, 0) if self.trace.cpu_only else self.launched_time

    @cached_property
    def main_thread(self) -> int:
        """The thread with the steps, or else that with most time in operators; -1 without CPU slices."""
        cpu = self.trace.cpu
        steps = np.flatnonzero(self.lexicon.profiler_step[cpu.name])
        if len(steps):
            return int(cpu.thread[steps[0]])
        busy = np.zeros(len(self.trace.threads), np.int64)
        np.add.at(busy, cpu.thread[self.operators], self.nest.own[self.operators])
        return int(busy.argmax()) if len(cpu) else MISSING

    @cached_property
    def main(self) -> Segments:
        """The activity of the main thread over the whole window."""
        return innermost(self.trace, self.nest, self.main_thread, self.window.start, self.window.end)


_FRAME = re.compile(r"(?P<path>[^<].*)\((?P<line>\d+)\): (?P<function>.+)$")
_NOT_THE_USERS = re.compile(
    r"(^|.*/)(torch|site-packages|dist-packages|torchvision|gpubench)/|(^|.*/)lib/python\d\.\d+/"
    r"|(.*/)?(threading|contextlib|typing|functools|runpy)\.py$"
)


@dataclass(frozen=True)
class UserFrames:
    """The user's innermost function around each slice.

    The line is the recorded one: that at which the function begins, or in old traces, which have stacks at operators,
    that of the call.
    """

    _trace: Trace
    _frame: Ids
    _stack: Ids

    @classmethod
    def of(cls, program: ProgramSlices) -> Self:
        trace = program.trace
        return cls(trace, innermost_frames(program), nearest(program.nest, trace.cpu.stack >= 0))

    def at(self, slice_: int) -> str | None:
        """The place as "train.py:25 in step"; None without a stack or without a function of the user's."""
        if (frame := self._frame[slice_]) >= 0:
            return user_frame(self._trace.names[self._trace.cpu.name[frame]])
        if (operator := self._stack[slice_]) < 0:
            return None
        frames = re.split(r"[;\n]", self._trace.names[self._trace.cpu.stack[operator]])
        return next((found for one in frames if (found := user_frame(one.strip()))), None)


def innermost_frames(program: ProgramSlices) -> Ids:
    """For each slice, the user's innermost function around it, as a slice, or -1."""
    cpu, users = program.trace.cpu, program.trace.names_where(user_frame)
    return nearest(program.nest, users[cpu.name] & (cpu.kind == SliceKind.PYTHON))


def user_frame(name: str) -> str | None:
    """The place in a frame's name, such as "train.py(25): step"; None for libraries and other names."""
    match = _FRAME.match(name)
    if not match or _NOT_THE_USERS.match(match["path"]):
        return None
    # The profiler removes entries of sys.path from names, as in json/encoder.py; profile.py may be the user's module.
    package, inside, _ = match["path"].partition("/")
    if inside and package in sys.stdlib_module_names:
        return None
    return f"{match['path']}:{match['line']} in {match['function']}"
