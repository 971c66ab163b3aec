"""Computes what the CPU did: time by part, by module and in Python, and what was compiled."""

import re
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from gpubench.trace.columns import (
    MISSING,
    Ids,
    Mask,
    Ns,
    SliceKind,
    Spans,
    at,
    clip,
    intersect,
    join,
    subtract,
    sum_at,
    union,
)
from gpubench.trace.copies import copying
from gpubench.trace.names import COMPILATION, COMPILING
from gpubench.trace.phases import (
    BACKWARD,
    NAMES,
    OPTIMIZER,
    OTHER,
    RECV_WAIT,
    SEND_WAIT,
    ModuleCalls,
    Phases,
    for_autograd,
    for_other_ranks,
)
from gpubench.trace.profile import (
    HOST_PARTS,
    Compiled,
    HostPart,
    Module,
    Python,
    PythonStretch,
    common_path,
    without_numbers,
)
from gpubench.trace.slices import (
    ProgramSlices,
    Segments,
    innermost_frames,
    nearest,
    nearest_around,
    outermost,
    user_frame,
)

_PYTHON = HOST_PARTS.index("python")


def cpu_parts(program: ProgramSlices, phases: Phases) -> dict[HostPart, Spans]:
    """What the main thread did when; the parts are disjoint and fill the window.

    If several are open at once, the first of HOST_PARTS counts. While the main thread records nothing, a collective on
    a thread of its own counts as communication, and waiting in `backward()` for autograd's own thread as operators.
    """
    trace, nest = program.trace, program.nest
    kind, name = trace.cpu.kind, trace.cpu.name
    marks: dict[HostPart, Mask] = {
        "data_loader": program.lexicon.data_loader[name],
        "communication": (program.lexicon.communication_cpu[name] & (kind != SliceKind.PYTHON))
        | np.isin(phases.of, (RECV_WAIT, SEND_WAIT)),
        "copies": copying(program),
        "optimizer": phases.of == OPTIMIZER,
        "operators": program.operators,
    }
    part = np.full(len(trace.cpu), _PYTHON, np.int8)
    for one in reversed(HOST_PARTS[:_PYTHON]):
        part[nearest(nest, marks[one]) >= 0] = HOST_PARTS.index(one)
    pieces = program.main
    of = at(part, pieces.slice, _PYTHON)
    found = {one: union(pieces.start[of == n], pieces.end[of == n]) for n, one in enumerate(HOST_PARTS)}
    idle = pieces.only(of == _PYTHON)
    ranks = for_other_ranks(program, idle)
    autograd = subtract(for_autograd(program, phases.evaluation >= 0, idle), ranks)
    found["communication"] = join(found["communication"], ranks)
    found["operators"] = join(found["operators"], autograd)
    found["python"] = subtract(found["python"], join(ranks, autograd))
    return found


def modules(program: ProgramSlices, phases: Phases) -> list[Module]:
    """Every module that ran in the window, parents before their children.

    A layer counts as one even if the trace links no work to it.

    Times are nanoseconds: of the work that was launched from the module, or in a trace without device work of the
    operators themselves. Calls and CPU time are of the calls from which such work was launched. Work of the backward
    pass belongs to the module of its forward operator, found by sequence number.
    """
    calls, backward = phases.calls, phases.evaluation >= 0
    around = nearest(program.nest, calls.mask)
    parents = _parents(program, calls, around, backward)
    place = _place(calls, around, phases)
    parts = (~backward, backward & ~phases.recompute, phases.recompute)
    own = [sum_at(place, np.where(part, program.effort, 0), len(calls.names)) for part in parts]
    whole = [_with_children(amounts, parents) for amounts in own]
    called = calls.mask & ~backward & program.counted
    ordered = sorted((path, module) for module, path in enumerate(_paths(calls, parents)))
    count = sum_at(calls.of, called.astype(np.int64), len(calls.names))
    cpu = sum_at(calls.of, np.where(called, program.nest.end - program.trace.cpu.start, 0), len(calls.names))
    found = [
        Module(
            path=path,
            kind=calls.kinds[one],
            calls=int(count[one]),
            host=int(cpu[one]),
            forward=int(whole[0][one]),
            backward=int(whole[1][one]),
            recompute=int(whole[2][one]),
            own=int(sum(amounts[one] for amounts in own)),
        )
        for path, one in ordered
    ]
    ran = sum_at(calls.of, (calls.mask & ~backward & program.inside).astype(np.int64), len(calls.names))
    return [
        module
        for module, (_, one) in zip(found, ordered, strict=True)
        if ran[one] or module.calls or module.forward or module.backward or module.recompute
    ]


