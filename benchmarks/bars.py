"""The bars of a benchmark, which are limits for its results, and the report of whether they are met.

A benchmark ends its output with a verdict on each bar. Its exit code is like that of `gpubench compare`: 0 if all bars
are met, 3 if one is missed, 4 if one is undecided and none is missed, 1 or 2 if the benchmark did not finish. The
verdicts are also written to the file named by the environment variable `BENCHMARK_BARS`, for programs that run several
benchmarks.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

VARIABLE = "BENCHMARK_BARS"
MET, MISSED, UNDECIDED = "met", "missed", "undecided"
CODES = {MET: 0, MISSED: 3, UNDECIDED: 4}


class Bar(msgspec.Struct, frozen=True):
    """A measured figure, its limit, and the verdict."""

    what: str
    """What is measured."""
    figure: str
    """The measured figure."""
    bar: str
    """The limit."""
    verdict: str
    by: str | None = None
    """The amount by which the bar is missed."""

    def __str__(self) -> str:
        return f"{self.verdict + (f' by {self.by}' if self.by else ''):<16}  {self.what}: {self.figure}, bar {self.bar}"


def at_most(what: str, figure: float, limit: float, form: str) -> Bar:
    """Judge a figure with an upper limit; `form` is its format with the unit, such as "{:.2f} s"."""
    over = figure / limit - 1
    missed = f"{over:.1%}" if over > 0 else None
    return Bar(what, form.format(figure), f"at most {form.format(limit)}", MISSED if missed else MET, missed)


def every(what: str, good: int, total: int) -> Bar:
    """Judge the number of good cases, of which there must be `total`."""
    missed = total - good
    return Bar(what, f"{good} of {total}", "all", MISSED if missed else MET, str(missed) if missed else None)


def near_one(what: str, estimate: float, interval: tuple[float, float] | None, margin: float) -> Bar:
    """Judge a ratio by its 95 % interval: met if all of it is within `margin` of 1, missed if none of it is."""
    low, high = interval or (0.0, float("inf"))
    figure = f"{estimate:.4f}" + (f" [{low:.4f}, {high:.4f}]" if interval else "")
    off = max(1 - margin - high, low - 1 - margin)
    inside = 1 - margin <= low and high <= 1 + margin
    verdict = MET if inside else MISSED if off > 0 else UNDECIDED
    return Bar(what, figure, f"{1 - margin:.3f} to {1 + margin:.3f}", verdict, f"{off:.1%}" if off > 0 else None)


def conclude(bars: Sequence[Bar]) -> int:
    """Print the verdicts, and return the exit code."""
    print()
    for bar in bars:
        print(bar)
    if path := os.environ.get(VARIABLE):
        Path(path).write_bytes(msgspec.json.encode(bars))
    verdicts = {bar.verdict for bar in bars}
    return CODES[MISSED if MISSED in verdicts else UNDECIDED if UNDECIDED in verdicts else MET]
