"""Finds copies between CPU and device, and the calls that made the CPU wait."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gpubench.trace.columns import MISSING, Ids, Mask, Ns, Signature, Tensor, WorkKind, at, shapes_text, tensor
from gpubench.trace.device import waiting_calls
from gpubench.trace.names import transfer
from gpubench.trace.phases import NAMES, OTHER, Phases
from gpubench.trace.profile import Copy, CopyKind, Synchronisation
from gpubench.trace.slices import ProgramSlices, UserFrames, nearest, outermost

_READING = (
    "aten::item",
    "aten::_local_scalar_dense",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
)
"""The operators that bring a value or a size to the CPU, and therefore wait for it."""
_ASKING_SYNC = (
    *_READING,
    "aten::to",
    "aten::_to_copy",
    "aten::copy_",
    "aten::index",
    "aten::_unique2",
    "aten::unique_dim",
)


class _SyncPlace(NamedTuple):
    operator: str
    call: str
    where: str | None
    phase: str


def synchronisations(program: ProgramSlices, phases: Phases, idle_by_call: Ns) -> list[Synchronisation]:
    """The window's calls that blocked the CPU, longest wait first. Times are nanoseconds.

    Waits that only the recording makes are left out. `idle_by_call` has for each CPU slice how long the device was idle
    because of it. In a trace without device work, the operators that would wait for a device are listed, without a
    call.
    """
    cpu = program.trace.cpu
    asking, waiting = program.named(_ASKING_SYNC), _waiting(program)
    asked_by = outermost(program.nest, asking)
    frames = UserFrames.of(program)
    totals: defaultdict[_SyncPlace, list[int]] = defaultdict(lambda: [0, 0, 0])
    blocked = program.nest.end - cpu.start
    for slice_ in np.flatnonzero(waiting & program.inside).tolist():
        call = "" if program.trace.cpu_only else program.trace.names[cpu.name[slice_]]
        operator = asked_by[slice_] if asked_by[slice_] >= 0 else program.operator[slice_]
        name = program.trace.names[cpu.name[operator]] if operator >= 0 else call
        total = totals[_SyncPlace(name, call, frames.at(slice_), NAMES[phases.of[slice_]])]
        for place, amount in enumerate((1, blocked[slice_], idle_by_call[slice_])):
            total[place] += int(amount)
    found = [
        Synchronisation(
            operator=place.operator,
            call=place.call,
            where=place.where,
            calls=calls,
            blocked=waited,
            idle=idle,
            phase=place.phase,
        )
        for place, (calls, waited, idle) in totals.items()
    ]
    return sorted(found, key=lambda one: (-one.blocked, one.operator, one.where or ""))


def _waiting(program: ProgramSlices) -> Mask:
    cpu = program.trace.cpu
    if program.trace.cpu_only:
        reading = program.named(_READING)
        outer: Mask = outermost(program.nest, reading) == np.arange(len(cpu))
        return reading & outer
    return waiting_calls(program) & ~program.recorder_waits


TYPICAL = ("aten::copy_", "aten::to", "aten::_to_copy")
"""The most likely kind of copy, if inputs were not recorded."""
CLONE = "aten::clone"
_ASKING = (
    *TYPICAL,
    "aten::contiguous",
    CLONE,
    "aten::item",
    "aten::reshape",
)


class _Place(NamedTuple):
    """The key by which copies are counted together."""

    kind: CopyKind
    pinned: bool | None
    phase: str
    where: str | None
    clones: bool
    """Whether aten::clone was called for itself."""


@dataclass
class _CopyTally:
    calls: int = 0
    cpu: int = 0
    device: int = 0
    bytes: int | None = 0
    example: str = ""
    largest: int = -1


@dataclass(frozen=True)
class _Call:
    slice: int
    """The slice of aten::copy_, or of what else launched the copy; -1 if it is not in the trace."""
    kind: CopyKind
    pinned: bool | None
    device: int
    bytes: int | None
    name: str


def copies(program: ProgramSlices, phases: Phases) -> list[Copy]:
    """The window's copies by kind, page-locking, phase and place in the user's code, most time first.

    A call of aten::copy_ that launches no copy of the runtime, but a kernel or nothing, is classified by types and
    strides of its inputs. It is left out if those were not recorded, or if it copies a single number and launches
    nothing. Times are nanoseconds; CPU time is that of the program's own call, such as aten::to. Bytes are those of the
    trace, or else the size of the destination.
    """
    frames = UserFrames.of(program)
    asking = _asking(program)
    timed: set[int] = set()
    tallies: defaultdict[_Place, _CopyTally] = defaultdict(_CopyTally)
    for call in _calls(program):
        known = call.slice >= 0
        phase = NAMES[phases.of[call.slice]] if known else NAMES[OTHER]
        asker = int(asking[call.slice]) if known else MISSING
        clones = known and program.trace.names[program.trace.cpu.name[asker]] == CLONE
        tally = tallies[_Place(call.kind, call.pinned, phase, frames.at(call.slice) if known else None, clones)]
        _add(tally, call, program, asker)
        if known and asker not in timed:  # one call may make several copies
            timed.add(asker)
            tally.cpu += int(program.nest.end[asker] - program.trace.cpu.start[asker])
    found = [
        Copy(
            kind=place.kind,
            pinned=place.pinned,
            calls=tally.calls,
            host=tally.cpu,
            device=tally.device,
            bytes=tally.bytes,
            phase=place.phase,
            example=tally.example,
            where=place.where,
        )
        for place, tally in tallies.items()
    ]
    return sorted(found, key=lambda one: (-max(one.device, one.host), one.kind, one.phase, one.where or ""))


def copying(program: ProgramSlices) -> Mask:
    """The program's own calls that copy more than a number, or may do so if inputs were not recorded."""
    cpu = program.trace.cpu
    if not program.trace.signatures:
        return program.named(TYPICAL)
    calls = [call for call in np.flatnonzero(program.named(("aten::copy_",))).tolist() if not _of_number(program, call)]
    found = np.zeros(len(cpu), np.bool_)
    found[_asking(program)[calls]] = True
    return found