def _place(calls: ModuleCalls, around: Ids, phases: Phases) -> Ids:
    """The module of each slice, or -1."""
    call = np.where(around > phases.evaluation, around, at(around, phases.evaluated))
    return at(calls.of, np.where(phases.evaluation >= 0, call, around))


def _parents(program: ProgramSlices, calls: ModuleCalls, around: Ids, backward: Mask) -> list[int]:
    """The parent of each module, or -1: by qualified name, or by which module called it first."""
    if calls.qualified:
        numbers = {name: number for number, name in enumerate(calls.names)}
        return [_prefix(numbers, name) for name in calls.names]
    slices = np.flatnonzero(calls.mask)
    slices = slices[np.lexsort((program.trace.cpu.start[slices], backward[slices]))]
    _, first = np.unique(calls.of[slices], return_index=True)
    outer = nearest_around(program.nest, around)[slices[first]]
    parents = np.where(outer >= 0, calls.of[outer], MISSING)
    return [int(parent) if parent != module else MISSING for module, parent in enumerate(parents)]


def _prefix(numbers: dict[str, int], name: str) -> int:
    """The index of the longest name that is a proper prefix in whole words; the root's name is empty."""
    while name:
        name = name.rpartition(".")[0]
        if name in numbers:
            return numbers[name]
    return MISSING


def _with_children(amounts: Ns, parents: list[int]) -> Ns:
    total = amounts.copy()
    for module, parent in enumerate(parents):
        while parent >= 0:
            total[parent] += amounts[module]
            parent = parents[parent]
    return total


def _paths(calls: ModuleCalls, parents: list[int]) -> list[str]:
    if calls.qualified:
        return calls.names
    paths = []
    for module, parent in enumerate(parents):
        path = calls.names[module]
        while parent >= 0:
            path = f"{calls.names[parent]}/{path}"
            parent = parents[parent]
        paths.append(path)
    return paths


PLACES = 5
"""The largest number of stretches that are listed."""

Positions = NDArray[np.intp]

_EVALUATION = "autograd::engine::evaluate_function: "


def loads_in_workers(program: ProgramSlices) -> bool | None:
    """See `RankProfile.loads_in_workers`: slices are called by the iterator, which is another one with workers."""
    cpu = program.trace.cpu
    waited = []
    for iterator in ("_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter"):
        named = program.trace.names_where(lambda name, iterator=iterator: iterator in name)  # type: ignore[misc]
        of_it = program.inside & named[cpu.name] & program.lexicon.data_loader[cpu.name]
        waited.append(union(cpu.start[of_it], cpu.end[of_it]).length if of_it.any() else 0)
    return waited[1] > waited[0] if any(waited) else None


def stretches(program: ProgramSlices, known: Phases) -> Python | None:
    """The time of the window that the main thread spent in Python, outside operators and runtime calls.

    None without slices of the CPU. Loading data and waiting for autograd's own thread or for other ranks are left out,
    and so is the unknown time before the thread's first slice and after its last one. Times are nanoseconds.
    """
    if not len(program.trace.cpu):
        return None
    busy = _busy(program, known)
    pieces = program.main
    idle = pieces.only((pieces.slice < 0) | ~busy[pieces.slice])
    found = _outside(program, known, idle)
    lengths, operators = found.end - found.start, _operator_durations(program, known)
    places = _Places.of(program, known, found, idle, _before(program, known, busy, found)) if len(found) else None
    return Python(
        total=found.length,
        stretches=len(found),
        median=_median(lengths),
        half=_half(lengths),
        longest=_longest(program, known, lengths, places) if places else [],
        operators=len(operators),
        operator_median=_median(operators),
    )


def _busy(program: ProgramSlices, known: Phases) -> Mask:
    """Slices that are, or are within, something other than the program's own Python."""
    kind, name = program.trace.cpu.kind, program.trace.cpu.name
    waits = program.lexicon.communication_cpu[name] & (kind != SliceKind.PYTHON)
    marks = program.operators | (kind == SliceKind.RUNTIME) | program.lexicon.data_loader[name] | waits
    busy: Mask = (nearest(program.nest, marks) >= 0) | np.isin(known.of, (RECV_WAIT, SEND_WAIT))
    return busy


def _outside(program: ProgramSlices, known: Phases, idle: Segments) -> Spans:
    here = program.trace.cpu.thread == program.main_thread
    waiting = join(for_autograd(program, known.of == BACKWARD, idle), for_other_ranks(program, idle))
    spans = subtract(union(idle.start, idle.end), waiting)
    return clip(spans, int(program.trace.cpu.start[here].min()), int(program.nest.end[here].max()))


