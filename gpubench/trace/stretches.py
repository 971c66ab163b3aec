"""Time of the main thread outside operators: a few long stretches of Python, or many short ones between operators."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from gpubench.trace.calls import ModuleCalls
from gpubench.trace.columns import MISSING, HostKind, Ids, Mask, Ns
from gpubench.trace.frames import innermost_frames, user_frame
from gpubench.trace.intervals import Spans, clip, intersect, join, subtract, union
from gpubench.trace.modules import common_path, without_numbers
from gpubench.trace.nesting import Segments, nearest, outermost
from gpubench.trace.phases import BACKWARD, NAMES, OTHER, RECV_WAIT, SEND_WAIT, Phases
from gpubench.trace.profile import Python, Stretch
from gpubench.trace.program import Program
from gpubench.trace.waiting import for_autograd, for_other_ranks

PLACES = 5
"""The most that are listed."""

Positions = NDArray[np.intp]

_EVALUATION = "autograd::engine::evaluate_function: "


def stretches(program: Program, known: Phases) -> Python | None:
    """What of the window the main thread spent in no operator and no runtime call; None without slices of the host.

    Loading data, and waiting for autograd's own thread or for other ranks, is left out. So is what lies before the
    thread's first slice and after its last, of which nothing is known. Times are nanoseconds.
    """
    if not len(program.trace.host):
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


def _busy(program: Program, known: Phases) -> Mask:
    """Slices that are, or stand in, something that is no Python of the program's own."""
    kind, name = program.trace.host.kind, program.trace.host.name
    waits = program.lexicon.communication_host[name] & (kind != HostKind.PYTHON)
    marks = program.operators | (kind == HostKind.RUNTIME) | program.lexicon.data_loader[name] | waits
    busy: Mask = (nearest(program.nest, marks) >= 0) | np.isin(known.of, (RECV_WAIT, SEND_WAIT))
    return busy


def _outside(program: Program, known: Phases, idle: Segments) -> Spans:
    here = program.trace.host.thread == program.main_thread
    waiting = join(for_autograd(program, known.of == BACKWARD, idle), for_other_ranks(program, idle))
    spans = subtract(union(idle.start, idle.end), waiting)
    return clip(spans, int(program.trace.host.start[here].min()), int(program.nest.end[here].max()))


def _operator_durations(program: Program, known: Phases) -> Ns:
    """Of outermost operators: a node of autograd is none, what it calls are; those that load data are left out."""
    slices = np.arange(len(program.trace.host))
    plain = program.operators & (known.evaluation != slices)
    loading = nearest(program.nest, program.lexicon.data_loader[program.trace.host.name]) >= 0
    counted = np.flatnonzero((outermost(program.nest, plain) == slices) & program.inside & ~loading)
    return program.nest.end[counted] - program.trace.host.start[counted]


def _before(program: Program, known: Phases, busy: Mask, found: Spans) -> Ids:
    """For each stretch what ended last before it, on the main thread or autograd's: the outermost busy slice, or -1."""
    around = program.nest.parent
    top = busy & ~np.where(around >= 0, busy[around], False)
    ours = (program.trace.host.thread == program.main_thread) | (known.of == BACKWARD)
    ended = np.flatnonzero(top & ours)
    ended = ended[np.argsort(program.nest.end[ended], kind="stable")]
    place = np.searchsorted(program.nest.end[ended], found.start, side="right")
    return np.concatenate(([MISSING], ended)).astype(np.int32)[place]


@dataclass(frozen=True)
class _Places:
    """Where each stretch is; where it is in several, the one that most of it is in."""

    phase: Ids
    call: Ids
    """The innermost call of a module around it, as a slice; -1 where there is none, here and below."""
    module: Ids
    frame: Ids
    """The name of the user's innermost function around it."""
    after: Ids
    """The name of what ended last before it."""

    @classmethod
    def of(cls, program: Program, known: Phases, found: Spans, idle: Segments, before: Ids) -> Self:
        cut = intersect(Spans(idle.start, idle.end), found)
        slice_ = idle.slice[np.searchsorted(idle.start, cut.start, side="right") - 1]
        stretch = np.searchsorted(found.start, cut.start, side="right") - 1
        calls, name = known.calls, program.trace.host.name
        call = _at(nearest(program.nest, calls.mask), slice_)
        columns = _at(known.of, slice_, OTHER), _at(calls.of, call), _at(name, _at(innermost_frames(program), slice_))
        phase, module, frame = (_most(stretch, column, cut.end - cut.start) for column in columns)
        return cls(
            phase=columns[0][phase],
            call=call[module],
            module=columns[1][module],
            frame=columns[2][frame],
            after=_at(name, before),
        )


def _at(column: NDArray[np.integer[Any]], places: Ids, otherwise: int = MISSING) -> Ids:
    return np.where(places >= 0, column[places], otherwise).astype(np.int32)


def _most(stretch: Positions, column: Ids, length: Ns) -> Positions:
    """For each stretch one of its pieces, such that most of the stretch is in pieces of its value."""
    order = np.lexsort((column, stretch))
    first = _changes(stretch[order], column[order])
    sums = np.add.reduceat(length[order], first)
    ranked = np.lexsort((-sums, stretch[order][first]))
    best = ranked[_changes(stretch[order][first][ranked])]
    return order[first[best]]


def _changes(*columns: NDArray[np.integer[Any]]) -> Positions:
    """Where any of the columns has another value than before, the beginning included."""
    changed = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return np.flatnonzero(np.concatenate(([True], changed)))


def _longest(program: Program, known: Phases, length: Ns, places: _Places) -> list[Stretch]:
    """The longest stretch of each place, and how many there are about as long. Equal layers are one place."""
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
        stretch = Stretch(
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
    """Of each module a number that equal layers share, and at the end -1, which no module at all has."""
    layers = dict[tuple[str, ...], int]()
    paths = zip(calls.kinds, calls.names, strict=True)
    numbers = [layers.setdefault((kind, *without_numbers(kind, name)), len(layers)) for kind, name in paths]
    return np.array([*numbers, MISSING], np.int32)


def _path(program: Program, calls: ModuleCalls, call: int) -> str:
    """Of a module, given by a call of it: its qualified name, or the names of those that called it."""
    parent, path = program.nest.parent, []
    while call >= 0:
        if calls.of[call] >= 0:
            path.append(calls.names[calls.of[call]])
        call = MISSING if calls.qualified and path else int(parent[call])
    return "/".join(reversed(path))


def _median(durations: Ns) -> int:
    """0 of none."""
    return int(np.median(durations)) if len(durations) else 0


def _half(lengths: Ns) -> int:
    """The length that half of all time is in stretches of, or of longer ones; 0 without any."""
    falling = np.sort(lengths)[::-1]
    reached = np.cumsum(falling)
    return int(falling[np.searchsorted(reached, (reached[-1] + 1) // 2)]) if len(falling) else 0
