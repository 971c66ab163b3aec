"""Allocations over time: who requested each one, when, and what it holds."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal

import numpy as np
from msgspec import Struct, structs
from numpy.typing import NDArray

Category = Literal[
    "parameters", "buffers", "gradients", "optimizer_state", "activations", "inputs", "temporaries", "workspaces",
    "before", "unknown",
]  # fmt: skip
"""The contents of an allocation. `before`: it existed when the recording began. `unknown`: nothing shows it."""

Phase = Literal[
    "start", "model", "data", "forward", "loss", "backward", "optimizer", "zero_grad", "evaluation", "unknown"
]
"""The activity of the program. Forward is the model's own pass; the loss is between it and the backward pass."""
PLACES: dict[Phase, str] = {
    "start": "at the start",
    "model": "while the model is built",
    "data": "in the {}loading of data",
    "forward": "in the {}forward pass",
    "loss": "in the {}loss",
    "backward": "in the {}backward pass",
    "optimizer": "in the {}optimizer step",
    "zero_grad": "in the {}zero_grad",
    "evaluation": "in the {}evaluation",
    "unknown": "",
}
"""The wording of each phase in a sentence, with a place for "first "; empty for an unknown phase."""


class Allocation(Struct, gc=False):
    """One piece of memory from its allocation to its free.

    `begin` and `end` are positions in the log: 0 is the first event, and each allocation and each free has a
    position of its own. The allocation is held at positions in [begin, end).
    """

    size: int
    """The number of bytes requested."""
    begin: int
    end: int | None = None
    """The position of its free; None if it is still held when the log ends."""
    category: Category = "unknown"
    phase: Phase = "unknown"
    """The phase at the allocation; the next four fields are of the same moment."""
    step: int | None = None
    """The step, from 0; None before the first one."""
    module: str = ""
    """The path of the nn.Module, such as "transformer.h.0.attn"; "" for the model itself and if unknown."""
    operator: str = ""
    """The operator, such as "aten::mm"."""
    shape: str = ""
    """The type and shape, such as "float32[8, 1024, 768]"."""
    where: str = ""
    """The file:line of the innermost frame of the user's code."""


class PhaseStart(Struct, frozen=True, gc=False):
    """The start of `phase` at position `at`."""

    at: int
    phase: Phase
    step: int | None = None


class AllocatorReading(Struct, frozen=True, gc=False):
    """The bytes that the device's allocator reports for the time between the previous mark and `at`."""

    at: int
    allocated: int
    reserved: int
    peak_allocated: int
    peak_reserved: int


class FailedRequest(Struct, frozen=True):
    """A request for memory that failed because memory was short."""

    size: int
    left: int | None
    """The bytes that the driver had left; None if they are unknown."""
    operator: str = ""
    where: str = ""
    """The file:line of the innermost frame of the user's code."""
    at: int = 0
    """The position in the log before which it failed."""


class Counts(Struct, frozen=True):
    """Totals of an allocator over a log. None means unknown."""

    allocations: int
    """The allocations; on a device without a counting allocator, such as a CPU, those of tensors in the log."""
    frees: int
    retries: int | None = None
    """The allocations for which the driver had too little memory until the allocator freed its unused memory."""
    ooms: int | None = None
    """The allocations that failed because memory was short."""
    largest_free: int | None = None
    """The bytes of the largest unused block of the allocator when the log ends."""


class AllocationLog(Struct):
    allocations: list[Allocation]
    """The allocations, ordered by `begin`."""
    marks: list[PhaseStart]
    """The marks in order; the first one is at 0."""
    length: int
    """The number of positions. Every `begin` and `end` is less."""
    readings: list[AllocatorReading] = []
    """The readings, one for each mark, if the device has an allocator that counts."""
    counts: Counts | None = None
    """The counts of the device's allocator, if it reported them."""
    late: bool = False
    """Whether memory was already held when the recording began, and no event is known to be lost."""
    truncated: bool = False
    """Whether events before the first recorded one were lost."""
    truncation_proven: bool = False
    """Whether the file proves the loss; otherwise the number of events suggests it."""
    notes: list[str] = []
    """Notes for the reader, one sentence each."""
    levels: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
    """The bytes that the allocator has given out, and those that it has from the driver: before the first event, and
    after each. None if they are known at the marks alone."""
    failed: list[FailedRequest] = []
    is_state: bool = False
    """Whether it has no events, but only what is held at one moment."""


LARGEST = 2**48
"""The largest size in bytes that is read from a file: as many of them as a file can hold sum to an int64."""

