"""Groups kernels, copies and memsets of the device by name."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gpubench.trace.columns import MISSING, Ids, Mask, Ns, Trace, WorkKind
from gpubench.trace.device import communication_work
from gpubench.trace.families import MOVES_MEMORY, Family, family
from gpubench.trace.names import Lexicon, Window, transfer
from gpubench.trace.operators import only_moves_memory
from gpubench.trace.profile import Kernel
from gpubench.trace.slices import by_stream, started_in

KernelKind = Literal["compute", "communication", "copy", "set"]
_KINDS: dict[int, KernelKind] = {WorkKind.KERNEL: "compute", WorkKind.COPY: "copy", WorkKind.SET: "set"}


def moves_memory(kind: KernelKind, name: str, operator: str) -> bool:
    """Whether the device's memory limits this work, so that fusing it with its neighbours saves time.

    A kernel is judged by its name, or else by the operator that launches it. A copy within the device counts, one over
    a link to the CPU or to another device does not. Memsets and collectives do not: no compiler fuses them.
    """
    if kind != "compute":
        return kind == "copy" and transfer(name) is None
    known = family(name)
    return known in MOVES_MEMORY or (known == "other" and only_moves_memory(operator))


def memory_family(kernel: Kernel) -> Family:
    """The family of work that `moves_memory`: copies of the runtime count with those that kernels make."""
    return "copy" if kernel.kind == "copy" else family(kernel.name)


def fusible(trace: Trace, lexicon: Lexicon, owner: Ids, window: Window) -> int:
    """An upper limit for the nanoseconds that fusing neighbours saves: see `RankProfile.fusible`.

    `owner` is as for `kernels`. A kernel that does the work of a whole run takes at least as long as the longest of its
    kernels, if that one reads and writes no more than the run's inputs and outputs.
    """
    device, started = trace.device, started_in(trace, window)
    if not started.any():
        return 0
    communicates = communication_work(trace, lexicon)
    first, pair = _groups(owner, device.name * len(WorkKind) + device.kind)  # in this order: an owner may be -1
    judged = [
        moves_memory(
            _kind(trace, communicates, work),
            trace.names[device.name[work]],
            trace.names[owner[work]] if owner[work] != MISSING else "",
        )
        for work in first.tolist()
    ]
    moves = np.array(judged)[pair]
    duration = device.end - device.start
    saved = 0
    for works in by_stream(trace):
        own = works[started[works]]
        in_run = moves[own]
        begins = in_run & ~np.concatenate(([False], in_run[:-1]))
        if begins.any():
            time = duration[own[in_run]]
            longest = np.maximum.reduceat(time, np.flatnonzero(begins[in_run]))
            saved += int(time.sum() - longest.sum())
    return saved


def kernels(trace: Trace, lexicon: Lexicon, owner: Ids, window: Window) -> list[Kernel]:
    """All work that starts in the window by name, most time first.

    `owner` has for each work of the device the index into `Trace.names` of the operator that launched it, or -1.
    """
    device = trace.device
    works = np.flatnonzero(started_in(trace, window))
    if not len(works):
        return []
    communicates = communication_work(trace, lexicon)
    duration = device.end[works] - device.start[works]
    first, group = _groups(device.name[works], device.kind[works])
    order = np.lexsort((duration, group))
    count = np.bincount(group)
    begin = np.cumsum(count) - count
    in_order = duration[order]
    total = np.add.reduceat(in_order, begin)
    operators = _most_frequent(group, owner[works], len(count))
    found = [
        Kernel(
            name=trace.names[device.name[works[example]]],
            kind=_kind(trace, communicates, int(works[example])),
            calls=int(count[place]),
            total=int(total[place]),
            shortest=int(in_order[begin[place]]),
            median=_median(in_order[begin[place] : begin[place] + count[place]]),
            longest=int(in_order[begin[place] + count[place] - 1]),
            operator=trace.names[operators[place]] if operators[place] != MISSING else "",
        )
        for place, example in enumerate(first.tolist())
    ]
    return sorted(found, key=lambda kernel: (-kernel.total, kernel.name))


def _kind(trace: Trace, communicates: Mask, work: int) -> KernelKind:
    return "communication" if communicates[work] else _KINDS[trace.device.kind[work]]


def _groups(major: Ids, minor: NDArray[np.int8] | Ids) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The index of each distinct pair's first element, and for each element the index of its pair."""
    pairs = major.astype(np.int64) << 32 | minor
    _, first, group = np.unique(pairs, return_index=True, return_inverse=True)
    return first, group.reshape(-1)


def _median(in_order: Ns) -> int:
    """The median, rounded down to a nanosecond."""
    middle = len(in_order) // 2
    return int(in_order[middle]) if len(in_order) % 2 else int(in_order[middle - 1] + in_order[middle]) // 2


def _most_frequent(group: NDArray[np.intp], owner: Ids, groups: int) -> list[int]:
    """The most frequent owner of each group; -1 only if no work of the group has one."""
    found = np.full(groups, MISSING, np.int64)
    known = np.flatnonzero(owner != MISSING)
    group, owner = group[known], owner[known]
    first, pair = _groups(group.astype(np.int32), owner)
    rarest_first = first[np.argsort(np.bincount(pair), kind="stable")]
    found[group[rarest_first]] = owner[rarest_first]
    operators: list[int] = found.tolist()
    return operators
