"""Several traces as one program: do they belong together, and who kept the others waiting?

Clocks of different machines differ, so that starts cannot be compared. Durations can: a collective's kernel spins until
the last rank is there, and they all end together; the rank with the shortest kernel is the one that came last.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpubench.errors import DataError
from gpubench.trace.breakdown import communication_work
from gpubench.trace.columns import MISSING, Ns, Trace
from gpubench.trace.links import launchers
from gpubench.trace.names import Lexicon
from gpubench.trace.profile import Straggler
from gpubench.trace.windows import Window

NOISE = 20_000
"""Nanoseconds. Ranks that launch at the same instant begin some microseconds apart: launches take about 10 us, and so
does the pick-up of a kernel by the device."""
NOISE_SHARE = 0.05
"""Of the shortest kernel: links share their bandwidth, and do not finish on all ranks at once."""

HOW = "give traces of one run, one of each rank"


def check(traces: Sequence[Trace], lexicons: Sequence[Lexicon]) -> None:
    """Raises DataError for traces that cannot be of one run; of one trace there is nothing to say."""
    first, *others = traces
    for place, trace in enumerate(traces):
        twin = next((one for one in traces[:place] if one.rank is not None and one.rank == trace.rank), None)
        if twin:
            raise DataError(f"{twin.label} and {trace.label} are both of rank {trace.rank}", HOW)
    for trace in others:
        for what, ours, theirs in (
            ("world size", first.world_size, trace.world_size),
            ("backend", first.backend, trace.backend),
        ):
            if ours != theirs:
                raise DataError(f"{first.label} and {trace.label} are of two runs: {what} {ours} and {theirs}", HOW)
    names = [_collective_names(trace, lexicon) for trace, lexicon in zip(traces, lexicons, strict=True)]
    for trace, own in zip(others, names[1:], strict=True):
        if (own or names[0]) and not own & names[0]:
            raise DataError(f"{first.label} and {trace.label} have no collective in common", HOW)


def stragglers(traces: Sequence[Trace], windows: Sequence[Window], lexicons: Sequence[Lexicon]) -> list[Straggler]:
    """Each rank, the latest first; empty where no collective can be matched.

    The k-th kernel of a name on a stream in a step is the same collective on every rank that has as many of them.
    A collective counts as waiting for a rank where its kernels differ by more than noise.
    """
    if len(traces) < 2:
        return []
    durations = _matched([_collectives(*each) for each in zip(traces, windows, lexicons, strict=True)])
    longest, shortest = durations.max(axis=0, initial=0), durations.min(axis=0, initial=np.iinfo(np.int64).max)
    waits = longest - shortest > np.maximum(NOISE, NOISE_SHARE * shortest)
    last = durations.argmin(axis=0) if durations.size else np.empty(0, np.intp)
    found = [
        Straggler(
            rank=place if trace.rank is None else trace.rank,
            late=round(float((longest - own).mean())),
            waited_for=int((waits & (last == place)).sum()),
            of=len(own),
        )
        for place, (trace, own) in enumerate(zip(traces, durations, strict=True))
        if len(own)
    ]
    return sorted(found, key=lambda one: (-one.late, one.rank))


_Key = tuple[str, int, int]
"""Name, step, and which of the streams that communicate, in the order of their numbers."""


def _collectives(trace: Trace, window: Window, lexicon: Lexicon) -> dict[_Key, Ns]:
    """The durations of kernels that were launched in the window, in their order."""
    device = trace.device
    launched = _launch_times(trace)
    inside = (launched >= window.start) & (launched < window.end)
    works = np.flatnonzero(communication_work(trace, lexicon) & inside)
    # By the launch: a device that lags behind its host starts kernels when the next step has long begun.
    numbers = np.array([MISSING, *(step.number for step in window.steps)], np.int64)
    step = numbers[np.searchsorted([step.start for step in window.steps], launched[works], side="right")]
    _, stream = np.unique(device.stream[works], return_inverse=True)
    keys = np.stack((device.name[works], step, stream.reshape(-1)))
    groups, group = np.unique(keys, axis=1, return_inverse=True)
    duration = device.end[works] - device.start[works]
    return {
        (trace.names[name], step, stream): duration[group.reshape(-1) == place]
        for place, (name, step, stream) in enumerate(groups.T.tolist())
    }


def _launch_times(trace: Trace) -> Ns:
    links = launchers(trace)
    times = trace.device.start.copy()
    times[links != MISSING] = trace.host.start[links[links != MISSING]]
    return times


def _matched(ranks: Sequence[dict[_Key, Ns]]) -> NDArray[np.int64]:
    """Durations as [rank, collective], of groups that are of one size on all ranks."""
    first = ranks[0]
    common = [key for key in first if {len(rank.get(key, ())) for rank in ranks} == {len(first[key])}]
    return np.stack([np.concatenate([np.empty(0, np.int64), *(rank[key] for key in common)]) for rank in ranks])


def _collective_names(trace: Trace, lexicon: Lexicon) -> set[str]:
    works = communication_work(trace, lexicon)
    return {trace.names[name] for name in np.unique(trace.device.name[works]).tolist()}
