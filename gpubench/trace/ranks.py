"""Traces of several ranks: whether they belong together, their collectives, and for which rank the others waited.

Clocks of different machines differ, so that starts cannot be compared. Durations can be: the kernels of a collective
spin until the last rank arrives, and all end together, so that the rank with the shortest kernel came last. The same
applies to slices of collectives that run on the host, such as gloo's, in traces without device work.
"""

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpubench import units
from gpubench.errors import DataError
from gpubench.trace.columns import MISSING, HostKind, Ids, Mask, Ns, Spans, Trace, at, clip, intersect, union
from gpubench.trace.device import communication_work
from gpubench.trace.names import Lexicon, Window
from gpubench.trace.profile import Collective, CollectiveKind, Straggler
from gpubench.trace.slices import launchers, started_in

KINDS: tuple[CollectiveKind, ...] = CollectiveKind.__args__  # type: ignore[attr-defined]
_PATTERNS: tuple[tuple[CollectiveKind, str], ...] = (
    ("all_to_all", r"all_?(to|2)_?all|deep_ep"),
    ("reduce_scatter", r"reduce_?scatter"),
    ("all_gather", r"all_?gather"),
    ("all_reduce", r"all_?reduce|cross_device_reduce|quickreduce|custom_ar(?![a-z])|(one|two)_?shot"),
    ("broadcast", r"broadcast|bcast"),
    ("send_recv", r"send_?recv|(?<![a-z])i?(send|recv)(?![a-z])"),
)
"""Substrings to search for in a lower-case name; the first one found counts. Kernels, operators and backends spell them
differently: ncclDevKernel_AllGather_RING_LL, c10d::_allgather_base_, nccl:_all_gather_base."""

OTHER = KINDS.index("other")


def kind_of(name: str) -> CollectiveKind:
    """Returns the kind of a kernel's, operator's or backend's name."""
    return next((kind for kind, pattern in _PATTERNS if re.search(pattern, name.lower())), "other")


def kinds(trace: Trace, lexicon: Lexicon) -> NDArray[np.int8]:
    """Returns for each work of the device the index of its kind in KINDS, OTHER for work that does not communicate.

    It is what the program requested, from the kernel's arguments, or else from the operator or annotation around its
    launch. If both are missing, it is the kind of other kernels of the same name, if they are of one kind, or else what
    the name says. NCCL runs an all-to-all as SendRecv, and some versions give other collectives that name too.
    """
    device = trace.device
    named = lexicon.communication_kernel | lexicon.communication_host
    named[device.collective[device.collective != MISSING]] = True
    known = np.full(len(trace.names), OTHER, np.int8)
    known[named] = [KINDS.index(kind_of(trace.names[name])) for name in np.flatnonzero(named).tolist()]
    around = _operators(trace, lexicon.communication_host & (known != OTHER), launchers(trace))
    asked = np.full(len(device), OTHER, np.int8)
    for column in (around, device.collective):
        stated = at(known, column, OTHER)
        asked = np.where(stated != OTHER, stated, asked)
    for name in np.unique(device.name[asked != OTHER]).tolist():
        among = np.unique(asked[(asked != OTHER) & (device.name == name)])
        known[name] = among[0] if len(among) == 1 else OTHER
    found = np.where(asked != OTHER, asked, known[device.name])
    return np.where(communication_work(trace, lexicon), found, np.int8(OTHER))


def collectives(trace: Trace, lexicon: Lexicon, window: Window, exposed: Spans) -> list[Collective]:
    """Returns the collectives by kind and kernel name, most exposed first. `exposed` is `Sets.exposed_communication`.

    If two with different names run at once, the time is in the `exposed` of both. Bytes are those of the messages on
    this rank, and known if the trace has them for every call.
    """
    device, kind = trace.device, kinds(trace, lexicon)
    works = np.flatnonzero(started_in(trace, window) & communication_work(trace, lexicon))
    visible = clip(exposed, window.start, window.end)
    found = []
    for name, of_kind in np.unique(np.stack((device.name[works], kind[works]), axis=1), axis=0).tolist():
        own = works[(device.name[works] == name) & (kind[works] == of_kind)]
        start, end, size = device.start[own], device.end[own], device.bytes[own]
        found.append(
            Collective(
                name=trace.names[name],
                calls=len(own),
                total=int((end - start).sum()),
                exposed=intersect(union(start, end), visible).length,
                bytes=None if (size == MISSING).any() else int(size.sum()),
                kind=KINDS[of_kind],
            )
        )
    return sorted(found, key=lambda one: (-one.exposed, -one.total, one.name))