def _operator_durations(program: ProgramSlices, known: Phases) -> Ns:
    """The durations of outermost operators without those that load data; an autograd node counts as the operators it
    calls."""
    slices = np.arange(len(program.trace.cpu))
    plain = program.operators & (known.evaluation != slices)
    loading = nearest(program.nest, program.lexicon.data_loader[program.trace.cpu.name]) >= 0
    counted = np.flatnonzero((outermost(program.nest, plain) == slices) & program.inside & ~loading)
    return program.nest.end[counted] - program.trace.cpu.start[counted]


def _before(program: ProgramSlices, known: Phases, busy: Mask, found: Spans) -> Ids:
    """For each stretch, the outermost busy slice that ended last before it, on the main or autograd's thread."""
    around = program.nest.parent
    top = busy & ~np.where(around >= 0, busy[around], False)
    ours = (program.trace.cpu.thread == program.main_thread) | (known.of == BACKWARD)
    ended = np.flatnonzero(top & ours)
    ended = ended[np.argsort(program.nest.end[ended], kind="stable")]
    place = np.searchsorted(program.nest.end[ended], found.start, side="right")
    return np.concatenate(([MISSING], ended)).astype(np.int32)[place]


@dataclass(frozen=True)
class _Places:
    """The place of each stretch; of several places, the one with most of the stretch."""

    phase: Ids
    call: Ids
    """The innermost call of a module around it, as a slice; here and below, -1 if there is none."""
    module: Ids
    frame: Ids
    """The name of the user's innermost function that has nearly all of it, or else most of it."""
    after: Ids
    """The name of what ended last before it."""

    @classmethod
    def of(cls, program: ProgramSlices, known: Phases, found: Spans, idle: Segments, before: Ids) -> Self:
        cut = intersect(Spans(idle.start, idle.end), found)
        slice_ = idle.slice[np.searchsorted(idle.start, cut.start, side="right") - 1]
        stretch = np.searchsorted(found.start, cut.start, side="right") - 1
        calls, name = known.calls, program.trace.cpu.name
        call = at(nearest(program.nest, calls.mask), slice_)
        phases = at(known.of, slice_, OTHER).astype(np.int32)
        frames, length = at(innermost_frames(program), slice_), cut.end - cut.start
        columns = phases, at(calls.of, call), at(name, frames)
        phase, module, frame = (_most(stretch, column, length) for column in columns)
        whole = _with_nearly_all(program, stretch, frames, length)
        return cls(
            phase=columns[0][phase],
            call=call[module],
            module=columns[1][module],
            frame=np.where(whole >= 0, whole, columns[2][frame]),
            after=at(name, before),
        )


NEARLY_ALL = 0.9  # of a stretch: the function with as much of it is where to look, and its callers say less


def _with_nearly_all(program: ProgramSlices, stretch: Positions, frames: Ids, length: Ns) -> Ids:
    """For each stretch, the name of the user's innermost function with NEARLY_ALL of it, in all calls, or -1.

    `frames` has the user's innermost function around each piece. A module's own code is left out: it contains all.
    """
    name = program.trace.cpu.name
    outer = nearest_around(program.nest, innermost_frames(program))
    pieces, around = [np.empty(0, np.intp)], [np.empty(0, np.int32)]
    here, of = np.arange(len(frames)), frames
    while len(here):
        here, of = here[of >= 0], of[of >= 0]
        pieces.append(here)
        around.append(of)
        of = outer[of]
    piece, frame = np.concatenate(pieces), np.concatenate(around)
    number = len(program.trace.names)
    own, first = np.unique(piece * number + name[frame], return_index=True)  # a function that calls itself counts once
    piece, of = np.divmod(own, number)
    pairs, pair = np.unique(stretch[piece] * number + of, return_inverse=True)
    place, of = np.divmod(pairs, number)
    spent, depth = np.bincount(pair, weights=length[piece]), np.full(len(place), MISSING, np.int32)
    np.maximum.at(depth, pair, frame[first])
    named = ~program.trace.names_where(lambda one: one.endswith(": <module>"))[of]
    enough = np.flatnonzero((spent >= NEARLY_ALL * np.bincount(stretch, weights=length)[place]) & named)
    enough = enough[np.argsort(depth[enough], kind="stable")]  # the last call of an inner function began last
    found = np.full(int(stretch.max(initial=MISSING)) + 1, MISSING, np.int32)
    found[place[enough]] = of[enough]
    return found


def _most(stretch: Positions, column: Ids, length: Ns) -> Positions:
    """One piece of each stretch, whose value most of the stretch has."""
    order = np.lexsort((column, stretch))
    first = _changes(stretch[order], column[order])
    sums = np.add.reduceat(length[order], first)
    ranked = np.lexsort((-sums, stretch[order][first]))
    best = ranked[_changes(stretch[order][first][ranked])]
    return order[first[best]]


