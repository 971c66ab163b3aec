"""What a benchmark had to reach, whether it did, and how it says so.

Verdicts are the last that a benchmark prints, a line each. Its exit code is as that of `gpubench compare`: 0 where all
bars are met, 3 where one is missed, 4 where one is undecided and none is missed; with 1 or 2 it did not get so far. Who
runs many of them finds the same in the file that `BENCHMARK_BARS` names.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

VARIABLE = "BENCHMARK_BARS"
MET, MISSED, UNDECIDED = "met", "missed", "undecided"
CODES = {MET: 0, MISSED: 3, UNDECIDED: 4}


class Bar(msgspec.Struct, frozen=True):
    what: str
    figure: str
    """Ours."""
    bar: str
    verdict: str
    by: str | None = None
    """How far off, where it is missed."""

    def __str__(self) -> str:
        return f"{self.verdict + (f' by {self.by}' if self.by else ''):<16}  {self.what}: {self.figure}, bar {self.bar}"


def at_most(what: str, figure: float, limit: float, form: str) -> Bar:
    """`form` gives a figure its decimals and its unit, as "{:.2f} s"."""
    over = figure / limit - 1
    missed = f"{over:.1%}" if over > 0 else None
    return Bar(what, form.format(figure), f"at most {form.format(limit)}", MISSED if missed else MET, missed)


def every(what: str, good: int, total: int) -> Bar:
    """All of them have to be good."""
    missed = total - good
    return Bar(what, f"{good} of {total}", "all", MISSED if missed else MET, str(missed) if missed else None)


def near_one(what: str, estimate: float, interval: tuple[float, float] | None, margin: float) -> Bar:
    """A ratio with its 95 % interval: met if the whole of it lies within `margin` of 1, missed if none of it does."""
    low, high = interval or (0.0, float("inf"))
    figure = f"{estimate:.4f}" + (f" [{low:.4f}, {high:.4f}]" if interval else "")
    off = max(1 - margin - high, low - 1 - margin)
    inside = 1 - margin <= low and high <= 1 + margin
    verdict = MET if inside else MISSED if off > 0 else UNDECIDED
    return Bar(what, figure, f"{1 - margin:.3f} to {1 + margin:.3f}", verdict, f"{off:.1%}" if off > 0 else None)


def conclude(bars: Sequence[Bar]) -> int:
    """Prints the verdicts, and returns the exit code."""
    print()
    for bar in bars:
        print(bar)
    if path := os.environ.get(VARIABLE):
        Path(path).write_bytes(msgspec.json.encode(bars))
    verdicts = {bar.verdict for bar in bars}
    return CODES[MISSED if MISSED in verdicts else UNDECIDED if UNDECIDED in verdicts else MET]