LASTING: dict[Phase, Category] = {
    "model": "parameters",
    "data": "inputs",
    "forward": "activations",
    "loss": "activations",
    "backward": "gradients",
    "optimizer": "optimizer_state",
    "evaluation": "activations",
}
"""The category of what is still held when the phase that requested it is over."""


def classify(log: AllocationLog) -> None:
    """Sets the category of allocations with category "unknown", in place, where their lifetime determines it.

    - Freed within the phase that requested it, in the same step: temporaries.
    - Requested in forward or loss: activations if held when a backward pass of the same step begins, or if held beyond
      the step, as outputs to which the loop keeps a reference, or if no backward pass follows; otherwise temporaries.
    - Requested in backward and held when it is over: gradients, whether they are freed after the optimizer or in the
      next step. Recomputed activations are freed within the backward pass, and so temporaries.
    - Requested in the optimizer and held when it is over: optimizer state. With the model: parameters, which includes
      buffers.
    - Requested in an evaluation and held when it is over: activations, as outputs that are kept.
    - Requested with the data: inputs, however long they live, because a loop may free a batch after it has the next.
    - In an unknown phase: unknown.

    If the log ends within a phase, what it holds at its end counts as held when the phase is over. Workspaces,
    which libraries request in a forward or backward pass and keep, cannot be recognised by their lifetime.
    """
    starts = [mark.at for mark in log.marks]
    over = [*starts[1:], log.length]
    backward = _next_backward(log.marks, log.length)
    for one in log.allocations:
        if one.category == "unknown" and one.phase in LASTING:
            span = bisect_right(starts, one.begin) - 1
            following = backward if one.phase in ("forward", "loss") else over
            held = one.phase == "data" or one.end is None or one.end >= following[span]
            one.category = LASTING[one.phase] if held else "temporaries"


def _next_backward(marks: Sequence[PhaseStart], length: int) -> list[int]:
    """For each phase, the position at which the next backward pass of its step begins, or else its step ends."""
    found = [length] * len(marks)
    for number in range(len(marks) - 2, -1, -1):
        coming = marks[number + 1]
        near = coming.phase == "backward" or coming.step != marks[number].step
        found[number] = coming.at if near else found[number + 1]
    return found


_LOOP: tuple[Phase, ...] = ("data", "forward", "loss", "backward", "optimizer", "zero_grad")
_PASS: tuple[Phase, ...] = ("forward", "loss")
_BATCH: tuple[Phase, ...] = ("data", "backward", "optimizer", "zero_grad")


def filled(known: Sequence[Phase | None]) -> list[Phase]:
    """Replaces each None in `known` by the phase that its neighbours imply.

    Between two events of one phase it is that phase; between forward and backward pass the loss; between backward pass
    and optimizer the preparation of its step; before the next forward pass the loading of data.
    """
    runs = [(phase, len(list(run))) for phase, run in groupby(known)]
    phases = [None, *(phase for phase, _ in runs), None]
    found: list[Phase] = []
    for number, (phase, length) in enumerate(runs):
        found += [phase or _between(phases[number], phases[number + 2])] * length
    return found


def steps(phases: Sequence[Phase]) -> Iterator[int | None]:
    """Yields the step of each event, from 0; None before the loop begins.

    A step ends with the optimizer, and with zero_grad if that follows; without an optimizer it ends with the backward
    pass.
    """
    last: Phase = "optimizer" if "optimizer" in phases else "backward"
    step, ending = None, False
    for phase in phases:
        if phase in _LOOP:
            if step is None:
                step = 0
            elif ending and phase not in (last, "zero_grad"):
                step, ending = step + 1, False
            ending |= phase == last
        yield step


def _between(before: Phase | None, after: Phase | None) -> Phase:
    """The phase between two phases. Before the first forward pass it may be model or data, and is unknown."""
    if before is not None and before == after:
        return before
    if before in _PASS and after in (*_PASS, "zero_grad", "backward"):
        return "loss"
    if before == "zero_grad" and after == "backward":  # zero_grad may be called as late as that
        return "loss"
    if before == "backward" and after == "optimizer":
        return "optimizer"
    return "data" if before in _BATCH and after in ("data", "forward") else "unknown"


@dataclass(frozen=True)
class DeviceLog:
    """The allocations of one device, and what their source says about the device."""

    device: int
    """The device's number in the program; -1 for the memory of the CPU."""
    history: AllocationLog
    """The log of its allocations, which have categories."""
    name: str | None = None
    """The device's name as the driver reports it, if the file has it."""
    capacity: int | None = None
    """The bytes of the device's memory, if the file has them."""
    rank: int | None = None
    other: int = 0
    """The bytes that the device holds outside of the program's allocator, as far as they are known."""


