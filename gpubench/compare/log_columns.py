"""The numbers in the logs of other tools: their units, their possible values, and how finely they were measured."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpubench.errors import DataError, UsageError
from gpubench.metrics import RATES, Better
from gpubench.runs.stats import Series

SECONDS = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "msec": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
BYTES = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "kB": 1e3, "MB": 1e6, "GB": 1e9}
A_SECOND = ("s", "sec", "second")
GREATEST = 1e100  # largest value: sums of squares must be finite
LEAST = 1 / GREATEST  # smallest time or rate: inverses must be finite too
PLAIN = "write numbers with a decimal point, without separators of thousands"
EMPTY = "leave the cell empty where nothing was measured, and the row is skipped"


@dataclass(frozen=True)
class LogColumn:
    """The column to read from a log. Values times `scale` are in `unit`, which is a base unit if it is known."""

    name: str
    unit: str
    scale: float
    better: Better

    @classmethod
    def of(cls, name: str, unit: str, better: Better | None = None) -> "LogColumn":
        """Returns the column with its base unit. Raises UsageError if the better direction is unknown."""
        amount, _, per = unit.partition("/")
        if (
            amount in SECONDS and unit != f"{amount}/" and per not in A_SECOND
        ):  # "ms", or "s/it" as progress bars have it
            return cls(name, "s", SECONDS[amount], better or "lower")
        if unit in BYTES:
            return cls(name, "B", BYTES[unit], better or "lower")
        work, _, time = unit.rpartition("/")
        if work and time in A_SECOND:
            unit = f"{work}/s"
        better = better or ("higher" if unit.endswith("/s") else None)
        if better is None:
            raise UsageError(
                f"it is unknown whether lower or higher values in {unit!r} are better",
                "add --better lower or --better higher",
            )
        return cls(name, unit, 1.0, better)

    @property
    def is_rate(self) -> bool:
        """Whether the column holds work over time, with one step per row."""
        return self.unit.endswith("/s") or (self.name in RATES and self.unit not in ("s", "B"))


class Number(str):
    """A number of a JSON document as it is written, which shows its resolution."""

    __slots__ = ()


_JSON = json.JSONDecoder(parse_float=Number, parse_int=Number, parse_constant=Number)


def json_of(text: str, start: int = 0) -> tuple[Any, int]:
    """Decodes the JSON value at `start`, with numbers as `Number`. Returns it and its end.

    Raises ValueError, or RecursionError for a value that is nested too deeply. Not a number and infinity are accepted,
    because Python writes them.
    """
    return _JSON.raw_decode(text, start)


class Cells:
    """Converts the cells of one column to numbers, counts the empty ones and notes how finely they are written."""

    def __init__(self, path: Path, column: LogColumn, *, clock: bool = False, hint: str = EMPTY) -> None:
        """With `clock` the cells are readings of a clock, which may be 0. `hint` says what to do about a bad cell."""
        self.column = column
        self.is_clock = clock
        self._path = path
        self._hint = hint
        self._per_step = None if clock else "rate" if column.is_rate else "time" if column.unit == "s" else None
        self._least = 0.0 if clock or column.unit == "B" else -GREATEST
        self._decimals = -math.inf
        self._digits = 0
        self.empty = 0

    def number(self, cell: Any, line: int | None = None) -> float:
        """Returns the cell as a number. Raises DataError with the line, if it has one."""
        try:
            if isinstance(cell, str) and ("_" in cell or not cell.isascii()):
                raise ValueError("Python reads it as a number, but no other tool writes one so")
            value = math.nan if isinstance(cell, bool) else float(cell)
        except (TypeError, ValueError, OverflowError):
            hint = PLAIN if "," in str(cell) and any(map(str.isdigit, str(cell))) else self._hint
            raise self._refusal(f"{cell!r} is not a number", line, hint) from None
        if self._per_step and value * self.column.scale < LEAST and value > -math.inf:
            raise self._refusal(f"{cell!r} cannot be the {self._per_step} of a step", line, self._hint)
        if not self._least <= value <= GREATEST:
            raise self._refusal(f"{cell!r} is not a possible value", line, self._hint)
        self._note(str(cell))
        return value

    def _note(self, text: str) -> None:
        mantissa, _, power = text.strip().lower().partition("e")
        decimals = len(mantissa.partition(".")[2]) - int(power or 0)
        if decimals > self._decimals:
            self._decimals = decimals
            self._digits = len(mantissa.replace(".", "").lstrip("-+0"))

    @property
    def written(self) -> float | None:
        """The smallest difference that the cells can express, in the column's unit; None without a cell.

        It is 0 if they have all the digits of a floating-point number.
        """
        if math.isinf(self._decimals):
            return None
        return 0.0 if self._digits >= FULL_PRECISION else 10.0**-self._decimals * self.column.scale

    def _refusal(self, reason: str, line: int | None, hint: str) -> DataError:
        where = self._path if line is None else f"{self._path}:{line}"
        return DataError(f"{where}: {self.column.name}: {reason}", hint)


FULL_PRECISION = 15  # digits that every floating-point number has
CLOCK_ROUNDING = 5e-7  # seconds: the difference of two times since 1970, each rounded to a floating-point number
FEWEST_TICKS = 10  # values that show the step of a clock
COARSE = 8.0  # times the rounding of a value: smaller steps cannot be told from it
BY_CHANCE = 0.05  # probability that values which a clock did not round are multiples of one step
SMALLEST_GAP = 3  # multiples of the clock's step that the smallest difference of two values may be


def clock_step(values: Series, written: float) -> float:
    """Returns the step of the clock that measured these times in seconds, or `written` if no coarser step is seen.

    A coarse clock, such as one that advances every 15.6 ms, gives multiples of its step however many digits are
    written. `written` is the smallest difference that these can express. A step is found if all values are multiples
    of it, up to their rounding, and if so many different values are so by chance with a probability below BY_CHANCE.
    """
    rounding = max(written, CLOCK_ROUNDING)
    ordered = np.unique(values)
    points = ordered[np.diff(ordered, prepend=-np.inf) > rounding]  # one of those that differ by their rounding alone
    if len(values) < FEWEST_TICKS or len(points) < 2:
        return written
    smallest = float(np.diff(points).min())
    distances = [*(points[1:] - points[0]).tolist(), float(points[0])]
    steps = (_common_step(distances, smallest / parts, smallest, rounding) for parts in range(1, SMALLEST_GAP + 1))
    return next((step for step in steps if step), written)


def _common_step(distances: Sequence[float], step: float, known: float, rounding: float) -> float | None:
    """Returns the step of which all distances are multiples, more precisely than it is given; None if there is none.

    `known` is a distance that is a multiple of the step, and tells it with an error of rounding. Each longer one tells
    it more precisely. Those that are too long to be told from the next multiple are left out.
    """
    chances = []
    for distance in distances:
        multiple, allowed = round(distance / step), rounding * (1 + distance / known)
        if 4 * allowed > step:
            continue
        if not multiple or abs(distance - multiple * step) > allowed:
            return None
        chances.append(2 * allowed / step)
        if distance > known:
            known, step = distance, distance / multiple
    by_chance = math.prod(sorted(chances)[1:])  # the distance that the step was taken from is its multiple anyway
    return step if by_chance < BY_CHANCE and step >= COARSE * rounding else None
