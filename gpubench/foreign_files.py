"""Opens files that others can have placed: without blocking, without harm to another file, with limits on their size.

In place of a file there can be a pipe without a writer, an endless device, a folder, a sparse file larger than the
memory, or a link to a file of somebody else. A link is followed for reading only. All else raises OSError, like a file
that cannot be read. The module also holds the names by which files of gpubench are recognised.
"""

import errno
import fcntl
import os
import select
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import IO

HISTORY = "history.html"
"""The page of all runs over time, in the results folder."""
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
MARGIN = 2**16
"""The bytes by which a document may grow while it is read."""
LONGEST = 16 * 2**20
"""The largest length of a line in bytes. A line of steps.jsonl has about 300."""


OTHER_END_SECONDS = 2.0
"""How long a pipe that the user has named may be without a program at its other end."""
_AT_ONCE = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
"""The flags of every file: a pipe without its other end does not block, and a terminal does not become that of this
process."""
_NEW = 0o666
"""The permissions of a new file, before those that the user's mask takes away."""


def opened(path: Path) -> BufferedReader:
    """Opens a regular file for reading. Raises OSError for any other kind, without waiting for a pipe."""
    return os.fdopen(_regular(path, os.O_RDONLY), "rb")


def given(path: Path) -> BufferedReader:
    """Opens an input that the user has named: a regular file, or a pipe, such as that of `<(zcat FILE)`.

    Raises OSError for any other kind, and for a pipe into which no program writes.
    """
    descriptor = os.open(path, os.O_RDONLY | _AT_ONCE)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISFIFO(mode):
            waiting = select.poll()
            waiting.register(descriptor, select.POLLIN)
            if not waiting.poll(1000 * OTHER_END_SECONDS):
                with suppress(BlockingIOError):  # which a pipe raises as long as a program has it open to write
                    os.read(descriptor, 1)
                    raise OSError(errno.EINVAL, "it is a pipe, and no program writes into it", str(path))
        elif not stat.S_ISREG(mode):
            raise _no_file(path, mode)
        os.set_blocking(descriptor, True)
        return os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def appended(path: Path) -> IO[bytes]:
    """Opens a file to add to its end; a new one if there is none. Raises OSError for a link, or if it is not a file."""
    return os.fdopen(_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW), "ab")


def overwritten(path: Path) -> IO[bytes]:
    """Opens an existing file to write over its content, which stays. Raises OSError for a link, or if it is not a
    file."""
    return os.fdopen(_regular(path, os.O_RDWR | os.O_NOFOLLOW), "r+b")


def written(path: Path) -> IO[bytes]:
    """Opens a pipe or a device that the user has named, to write to it. Raises OSError for a pipe that nobody reads."""
    end = time.monotonic() + OTHER_END_SECONDS
    while True:
        try:
            descriptor = os.open(path, os.O_WRONLY | _AT_ONCE)
        except OSError as error:
            if error.errno != errno.ENXIO or time.monotonic() > end or not path.is_fifo():
                raise
            time.sleep(0.02)
        else:
            os.set_blocking(descriptor, True)
            return os.fdopen(descriptor, "wb")


def lock(path: Path, *, shared: bool = False) -> IO[bytes]:
    """Locks a file, until the returned one is closed; its content stays as it is.

    A shared lock needs an existing file. Raises BlockingIOError if another process has a lock, and OSError for a link
    or anything else that is not a file.
    """
    file = os.fdopen(_regular(path, os.O_RDWR | os.O_NOFOLLOW | (0 if shared else os.O_CREAT)), "r+b")
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


@contextmanager
def locked(folder: Path, seconds: float) -> Iterator[None]:
    """A context that no other process enters for the same folder. A file system without locks has none.

    The folder itself is locked, so that no file is left behind. Raises BlockingIOError if it stays locked for so long.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _AT_ONCE)
    try:
        end = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.02)
            except OSError:
                break
        yield
    finally:
        os.close(descriptor)


def replace(path: Path, data: bytes) -> None:
    """Writes a new file and renames it to `path`, so that a link there is replaced and never followed.

    Raises OSError, and removes the new file in that case.
    """
    aside = path.with_name(f".{path.name}.tmp")
    try:
        aside.unlink(missing_ok=True)  # in a shared folder it may be a link to another file
        with aside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def _regular(path: Path, flags: int) -> int:
    descriptor = os.open(path, flags | _AT_ONCE, _NEW)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _no_file(path, mode)
    return descriptor


def _no_file(path: Path, mode: int) -> OSError:
    if stat.S_ISDIR(mode):
        return OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    return OSError(errno.EINVAL, "it is not a regular file", str(path))


def content(path: Path, most: int = MOST) -> bytes:
    """Reads the whole file. Raises OSError if it is not a regular file or has more than `most` bytes."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it is larger than {most >> 20} MiB", str(path))
        return file.read(min(most, size + MARGIN))  # which takes as much memory as it may read


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
