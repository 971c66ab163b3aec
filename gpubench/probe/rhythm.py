"""Decides which updates of a program make one step, from the order of its optimizers alone.

With one optimizer, each update is a step. If several optimizers take turns, a step is one turn of them all. Updates of
one optimizer in a row are one part of its turn, so that the number of a GAN's critic updates may change. A turn must
repeat before it counts: while it is unknown whether it does, updates are held back, but not for long. If no
turn repeats, as in a program that chooses its optimizer at random, each update is a step.

Where steps are slow, the time may be over before that. Then a number of updates is set after which each is a step, if
all have been by one optimizer.

A program may change its rhythm, for example when a second optimizer begins later. Then the steps until there stay as
they are, and the following ones are decided anew. Nothing depends on time, so that all ranks of a program whose
updates come in the same order make the same steps.
"""

from __future__ import annotations

from collections import Counter, deque
from copy import deepcopy
from typing import Iterable

CERTAIN = 4
"""Updates by one optimizer after which each is a step, if the program has made no other optimizer."""
LONGEST_RUN = 128
"""Updates by one optimizer in a row after which each is a step, also if the program has made other optimizers."""
TURNS, UPDATES = 2, 12
"""The smallest numbers of turns and of updates in them that have shown a rhythm if all turns are the same."""
RUNS, RUNS_AGAIN = 16, 32
"""The smallest numbers of runs that have shown one if they are only alike, and after the updates had no rhythm. Turns
of few optimizers also come by chance if a program chooses them at random."""
ALIKE = 0.75
"""The share of turns in which an optimizer must have its usual number of updates, and of optimizers that must have it
in a turn. A regularisation may add an update to every fourth turn."""
IRREGULAR, MOST_IRREGULAR = 2, 8
"""What an irregular turn adds to a count that a regular one reduces by one, and the count that ends a rhythm."""
FEW = 4
"""The largest number of updates in a row by one of the optimizers at least. Optimizers that all update for long, such
as those of a network for each half of an epoch, take no turns within a step."""
MOST_RETURNS = 8
"""The largest number of runs that one optimizer has in a turn."""


