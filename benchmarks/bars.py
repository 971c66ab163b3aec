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
MET, MISSED, UNDECIDED, SKIPPED = "met", "missed", "undecided", "skipped"
FAILED, STOPPED, INTERRUPTED = "failed", "stopped", "interrupted"
WORST_FIRST = (MISSED, FAILED, STOPPED, INTERRUPTED, UNDECIDED, SKIPPED, MET)
"""All verdicts. Those between missed and undecided are of a benchmark, or of a part, that did not come to its end."""
CODES = {MET: 0, MISSED: 3, UNDECIDED: 4}


class Bar(msgspec.Struct, frozen=True):
    """A measured figure, its limit, and the verdict."""

    what: str
    """What is measured."""
    figure: str
    """The measured figure; for a bar that was skipped, the reason."""
    bar: str
    """The limit; empty for a bar that was skipped."""
    verdict: str
    by: str | None = None
    """The amount by which the bar is missed."""

    def __str__(self) -> str:
        limit = f", bar {self.bar}" if self.bar else ""
        return f"{self.verdict + (f' by {self.by}' if self.by else ''):<16}  {self.what}: {self.figure}{limit}"


def at_most(what: str, figure: float, limit: float, form: str, detail: str = "") -> Bar:
    """Judge a figure with an upper limit; `form` is its format with the unit, such as "{:.2f} s".

    `detail` says what the figure was computed from.
    """
    over = figure / limit - 1
    missed = f"{over:.1%}" if over > 0 else None
    shown = form.format(figure) + (f" ({detail})" if detail else "")
    return Bar(what, shown, f"at most {form.format(limit)}", MISSED if missed else MET, missed)


def holds(what: str, figure: str, bar: str, *, good: bool) -> Bar:
    """Return the bar of what either holds or does not, such as that a run completes."""
    return Bar(what, figure, bar, MET if good else MISSED)


def skipped(what: str, reason: str) -> Bar:
    """Return the bar of what cannot be measured here."""
    return Bar(what, reason, "", SKIPPED)


def every(what: str, good: int, total: int) -> Bar:
    """Judge the number of good cases, of which there must be `total`."""
    missed = total - good
    return Bar(what, f"{good} of {total}", "all", MISSED if missed else MET, str(abs(missed)) if missed else None)


def near_one(what: str, estimate: float, interval: tuple[float, float] | None, margin: float) -> Bar:
    """Judge a ratio by its 95 % interval: met if all of it is within `margin` of 1, missed if none of it is."""
    low, high = interval or (0.0, float("inf"))
    figure = f"{estimate:.4f}" + (f" [{low:.4f}, {high:.4f}]" if interval else "")
    off = max(1 - margin - high, low - 1 - margin)
    inside = 1 - margin <= low and high <= 1 + margin
    verdict = MET if inside else MISSED if off > 0 else UNDECIDED
    return Bar(what, figure, f"{1 - margin:.3f} to {1 + margin:.3f}", verdict, f"{off:.1%}" if off > 0 else None)


def not_above(what: str, estimate: float, interval: tuple[float, float] | None, limit: float) -> Bar:
    """Judge a ratio with an upper limit by its 95 % interval: met if all of it is below, missed if all is above."""
    low, high = interval or (0.0, float("inf"))
    figure = f"{estimate:.4f}" + (f" [{low:.4f}, {high:.4f}]" if interval else "")
    verdict = MET if high <= limit else MISSED if low > limit else UNDECIDED
    return Bar(what, figure, f"at most {limit:.3f}", verdict, f"{low - limit:.1%}" if verdict == MISSED else None)


def counted(verdicts: Sequence[str]) -> str:
    """Return how many there are of each verdict, as "1 missed, 4 met"."""
    return ", ".join(f"{verdicts.count(one)} {one}" for one in WORST_FIRST if one in verdicts)


def conclude(bars: Sequence[Bar]) -> int:
    """Print the verdicts, and return the exit code."""
    print()
    for bar in bars:
        print(bar)
    note(bars)
    verdicts = {bar.verdict for bar in bars}
    return CODES[MISSED if MISSED in verdicts else UNDECIDED if UNDECIDED in verdicts else MET]


def note(bars: Sequence[Bar]) -> None:
    """Write the verdicts so far for the program that runs this benchmark, if one does."""
    if path := os.environ.get(VARIABLE):
        Path(path).write_bytes(msgspec.json.encode(bars))
