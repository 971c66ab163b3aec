"""Traces of several ranks: whether they belong together, their collectives, and for which rank the others waited.

Clocks of different machines differ, so that starts cannot be compared. Durations can be: the kernels of a collective
spin until the last rank arrives, and all end together, so that the rank with the shortest kernel came last. The same
applies to slices of collectives that run on the CPU, such as gloo's, in traces without device work.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpubench import units
from gpubench.errors import DataError
from gpubench.trace.columns import MISSING, Ids, Mask, Ns, SliceKind, Spans, Trace, WorkKind, at, clip, intersect, union
from gpubench.trace.device import communication_work
from gpubench.trace.launching import slices_around
from gpubench.trace.names import Lexicon, Window
from gpubench.trace.profile import Collective, CollectiveKind, Straggler
from gpubench.trace.slices import started_in

KINDS: tuple[CollectiveKind, ...] = CollectiveKind.__args__  # type: ignore[attr-defined]
_PATTERNS: tuple[tuple[CollectiveKind, str], ...] = (
    ("all_to_all", r"all_?(to|2)_?all|deep_ep|(?<![a-z])ep::|(inter|intra)node|ep(dispatch|combine)|a2a_?[pdc]"),
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
    """The kind of a kernel's, operator's or backend's name."""
    return next((kind for kind, pattern in _PATTERNS if re.search(pattern, name.lower())), "other")


def kinds(trace: Trace, lexicon: Lexicon) -> NDArray[np.int8]:
    """For each work of the device, the index of its kind in KINDS, OTHER for work that does not communicate.

    It is what the program requested, from the collective's description, or else from the operator or annotation around
    its launch, also one of a library such as vllm::all_reduce. If both are missing, it is the kind of the other kernels
    of the same name, if at least half of them are known and of one kind, or else what the name says. NCCL runs an
    all-to-all as SendRecv, and some versions give other collectives that name too; RCCL has one kernel for all kinds.
    """
    device, cpu = trace.device, trace.cpu
    named = lexicon.communication_kernel | lexicon.communication_cpu | lexicon.collective_operator
    known = np.full(len(trace.names), OTHER, np.int8)
    known[named] = [KINDS.index(kind_of(trace.names[name])) for name in np.flatnonzero(named).tolist()]
    telling = (lexicon.communication_cpu | lexicon.collective_operator) & (known != OTHER)
    telling = telling[cpu.name] & (cpu.kind != SliceKind.PYTHON)
    around = at(cpu.name, slices_around(trace, telling, trace.launchers))
    described = np.array([KINDS.index(kind_of(one.name)) for one in trace.messages], np.int8)
    asked = at(known, around, OTHER)
    stated = at(described, messages(trace), OTHER)
    asked = np.where(stated != OTHER, stated, asked)
    for name in np.unique(device.name[asked != OTHER]).tolist():
        own = asked[device.name == name]
        among = np.unique(own[own != OTHER])
        if len(among) > 1:
            known[name] = OTHER
        elif 2 * np.count_nonzero(own != OTHER) >= len(own):
            known[name] = among[0]
    found = np.where(asked != OTHER, asked, known[device.name])
    return np.where(communication_work(trace, lexicon), found, np.int8(OTHER))


def collectives(trace: Trace, lexicon: Lexicon, window: Window, exposed: Spans) -> list[Collective]:
    """The collectives by kind and kernel name, most exposed first. `exposed` is `Sets.exposed_communication`.

    If two with different names run at once, the time is in the `exposed` of both. Bytes are those of the messages on
    this rank, and known if the trace has them for every call.
    """
    device, kind = trace.device, kinds(trace, lexicon)
    communicates = communication_work(trace, lexicon)
    works = np.flatnonzero(started_in(trace, window) & communicates)
    computing = np.flatnonzero((device.kind == WorkKind.KERNEL) & ~communicates)
    visible = clip(exposed, window.start, window.end)
    in_order = works[np.argsort(device.start[works], kind="stable")]
    found = []
    for name, of_kind in np.unique(np.stack((device.name[works], kind[works]), axis=1), axis=0).tolist():
        own = works[(device.name[works] == name) & (kind[works] == of_kind)]
        start, end, size = device.start[own], device.end[own], device.bytes[own]
        longest = int(own[np.argmax(end - start)])
        found.append(
            Collective(
                name=trace.names[name],
                calls=len(own),
                total=int((end - start).sum()),
                exposed=intersect(union(start, end), visible).length,
                bytes=None if (size == MISSING).any() else int(size.sum()),
                kind=KINDS[of_kind],
                median=int(np.median(end - start)),
                longest=int((end - start).max()),
                place=int(np.flatnonzero(in_order == longest)[0]) + 1,
                after=_last_ended(trace, computing, int(device.start[longest])),
            )
        )
    return sorted(found, key=lambda one: (-one.exposed, -one.total, one.name))