class Rhythm:
    """The updates so far, and the steps that they make."""

    def __init__(self) -> None:
        self.steps: deque[int] = deque()
        """The numbers of updates in the decided steps, without those that were taken."""
        self.complete = 0
        """The number of decided steps."""
        self.changed: int | None = None
        """The number of steps before the last change of the rhythm; None without a change."""
        self._held: list[int] = []
        """The optimizers of the updates that belong to no step yet."""
        self._known: set[int] = set()
        self._single = self._again = False
        """Whether each update is a step, and whether the updates had no rhythm before."""
        self._runs: list[list[int]] = []
        """(optimizer, number of its updates in a row) in their order, while no turn is known."""
        self._order: list[int] = []
        """The optimizers of the runs of a turn; empty while no turn is known."""
        self._usual: list[int] = []
        """The usual number of updates in each run of a turn."""
        self._last: list[int] = []
        self._now: list[int] = []
        """Those of the last turn and of this one."""
        self._at = self._irregular = 0
        self.longest = LONGEST_RUN
        """The number of updates by one optimizer from the start after which each is a step."""

    @property
    def uncertain(self) -> bool:
        """Whether several optimizers have updated without a rhythm, so that each update is a step."""
        return self._single and len(self._runs) > len(self._known) > 1

    @property
    def is_single(self) -> bool:
        """Whether each update is a step, as there is only one optimizer."""
        return self._single and len(self._known) == 1

    @property
    def is_looking(self) -> bool:
        """Whether updates are held back until a rhythm is found."""
        return bool(self._held) and not self._order

    @property
    def is_alone(self) -> bool:
        """Whether all updates so far are held back and by one optimizer."""
        return self.is_looking and len(self._runs) == 1 and not self.complete

    @property
    def optimizers(self) -> int:
        """The number of optimizers that have updated."""
        return len(self._known)

    def add(self, optimizer: int, *, alone: bool = True) -> None:
        """Notes an update; `alone` means that the program has made no other optimizer."""
        if self.is_single and optimizer in self._known:
            self._end_step(1)
        elif self._order:
            self._go_on(optimizer)
        else:
            self._settle(optimizer, alone)

    def end(self) -> None:
        """Decides about the updates that are held back, after the last one. An incomplete turn is not a step."""
        if self._order or self._single:
            return
        if not self._runs or not self._find_turn(ended=True):
            for _ in range(len(self._held)):
                self._end_step(1)
            self._held.clear()

    def pending(self) -> list[int]:
        """Returns the sizes of the steps that the held updates would make if they were the last."""
        ended = deepcopy(self)
        ended.steps.clear()
        ended.end()
        return list(ended.steps)

    def keep(self, steps: int) -> int:
        """Forgets what follows the first `steps` steps. Returns the number of updates that it forgets."""
        forgotten = len(self._held)
        self._held.clear()
        while self.complete > steps and self.steps:
            forgotten += self.steps.pop()
            self.complete -= 1
        return forgotten

    def _end_step(self, updates: int) -> None:
        self.steps.append(updates)
        self.complete += 1

    def _settle(self, optimizer: int, alone: bool) -> None:
        """Notes an update while no turn is known."""
        if optimizer not in self._known:
            self._known.add(optimizer)
            self._single, self._runs = False, [] if self._single else self._runs
        self._held.append(optimizer)
        if self._runs and self._runs[-1][0] == optimizer:
            self._runs[-1][1] += 1
        else:
            self._runs.append([optimizer, 1])
            if (not self._single or len(self._runs) % RUNS == 0) and self._find_turn():
                return
        if self._single or self._is_too_late(alone):
            for _ in self._held:
                self._end_step(1)
            self._held.clear()
            self._again = self._again or len(self._runs) > len(self._known)  # one has updated again after another
            self._single = True
            kept = max(RUNS_AGAIN, self._longest * TURNS) + 1
            if len(self._runs) > 2 * kept:
                del self._runs[:-kept]

    @property
    def _longest(self) -> int:
        """The largest number of runs in a turn for which it is looked."""
        return RUNS + 2 * len(self._known)

    def _is_too_late(self, alone: bool) -> bool:
        """Tells whether no more updates are held back to find a turn."""
        runs, held = self._runs, len(self._held)
        if len(runs) == 1 and alone and len(self._known) == 1:
            return held >= CERTAIN
        if len(runs) == 1 and held >= self.longest and not self.complete:
            return True
        most = _most_held(len(self._known))
        return runs[-1][1] >= LONGEST_RUN or held >= (most if len(runs) > RUNS_AGAIN else 4 * most)

    def _find_turn(self, *, ended: bool = False) -> bool:
        """Looks for a turn that the latest runs repeat. If there is one, decides about the held updates by it."""
        runs = self._runs
        end = len(runs) if ended else len(runs) - 1  # the last one may go on
        shortest = 0
        for length in self._candidates(end):
            turns = TURNS + bool(shortest)  # with another length to try, chance has another one too
            same, alike = turns * length, 0
            while (
                not (ended and not shortest) and same < end and sum(run[1] for run in runs[end - same : end]) < UPDATES
            ):
                same += length
            enough = (ended and not shortest) or sum(run[1] for run in runs[max(0, end - same) : end]) >= UPDATES
            if not shortest and all(
                runs[at][0] == runs[at + length][0] for at in range(end - 2 * length, end - length)
            ):
                shortest = length
                alike = length * max(turns, -(-(RUNS_AGAIN if self._again else RUNS) // length))
            if (
                not self._again
                and enough
                and same <= end
                and runs[end - same : end - length] == runs[end - same + length : end]
            ):
                usual = [run[1] for run in runs[end - length : end]]
                if min(usual) <= FEW:
                    self._begin_turns(end, length, same, usual)
                    return True
            if alike and alike <= end:
                latest = runs[end - alike : end]
                if all(one[0] == other[0] for one, other in zip(latest, latest[length:])):
                    usual = [_usual(run[1] for run in latest[place::length]) for place in range(length)]
                    if 0 < min(usual) <= FEW:
                        self._begin_turns(end, length, alike, usual)
                        return True
        return False

    def _candidates(self, end: int) -> list[int]:
        """Returns the lengths that a turn can have, in runs: the distances since which its optimizer comes back."""
        runs = self._runs
        start = len(runs) - 1
        optimizer, found = runs[start][0], []
        for length in range(2, min(start, end // TURNS, self._longest) + 1):
            if runs[start - length][0] == optimizer:
                found.append(length)
                if len(found) == MOST_RETURNS:
                    break
        return found

    def _begin_turns(self, end: int, length: int, latest: int, usual: list[int]) -> None:
        """Makes turns of the held updates, from the first run on since which `length` runs repeat.

        The turns were found in the `latest` runs before number `end`.
        """
        runs, start = self._runs, end - latest
        if self._single:  # the steps until here have been decided
            start, held = end - length, self._held
        else:
            while start and runs[start - 1][0] == runs[start - 1 + length][0]:
                start -= 1
                usual = usual[-1:] + usual[:-1]
            held = self._held[sum(run[1] for run in runs[:start]) :]
        order = [run[0] for run in runs[start : start + length]]
        for _ in range(len(self._held) - len(held)):
            self._end_step(1)
        if not self._single and runs[start][1] > usual[0]:  # it had begun before the others did
            before = runs[start][1] - usual[0]
            for _ in range(before):
                self._end_step(1)
            held = held[before:]
        if self.complete:
            self.changed = self.complete
        self._order, self._usual, self._last, self._now = order, usual, [], [0] * length
        self._at = self._irregular = 0
        self._single, self._held, self._runs = False, [], []
        for optimizer in held:
            self.add(optimizer, alone=False)

    def _go_on(self, optimizer: int) -> None:
        """Notes an update while turns are known."""
        order = self._order
        if optimizer != order[self._at]:
            following = [*range(self._at + 1, len(order)), *range(self._at)]
            place = next((place for place in following if order[place] == optimizer), None)
            if place is None:
                self._begin_again(optimizer)
                return
            if place < self._at:
                self._end_turn()
                if self._irregular >= MOST_IRREGULAR:
                    self._again = True
                    self._begin_again(optimizer)
                    return
            self._at = place
        self._held.append(optimizer)
        self._now[self._at] += 1
        if self._at == len(order) - 1 and self._now[self._at] == self._usual[self._at]:
            self._end_step(len(self._held))
            self._held.clear()
        elif len(self._held) >= _most_held(len(order)) + sum(self._usual):  # the others update no more
            self._again = True
            self._begin_again()

    def _end_turn(self) -> None:
        now, usual = self._now, self._usual
        if now[-1] < usual[-1] and self._held:  # the step would have ended with a later update
            self._end_step(len(self._held))
            self._held.clear()
        fitting = sum(one == other for one, other in zip(now, usual))
        if fitting >= ALIKE * len(usual) or now == self._last:
            self._irregular = max(0, self._irregular - 1)
            if now == self._last:
                self._usual = [one or other for one, other in zip(now, usual)]
        else:
            self._irregular += IRREGULAR
        self._last, self._now = now, [0] * len(now)

    def _begin_again(self, *more: int) -> None:
        """Ends the rhythm: the updates since the last step, and `more`, are held until another one is found."""
        self.changed = self.complete
        held, self._held, self._order, self._runs = [*self._held, *more], [], [], []
        for optimizer in held:
            self.add(optimizer, alone=False)


def _most_held(optimizers: int) -> int:
    return LONGEST_RUN + 2 * optimizers


def _usual(numbers: Iterable[int]) -> int:
    """Returns the number that most of `numbers` are; 0 if there is none."""
    found = Counter(numbers)
    number, times = found.most_common(1)[0]
    return number if times >= ALIKE * sum(found.values()) else 0