def _operators(trace: Trace, named: Mask, links: Ids) -> Ids:
    """Returns for each work the name of the outermost slice around its launch that has one of these names, or -1."""
    host = trace.host
    chosen = np.flatnonzero(named[host.name] & (host.kind != HostKind.PYTHON))
    found = np.full(len(links), MISSING, np.int32)
    works = np.flatnonzero(links != MISSING)
    for thread in np.unique(host.thread[chosen]).tolist():
        own = chosen[host.thread[chosen] == thread]
        reach = np.maximum.accumulate(host.end[own])
        outer = own[np.concatenate(([True], host.end[own[1:]] > reach[:-1]))]
        here = works[host.thread[links[works]] == thread]
        launched = host.start[links[here]]
        place = np.searchsorted(host.start[outer], launched, side="right") - 1
        around = outer[np.maximum(place, 0)]
        inside = (place >= 0) & (host.end[around] >= launched)
        found[here[inside]] = host.name[around[inside]]
    return found


NOISE = 20_000
"""The nanoseconds by which ranks that launch at the same instant may differ, because a launch takes about 10 us, and so
does the start of a kernel by the device."""
NOISE_SHARE = 0.05
"""The same as a fraction of the shortest kernel, because links share bandwidth and finish at different times."""

_BETWEEN_TWO: CollectiveKind = "send_recv"
"""The kind that is left out: a long receive does not show that its sender is late, as pipelines post receives early,
and a stage cannot send before it has computed. In an all-to-all, which NCCL also runs as SendRecv, all ranks wait."""

HOW = "give traces of one run, one of each rank"


