"""Determines the phase of a training step at each instant: data, forward, backward, optimizer and others.

The backward pass consists of autograd's own slices, each of which belongs to a forward operator. An operator that makes
an autograd node and the slice that later evaluates the node have the same "Sequence number". It counts per thread of
the forward pass, and "Fwd thread id" is that thread in the profiler's own numbers (see
torch.autograd.profiler.emit_nvtx).

While the main thread records nothing itself, it may wait for other threads of the process. No trace records these
waits, so they are inferred from what the other threads do; `idle` are the pieces of the main thread in which it may
wait.
"""

import re
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from gpubench.trace.columns import (
    EMPTY,
    MISSING,
    Ids,
    Mask,
    SliceKind,
    Spans,
    Trace,
    WorkKind,
    at,
    clip,
    intersect,
    join,
    subtract,
    union,
)
from gpubench.trace.profile import StepPhase
from gpubench.trace.slices import ProgramSlices, Segments, nearest, nearest_around, outermost

_ANNOTATION = re.compile(r"module: (?P<name>\S*) \((?P<kind>[^()]*)\)$")
_FRAME = re.compile(r"nn\.Module: (?P<name>(?P<kind>.+?)(_\d+)?)$")


@dataclass(frozen=True)
class ModuleCalls:
    names: list[str]
    """The modules: qualified paths ("layer1.0.conv1") if annotated, else the profiler's names ("Conv2d_3")."""
    kinds: list[str]
    """The classes of the modules."""
    qualified: bool
    of: Ids
    """The module of which each CPU slice is a call; -1 for most slices."""

    @property
    def mask(self) -> Mask:
        return self.of >= 0

    @classmethod
    def of_trace(cls, trace: Trace) -> Self:
        """Finds calls by annotations "module: <path> (<class>)" if any, else by the frames of with_stack."""
        annotated = cls._matching(trace, _ANNOTATION, SliceKind.ANNOTATION)
        return annotated if annotated.names else cls._matching(trace, _FRAME, SliceKind.PYTHON)

    @classmethod
    def _matching(cls, trace: Trace, pattern: re.Pattern[str], kind: SliceKind) -> Self:
        candidates = np.unique(trace.cpu.name[trace.cpu.kind == kind]).tolist()
        matches = [(name, match) for name in candidates if (match := pattern.match(trace.names[name]))]
        modules: dict[str, str] = {match["name"]: match["kind"] for _, match in matches}
        numbers = {name: number for number, name in enumerate(modules)}
        by_name = np.full(len(trace.names), MISSING, np.int32)
        for name, match in matches:
            by_name[name] = numbers[match["name"]]
        of = np.where(trace.cpu.kind == kind, by_name[trace.cpu.name], np.int32(MISSING))
        return cls(list(modules), list(modules.values()), pattern is _ANNOTATION, of)


Places = NDArray[np.integer[Any]]

_NODE = ("autograd::engine::evaluate_function: ", "torch::autograd::")


def evaluations(trace: Trace) -> Mask:
    """Slices that evaluate an autograd node, by their names or by the forward's thread."""
    names = trace.names_where(lambda name: name.startswith(_NODE))
    return names[trace.cpu.name] | (trace.cpu.forward_thread > 0)


def forward_of(trace: Trace, backward: Mask) -> Ids:
    """The forward operator of the node of each slice of `backward`, as a slice; -1 for others and if unknown.

    Operators that make no node have the number of the next one made, so that the last operator with the number before
    the evaluation counts.
    """
    cpu = trace.cpu
    forward = np.flatnonzero((cpu.sequence >= 0) & (cpu.forward_thread <= 0) & ~backward)
    nodes = np.flatnonzero(backward & (cpu.sequence >= 0))
    found = np.full(len(cpu), MISSING, np.int32)
    for number in np.unique(cpu.forward_thread[nodes]).tolist():
        ours = nodes[cpu.forward_thread[nodes] == number]
        thread = _forward_thread(trace, forward, ours)
        found[ours] = _last_before(trace, forward[cpu.thread[forward] == thread], ours)
    return found