def _asking(program: ProgramSlices) -> Ids:
    """For each slice, the outermost call around it that is known to copy, else the slice itself."""
    found = outermost(program.nest, program.named(_ASKING))
    return np.where(found >= 0, found, np.arange(len(found), dtype=np.int32))


def _of_number(program: ProgramSlices, call: int) -> bool:
    """Whether aten::copy_ fills a scalar tensor, as operators with a number among their inputs do."""
    number = program.trace.cpu.signature[call]
    target = tensor(program.trace.signatures[number], 0) if number >= 0 else None
    return target is not None and not target.shape


def _add(tally: _CopyTally, call: _Call, program: ProgramSlices, asker: int) -> None:
    tally.calls += 1
    tally.device += call.device
    tally.bytes = None if tally.bytes is None or call.bytes is None else tally.bytes + call.bytes
    size = call.device if call.bytes is None else call.bytes
    if size > tally.largest:
        tally.largest, tally.example = size, _example(program, call, asker)


def _calls(program: ProgramSlices) -> Iterator[_Call]:
    """Yields requests with a copy of the runtime, then those of aten::copy_ without one."""
    trace, nest = program.trace, program.nest
    copying = program.named(("aten::copy_",))
    around = nearest(nest, copying)
    caller = _caller(program, around)
    moved = (trace.device.kind == WorkKind.COPY) & program.started
    works: defaultdict[int, list[int]] = defaultdict(list)
    for work in np.flatnonzero((caller >= 0) & program.started).tolist():
        works[int(caller[work])].append(work)
    recorded = np.unique(caller[moved & (caller >= 0)]).tolist()
    for slice_ in recorded:
        yield _runtime_copy(program, slice_, works[slice_])
    for work in np.flatnonzero(moved & (caller < 0)).tolist():
        yield _runtime_copy(program, MISSING, [work])
    unrecorded = copying & program.counted
    unrecorded[recorded] = False
    for slice_ in np.flatnonzero(unrecorded & (trace.cpu.signature >= 0)).tolist():
        signature = trace.signatures[trace.cpu.signature[slice_]]
        target, kind = tensor(signature, 0), _kind_within_memory(signature)
        if target and kind and (target.shape or works[slice_]):
            device = int(program.work_time[works[slice_]].sum())
            yield _Call(slice_, kind, None, device, target.bytes, "aten::copy_")


def _caller(program: ProgramSlices, around: Ids) -> Ids:
    """For each work, the call of aten::copy_ around its launch; for other copies the operator or the launch."""
    device, links = program.trace.device, program.links
    copy_ = at(around, links)
    other = np.where(program.owner >= 0, program.owner, links)
    return np.where((copy_ < 0) & (device.kind == WorkKind.COPY), other, copy_)


def _runtime_copy(program: ProgramSlices, slice_: int, works: list[int]) -> _Call:
    """Combines all that a call launched into one request; the first copy among it decides the kind."""
    device = program.trace.device
    copied = [work for work in works if device.kind[work] == WorkKind.COPY]
    name = program.trace.names[device.name[copied[0]]]
    sizes = device.bytes[copied]
    kind: CopyKind = transfer(name) or "device_to_device"
    pinned = True if "Pinned" in name else False if "Pageable" in name else None
    between = kind in ("host_to_device", "device_to_host")
    size = sum(sizes.tolist()) if (sizes >= 0).all() else None
    return _Call(slice_, kind, pinned if between else None, int(program.work_time[works].sum()), size, name)


def _kind_within_memory(signature: Signature) -> CopyKind | None:
    """What aten::copy_ does within one memory; None if the inputs do not show."""
    target, source = tensor(signature, 0), tensor(signature, 1)
    if target is None or source is None:
        return None
    if target.dtype != source.dtype:
        return "dtype_cast"
    if target.strides is None or source.strides is None:
        return None
    if _broadcast(source, target):
        return "same"
    return "same" if _layout(target) == _layout(source) else "layout_change"


def _broadcast(source: Tensor, target: Tensor) -> bool:
    """Whether elements are read more than once, so that the source has no layout to keep."""
    repeated = any(size > 1 and not step for size, step in zip(source.shape, source.strides or (), strict=False))
    return repeated or source.elements != target.elements


def _layout(one: Tensor) -> list[tuple[int, int]]:
    """The dimensions with more than one element, because the stride of the others means nothing."""
    return [(size, step) for size, step in zip(one.shape, one.strides or (), strict=False) if size != 1]


def _example(program: ProgramSlices, call: _Call, asker: int) -> str:
    if call.slice < 0:
        return call.name
    cpu, names = program.trace.cpu, program.trace.names
    name = names[cpu.name[asker]]
    number = cpu.signature[call.slice]
    if number < 0:
        return f"{name}: {call.name}"
    signature = program.trace.signatures[number]
    types = " <- ".join(one.dtype for place in (0, 1) if (one := tensor(signature, place)))
    strides = " <- ".join(str(one) for one in signature.strides[:2])
    return " ".join(part for part in (name, shapes_text(signature), types, strides and f"strides {strides}") if part)
