"""Finds the numbers that the user watches in what a program prints, such as the loss of its evaluations."""

import re
from collections.abc import Iterator
from functools import cache

from gpubench.errors import UsageError
from gpubench.kinds.program.matching import LONGEST, numbers

SECONDS = 20.0
"""The CPU time that the search of a repeat's output may take: ten times that of 64 MiB with an ordinary pattern."""
TRIAL_SECONDS = 2.0
"""The CPU time that the pattern may take for the lines of `trial`, which an ordinary one reads in a hundredth of it."""
UNITS = ("a", "0", " ", "\t", "_", "=", ".", "-", "é", "0.1 ", "ab", "a=1, ", "loss: 0.1 ")
"""What the lines of a trial repeat, besides the words and the characters of the pattern."""
MOST_UNITS = 64
NAME = re.compile(r"[A-Za-z][\w/ .-]*")


def name_of(pattern: str) -> str:
    """Returns what the first group of a pattern is called: what stands before it, as in "val_loss=([0-9.]+)"."""
    found = NAME.findall(pattern.partition("(")[0])
    return found[-1].strip(" .-") if found else "watched"


class WatchedOutput:
    """The output of a program, of one repeat after the other."""

    def __init__(self, pattern: str) -> None:
        """`pattern` is a regular expression, whose first group is a number; named groups are several numbers.

        Raises UsageError for a pattern that takes too long.
        """
        if not _is_fast(pattern):
            raise UsageError(
                f"program.watch: {pattern!r} is not done with lines of {LONGEST} characters after {TRIAL_SECONDS:g} s",
                "repeat nothing that is itself repeated, as in (a+)+, and name what stands before the number: "
                "'val_loss=([0-9.]+)'",
            )
        self._pattern = pattern
        self._names = list(re.compile(pattern).groupindex) or [name_of(pattern)]
        self._output = bytearray()
        self._searched = 0
        self._repeat = 0
        self._values: dict[int, list[list[float]]] = {}
        self._is_slow = False

    def begin(self, repeat: int) -> None:
        """Takes up that what follows is printed in another repeat."""
        self._search()
        self._output.clear()
        self._searched, self._repeat = 0, repeat

    def add(self, data: bytes) -> None:
        """Takes up a part of the output."""
        self._output += data

    def of_repeats(self, repeats: list[int]) -> dict[str, list[list[float]]]:
        """Returns the values of each number in these repeats, in the order in which they were printed."""
        self._search()
        found = [self._values.get(repeat) or [[] for _ in self._names] for repeat in repeats]
        return {name: [values[place] for values in found] for place, name in enumerate(self._names)}

    @property
    def warning(self) -> str | None:
        """Says that a repeat took too long to search, so that it and those after it have no values."""
        if not self._is_slow:
            return None
        return (
            f"what program.watch finds is unknown from repeat {max(self._values) + 1} on: the search of its output was "
            f"not done after {SECONDS:g} s"
        )

    def _search(self) -> None:
        """Searches the output of the last repeat, unless it has been searched."""
        if self._is_slow or self._searched == len(self._output):
            return
        self._searched = len(self._output)
        found = numbers(self._pattern, bytes(self._output), SECONDS)
        self._is_slow = found is None
        self._values[self._repeat] = found or []


@cache
def _is_fast(pattern: str) -> bool:
    lines = "".join(f"{line}\n" for line in trial(pattern))
    return numbers(pattern, lines.encode(errors="replace"), TRIAL_SECONDS) is not None


def trial(pattern: str) -> Iterator[str]:
    """Yields lines of `LONGEST` characters that repeat the same, each with one at its end that may fit, or may not."""
    words = re.findall(r"\w+", pattern)
    own = dict.fromkeys([pattern, "".join(words), *words, *pattern])
    for unit in [*UNITS, *(one for one in own if one.isprintable() and one)][:MOST_UNITS]:
        for end in (unit[0], "\x01"):
            yield (unit * LONGEST)[: LONGEST - 1] + end