def _forward_thread(trace: Trace, forward: Places, nodes: Places) -> int:
    """The thread whose operators have most of the numbers of `nodes`."""
    cpu = trace.cpu
    candidates = forward[np.isin(cpu.sequence[forward], cpu.sequence[nodes])]
    pairs = np.unique(np.stack((cpu.thread[candidates].astype(np.int64), cpu.sequence[candidates])), axis=1)
    return int(np.bincount(pairs[0]).argmax()) if pairs.size else MISSING


def _last_before(trace: Trace, forward: Places, nodes: Places) -> Ids:
    """For each of `nodes`, the last of `forward` with its number that began before it, else -1."""
    if not len(forward):
        return np.full(len(nodes), MISSING, np.int32)
    cpu = trace.cpu
    both = np.concatenate((forward, nodes))
    is_node = np.arange(len(both)) >= len(forward)
    order = np.lexsort((is_node, cpu.start[both], cpu.sequence[both]))
    last = np.maximum.accumulate(np.where(is_node[order], MISSING, np.arange(len(both))))
    candidate = both[order][np.maximum(last, 0)]
    known = (last >= 0) & (cpu.sequence[candidate] == cpu.sequence[both[order]])
    found = np.empty(len(both), np.int32)
    found[order] = np.where(known, candidate, MISSING)
    return found[len(forward) :]


_CHECKPOINT = re.compile(
    r".*torch/utils/checkpoint\.py\(\d+\): (recompute_fn|unpack_hook)$"  # use_reentrant=False
    r"|CheckpointFunctionBackward$"  # use_reentrant=True
)


def recomputed(program: ProgramSlices, evaluation: Ids, calls: ModuleCalls) -> Mask:
    """Slices of forward work within the evaluation of an autograd node.

    They are within a call of a module or of torch.utils.checkpoint; otherwise they are operators that record gradients
    in a node that also has operators that do not, because a backward pass records gradients only with create_graph, and
    then for all operators.
    """
    trace, nest = program.trace, program.nest
    known = trace.names_where(_CHECKPOINT.match)
    roots = calls.mask | known[trace.cpu.name] | _recording(program)
    around = nearest(nest, roots & (evaluation >= 0))
    again = around >= 0
    # Reentrant checkpoints run a backward pass of their own inside, which is not part of the forward pass.
    return again & (evaluation <= around)


def _recording(program: ProgramSlices) -> Mask:
    """Operators with a sequence number directly in a node that also has operators without one."""
    cpu = program.trace.cpu
    node = nearest_around(program.nest, program.operator)
    direct = program.operators & (node >= 0) & (cpu.forward_thread[node] > 0)
    recording = direct & (cpu.sequence >= 0) & (cpu.forward_thread <= 0)
    mixed = np.zeros(len(cpu), np.bool_)
    mixed[node[direct & (cpu.sequence < 0)]] = True
    return recording & mixed[node]


def for_autograd(program: ProgramSlices, evaluating: Mask, idle: Segments) -> Spans:
    """Waits in `backward()` for autograd's thread: per piece, from that thread's first to its last slice."""
    working = _elsewhere(program, evaluating)
    if not len(working):
        return EMPTY
    first = np.searchsorted(working.end, idle.start, side="right")
    beyond = np.searchsorted(working.start, idle.end, side="left")
    met = beyond > first
    start = np.maximum(idle.start[met], working.start[first[met]])
    return union(start, np.minimum(idle.end[met], working.end[beyond[met] - 1]))


def for_other_ranks(program: ProgramSlices, idle: Segments) -> Spans:
    """Waits for collectives that run on a thread of their own, such as gloo's."""
    communicating = _elsewhere(program, program.lexicon.communication_wait[program.trace.cpu.name])
    return intersect(union(idle.start, idle.end), communicating)


