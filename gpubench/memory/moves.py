"""From what a file tells, memory given out and given back by address, to a history."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from msgspec import Struct

from gpubench.memory.history import Allocation, History, Mark, Phase, Reading


@dataclass(frozen=True)
class DeviceHistory:
    """What a file tells of one device."""

    device: int
    """Its number in the program; -1 for the host's own memory."""
    history: History
    """Its allocations have their categories."""
    name: str | None = None
    """As the driver reports it, where the file tells."""
    capacity: int | None = None
    """Bytes of the device, where the file tells."""
    rank: int | None = None


class Move(Struct, gc=False):
    address: int
    block: int
    """Bytes that the allocator gives out or takes back, which may be more than was asked for."""
    phase: Phase
    step: int | None
    given: Allocation | None = None
    """What is given out, its `begin` and `end` yet to be told; None where something is given back."""
    size: int = 0
    """Bytes that were asked for, of what is given back."""
    reserved: int | None = None
    """Bytes that the allocator has from the driver after it."""


Held = tuple[Allocation, int]
"""With its block."""

Place = tuple[Phase, int | None]
"""A phase, and the step it is of."""
_START: Place = ("start", None)


def assembled(moves: Sequence[Move], there: Sequence[Held], reserved: int | None) -> History:
    """The history of `moves`.

    `there` is what was held before them and is not given back by them. What they give back without having given it
    out was there as well. All of it begins in a phase "start" before the first move, when the allocator had `reserved`
    bytes from the driver; where that is None there are no readings. Readings stand at each mark, and one at the end.
    """
    course = _Course(there)
    for move in moves:
        course.add(move)
    first = len(course.before)
    for position, (one, _) in enumerate(course.before):
        one.begin = position
    for one in course.given:
        one.begin += first
    for one in (*course.given, *(one for one, _ in course.before)):
        one.end = None if one.end is None else one.end + first
    history = History(
        allocations=[*(one for one, _ in course.before), *course.given],
        marks=_marks([_START] * first + course.phases),
        length=first + len(course.phases),
        late=bool(course.before),
    )
    if reserved is not None:
        changes = [*(block for _, block in course.before), *course.changes]
        history.readings = _readings(history, changes, [reserved] * (first + 1) + course.reserved)
    return history


class _Course:
    """What happens, in positions from the first move on."""

    def __init__(self, there: Sequence[Held]) -> None:
        self.before = [*there]
        self.given: list[Allocation] = []
        self.phases: list[Place] = []
        self.changes: list[int] = []
        """Of what is given out, in blocks."""
        self.reserved: list[int] = []
        self._open: dict[int, Held] = {}

    def add(self, move: Move) -> None:
        if move.given is None:
            self._take_back(move)
            return
        if move.address in self._open:  # that it was given back is not told, but so it was
            self._take_back(move)
        move.given.begin = self._position(move, move.block)
        self.given.append(move.given)
        self._open[move.address] = move.given, move.block

    def _take_back(self, move: Move) -> None:
        held = self._open.pop(move.address, None)
        if held is None:
            held = Allocation(size=move.size, begin=0, category="before", phase="start"), move.block
            self.before.append(held)
        one, block = held
        one.end = self._position(move, -block)

    def _position(self, move: Move, change: int) -> int:
        self.phases.append((move.phase, move.step))
        self.changes.append(change)
        self.reserved.append(move.reserved or 0)
        return len(self.phases) - 1


def _marks(phases: Sequence[Place]) -> list[Mark]:
    starts = [at for at, phase in enumerate(phases) if not at or phase != phases[at - 1]]
    return [Mark(at, *phases[at]) for at in starts]


def _readings(history: History, changes: Sequence[int], reserved: Sequence[int]) -> list[Reading]:
    """`reserved` has one more than the history has positions: what there was before the first."""
    ours, drivers = np.cumsum([0, *changes], dtype=np.int64), np.array(reserved, np.int64)
    borders = [0, *(mark.at for mark in history.marks), history.length]
    return [
        Reading(
            at, int(ours[at]), int(drivers[at]), int(ours[start : at + 1].max()), int(drivers[start : at + 1].max())
        )
        for start, at in pairwise(borders)
    ]
