"""Compares the clock of a measured program with the host's, by bounds that hold however busy the machine is.

The host sends tokens to the program, and notes when it sends each. The program reads them as it reports its steps, and
its next report names the first step that ended after it had read the newest one. That step has ended after the host
had sent the token, and the last step of a report before the host had read the report. Delays widen these bounds, and
nothing moves the end of a step out of them but a clock that is not the host's.

Between two steps the host's clock has thus advanced at least so much and at most so much. Divided by the time between
them that the program reports, these are bounds of the rate: the seconds of the host's clock in one of the program's.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from gpubench import units
from gpubench.events import StepsMeasured

DRIFT = 0.01
"""The rate of a true clock differs from 1 by less. A program on the CPU uses the host's own clock. The clock of a GPU
deviates by less than 0.01 %, but a system may let its own run faster or slower for a while to correct it."""
SLACK = 1e-4
"""The seconds by which the processors of a machine may disagree about the time of an event, or rounding may change it.
"""
NARROW = 0.1
"""How far apart the bounds of the rate may be for clocks to count as the same. One that is off by more than this and
DRIFT together never does, because its rate lies between its bounds."""


class ClockRates(Struct, frozen=True):
    """The bounds of the seconds that passed by the host's clock in one second of a program's clock, in one repeat."""

    low: float
    """The largest lower bound that any two steps give. It is above `high` if the rate was not the same throughout."""
    high: float
    """The smallest upper bound."""
    seconds: float
    """The time in which the clocks were compared, by that of the program."""

    @property
    def agree(self) -> bool | None:
        """Whether both clocks tell the same time; None if the bounds are too far apart to tell."""
        if self.low > 1 + DRIFT or self.high < 1 - DRIFT:
            return False
        return True if self.high - self.low <= NARROW else None

    def __str__(self) -> str:
        if self.low > self.high:
            least, most = units.seconds(self.low), units.seconds(self.high)
            took = f"at least {least} by the host's clock in one part of a repeat, and at most {most} in another"
        else:
            took = f"{units.span(self.low, self.high, 's')} by the host's clock"
        return f"one second of its clock took {took}"


class Exchanges:
    """What the reports of one rank tell about its clock in a repeat."""

    def __init__(self) -> None:
        self._end = 0.0
        """When the last step ended, by the clock of the rank, which begins with the first step."""
        self._after: list[tuple[float, float]] = []
        """When steps ended by the clock of the rank, and by the host's clock a time before that."""
        self._before: list[tuple[float, float]] = []
        """The same with a time after that."""

    def add(self, report: StepsMeasured) -> None:
        """Takes up a report, unless its host has not said when it was read.

        The end of a step is the sum of the times of all steps until then, so that these times are what is compared.
        """
        if report.read is None:
            return
        if report.anew:
            self._after, self._before = [], []
        ends = list(accumulate((step.total for step in report.steps), initial=self._end))[1:]
        self._end = ends[-1]
        self._before.append((self._end, report.read + SLACK))
        if report.token and report.sent is not None and not report.anew:
            place = report.token[0] - report.steps[0].step
            if 0 <= place < len(ends):
                self._after.append((ends[place], report.sent - SLACK))

    def rates(self) -> ClockRates | None:
        """Returns the bounds of the rate; None if the reports give none."""
        after, before = np.array(self._after), np.array(self._before)
        if not (len(after) and len(before)):
            return None
        low, negated = _steepest(before, after), _steepest(after * (1, -1), before * (1, -1))
        if low is None or negated is None:
            return None
        seconds = max(after[-1, 0], before[-1, 0]) - min(after[0, 0], before[0, 0])
        return ClockRates(low=max(0.0, low), high=-negated, seconds=float(seconds))


def _steepest(points: NDArray[np.float64], later: NDArray[np.float64]) -> float | None:
    """Returns the largest slope from one of `points` to one of the `later` ones to the right of it; None without any.

    Both are (x, y), in the order of x. A slope is found that is exceeded from one pair at least, until there is none:
    the point from which a given slope is exceeded most is the one that is lowest over a line of this slope.
    """
    before = np.searchsorted(points[:, 0], later[:, 0])
    later, before = later[before > 0], before[before > 0]
    if not len(later):
        return None
    slope = -np.inf
    first, last = points[0], later[-1]
    while (found := (last[1] - first[1]) / (last[0] - first[0])) > slope:
        slope = found
        height, above = points[:, 1] - slope * points[:, 0], later[:, 1] - slope * later[:, 0]
        place = np.argmax(above - np.minimum.accumulate(height)[before - 1])
        first, last = points[np.argmin(height[: before[place]])], later[place]
    return float(slope)


def differ(found: Sequence[ClockRates | None]) -> bool | None:
    """Returns whether the clock of a program is not the host's, by all of its repeats; None if that is unknown."""
    agree = [rates.agree if rates else None for rates in found]
    if False in agree:
        return True
    return None if None in agree or not agree else False


def contradiction(found: Sequence[ClockRates | None]) -> str:
    """Says how the clock of a program contradicts the host's, in the repeat that shows it best; "" if none does."""
    wrong = [rates for rates in found if rates and rates.agree is False]
    return str(max(wrong, key=lambda rates: max(rates.low - 1, 1 - rates.high))) if wrong else ""


def worst(found: Sequence[ClockRates]) -> ClockRates | None:
    """Returns the rates of the rank whose clock is the least certain to be right; None if there are none."""
    certainty = (False, None, True)
    return min(found, key=lambda rates: (certainty.index(rates.agree), rates.low - rates.high), default=None)