def _elsewhere(program: ProgramSlices, mask: Mask) -> Spans:
    cpu = program.trace.cpu
    return cpu.spans(mask & (cpu.thread != program.main_thread))


NAMES = (
    "other", "data_wait", "host_to_device", "forward", "backward", "exposed_communication", "optimizer",
    "scheduler", "recv_wait", "send_wait",
)  # fmt: skip
OTHER, DATA_WAIT, HOST_TO_DEVICE, FORWARD, BACKWARD, EXPOSED_COMMUNICATION, OPTIMIZER = range(7)
SCHEDULER, RECV_WAIT, SEND_WAIT = range(7, len(NAMES))  # phases of diffusion that is split over ranks
PhaseIds = NDArray[np.int8]
"""Indices into NAMES."""

_TAG = re.compile(r"\[[^\]]*\]")  # tags as Lightning's: [pl][profile][Strategy]DDPStrategy.backward
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
    """The phase of each CPU slice, and what it belongs to. Each column has one entry per slice."""

    of: PhaseIds
    calls: ModuleCalls
    evaluation: Ids
    """The innermost slice at or around this one in which autograd evaluates a node, or -1."""
    forward: Ids
    """The forward operator of the node that the slice evaluates, or -1 for other slices."""
    recompute: Mask
    """Whether the slice is part of a forward pass that is recomputed within the backward pass."""

    @property
    def evaluated(self) -> Ids:
        """The forward operator of the node that autograd evaluates around each slice, or -1."""
        return at(self.forward, self.evaluation)


def phase_of(program: ProgramSlices) -> Phases:
    """Determines the phase of every slice.

    It is that of the innermost slice around it that has one: an annotation's name, autograd's evaluation of a node, or
    the marks of optimizer and data loader. In other programs, modules and operators that make autograd nodes are
    forward, and copies to the device host_to_device. Work of autograd's own thread between nodes, such as summing
    gradients, is backward, as are calls that contain calls of its engine.
    """
    trace, nest = program.trace, program.nest
    backward, calls = evaluations(trace), ModuleCalls.of_trace(trace)
    evaluation = nearest(nest, backward)
    forward = forward_of(trace, backward)
    marks = np.where(backward, np.int8(BACKWARD), _announced(trace))
    marker = nearest(nest, marks > 0)
    guesses = _guessed(program, calls, backward, forward)
    guess = nearest(nest, guesses > 0)
    guessed = at(guesses, guess, OTHER)
    guessed = np.where(_of_autograd(program, marks) | _in_engine(program), np.int8(BACKWARD), guessed)
    of = np.where(marker >= 0, marks[marker], guessed)
    return Phases(of.astype(np.int8), calls, evaluation, forward, recomputed(program, evaluation, calls))


def phases(program: ProgramSlices, known: Phases) -> list[StepPhase]:
    """The nanoseconds of each phase: CPU time adds up to the window, including `other`, which comes last.

    Device time is the part of the window under work that starts in it and was launched in the phase, so that two phases
    may overlap. In a trace without device work it is 0, and recomputation is the operators' own time.
    """
    cpu = cpu_spans(program, known)
    again_on_cpu = np.where(known.recompute, program.effort, 0) if program.trace.cpu_only else None
    linked = np.flatnonzero((program.links >= 0) & program.started)
    launcher = program.links[linked]
    of, again = known.of[launcher], known.recompute[launcher]
    found = [
        StepPhase(
            name=name,
            host=cpu[number].length,
            device=_length(program, linked[of == number]),
            launches=int((of == number).sum()),
            recompute=_length(program, linked[(of == number) & again])
            if again_on_cpu is None
            else int(again_on_cpu[known.of == number].sum()),
        )
        for number, name in (*enumerate(NAMES[1:], 1), (OTHER, NAMES[OTHER]))
    ]
    return [phase for phase in found if phase.host or phase.launches]