def check(traces: Sequence[Trace], lexicons: Sequence[Lexicon]) -> None:
    """Raises DataError for traces that cannot be of one run, that nothing connects, or that are the same.

    A trace of several processes raises it, too.
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
            "some of them have no rank, and some do not communicate",
            HOW,
        )


def apart(traces: Sequence[Trace], windows: Sequence[Window]) -> list[str]:
    """Returns a note if two traces were not recorded at the same time."""
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
    """Returns each rank, latest first; empty if no collective can be matched.

    The k-th kernel of a name on a stream in a step is the same collective on every rank that has the same number of
    them; in traces without device work it is the k-th slice of a name in a step. Ranks wait in a collective if the
    durations of its kernels differ by more than noise.

    In a broadcast not every rank waits for every other: the root may leave before the others come, and a late rank may
    delay none of them. So it counts only if all ranks are traced, and either none of them waited or all but one did:
    that one came last, whether it is the root or not. Otherwise it is unknown which rank the others waited for.
    """
    if len(traces) < 2:
        return []
    durations, broadcast = _matched([_collectives(*each) for each in zip(traces, windows, lexicons, strict=True)])
    shortest = durations.min(axis=0, initial=np.iinfo(np.int64).max)
    waited = (durations - shortest > np.maximum(NOISE, NOISE_SHARE * shortest)).sum(axis=0)
    whole = traces[0].world_size is not None and len(traces) >= traces[0].world_size
    clear = ~broadcast | (whole & ((waited == 0) | (waited == len(traces) - 1)))
    durations, waits = durations[:, clear], waited[clear] > 0
    longest = durations.max(axis=0, initial=0)
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


_Key = tuple[str, int, int, bool]
"""The name, the step, the index of the stream among those that communicate, and whether it is a broadcast."""


def _collectives(trace: Trace, window: Window, lexicon: Lexicon) -> dict[_Key, Ns]:
    """Returns the durations of collectives that were launched in the window, in their order."""
    steps = np.array([step.start for step in window.steps], np.int64)
    numbers = np.array([MISSING, *(step.number for step in window.steps)], np.int64)
    calls = _on_host(trace, lexicon) if trace.host_only else _on_device(trace, lexicon)
    launched, name, stream, broadcast, duration = calls
    inside = (launched >= window.start) & (launched < window.end)
    step = numbers[np.searchsorted(steps, launched, side="right")]
    keys = np.stack((name, step, stream, broadcast))[:, inside]
    groups, group = np.unique(keys, axis=1, return_inverse=True)
    return {
        (trace.names[name], step, stream, bool(broadcast)): duration[inside][group.reshape(-1) == place]
        for place, (name, step, stream, broadcast) in enumerate(groups.T.tolist())
    }


def _on_device(trace: Trace, lexicon: Lexicon) -> tuple[Ns, Ns, Ns, Ns, Ns]:
    """Returns launch, name, stream, whether it is a broadcast, and duration of each collective."""
    device, kind = trace.device, kinds(trace, lexicon)
    works = np.flatnonzero(communication_work(trace, lexicon) & (kind != KINDS.index(_BETWEEN_TWO)))
    # By the launch, because a device behind its host starts kernels long after the next step has begun.
    _, stream = np.unique(device.stream[works], return_inverse=True)
    duration = device.end[works] - device.start[works]
    broadcast = (kind[works] == KINDS.index("broadcast")).astype(np.int64)
    return _launch_times(trace)[works], device.name[works].astype(np.int64), stream.reshape(-1), broadcast, duration


def _on_host(trace: Trace, lexicon: Lexicon) -> tuple[Ns, Ns, Ns, Ns, Ns]:
    host = trace.host
    waits, broadcasts = lexicon.communication_wait.copy(), np.zeros(len(trace.names), np.int64)
    for each in np.flatnonzero(waits).tolist():
        kind = kind_of(trace.names[each])
        waits[each], broadcasts[each] = kind != _BETWEEN_TWO, kind == "broadcast"
    calls = np.flatnonzero(waits[host.name] & (host.kind != HostKind.PYTHON))
    calls = calls[np.argsort(host.start[calls], kind="stable")]  # the backend has several threads
    name = host.name[calls].astype(np.int64)
    duration = host.end[calls] - host.start[calls]
    return host.start[calls], name, np.zeros(len(calls), np.int64), broadcasts[name], duration


def _launch_times(trace: Trace) -> Ns:
    links = launchers(trace)
    times = trace.device.start.copy()
    times[links != MISSING] = trace.host.start[links[links != MISSING]]
    return times


def _matched(ranks: Sequence[dict[_Key, Ns]]) -> tuple[NDArray[np.int64], Mask]:
    """Returns the durations [rank, collective] of groups with one size on all ranks, and which are broadcasts."""
    first = ranks[0]
    common = [key for key in first if {len(rank.get(key, ())) for rank in ranks} == {len(first[key])}]
    broadcast = np.repeat([key[3] for key in common], [len(first[key]) for key in common]).astype(np.bool_)
    durations = [np.concatenate([np.empty(0, np.int64), *(rank[key] for key in common)]) for rank in ranks]
    return np.stack(durations), broadcast


def _check_differing(trace: Trace, before: Sequence[Trace]) -> None:
    for other in before:
        if trace.rank == other.rank and _same(trace, other):
            raise DataError(f"{other.label} and {trace.label} are the same trace", HOW)
        if trace.rank is not None and trace.rank == other.rank:
            raise DataError(f"{other.label} and {trace.label} are both of rank {trace.rank}", HOW)


def _same(one: Trace, other: Trace) -> bool:
    """Returns whether all times are equal, which two different processes never have to the nanosecond."""
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
    """Returns the processes that call the runtime, each of which has its own correlation numbers."""
    threads = trace.host.thread[trace.host.kind == HostKind.RUNTIME]
    return {trace.threads[thread][0] for thread in np.unique(threads).tolist()}


def _collective_names(trace: Trace, lexicon: Lexicon) -> set[str]:
    works = communication_work(trace, lexicon)
    return {trace.names[name] for name in np.unique(trace.device.name[works]).tolist()}