def _last_ended(trace: Trace, works: NDArray[np.intp], at: int) -> str:
    """The name of the one of the works that ended last by an instant; an empty string if none did."""
    ended = works[trace.device.end[works] <= at]
    if not len(ended):
        return ""
    last: str = trace.names[trace.device.name[ended[np.argmax(trace.device.end[ended])]]]
    return last


def messages(trace: Trace) -> Ids:
    """For each work, the index of its description in `Trace.messages`, or -1.

    It is the one of the kernel, or else the one of the CPU slice around the launch (record_param_comms).
    """
    described = trace.cpu.message != MISSING
    around = at(trace.cpu.message, slices_around(trace, described, trace.launchers))
    return np.where(trace.device.message != MISSING, trace.device.message, around).astype(np.int32)


NOISE = 20_000
"""The nanoseconds by which ranks that launch at the same instant may differ, because a launch takes about 10 us, and so
does the start of a kernel by the device."""
NOISE_SHARE = 0.05
"""The same as a fraction of the shortest kernel, because links share bandwidth and finish at different times."""

_WAITING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"})
"""The kinds in which ranks wait for each other; a barrier is one too.

In the others a long kernel does not show that another rank is late: pipelines post receives early, and the ranks that
only send in a gather leave before the last one comes."""
_BARRIER, _ONE_SIDED = r"barrier", r"^_?(gather|scatter|reduce|send|recv)"
"""Names of descriptions: collectives with one root have the kernels of others."""
_SIZED = _WAITING - {"all_to_all"}
"""The kinds in which the messages of all ranks have one size."""

HOW = "give traces of one run, one of each rank"
ONE_PROCESS = "give the trace that each process recorded, as a file of its own, instead of one that was merged"


def check(traces: Sequence[Trace], lexicons: Sequence[Lexicon]) -> None:
    """Raises DataError for traces that cannot be of one run, that nothing connects, or that are the same.

    A trace of several processes raises it, too.
    """
    first, *others = traces
    for place, trace in enumerate(traces):
        if len(processes := _processes(trace)) > 1:
            named = units.listed(sorted(processes))
            raise DataError(f"{trace.label} is of {len(processes)} processes: {named}", ONE_PROCESS)
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
    """Notes that two traces were not recorded at the same time."""
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
    """Each rank whose collectives can be matched with those of other ranks, latest first.

    Ranks wait in a collective if the durations of its kernels differ by more than noise.

    In a broadcast not every rank waits for every other: the root may leave before the others come, and a late rank may
    delay none of them. So it counts only if all its ranks are traced, and either none of them waited or all but one
    did: that one came last, whether it is the root or not. Otherwise it is unknown which rank the others waited for.
    """
    if len(traces) < 2:
        return []
    ranks = [_collectives(*each) for each in zip(traces, windows, lexicons, strict=True)]
    found = [_RankTally() for _ in traces]
    for matched in _matched(traces, ranks):
        durations = matched.durations
        shortest, longest = durations.min(axis=0), durations.max(axis=0)
        waited = (durations - shortest > np.maximum(NOISE, NOISE_SHARE * shortest)).sum(axis=0)
        if matched.broadcast:
            clear = (waited == 0) | (waited == len(durations) - 1) if matched.whole else np.zeros(len(waited), np.bool_)
            durations, shortest, longest = durations[:, clear], shortest[clear], longest[clear]
            waited = waited[clear]
        last = durations.argmin(axis=0)
        for place, member in enumerate(matched.members):
            found[member].add(
                late=int((longest - durations[place]).sum()),
                of=durations.shape[1],
                waited_for=int(((waited > 0) & (last == place)).sum()),
                waits=int((waited > 0).sum()),
                among=len(matched.members),
                whole=matched.whole,
            )
    every = [
        tally.straggler(place if trace.rank is None else trace.rank)
        for place, (trace, tally) in enumerate(zip(traces, found, strict=True))
        if tally.of
    ]
    return sorted(every, key=lambda one: (-one.late, one.rank))