def cpu_spans(program: ProgramSlices, known: Phases) -> list[Spans]:
    """For each of NAMES, when the main thread was in it; together they are the window.

    Where the main thread is in no other phase, or in Python within the backward pass, waiting for autograd's own thread
    is backward, and waiting for collectives on a thread of their own is exposed communication.
    """
    pieces = program.main
    of = at(known.of, pieces.slice, OTHER)
    spans = [union(pieces.start[of == number], pieces.end[of == number]) for number in range(len(NAMES))]
    in_engine = (known.evaluation < 0) & (program.trace.cpu.kind == SliceKind.PYTHON)
    idle = pieces.only((of == OTHER) | ((of == BACKWARD) & (at(in_engine.astype(np.int8), pieces.slice, 0) > 0)))
    autograd = for_autograd(program, known.evaluation >= 0, idle)
    ranks = subtract(for_other_ranks(program, idle), autograd)
    spans[BACKWARD] = join(subtract(spans[BACKWARD], ranks), autograd)
    spans[EXPOSED_COMMUNICATION] = join(spans[EXPOSED_COMMUNICATION], ranks)
    spans[OTHER] = subtract(spans[OTHER], join(autograd, ranks))
    return spans


def _length(program: ProgramSlices, works: Ids) -> int:
    launched = program.trace.device.spans(works)
    return clip(launched, program.window.start, program.window.end).length


def _announced(trace: Trace) -> PhaseIds:
    """The phase that each slice's name states, if it is an annotation; old traces call annotations operators."""
    by_name = np.fromiter((_named(name) for name in trace.names), np.int8, len(trace.names))
    may = (trace.cpu.kind == SliceKind.ANNOTATION) | (trace.cpu.kind == SliceKind.OPERATOR)
    return np.where(may, by_name[trace.cpu.name], np.int8(OTHER))


def _named(name: str) -> int:
    """The phase of a name such as "forward", "## forward:embeddings ##" and "[pl][profile]..."."""
    bare = _TAG.sub("", name).strip("#. ").lower()
    for word in (bare, bare.split(":")[0]):
        for phase, pattern in _PATTERNS.items():
            if pattern.match(word):
                return phase
    return OTHER


def _guessed(program: ProgramSlices, calls: ModuleCalls, backward: Mask, forward: Ids) -> PhaseIds:
    """The phase of modules and operators that are outside all others, and of nothing else."""
    top = program.operators & (nearest_around(program.nest, program.operator) < 0)
    guesses = np.zeros(len(program.trace.cpu), np.int8)
    certain = calls.mask | (top & _used_by_backward(program, forward))
    guesses[certain | (top & _before_backward(program, backward, certain))] = FORWARD
    guesses[top & _uploads(program)] = HOST_TO_DEVICE
    return guesses


def _of_autograd(program: ProgramSlices, marks: PhaseIds) -> Mask:
    """Slices of threads other than the main one that evaluate nodes and have no other phase."""
    cpu = program.trace.cpu
    threads = np.arange(len(program.trace.threads))
    own = np.isin(threads, cpu.thread[marks == BACKWARD]) & (threads != program.main_thread)
    own &= ~np.isin(threads, cpu.thread[(marks != OTHER) & (marks != BACKWARD)])
    found: Mask = own[cpu.thread]
    return found


def _in_engine(program: ProgramSlices) -> Mask:
    """Slices within Python's call of autograd's engine, from stacks."""
    cpu, known = program.trace.cpu, program.trace.names_where(_ENGINE.match)
    return nearest(program.nest, known[cpu.name] & (cpu.kind == SliceKind.PYTHON)) >= 0


def _used_by_backward(program: ProgramSlices, forward: Ids) -> Mask:
    """Outermost operators that made a node that is evaluated."""
    top = outermost(program.nest, program.operators)[forward[forward >= 0]]
    used = np.zeros(len(forward), np.bool_)
    used[top] = True
    return used


