"""The road of work from the host to the device."""

import numpy as np
from numpy.typing import NDArray

from gpubench.trace.columns import MISSING, Ids, Mask, Ns, Trace, WorkKind
from gpubench.trace.profile import Launches
from gpubench.trace.windows import Window

SHORT_KERNEL = 10_000
"""Nanoseconds: about what a launch costs the host, so that a run of shorter kernels cannot keep the device busy."""


NEVER = np.iinfo(np.int64).min


def launches(trace: Trace, links: Ids, window: Window) -> Launches | None:
    """Of the work that starts in the window; None without any.

    Work is in the queue from the end of its launch call, since until then the host is not free for the next, to its
    start.
    """
    device, host = trace.device, trace.host
    inside = started_in(trace, window)
    if not inside.any():
        return None
    linked = inside & (links != MISSING)
    unlinked = inside & (links == MISSING)
    duration = device.end - device.start
    short = inside & (device.kind == WorkKind.KERNEL) & (duration < SHORT_KERNEL)
    launched = host.end[links[linked]]
    started = np.maximum(device.start[linked], launched)
    delay = started - launched
    calls = np.unique(links[linked])
    mean, longest = _queue(launched, started, window)
    return Launches(
        calls=len(calls),
        host=int((host.end[calls] - host.start[calls]).sum()),
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
    """Over `Trace.device`: work belongs to the window, and to the step, in which it starts."""
    inside: Mask = (trace.device.start >= window.start) & (trace.device.start < window.end)
    return inside


def ready(trace: Trace, links: Ids) -> Ns:
    """For each work the instant from which nothing of the host kept it: the end of its launch call.

    Where the work began before that, it is the beginning of the call, and where the trace has no launch the least
    integer.
    """
    times = np.full(len(links), NEVER)
    linked = links != MISSING
    start, end = trace.host.start[links[linked]], trace.host.end[links[linked]]
    began = trace.device.start[linked]
    times[linked] = np.where(end <= began, end, np.minimum(start, began))
    return times


def previous_on_stream(trace: Trace) -> tuple[Ids, Ns]:
    """For each work the one on its stream that ended last among those before it (-1: none), and that end."""
    device = trace.device
    previous = np.full(len(device), MISSING, np.int32)
    ended = np.zeros(len(device), np.int64)
    for works in by_stream(trace):
        reach = np.maximum.accumulate(device.end[works])
        last = np.maximum.accumulate(np.where(device.end[works] == reach, np.arange(len(works)), 0))
        previous[works[1:]], ended[works[1:]] = works[last[:-1]], reach[:-1]
    return previous, ended


def by_stream(trace: Trace) -> list[NDArray[np.intp]]:
    """The works of each stream of each device, as indices into `Trace.device`, in the order of their starts."""
    device = trace.device
    order = np.lexsort((np.arange(len(device)), device.stream, device.device))
    borders = (np.diff(device.stream[order]) != 0) | (np.diff(device.device[order]) != 0)
    return np.split(order, np.flatnonzero(borders) + 1)


def _launched_late(trace: Trace, links: Ids) -> Mask:
    """Work whose stream had nothing left to do when it was launched."""
    previous, ended = previous_on_stream(trace)
    late: Mask = links != MISSING
    late[late] = (ready(trace, links)[late] >= ended[late]) | (previous[late] == MISSING)
    return late


def _queue(launched: Ns, started: Ns, window: Window) -> tuple[float, int]:
    """Mean over the window, and longest."""
    times = np.concatenate((launched, started))
    changes = np.repeat((1, -1), (len(launched), len(started)))
    order = np.lexsort((changes, times))  # at one instant, what starts leaves before what is launched comes
    depth = np.cumsum(changes[order])
    waited = np.minimum(started, window.end) - np.maximum(launched, window.start)
    mean = int(np.maximum(waited, 0).sum()) / window.wall
    return mean, int(depth.max(initial=0))


def _quantile(values: Ns, part: float) -> int:
    """The nearest of the values; 0 where there are none."""
    return int(np.quantile(values, part, method="nearest")) if len(values) else 0
