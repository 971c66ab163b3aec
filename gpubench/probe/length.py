"""Chooses the number of steps of a repeat from the time that they may take, where the user sets no number."""

from __future__ import annotations

from typing import NamedTuple, Sequence

MOST_WARMUP = 10
"""The warm-up of a repeat in steps, where the user sets none and there is time for it."""
WARMUP_SHARE = 6
"""A shorter repeat has one warm-up step in so many steps, as ten are of sixty."""
FEWEST = 2
"""The smallest number of measured steps: the least that have a mean and a spread. The intervals come from the repeats,
each of which counts as one value however many steps it has."""
MOST = 1000
"""The largest number of measured steps. Repeats differ by more than the error of a mean over so many steps."""
DECISIONS = (2, MOST_WARMUP)
"""The numbers of known durations with which a repeat can be decided: one of slow steps early, others once they run at
their usual speed."""


OVERRUN = 2
"""How many times its share of the time a repeat takes before it is shortened, as its steps have become slower."""


class Length(NamedTuple):
    """How long a repeat is."""

    warmup: int
    """The smallest number of steps that are excluded at its start."""
    steps: int
    """The number of all steps, with those of the warm-up."""
    each_update: bool = False
    """Whether each of so many updates is a step if they are by one optimizer, also where the program has made others.
    It is true of a length that was chosen when the time was over and no other optimizer had updated."""


def shortened(length: Length, taken: int) -> Length:
    """Returns the length of a repeat that is to end after the step that follows the `taken` ones, or soon after it."""
    return length._replace(steps=min(length.steps, max(taken + 1, length.warmup + FEWEST)))


def warmup_of(steps: int) -> int:
    """Returns the warm-up of a repeat of `steps` steps, where the user sets none."""
    return min(MOST_WARMUP, max(1, steps // WARMUP_SHARE))


def usual(durations: Sequence[float]) -> float:
    """Returns the median of the durations in seconds, without the first one, which may compile and allocate."""
    known = sorted(durations[1:])
    return max(known[len(known) // 2], 1e-9)


def fitting(seconds: float, durations: Sequence[float], warmup: int | None) -> Length | None:
    """Returns the length of a repeat whose steps, but for the first one, take about `seconds`; None if it is too early.

    `durations` are those of the steps so far, in seconds. `warmup` is what the user has set.
    """
    early, late = DECISIONS
    if len(durations) < early:
        return None
    fit = 1 + int(seconds / usual(durations))
    if fit > late > len(durations):
        return None
    warmup = warmup_of(fit) if warmup is None else warmup
    return Length(warmup, min(max(fit, warmup + FEWEST), warmup + MOST))