def _before_backward(program: ProgramSlices, backward: Mask, certain: Mask) -> Mask:
    """Operators that record gradients in the forward pass of a step, before its first backward slice.

    The forward pass lasts from the first to the last slice that is `certain` to belong to it. Where there is none in a
    step, it is all that comes before the backward pass. Operators outside of it record gradients too, such as those
    that read values between two steps.
    """
    cpu = program.trace.cpu
    edges = np.array([step.start for step in program.window.steps], np.int64)
    step = np.searchsorted(edges, cpu.start, side="right")
    never = np.iinfo(np.int64).max
    first, begins, ends = (np.full(len(edges) + 1, value) for value in (never, never, -never))
    np.minimum.at(first, step[backward], cpu.start[backward])
    known = certain & (cpu.start < first[step])
    np.minimum.at(begins, step[known], cpu.start[known])
    np.maximum.at(ends, step[known], program.nest.end[known])
    within = (begins[step] == never) | ((cpu.start >= begins[step]) & (cpu.start < ends[step]))
    found: Mask = (cpu.sequence >= 0) & (cpu.forward_thread <= 0) & (cpu.start < first[step]) & within
    return found


def _uploads(program: ProgramSlices) -> Mask:
    """Operators of a copy that bring something to the device."""
    trace = program.trace
    names = trace.names_where(_UPLOADING.__contains__)
    uploads = (trace.device.kind == WorkKind.COPY) & program.lexicon.upload[trace.device.name]
    works = np.flatnonzero((program.links >= 0) & uploads)
    top = outermost(program.nest, program.operators)[program.links[works]]
    found = np.zeros(len(trace.cpu), np.bool_)
    found[top[top >= 0]] = True
    return found & names[trace.cpu.name]


ZEROING = ("aten::zero_", "aten::_foreach_zero_", "aten::fill_")


@dataclass(frozen=True)
class Optimizing:
    """The optimizer's work in the window."""

    steps: int
    """The number of optimizer steps that the CPU executed."""
    kernels: int
    """The number of launches in the optimizer's phase; without device work, the number of operators there."""
    zeroed_gradients: int
    """The number of operators with which zero_grad writes zeros."""
    zeroing: int
    """The time of these operators in nanoseconds: of the work that they launched, or without device work their own."""


def optimizing(program: ProgramSlices, phases: Phases) -> Optimizing:
    """Counts steps and launches both on the CPU, so that their ratio holds if the device is behind."""
    cpu, lexicon = program.trace.cpu, program.lexicon
    ours = (phases.of == OPTIMIZER) & program.inside
    launches = program.operators.copy()
    if not program.trace.cpu_only:
        launches[:] = False
        launches[program.links[program.links >= 0]] = True
    in_zero_grad = nearest(program.nest, lexicon.zero_grad[cpu.name]) >= 0
    zeroing = nearest(program.nest, program.named(ZEROING) & in_zero_grad)
    calls = (zeroing == np.arange(len(cpu))) & (nearest_around(program.nest, zeroing) < 0)  # zero_ calls fill_
    return Optimizing(
        steps=int((lexicon.optimizer[cpu.name] & program.inside).sum()),
        kernels=int((ours & launches).sum()),
        zeroed_gradients=int((calls & program.counted).sum()),
        zeroing=int(program.effort[zeroing >= 0].sum()),
    )


def zeroing_idle(program: ProgramSlices, waiting: Spans) -> int:
    """The part of `waiting`, when the device waits for Python and launches, in which zero_grad writes zeros."""
    cpu = program.trace.cpu
    zero_grad = nearest(program.nest, program.lexicon.zero_grad[cpu.name])
    filling = zero_grad[program.named(ZEROING) & (zero_grad >= 0)]
    return intersect(union(cpu.start[filling], program.nest.end[filling]), waiting).length
