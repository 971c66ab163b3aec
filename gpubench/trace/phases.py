"""The phases of a step: which part of training each slice, and each work it launched, belongs to."""

import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpubench.trace.autograd import evaluations, forward_of
from gpubench.trace.calls import ModuleCalls
from gpubench.trace.columns import HostKind, Ids, Mask, Trace, WorkKind
from gpubench.trace.intervals import Spans, clip, join, subtract, union
from gpubench.trace.nesting import nearest, nearest_around, of_pieces, outermost
from gpubench.trace.profile import Phase
from gpubench.trace.program import Program
from gpubench.trace.recompute import recomputed
from gpubench.trace.waiting import for_autograd, for_other_ranks

NAMES = (
    "other", "data_wait", "host_to_device", "forward", "backward", "exposed_communication", "optimizer",
    "scheduler", "recv_wait", "send_wait",
)  # fmt: skip
OTHER, DATA_WAIT, HOST_TO_DEVICE, FORWARD, BACKWARD, EXPOSED_COMMUNICATION, OPTIMIZER = range(7)
SCHEDULER, RECV_WAIT, SEND_WAIT = range(7, len(NAMES))  # of diffusion, split over ranks
PhaseIds = NDArray[np.int8]
"""Indices into NAMES."""

_TAG = re.compile(r"\[[^\]]*\]")  # as Lightning's: [pl][profile][Strategy]DDPStrategy.backward
_KNOWN = {
    DATA_WAIT: r"enumerate\(dataloader\)|(data_wait|(wait_for|load|fetch|get|next)_(batch|data)"
    r"|(data|batch)_?(load|loading|fetch|fetching)|data_?loader|\w*dataloader_next)$",
    HOST_TO_DEVICE: r"(host_to_device|h2d|(batch|data|copy|transfer|move|copy_batch)_to_(device|gpu)"
    r"|\w+\.batch_to_device)$",
    FORWARD: r"(forward|fwd|forward_pass|(\w+\.)?(training|validation|test)_step|distributeddataparallel\.forward)$",
    BACKWARD: r"(backward|bwd|backward_pass|\w+\.backward)$",
    EXPOSED_COMMUNICATION: r"exposed_communication$",
    SCHEDULER: r"scheduler$",
    RECV_WAIT: r"recv_wait$",
    SEND_WAIT: r"send_wait$",
    OPTIMIZER: r"optimizer\.(step|zero_grad)#|(optimizer|optimizer_step|optim|optim_step|opt_step|zero_grad)$",
}
_PATTERNS = {phase: re.compile(pattern) for phase, pattern in _KNOWN.items()}
_ENGINE = re.compile(r".*torch/autograd/.*: _engine_run_backward$|<built-in method run_backward of ")
_UPLOADING = ("aten::to", "aten::copy_", "aten::_to_copy")


@dataclass(frozen=True)
class Phases:
    """Columns beside `Trace.host`."""

    of: PhaseIds
    calls: ModuleCalls
    evaluation: Ids
    """The innermost slice that is or is around it in which autograd evaluates a node, or -1."""
    forward: Ids
    """Of each such slice the operator whose node it is, or -1."""
    recompute: Mask
    """Part of a forward pass done again within the backward pass."""


def phase_of(program: Program) -> Phases:
    """The phase of every slice.

    It is that of the innermost slice around it that tells one: an annotation by its name, autograd's evaluation of a
    node, the optimizer's and the data loader's own marks. In programs that are not annotated so, what is left is
    forward if it is a module's or makes autograd nodes, and host_to_device if it copies to the device. What a thread
    of autograd's own does between nodes, as summing gradients, is backward; so is what a call of its engine is around.
    """
    trace, nest = program.trace, program.nest
    backward, calls = evaluations(trace), ModuleCalls.of_trace(trace)
    evaluation = nearest(nest, backward)
    forward = forward_of(trace, backward)
    marks = np.where(backward, np.int8(BACKWARD), _announced(trace))
    marker = nearest(nest, marks > 0)
    guesses = _guessed(program, calls, backward, forward)
    guess = nearest(nest, guesses > 0)
    guessed = np.where(guess >= 0, guesses[guess], np.int8(OTHER))
    guessed = np.where(_of_autograd(program, marks) | _in_engine(program), np.int8(BACKWARD), guessed)
    of = np.where(marker >= 0, marks[marker], guessed)
    return Phases(of.astype(np.int8), calls, evaluation, forward, recomputed(program, evaluation, calls))


def phases(program: Program, known: Phases) -> list[Phase]:
    """What each phase took, in nanoseconds: host time sums to the window, `other` included, which is the last.

    Device time is what of the window is under work that starts in it and was launched in the phase, so that of two
    phases may overlap. Of a trace without device work it is 0, and what was done again is the operators' own time.
    """
    host = host_spans(program, known)
    again_on_host = np.where(known.recompute, program.effort, 0) if program.trace.host_only else None
    linked = np.flatnonzero((program.links >= 0) & program.started)
    launcher = program.links[linked]
    of, again = known.of[launcher], known.recompute[launcher]
    found = [
        Phase(
            name=name,
            host=host[number].length,
            device=_length(program, linked[of == number]),
            launches=int((of == number).sum()),
            recompute=_length(program, linked[(of == number) & again])
            if again_on_host is None
            else int(again_on_host[known.of == number].sum()),
        )
        for number, name in (*enumerate(NAMES[1:], 1), (OTHER, NAMES[OTHER]))
    ]
    return [phase for phase in found if phase.host or phase.launches]