@dataclass
class _RankTally:
    """What is known about one rank, added up over its collectives."""

    late: int = 0
    of: int = 0
    waited_for: int = 0
    waits: int = 0
    among: int = 0
    whole: bool = True

    def add(self, *, late: int, of: int, waited_for: int, waits: int, among: int, whole: bool) -> None:
        if not of:
            return
        self.among = min(self.among or among, among)
        self.late, self.of, self.whole = self.late + late, self.of + of, self.whole and whole
        self.waited_for, self.waits = self.waited_for + waited_for, self.waits + waits

    def straggler(self, rank: int) -> Straggler:
        return Straggler(rank, round(self.late / self.of), self.waited_for, self.of, self.waits, self.among, self.whole)


class _ProcessGroup(NamedTuple):
    name: str
    ranks: str
    """The numbers of its ranks, as recorded."""
    size: int | None


class _Key(NamedTuple):
    """What calls have in common that are the same collectives on all ranks of their group, one after the other."""

    kind: CollectiveKind
    name: str
    """The name of the collective where it is described, such as "allreduce", or else that of its kernel."""
    group: _ProcessGroup | None
    """None if it is not recorded."""
    message: tuple[int | None, int | None, str]
    """The elements that go in and out, if they are the same on all ranks, and their type."""
    step: int
    """The number of the step, or -1 for calls that are numbered in their group."""
    stream: int
    """The index of the stream among those that communicate, or -1 if the group is recorded."""


class _Calls(NamedTuple):
    duration: Ns
    end: Ns
    number: Ns
    """The sequence number in the process group; -1 where it is not recorded."""


class _Matched(NamedTuple):
    members: list[int]
    """The places of the ranks among the traces."""
    durations: Ns
    """[rank, collective]"""
    broadcast: bool
    whole: bool
    """Whether all ranks of the group are traced."""


def _matched(traces: Sequence[Trace], ranks: Sequence[dict[_Key, _Calls]]) -> Iterator[_Matched]:
    """Yields the collectives that are the same on several ranks.

    Where the process group is recorded, they are matched by group, operation, size and type of the message, and by
    their number in the group, or else by their order within a step, if all ranks of the group have as many.

    Where it is not recorded, ranks may be of different groups. Then the k-th kernel of a name and kind on a stream in a
    step is taken for the same collective if all ranks have as many, and if the ends confirm it (`_coincide`).
    """
    unconfirmed = []
    for key in dict.fromkeys(key for rank in ranks for key in rank):
        members = _members(key.group, traces) or [place for place, rank in enumerate(ranks) if key in rank]
        calls = [ranks[member][key] for member in members if key in ranks[member]]
        if len(members) < 2 or len(calls) < len(members):
            continue
        if all((one.number != MISSING).all() for one in calls):
            calls = _of_common_numbers(calls)
        elif len({len(one.end) for one in calls}) > 1:
            continue
        if key.group is None:
            unconfirmed.append((key.kind == "broadcast", calls))
        else:
            size = key.group.size
            whole = size is not None and len(members) >= size
            yield _Matched(members, np.stack([one.duration for one in calls]), key.kind == "broadcast", whole)
    yield from _confirmed(unconfirmed, traces[0].world_size)


