"""A trace with what every question about it needs: its window, which slice stands in which, what launched what."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from gpubench.trace.columns import MISSING, HostKind, Ids, Mask, Ns, Trace
from gpubench.trace.launches import started_in
from gpubench.trace.links import launchers
from gpubench.trace.names import Lexicon
from gpubench.trace.nesting import Nest, Segments, innermost, nearest, nest, owner_slice, reaching
from gpubench.trace.recorder import recorder_waits
from gpubench.trace.windows import Window, window


@dataclass(frozen=True)
class Program:
    trace: Trace
    lexicon: Lexicon
    window: Window
    nest: Nest
    links: Ids
    """For each work of the device the runtime slice that launched it, or -1."""

    @classmethod
    def of(cls, trace: Trace) -> Self:
        lexicon = Lexicon.of(trace)
        return cls(trace, lexicon, window(trace, lexicon), nest(trace), launchers(trace))

    @cached_property
    def operators(self) -> Mask:
        return np.equal(self.trace.host.kind, HostKind.OPERATOR)

    def named(self, names: Collection[str]) -> Mask:
        """Operators with one of these names."""
        known = np.fromiter((name in names for name in self.trace.names), np.bool_, len(self.trace.names))
        found: Mask = known[self.trace.host.name] & self.operators
        return found

    @cached_property
    def recorder_waits(self) -> Mask:
        """Waits for the device that only the recording makes."""
        return recorder_waits(self.trace, self.lexicon, self.links, self.window)

    @cached_property
    def operator(self) -> Ids:
        """For each slice the innermost operator that is it or around it, or -1."""
        return nearest(self.nest, self.operators)

    @cached_property
    def owner(self) -> Ids:
        """For each work of the device the operator that launched it, as a slice, or -1."""
        return owner_slice(self.trace, self.nest, self.links)

    @cached_property
    def inside(self) -> Mask:
        """Slices that begin in the window."""
        start = self.trace.host.start
        return (start >= self.window.start) & (start < self.window.end)

    @cached_property
    def started(self) -> Mask:
        """Works of the device that start in the window: they count, whole, and no others."""
        return started_in(self.trace, self.window)

    @cached_property
    def launching(self) -> Mask:
        """Slices from which, at whatever depth, work of the device was launched."""
        return reaching(self.nest, self.links[self.links >= 0])

    @cached_property
    def counted(self) -> Mask:
        """Slices whose calls count: work launched from them counts, or if none was launched, they begin in the window.

        A device may be far behind its host. So calls and the device's time are counted of the same work.
        """
        counting = reaching(self.nest, self.links[(self.links >= 0) & self.started])
        return np.where(self.launching, counting, self.inside)

    @cached_property
    def work_time(self) -> Ns:
        """Of each work of the device its nanoseconds, if it counts."""
        return np.where(self.started, self.trace.device.end - self.trace.device.start, 0)

    @cached_property
    def launched_time(self) -> Ns:
        """Of each slice the time of the counted work that itself launched."""
        total = np.zeros(len(self.trace.host), np.int64)
        known = self.links >= 0
        np.add.at(total, self.links[known], self.work_time[known])
        return total

    @cached_property
    def own_time(self) -> Ns:
        """Of each slice that begins in the window its own time."""
        return np.where(self.inside, self.nest.own, 0)

    @cached_property
    def effort(self) -> Ns:
        """Time to be laid at each slice's door: of the work it launched, or on a CPU of the operators themselves."""
        return np.where(self.operators, self.own_time, 0) if self.trace.host_only else self.launched_time

    @cached_property
    def main_thread(self) -> int:
        """The thread with the steps, else the one most of whose time is in operators; -1 without host slices."""
        host = self.trace.host
        steps = np.flatnonzero(self.lexicon.profiler_step[host.name])
        if len(steps):
            return int(host.thread[steps[0]])
        busy = np.zeros(len(self.trace.threads), np.int64)
        np.add.at(busy, host.thread[self.operators], self.nest.own[self.operators])
        return int(busy.argmax()) if len(host) else MISSING

    @cached_property
    def main(self) -> Segments:
        """What the main thread did, over all of the window."""
        return innermost(self.trace, self.nest, self.main_thread, self.window.start, self.window.end)