def host_spans(program: Program, known: Phases) -> list[Spans]:
    """For each of NAMES when the main thread was in it; together they are the window.

    Where it is in no other, or in Python within the backward pass, what it waits for autograd's own thread is of the
    backward pass, and what it waits for collectives on a thread of their own is exposed communication.
    """
    pieces = program.main
    of = of_pieces(pieces, known.of, OTHER)
    spans = [union(pieces.start[of == number], pieces.end[of == number]) for number in range(len(NAMES))]
    in_engine = (known.evaluation < 0) & (program.trace.host.kind == HostKind.PYTHON)
    idle = pieces.only((of == OTHER) | ((of == BACKWARD) & (of_pieces(pieces, in_engine.astype(np.int8), 0) > 0)))
    autograd = for_autograd(program, known.evaluation >= 0, idle)
    ranks = subtract(for_other_ranks(program, idle), autograd)
    spans[BACKWARD] = join(subtract(spans[BACKWARD], ranks), autograd)
    spans[EXPOSED_COMMUNICATION] = join(spans[EXPOSED_COMMUNICATION], ranks)
    spans[OTHER] = subtract(spans[OTHER], join(autograd, ranks))
    return spans


def _length(program: Program, works: Ids) -> int:
    device = program.trace.device
    launched = union(device.start[works], device.end[works])
    return clip(launched, program.window.start, program.window.end).length


def _announced(trace: Trace) -> PhaseIds:
    """The phase that each slice's name tells, if it is an annotation; old traces call annotations operators."""
    by_name = np.fromiter((_named(name) for name in trace.names), np.int8, len(trace.names))
    may = (trace.host.kind == HostKind.ANNOTATION) | (trace.host.kind == HostKind.OPERATOR)
    return np.where(may, by_name[trace.host.name], np.int8(OTHER))


def _named(name: str) -> int:
    """As "forward", "## forward:embeddings ##" and "[pl][profile]..." are meant."""
    bare = _TAG.sub("", name).strip("#. ").lower()
    for word in (bare, bare.split(":")[0]):
        for phase, pattern in _PATTERNS.items():
            if pattern.match(word):
                return phase
    return OTHER


def _guessed(program: Program, calls: ModuleCalls, backward: Mask, forward: Ids) -> PhaseIds:
    """The phase of modules and of operators that stand in no other, and of nothing else."""
    top = program.operators & (nearest_around(program.nest, program.operator) < 0)
    guesses = np.zeros(len(program.trace.host), np.int8)
    guesses[calls.mask | (top & (_used_by_backward(program, forward) | _before_backward(program, backward)))] = FORWARD
    guesses[top & _uploads(program)] = HOST_TO_DEVICE
    return guesses


def _of_autograd(program: Program, marks: PhaseIds) -> Mask:
    """Slices of threads other than the main one on which nodes are evaluated, and nothing of another phase."""
    host = program.trace.host
    threads = np.arange(len(program.trace.threads))
    own = np.isin(threads, host.thread[marks == BACKWARD]) & (threads != program.main_thread)
    own &= ~np.isin(threads, host.thread[(marks != OTHER) & (marks != BACKWARD)])
    found: Mask = own[host.thread]
    return found


def _in_engine(program: Program) -> Mask:
    """Slices within Python's call of autograd's engine, as stacks show it."""
    host, names = program.trace.host, program.trace.names
    known = np.fromiter((_ENGINE.match(name) is not None for name in names), np.bool_, len(names))
    return nearest(program.nest, known[host.name] & (host.kind == HostKind.PYTHON)) >= 0


def _used_by_backward(program: Program, forward: Ids) -> Mask:
    """Outermost operators in which a node was made that is evaluated."""
    top = outermost(program.nest, program.operators)[forward[forward >= 0]]
    used = np.zeros(len(forward), np.bool_)
    used[top] = True
    return used


def _before_backward(program: Program, backward: Mask) -> Mask:
    """Operators that record gradients before the first backward slice of their step."""
    host = program.trace.host
    edges = np.array([step.start for step in program.window.steps], np.int64)
    step = np.searchsorted(edges, host.start, side="right")
    first = np.full(len(edges) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, step[backward], host.start[backward])
    return (host.sequence >= 0) & (host.forward_thread <= 0) & (host.start < first[step])


def _uploads(program: Program) -> Mask:
    """Operators of a copy that bring something to the device."""
    trace = program.trace
    names = np.fromiter((name in _UPLOADING for name in trace.names), np.bool_, len(trace.names))
    uploading = np.fromiter(
        ("HtoD" in name or "HostToDevice" in name for name in trace.names), np.bool_, len(trace.names)
    )
    works = np.flatnonzero((program.links >= 0) & (trace.device.kind == WorkKind.COPY) & uploading[trace.device.name])
    top = outermost(program.nest, program.operators)[program.links[works]]
    found = np.zeros(len(trace.host), np.bool_)
    found[top[top >= 0]] = True
    return found & names[trace.host.name]