class AllocatorMove(Struct, gc=False):
    address: int
    block: int
    """The bytes that the allocator allocates or frees, which may be more than requested."""
    phase: Phase
    step: int | None
    given: Allocation | None = None
    """The new allocation, whose `begin` and `end` are not set yet; None for a free."""
    size: int = 0
    """The bytes that were requested for what is freed."""
    reserved: int | None = None
    """The bytes that the allocator has from the driver after the move."""


Held = tuple[Allocation, int]
"""An allocation with the size of its block."""

Place = tuple[Phase, int | None]
"""A phase and its step."""
_START: Place = ("start", None)


def assembled(
    moves: Sequence[AllocatorMove],
    there: Sequence[Held],
    reserved: int | None,
    failed: Sequence[tuple[int, FailedRequest]] = (),
) -> AllocationLog:
    """Makes a log of `moves`.

    `there` is what was held before the moves and is not freed by them. What they free without having allocated it was
    held before, too. All of this begins in a phase "start" before the first move, when the allocator had `reserved`
    bytes from the driver; if that is None there are no readings. There is a reading at each mark and one at the end.
    `failed` has the requests that failed, each with the number of moves before it.
    """
    builder = _LogBuilder(there)
    places = [0]
    for move in moves:
        builder.add(move)
        places.append(len(builder.phases))
    first = len(builder.before)
    for position, (one, _) in enumerate(builder.before):
        one.begin = position
    for one in builder.given:
        one.begin += first
    for one in (*builder.given, *(one for one, _ in builder.before)):
        one.end = None if one.end is None else one.end + first
    log = AllocationLog(
        allocations=[*(one for one, _ in builder.before), *builder.given],
        marks=_marks([_START] * first + builder.phases),
        length=first + len(builder.phases),
        late=bool(builder.before),
        failed=[structs.replace(one, at=first + places[number]) for number, one in failed],
    )
    if reserved is not None:
        changes = [*(block for _, block in builder.before), *builder.changes]
        given = np.cumsum([0, *changes], dtype=np.int64)
        log.levels = given, np.array([reserved] * (first + 1) + builder.reserved, np.int64)
        log.readings = readings_at([*(mark.at for mark in log.marks), log.length], *log.levels)
    return log


class _LogBuilder:
    """Collects moves, with positions counted from the first one."""

    def __init__(self, there: Sequence[Held]) -> None:
        self.before = [*there]
        self.given: list[Allocation] = []
        self.phases: list[Place] = []
        self.changes: list[int] = []
        """The sizes of the blocks of what is allocated."""
        self.reserved: list[int] = []
        self._open: dict[int, Held] = {}

    def add(self, move: AllocatorMove) -> None:
        if move.given is None:
            self._take_back(move)
            return
        if move.address in self._open:  # its free is missing from the file
            self._take_back(move)
        move.given.begin = self._position(move, move.block)
        self.given.append(move.given)
        self._open[move.address] = move.given, move.block

    def _take_back(self, move: AllocatorMove) -> None:
        held = self._open.pop(move.address, None)
        if held is None:
            held = Allocation(size=move.size, begin=0, category="before", phase="start"), move.block
            self.before.append(held)
        one, block = held
        one.end = self._position(move, -block)

    def _position(self, move: AllocatorMove, change: int) -> int:
        self.phases.append((move.phase, move.step))
        self.changes.append(change)
        self.reserved.append(move.reserved or 0)
        return len(self.phases) - 1


def _marks(phases: Sequence[Place]) -> list[PhaseStart]:
    starts = [at for at, phase in enumerate(phases) if not at or phase != phases[at - 1]]
    return [PhaseStart(at, *phases[at]) for at in starts]


def readings_at(
    positions: Iterable[int], allocated: NDArray[np.int64], reserved: NDArray[np.int64]
) -> list[AllocatorReading]:
    """Makes the readings at ascending `positions`. A peak is that since the previous one, including the value there.

    The arrays have one value more than there are events, the first of which is that before the first event.
    """
    return [
        AllocatorReading(
            at,
            int(allocated[at]),
            int(reserved[at]),
            int(allocated[start : at + 1].max()),
            int(reserved[start : at + 1].max()),
        )
        for start, at in pairwise([0, *positions])
    ]
