"""Files that anyone may have written, read without waiting and within bounds.

A name in a run directory can lead to a pipe that nobody writes to, a device that never ends, or a file with more holes
than there is memory. All of them are refused with OSError, as what cannot be read is.
"""

import errno
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

MOST = 256 * 2**20
"""Bytes of a document that is read whole; the largest that gpubench writes have a hundredth of it."""
LONGEST = 16 * 2**20
"""Bytes of a line; one of steps.jsonl has 300."""


def opened(path: Path) -> BufferedReader:
    """Raises OSError for what is no regular file. A pipe is not waited for."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def content(path: Path, most: int = MOST) -> bytes:
    """The whole file. Raises OSError for what is no regular file, or has more than `most` bytes."""
    with opened(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it is larger than {most >> 20} MiB", str(path))
        return file.read(most)


def lines(path: Path) -> Iterator[bytes]:
    """One after the other. Raises OSError for what is no regular file, and for a line of more than LONGEST bytes."""
    with opened(path) as file:
        while line := file.readline(LONGEST + 1):
            if len(line) > LONGEST:
                raise too_long(path)
            yield line


def too_long(path: Path) -> OSError:
    return OSError(errno.EFBIG, f"a line of it is longer than {LONGEST >> 20} MiB", str(path))