def _changes(*columns: NDArray[np.integer[Any]]) -> Positions:
    """Where any of the columns changes its value, including the beginning."""
    changed = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return np.flatnonzero(np.concatenate(([True], changed)))


def _longest(program: ProgramSlices, known: Phases, length: Ns, places: _Places) -> list[PythonStretch]:
    """The longest stretch of each place, with the number of similar lengths; equal layers are one place."""
    layer = _layers(known.calls)[places.module]
    keys = (places.phase, layer, places.frame, places.after)
    order = np.lexsort((-length, *keys))
    first = _changes(*(key[order] for key in keys))
    longest, of_place = length[order][first], np.diff(np.append(first, len(order)))
    alike = 2 * length[order] >= np.repeat(longest, of_place)
    counts = np.add.reduceat(alike.astype(np.int64), first)
    totals = np.add.reduceat(np.where(alike, length[order], 0), first)
    names, found = program.trace.names, []
    for group in np.argsort(-longest, kind="stable")[:PLACES].tolist():
        one, same = order[first[group]], order[first[group] : first[group] + of_place[group]]
        calls = places.call[same][np.unique(places.module[same], return_index=True)[1]]
        stretch = PythonStretch(
            length=int(longest[group]),
            count=int(counts[group]),
            total=int(totals[group]),
            phase=NAMES[places.phase[one]],
            module=common_path([_path(program, known.calls, call) for call in calls.tolist()]),
            after=names[places.after[one]].removeprefix(_EVALUATION) if places.after[one] >= 0 else "",
            where=user_frame(names[places.frame[one]]) if places.frame[one] >= 0 else None,
        )
        found.append(stretch)
    return found


def _layers(calls: ModuleCalls) -> Ids:
    """A number for each module that equal layers share, and at the end -1, for no module."""
    layers = dict[tuple[str, ...], int]()
    paths = zip(calls.kinds, calls.names, strict=True)
    numbers = [layers.setdefault((kind, *without_numbers(kind, name)), len(layers)) for kind, name in paths]
    return np.array([*numbers, MISSING], np.int32)


def _path(program: ProgramSlices, calls: ModuleCalls, call: int) -> str:
    """A module's qualified name from a call of it, or else the names of the modules that called it."""
    parent, path = program.nest.parent, []
    while call >= 0:
        if calls.of[call] >= 0:
            path.append(calls.names[calls.of[call]])
        call = MISSING if calls.qualified and path else int(parent[call])
    return "/".join(reversed(path))


def _median(durations: Ns) -> int:
    return int(np.median(durations)) if len(durations) else 0


def _half(lengths: Ns) -> int:
    """The length such that half of all time is in stretches at least as long; 0 without any."""
    falling = np.sort(lengths)[::-1]
    reached = np.cumsum(falling)
    return int(falling[np.searchsorted(reached, (reached[-1] + 1) // 2)]) if len(falling) else 0


_REGION = r"Torch-Compiled Region"
_ANY = rf"{_REGION}|CompiledFunction|TorchDynamo Cache Lookup|## Call CompiledFxGraph|inductor::|{COMPILING}"


def compiled(program: ProgramSlices) -> Compiled | None:
    """The compiled regions, and the nanoseconds that the window spent compiling; None for an eager program.

    Regions with different numbers are different graphs of one step. Modules that are compiled separately, such as the
    blocks of a model, count as regions too, because a trace does not distinguish them.
    """
    if not _matching(program, _ANY).any():
        return None
    cpu, window = program.trace.cpu, program.window
    compiling = program.lexicon.compiling[cpu.name]
    regions = _regions_of_a_step(program)
    return Compiled(
        regions=regions,
        graph_breaks=max(0, regions - 1),
        compilations=_compilations(program),
        compiling=clip(cpu.spans(compiling), window.start, window.end).length,
    )


def _compilations(program: ProgramSlices) -> int:
    """Counts compilations without nested slices, which are a second name for one compilation."""
    found = _matching(program, COMPILATION)
    outer = nearest_around(program.nest, nearest(program.nest, found)) < 0
    return int((found & outer & program.inside).sum())


def _regions_of_a_step(program: ProgramSlices) -> int:
    """The largest number of different graphs that began in one step."""
    cpu = program.trace.cpu
    regions = _matching(program, _REGION) & program.inside
    edges = np.array([step.start for step in program.window.steps], np.int64)
    steps = np.searchsorted(edges, cpu.start[regions], side="right")
    graphs = np.unique(np.stack((steps, cpu.name[regions])), axis=1)
    return int(np.bincount(graphs[0]).max(initial=0))


def _matching(program: ProgramSlices, pattern: str) -> Mask:
    return program.trace.names_where(re.compile(pattern).match)[program.trace.cpu.name]
