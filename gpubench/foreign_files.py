"""Reads files of unknown origin without blocking and with limits on their size.

A path in a run directory can lead to a pipe without a writer, an endless device, or a sparse file larger than the
memory. All of these raise OSError, like a file that cannot be read. The module also holds the names by which files of
gpubench are recognised.
"""

import errno
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

RUN = "run.json"
"""The file by which a folder is recognised as a run directory."""

SEARCH = "tune.json"
"""The file by which a folder is recognised as a search for the fastest settings."""

SEARCH_LOCK = ".lock"
"""The file in its folder that a search in progress has locked."""

TRIALS = "-verify"
"""The suffix of an experiment whose runs try the fixes proposed for a run of another experiment."""

MOST = 256 * 2**20
"""The largest size of a document in bytes: a hundred times that of the largest document that gpubench writes."""
LONGEST = 16 * 2**20
"""The largest length of a line in bytes. A line of steps.jsonl has about 300."""


def opened(path: Path) -> BufferedReader:
    """Opens a regular file. Raises OSError for any other kind, without waiting for a pipe."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def content(path: Path, most: int = MOST) -> bytes:
    """Returns the whole file. Raises OSError if it is not a regular file or has more than `most` bytes."""
    with opened(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it is larger than {most >> 20} MiB", str(path))
        return file.read(most)


def lines(path: Path) -> Iterator[bytes]:
    """Yields the lines of a file. Raises OSError if it is not a regular file or a line exceeds LONGEST bytes."""
    with opened(path) as file:
        while line := file.readline(LONGEST + 1):
            if len(line) > LONGEST:
                raise too_long(path)
            yield line


def too_long(path: Path) -> OSError:
    return OSError(errno.EFBIG, f"a line of it is longer than {LONGEST >> 20} MiB", str(path))


class BadLines:
    """Reports the invalid lines of a file: the first LIMIT each, and the number of the others."""

    LIMIT = 20

    def __init__(self, file: Path, problems: list[str]) -> None:
        self._file = file
        self._problems = problems
        self._count = 0

    def add(self, number: int, error: Exception) -> None:
        self._count += 1
        if self._count <= self.LIMIT:
            self._problems.append(f"{self._file}:{number}: {error}")

    def close(self) -> None:
        """Reports the number of the other lines. Call it at the end of the file."""
        if self._count > self.LIMIT:
            self._problems.append(f"{self._file}: {self._count - self.LIMIT} more lines are invalid")
