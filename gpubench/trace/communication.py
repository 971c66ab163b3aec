"""What ranks said to each other, and what of it nothing else hid."""

import re

import numpy as np
from numpy.typing import NDArray

from gpubench.trace.breakdown import communication_work
from gpubench.trace.columns import MISSING, HostKind, Ids, Mask, Trace
from gpubench.trace.intervals import Spans, clip, intersect, union
from gpubench.trace.launches import started_in
from gpubench.trace.links import launchers
from gpubench.trace.names import Lexicon
from gpubench.trace.profile import Collective, CollectiveKind
from gpubench.trace.windows import Window

KINDS: tuple[CollectiveKind, ...] = CollectiveKind.__args__  # type: ignore[attr-defined]
_PATTERNS: tuple[tuple[CollectiveKind, str], ...] = (
    ("all_to_all", r"all_?(to|2)_?all|deep_ep"),
    ("reduce_scatter", r"reduce_?scatter"),
    ("all_gather", r"all_?gather"),
    ("all_reduce", r"all_?reduce|cross_device_reduce|quickreduce|custom_ar(?![a-z])|(one|two)_?shot"),
    ("broadcast", r"broadcast|bcast"),
    ("send_recv", r"send_?recv|(?<![a-z])i?(send|recv)(?![a-z])"),
)
"""Looked for anywhere in a name in lower case; the first that is found counts. Kernels, operators and backends spell
them differently: ncclDevKernel_AllGather_RING_LL, c10d::_allgather_base_, nccl:_all_gather_base."""

OTHER = KINDS.index("other")


def kind_of(name: str) -> CollectiveKind:
    """Of a kernel, an operator, or what a backend calls a collective."""
    return next((kind for kind, pattern in _PATTERNS if re.search(pattern, name.lower())), "other")


def kinds(trace: Trace, lexicon: Lexicon) -> NDArray[np.int8]:
    """For each work of the device the place of its kind in KINDS, OTHER for what does not communicate.

    It is what the program asked for: by the kernel's arguments, else by the operator or annotation around its launch.
    Where neither is in the trace, it is what other kernels of the name are, if these are of one kind; without any, what
    the name says. NCCL runs an all-to-all as SendRecv, and some of its versions call other collectives so too.
    """
    device = trace.device
    named = lexicon.communication_kernel | lexicon.communication_host
    named[device.collective[device.collective != MISSING]] = True
    known = np.full(len(trace.names), OTHER, np.int8)
    known[named] = [KINDS.index(kind_of(trace.names[name])) for name in np.flatnonzero(named).tolist()]
    around = _operators(trace, lexicon.communication_host & (known != OTHER), launchers(trace))
    asked = np.full(len(device), OTHER, np.int8)
    for column in (around, device.collective):
        told = np.where(column != MISSING, known[column], np.int8(OTHER))
        asked = np.where(told != OTHER, told, asked)
    for name in np.unique(device.name[asked != OTHER]).tolist():
        among = np.unique(asked[(asked != OTHER) & (device.name == name)])
        known[name] = among[0] if len(among) == 1 else OTHER
    found = np.where(asked != OTHER, asked, known[device.name])
    return np.where(communication_work(trace, lexicon), found, np.int8(OTHER))


def collectives(trace: Trace, lexicon: Lexicon, window: Window, exposed: Spans) -> list[Collective]:
    """By kind and the name of the kernel, the most exposed first. `exposed` is `Sets.exposed_communication`.

    Where two of different names run at once, the time is in the `exposed` of both. Bytes are
    those of the messages on this rank, and known where the trace has them for every call.
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
    """For each work the name of the outermost slice around its launch that has one of these names, or -1."""
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
