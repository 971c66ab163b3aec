"""Compares the clock of the measured processes with the host's, which they cannot set.

The host notes when reports of steps arrive. A report arrives some time after the end of its last step, sooner or later
as the machine is busy, but never before it. Between two reports that came as soon as any around them, the same time has
passed by both clocks.
"""

import math
import time
from collections.abc import Iterable, Sequence

from msgspec import Struct

LEAST_SECONDS = 1.0
"""The time of a repeat, by the longer of both clocks, from which on the clocks are compared."""
FEWEST = 4
"""The reports that a repeat needs for that: two at each end."""
SHARE, DELAY = 0.03, 0.2
"""Clocks differ if their times do by more than this share of the longer one, and this delay in seconds for a repeat.
The delays of several repeats are independent of each other."""


class ClockCheck(Struct, frozen=True):
    """The time that has passed in one repeat by both clocks, in seconds."""

    program: float
    """By the clock of the measured process: the time from the end of one step to that of a later one."""
    host: float
    """By the clock of the host: the time between the arrivals of their reports."""


class Arrivals:
    """When the reports of one rank have arrived in a repeat."""

    def __init__(self) -> None:
        self._reports: list[tuple[float, float]] = []

    def add(self, end: float) -> None:
        """Takes up a report of steps, the last of which has ended at `end` by the clock of the rank."""
        self._reports.append((end, time.monotonic()))

    def check(self) -> ClockCheck | None:
        """Returns what has passed by both clocks; None for fewer than FEWEST reports."""
        return compared(self._reports)


def compared(reports: Sequence[tuple[float, float]]) -> ClockCheck | None:
    """Returns what has passed by both clocks between two reports; None for fewer than FEWEST reports.

    `reports` are (end of the last step by the rank's clock, arrival by the host's clock). The two are those with the
    least delay in the first and in the last third.
    """
    if len(reports) < FEWEST:
        return None
    third = max(2, len(reports) // 3)
    (end, arrival), (last_end, last_arrival) = (
        min(part, key=lambda report: report[1] - report[0]) for part in (reports[:third], reports[-third:])
    )
    return ClockCheck(program=max(0.0, last_end - end), host=max(0.0, last_arrival - arrival))


def together(checks: Iterable[ClockCheck | None]) -> ClockCheck | None:
    """Returns the times of all repeats that are long enough; None if there is none, so that nothing is known."""
    long = [one for one in checks if one and max(one.program, one.host) >= LEAST_SECONDS]
    return ClockCheck(sum(one.program for one in long), sum(one.host for one in long)) if long else None


def differ(checks: Sequence[ClockCheck | None]) -> bool | None:
    """Returns whether the clock of the process went at another speed than the host's; None if that is unknown."""
    both = together(checks)
    if both is None:
        return None
    repeats = sum(one is not None and max(one.program, one.host) >= LEAST_SECONDS for one in checks)
    return abs(both.host - both.program) > SHARE * max(both.host, both.program) + DELAY * math.sqrt(repeats)
