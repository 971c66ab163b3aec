"""Relates the work of the device to the calls that launched it: by their clocks, and by the slices around them."""

from dataclasses import replace

import numpy as np

from gpubench.trace.columns import MISSING, Ids, Mask, Trace

APART = 60_000_000_000
"""Nanoseconds: no queue is that long, so that work which begins later after its launch has another clock."""
BEFORE = 1_000_000
"""Nanoseconds by which most work may begin before its launch, as clocks are never quite the same."""


def with_one_clock(trace: Trace) -> Trace:
    """Shifts the device's times if its clock is another one than the CPU's, so that no work begins before its launch.

    The work that begins soonest after its launch then begins with it, as one does that finds the device idle.
    """
    links = trace.launchers
    linked = links != MISSING
    if not linked.any():
        return trace
    delay = trace.device.start[linked] - trace.cpu.start[links[linked]]
    least = int(delay.min())
    if least <= APART and np.median(delay) >= -BEFORE:
        return trace
    device = replace(trace.device, start=trace.device.start - least, end=trace.device.end - least)
    return replace(trace, device=device, shifted=-least)


def slices_around(trace: Trace, chosen: Mask, links: Ids) -> Ids:
    """For each work, the outermost of the chosen slices around its launch, or -1."""
    cpu = trace.cpu
    slices = np.flatnonzero(chosen)
    found = np.full(len(links), MISSING, np.int32)
    works = np.flatnonzero(links != MISSING)
    for thread in np.unique(cpu.thread[slices]).tolist():
        own = slices[cpu.thread[slices] == thread]
        reach = np.maximum.accumulate(cpu.end[own])
        outer = own[np.concatenate(([True], cpu.end[own[1:]] > reach[:-1]))]
        here = works[cpu.thread[links[works]] == thread]
        launched = cpu.start[links[here]]
        place = np.searchsorted(cpu.start[outer], launched, side="right") - 1
        around = outer[np.maximum(place, 0)]
        inside = (place >= 0) & (cpu.end[around] >= launched)
        found[here[inside]] = around[inside]
    return found