def _confirmed(found: Sequence[tuple[bool, list[_Calls]]], world_size: int | None) -> Iterator[_Matched]:
    """Yields those collectives of all traces, with whether each is a broadcast, whose ends coincide."""
    if not found:
        return
    members = list(range(len(found[0][1])))
    durations = np.stack([np.concatenate([calls[place].duration for _, calls in found]) for place in members])
    ends = np.stack([np.concatenate([calls[place].end for _, calls in found]) for place in members])
    broadcast = np.repeat([sends for sends, _ in found], [len(calls[0].end) for _, calls in found])
    coincide = _coincide(durations, ends)
    for sends in (False, True):
        whole = not sends if world_size is None else len(members) >= world_size
        yield _Matched(members, durations[:, coincide & (broadcast == sends)], sends, whole)


def _members(group: _ProcessGroup | None, traces: Sequence[Trace]) -> list[int]:
    """The places of the traces whose ranks are in the group; none if its ranks are not known."""
    if group is None:
        return list(range(len(traces)))
    numbers = [units.whole(number) for number in re.findall(r"\d+", group.ranks)]
    if len(numbers) != group.size or any(trace.rank is None for trace in traces):
        return []  # the ranks of large groups are recorded in part
    return [place for place, trace in enumerate(traces) if trace.rank in numbers]


def _of_common_numbers(calls: Sequence[_Calls]) -> list[_Calls]:
    """The calls whose numbers all ranks have, without those that share a number."""
    once = []
    for one in calls:
        number, count = np.unique(one.number, return_counts=True)
        once.append(number[count == 1])
    common = reduce(np.intersect1d, once)
    found = []
    for one in calls:
        order = np.argsort(one.number, kind="stable")
        place = order[np.searchsorted(one.number[order], common)]
        found.append(_Calls(one.duration[place], one.end[place], one.number[place]))
    return found


AGREEING = 0.75
"""The part of the time for which ranks seem to wait that must be in collectives whose ends coincide; with less, none is
matched."""
TOLERANCE = 0.25
"""How far apart the ends of one collective may be, as a fraction of the difference of its durations."""


def _coincide(durations: Ns, ends: Ns) -> Mask:
    """Which columns of [rank, collective] may each be one collective, because their kernels end together.

    The difference between the clocks of two ranks is taken to be the median difference of all their ends.
    """
    apart = ends - ends[0]
    apart = apart - np.median(apart, axis=1, keepdims=True).astype(np.int64)
    shortest, waiting = durations.min(axis=0), np.ptp(durations, axis=0)
    found: Mask = np.ptp(apart, axis=0) <= np.maximum(np.maximum(NOISE, NOISE_SHARE * shortest), TOLERANCE * waiting)
    return found if waiting[found].sum() >= AGREEING * waiting.sum() else np.zeros_like(found)


class _Launched(NamedTuple):
    """The collectives of a rank in which ranks wait for each other, in the order in which they began."""

    launched: Ns
    """By the launch, because a device behind the CPU starts kernels long after the next step has begun."""
    calls: _Calls
    kind: NDArray[np.int8]
    name: Ids
    stream: Ns
    message: Ids
    """The index in `Trace.messages`, or -1."""


def _collectives(trace: Trace, window: Window, lexicon: Lexicon) -> dict[_Key, _Calls]:
    """The collectives that were launched in the window, in their order."""
    found = _on_cpu(trace, lexicon) if trace.cpu_only else _on_device(trace, lexicon)
    starts = np.array([step.start for step in window.steps], np.int64)
    numbers = np.array([MISSING, *(step.number for step in window.steps)], np.int64)
    step = numbers[np.searchsorted(starts, found.launched, side="right")]
    step[found.calls.number != MISSING] = MISSING
    inside = np.flatnonzero((found.launched >= window.start) & (found.launched < window.end))
    distinct: dict[_Key, list[int]] = {}
    for place in inside.tolist():
        key = _key(trace, found, place, int(step[place]))
        distinct.setdefault(key, []).append(place)
    return {key: _Calls(*(column[places] for column in found.calls)) for key, places in distinct.items()}


