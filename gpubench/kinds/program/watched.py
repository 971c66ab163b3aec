"""Finds the numbers that the user watches in what a program prints, such as the loss of its evaluations."""

import re
from collections import defaultdict

LONGEST = 1000
"""The bytes of a line that are searched."""
MOST = 1000
"""The values of a number that are kept of one repeat."""
NAME = re.compile(r"[A-Za-z][\w/ .-]*")


def name_of(pattern: str) -> str:
    """Returns what the first group of a pattern is called: what stands before it, as in "val_loss=([0-9.]+)"."""
    found = NAME.findall(pattern.partition("(")[0])
    return found[-1].strip(" .-") if found else "watched"


class WatchedOutput:
    """The output of a program, line by line, of one repeat after the other."""

    def __init__(self, pattern: str) -> None:
        """`pattern` is a regular expression, whose first group is a number; named groups are several numbers."""
        self._pattern = re.compile(pattern)
        self._names = list(self._pattern.groupindex) or [name_of(pattern)]
        self._rest = b""
        self._repeat = 0
        self._values: defaultdict[int, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def begin(self, repeat: int) -> None:
        """Takes up that what follows is printed in another repeat."""
        self._rest, self._repeat = b"", repeat

    def add(self, data: bytes) -> None:
        """Takes up a part of the output."""
        *lines, self._rest = re.split(rb"[\r\n]", self._rest + data)
        self._rest = self._rest[-LONGEST:]
        for line in lines:
            for found in self._pattern.finditer(line[:LONGEST].decode(errors="replace")):
                self._take(found)

    def _take(self, found: re.Match[str]) -> None:
        for name in self._names:
            text = found[name] if name in self._pattern.groupindex else found[1]
            values = self._values[self._repeat][name]
            try:
                value = float(text)
            except (TypeError, ValueError):  # the group has taken no part, or is not a number
                continue
            if len(values) < MOST and abs(value) < 1e60:
                values.append(value)

    def of_repeats(self, repeats: list[int]) -> dict[str, list[list[float]]]:
        """Returns the values of each number in these repeats, in the order in which they were printed."""
        return {name: [list(self._values[repeat][name]) for repeat in repeats] for name in self._names}
