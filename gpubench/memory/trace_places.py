"""What a trace's slices tell of the memory that is given out or given back within them."""

from collections.abc import Sequence

import numpy as np

from gpubench.memory.course import filled, steps
from gpubench.memory.history import Phase
from gpubench.memory.memory_events import MemoryEvent
from gpubench.trace import phases as known_phases
from gpubench.trace.columns import MISSING, Ids, Mask, Ns, Trace
from gpubench.trace.frames import UserFrames
from gpubench.trace.nesting import innermost, nearest
from gpubench.trace.phases import Phases, phase_of
from gpubench.trace.program import Program
from gpubench.trace.windows import step_runs

_PHASES: dict[int, Phase] = {
    known_phases.DATA_WAIT: "data",
    known_phases.HOST_TO_DEVICE: "data",
    known_phases.FORWARD: "forward",
    known_phases.BACKWARD: "backward",
    known_phases.OPTIMIZER: "optimizer",
}
_ALLOCATING = ("aten::empty", "aten::new_empty", "aten::resize_")
"""How operators are called that only ask for memory: the one around them says what for."""


class Places:
    """Where in the program each event of a trace stands; `slices` has its slice, or -1."""

    def __init__(self, trace: Trace, events: Sequence[MemoryEvent]) -> None:
        """`events` in the order of time."""
        self._program = Program.of(trace)
        self._known = phase_of(self._program)
        self._frames = UserFrames.of(self._program)
        times = _nanoseconds(events)
        threads = {name: number for number, name in enumerate(trace.threads)}
        thread = np.array([threads.get(event.thread, MISSING) for event in events], np.int64)
        self.slices = _slices(self._program, thread, times)
        self.phases = filled(_told(self._program, self._known, self.slices, thread))
        self.steps = _steps(self._program, times, self.phases)
        self._operator = nearest(self._program.nest, _telling(self._program))
        self._module = _module(self._program, self._known)

    def operator(self, event: int) -> str:
        slice_ = self._at(self._operator, event)
        trace = self._program.trace
        return trace.names[trace.host.name[slice_]] if slice_ >= 0 else ""

    def module(self, event: int) -> str:
        """Its path where modules were annotated, else the profiler's name, as "Conv2d_3"."""
        module = self._at(self._module, event)
        return self._known.calls.names[module] if module >= 0 else ""

    def where(self, event: int) -> str:
        slice_ = int(self.slices[event])
        place = self._frames.at(slice_) if slice_ >= 0 else None
        return place.rpartition(" in ")[0] if place else ""

    def _at(self, column: Ids, event: int) -> int:
        slice_ = self.slices[event]
        return int(column[slice_]) if slice_ >= 0 else MISSING


def _nanoseconds(events: Sequence[MemoryEvent]) -> Ns:
    """As the slices' own: by whole microseconds and what is left, since a product would be rounded."""
    times = np.array([event.at for event in events], np.float64)
    whole = np.floor(times)
    found: Ns = whole.astype(np.int64) * 1000 + np.rint((times - whole) * 1000).astype(np.int64)
    return found


def _slices(program: Program, thread: Ns, times: Ns) -> Ns:
    """The innermost slice that is open at each event, on the event's own thread."""
    found = np.full(len(times), MISSING, np.int64)
    for number in np.unique(thread[thread >= 0]).tolist():
        here = np.flatnonzero(thread == number)
        pieces = innermost(program.trace, program.nest, number, int(times[here[0]]), int(times[here[-1]]) + 1)
        found[here] = pieces.slice[np.searchsorted(pieces.start, times[here], side="right") - 1]
    return found


def _told(program: Program, known: Phases, slices: Ns, thread: Ns) -> list[Phase | None]:
    """The phase that each event's slice tells, and between slices the thread, if it is one of autograd's own.

    The loss is told by none: of a trace that has modules, what is forward and stands in none of them is left open.
    """
    zero_grad = nearest(program.nest, program.lexicon.zero_grad[program.trace.host.name]) >= 0
    calls = known.calls.mask
    around = nearest(program.nest, calls) >= 0
    open_ = calls.any() & (known.of == known_phases.FORWARD) & ~around
    by_slice: list[Phase | None] = [_PHASES.get(phase) for phase in known.of.tolist()]
    for slice_ in np.flatnonzero(zero_grad).tolist():
        by_slice[slice_] = "zero_grad"
    for slice_ in np.flatnonzero(open_).tolist():
        by_slice[slice_] = None
    autograd = {*np.unique(program.trace.host.thread[known.of == known_phases.BACKWARD]).tolist()} - {
        program.main_thread
    }
    return [
        by_slice[slice_] if slice_ >= 0 else "backward" if number in autograd else None
        for slice_, number in zip(slices.tolist(), thread.tolist(), strict=True)
    ]


def _steps(program: Program, times: Ns, phases: Sequence[Phase]) -> list[int | None]:
    """By ProfilerStep, counted from 0; of a trace without any by the optimizer."""
    marked = [step.start for run in step_runs(program.trace, program.lexicon) for step in run]
    if not marked:
        return list(steps(phases))
    found = np.searchsorted(np.array(marked, np.int64), times, side="right") - 1
    return [number if number >= 0 else None for number in found.tolist()]


def _telling(program: Program) -> Mask:
    trace = program.trace
    told = np.fromiter((not name.startswith(_ALLOCATING) for name in trace.names), np.bool_, len(trace.names))
    found: Mask = told[trace.host.name] & program.operators
    return found


def _module(program: Program, known: Phases) -> Ids:
    """For each slice the module that it works for, or -1: in the backward pass that of the forward operator."""
    around = nearest(program.nest, known.calls.mask)
    node = np.where(known.evaluation >= 0, known.forward[known.evaluation], np.int32(MISSING))
    call = np.where((around < 0) & (node >= 0), around[node], around)
    return np.where(call >= 0, known.calls.of[call], np.int32(MISSING))
