"""Finds the call that launched each work of the device, and the slices around that call."""

from dataclasses import replace

import numpy as np

from gpubench.trace.columns import MISSING, Ids, Mask, SliceKind, Trace


def launchers(trace: Trace) -> Ids:
    """For each work of the device, the index of the runtime slice that launched it, -1 if the trace has none.

    Correlations of 0 and below mean none. The works of a CUDA graph have the same launch. Of several calls with one
    number (a runtime call and the driver call in it) the one that began first counts.
    """
    cpu, device = trace.cpu, trace.device
    calls = np.flatnonzero((cpu.kind == SliceKind.RUNTIME) & (cpu.correlation > 0))
    calls = calls[np.lexsort((cpu.start[calls], cpu.correlation[calls]))]
    if not len(calls):
        return np.full(len(device), MISSING, np.int32)
    numbers = cpu.correlation[calls]
    place = np.minimum(np.searchsorted(numbers, device.correlation), len(calls) - 1)
    return np.where(numbers[place] == device.correlation, calls[place], MISSING).astype(np.int32)


APART = 60_000_000_000
"""Nanoseconds: no queue is that long, so that work which begins later after its launch has another clock."""
BEFORE = 1_000_000
"""Nanoseconds by which most work may begin before its launch, as clocks are never quite the same."""


def with_one_clock(trace: Trace) -> Trace:
    """Shifts the device's times if its clock is another one than the CPU's, so that no work begins before its launch.

    The work that begins soonest after its launch then begins with it, as one does that finds the device idle.
    """
    links = launchers(trace)
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