def _key(trace: Trace, found: _Launched, place: int, step: int) -> _Key:
    kind = KINDS[found.kind[place]]
    message = trace.messages[found.message[place]] if found.message[place] >= 0 else None
    if message is None or not (message.group or message.ranks):
        return _Key(kind, trace.names[found.name[place]], None, (None, None, ""), step, int(found.stream[place]))
    sizes = (message.elements_in, message.elements_out) if kind in _SIZED else (None, None)
    group = _ProcessGroup(message.group, message.ranks, message.group_size)
    return _Key(kind, message.name, group, (*sizes, message.dtype), step, MISSING)


def _on_device(trace: Trace, lexicon: Lexicon) -> _Launched:
    device, kind, message = trace.device, kinds(trace, lexicon), messages(trace)
    barrier, one_sided = (
        at(np.array([bool(re.search(names, one.name)) for one in trace.messages], np.int8), message, 0) > 0
        for names in (_BARRIER, _ONE_SIDED)
    )
    waits = barrier | (np.isin(kind, [KINDS.index(one) for one in _WAITING]) & ~one_sided)
    works = np.flatnonzero(communication_work(trace, lexicon) & waits)
    _, stream = np.unique(device.stream[works], return_inverse=True)
    numbers = [MISSING if one.number is None else one.number for one in trace.messages]
    number = at(np.array(numbers, np.int64), message[works])
    calls = _Calls(device.end[works] - device.start[works], device.end[works], number)
    launched = _launch_times(trace)[works]
    return _Launched(launched, calls, kind[works], device.name[works], stream.reshape(-1), message[works])


def _on_cpu(trace: Trace, lexicon: Lexicon) -> _Launched:
    cpu = trace.cpu
    kind, waits = np.full(len(trace.names), OTHER, np.int8), np.zeros(len(trace.names), np.bool_)
    for each in np.flatnonzero(lexicon.communication_wait).tolist():
        kind[each] = KINDS.index(kind_of(trace.names[each]))
        waits[each] = KINDS[kind[each]] in _WAITING or re.search(_BARRIER, trace.names[each])
    slices = np.flatnonzero(waits[cpu.name] & (cpu.kind != SliceKind.PYTHON))
    slices = slices[np.argsort(cpu.start[slices], kind="stable")]  # the backend has several threads
    unknown = np.full(len(slices), MISSING, np.int64)
    calls = _Calls(cpu.end[slices] - cpu.start[slices], cpu.end[slices], unknown)
    name = cpu.name[slices]
    return _Launched(cpu.start[slices], calls, kind[name], name, unknown, unknown.astype(np.int32))


def _launch_times(trace: Trace) -> Ns:
    links = trace.launchers
    times = trace.device.start.copy()
    times[links != MISSING] = trace.cpu.start[links[links != MISSING]]
    return times


def _check_differing(trace: Trace, before: Sequence[Trace]) -> None:
    for other in before:
        if trace.rank == other.rank and _same(trace, other):
            raise DataError(f"{other.label} and {trace.label} are the same trace", HOW)
        if trace.rank is not None and trace.rank == other.rank:
            raise DataError(f"{other.label} and {trace.label} are both of rank {trace.rank}", HOW)


def _same(one: Trace, other: Trace) -> bool:
    """Whether all times are equal, which those of two different processes never are to the nanosecond."""
    return all(
        np.array_equal(ours, theirs)
        for ours, theirs in (
            (one.cpu.start, other.cpu.start),
            (one.cpu.end, other.cpu.end),
            (one.device.start, other.device.start),
            (one.device.end, other.device.end),
        )
    )


def _communicates(lexicon: Lexicon) -> bool:
    return bool(lexicon.communication_kernel.any() or lexicon.communication_cpu.any())


def _processes(trace: Trace) -> set[str]:
    """The processes that call the runtime, each of which has its own correlation numbers.

    Devices also appear as processes in which the runtime is called: a program has operators or Python too.
    """
    calls = trace.cpu.kind == SliceKind.RUNTIME
    calling, programs = (
        {trace.threads[thread][0] for thread in np.unique(trace.cpu.thread[chosen]).tolist()}
        for chosen in (calls, ~calls)
    )
    return calling & programs or calling


def _collective_names(trace: Trace, lexicon: Lexicon) -> set[str]:
    works = communication_work(trace, lexicon)
    return {trace.names[name] for name in np.unique(trace.device.name[works]).tolist()}
