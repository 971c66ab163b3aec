"""Several traces as one program: do they belong together, and who kept the others waiting?

Clocks of different machines differ, so that starts cannot be compared. Durations can: a collective's kernel spins until
the last rank is there, and they all end together; the rank with the shortest kernel is the one that came last. So it is
with the slices of collectives that the host runs, as gloo's, in traces without device work.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpubench import units
from gpubench.errors import DataError
from gpubench.trace.breakdown import communication_work
from gpubench.trace.columns import MISSING, HostKind, Ns, Trace
from gpubench.trace.communication import KINDS, kind_of, kinds
from gpubench.trace.links import launchers
from gpubench.trace.names import Lexicon
from gpubench.trace.profile import CollectiveKind, Straggler
from gpubench.trace.windows import Window

NOISE = 20_000
"""Nanoseconds. Ranks that launch at the same instant begin some microseconds apart: launches take about 10 us, and so
does the pick-up of a kernel by the device."""
NOISE_SHARE = 0.05
"""Of the shortest kernel: links share their bandwidth, and do not finish on all ranks at once."""

_OF_SOME: frozenset[CollectiveKind] = frozenset({"send_recv", "broadcast"})
"""Between two ranks, or from one to the others: who sends need not wait for who is late. In an all-to-all every rank
waits for every other."""

HOW = "give traces of one run, one of each rank"


def check(traces: Sequence[Trace], lexicons: Sequence[Lexicon]) -> None:
    """Raises DataError for traces that cannot be of one run, that nothing tells to be, or that are the same.

    So it does for a trace that is of several processes itself.
    """
    first, *others = traces
    for place, trace in enumerate(traces):
        if len(processes := _processes(trace)) > 1:
            raise DataError(f"{trace.label} is of {len(processes)} processes: {', '.join(sorted(processes))}", HOW)
        _check_differing(trace, traces[:place])
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
    if others and any(trace.rank is None for trace in traces) and not all(map(_communicates, lexicons)):
        raise DataError(
            f"{', '.join(trace.label for trace in traces)} do not belong together: "
            "not all of them tell their rank, and not all communicate",
            HOW,
        )


def apart(traces: Sequence[Trace], windows: Sequence[Window]) -> list[str]:
    """A note where two traces were not recorded at the same time."""
    early = min(range(len(traces)), key=lambda place: windows[place].end)
    late = max(range(len(traces)), key=lambda place: windows[place].start)
    gap = windows[late].start - windows[early].end
    if gap <= 0:
        return []
    return [
        f"{traces[late].label} begins {units.seconds(gap / 1e9)} after {traces[early].label} ends: "
        "they are of two runs, or of machines whose clocks differ"
    ]


def stragglers(traces: Sequence[Trace], windows: Sequence[Window], lexicons: Sequence[Lexicon]) -> list[Straggler]:
    """Each rank, the latest first; empty where no collective can be matched.

    The k-th kernel of a name on a stream in a step is the same collective on every rank that has as many of them; of
    traces without device work, the k-th slice of a name in a step.
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
    """The durations of collectives that were launched in the window, in their order."""
    steps = np.array([step.start for step in window.steps], np.int64)
    numbers = np.array([MISSING, *(step.number for step in window.steps)], np.int64)
    launched, name, stream, duration = _on_host(trace, lexicon) if trace.host_only else _on_device(trace, lexicon)
    inside = (launched >= window.start) & (launched < window.end)
    step = numbers[np.searchsorted(steps, launched, side="right")]
    keys = np.stack((name, step, stream))[:, inside]
    groups, group = np.unique(keys, axis=1, return_inverse=True)
    return {
        (trace.names[name], step, stream): duration[inside][group.reshape(-1) == place]
        for place, (name, step, stream) in enumerate(groups.T.tolist())
    }


def _on_device(trace: Trace, lexicon: Lexicon) -> tuple[Ns, Ns, Ns, Ns]:
    """When each was launched, its name, stream and duration."""
    device = trace.device
    of_some = np.isin(kinds(trace, lexicon), [KINDS.index(kind) for kind in _OF_SOME])
    works = np.flatnonzero(communication_work(trace, lexicon) & ~of_some)
    # By the launch: a device that lags behind its host starts kernels when the next step has long begun.
    _, stream = np.unique(device.stream[works], return_inverse=True)
    duration = device.end[works] - device.start[works]
    return _launch_times(trace)[works], device.name[works].astype(np.int64), stream.reshape(-1), duration


def _on_host(trace: Trace, lexicon: Lexicon) -> tuple[Ns, Ns, Ns, Ns]:
    host = trace.host
    waits = lexicon.communication_wait.copy()
    waits[[name for name in np.flatnonzero(waits).tolist() if kind_of(trace.names[name]) in _OF_SOME]] = False
    calls = np.flatnonzero(waits[host.name] & (host.kind != HostKind.PYTHON))
    calls = calls[np.argsort(host.start[calls], kind="stable")]  # the backend has several threads
    name = host.name[calls].astype(np.int64)
    return host.start[calls], name, np.zeros(len(calls), np.int64), host.end[calls] - host.start[calls]


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


def _check_differing(trace: Trace, before: Sequence[Trace]) -> None:
    for other in before:
        if trace.rank == other.rank and _same(trace, other):
            raise DataError(f"{other.label} and {trace.label} are the same trace", HOW)
        if trace.rank is not None and trace.rank == other.rank:
            raise DataError(f"{other.label} and {trace.label} are both of rank {trace.rank}", HOW)


def _same(one: Trace, other: Trace) -> bool:
    """Two processes do nothing at the same nanoseconds."""
    return all(
        np.array_equal(ours, theirs)
        for ours, theirs in (
            (one.host.start, other.host.start),
            (one.host.end, other.host.end),
            (one.device.start, other.device.start),
            (one.device.end, other.device.end),
        )
    )


def _communicates(lexicon: Lexicon) -> bool:
    return bool(lexicon.communication_kernel.any() or lexicon.communication_host.any())


def _processes(trace: Trace) -> set[str]:
    """Those that call the runtime: each counts its correlation numbers from the beginning."""
    threads = trace.host.thread[trace.host.kind == HostKind.RUNTIME]
    return {trace.threads[thread][0] for thread in np.unique(threads).tolist()}


def _collective_names(trace: Trace, lexicon: Lexicon) -> set[str]:
    works = communication_work(trace, lexicon)
    return {trace.names[name] for name in np.unique(trace.device.name[works]).tolist()}
