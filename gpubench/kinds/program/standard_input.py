"""Gives the standard input of gpubench to a program of the user, the same to each start of it.

A program is started again for each repeat and each side of a comparison, and standard input can be read only once. A
file is opened again for each start. What comes through a pipe is passed on as it comes, and kept in a file without a
name for the later starts, which get it from the beginning and then what comes after it. So a stream without an end
works too, as long as no more is read of it than is kept. A terminal is not passed on: the program runs in a session of
its own, in which it could not read from it.
"""

import logging
import os
import select
import stat
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from typing import IO

from gpubench import units
from gpubench.errors import ProgramFailed

MOST_KEPT = 256 * 2**20
"""The bytes of a stream that are kept for later starts."""
AT_ONCE = 1 << 16
"""The bytes that are passed on at a time: what a pipe holds. A stream of at most this size was there at once."""

log = logging.getLogger("gpubench.program")


class InputFeed:
    """The standard input of one start of a program."""

    def __init__(self, descriptor: int, wake: int | None = None, thread: threading.Thread | None = None) -> None:
        self.descriptor = descriptor
        """What to start the program with; subprocess.DEVNULL if there is nothing for it."""
        self._wake = wake
        self._thread = thread

    def release(self) -> None:
        """Closes what only the program needs, once it has started."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = subprocess.DEVNULL

    def close(self) -> None:
        """Passes nothing on any more."""
        self.release()
        if self._wake is not None and self._thread:
            os.close(self._wake)
            self._wake = None
            self._thread.join()


class StandardInput:
    """What is on a descriptor of this process, by default its standard input, for any number of starts."""

    def __init__(self, source: int | None = None) -> None:
        self._source = (0 if sys.__stdin__ is not None else -1) if source is None else source
        self._offset: int | None = None
        """Where a file was when it was given; None for anything else."""
        self._kept: IO[bytes] | None = None
        self._length = 0
        """The bytes that have come."""
        self._has_ended = False
        self._lost = ""
        """Why not all that has come is kept; an empty string if all is."""
        self._starts = 0

    @property
    def is_awaited(self) -> bool:
        """Whether a program may be waiting for more."""
        return self._kept is not None and not self._has_ended

    def close(self) -> None:
        """Forgets what has been kept."""
        if self._kept:
            self._kept.close()

    def feed(self) -> InputFeed:
        """Makes the standard input of the next start. Raises ProgramFailed if what it needs has not been kept."""
        self._starts += 1
        try:
            mode = os.fstat(self._source).st_mode
            if os.isatty(self._source):
                return InputFeed(subprocess.DEVNULL)
        except OSError:  # closed
            return InputFeed(subprocess.DEVNULL)
        if self._kept is None and (stat.S_ISREG(mode) or stat.S_ISBLK(mode) or stat.S_ISDIR(mode)):
            with suppress(OSError):  # it may be read, and yet not be opened again
                return InputFeed(self._opened())
        if self._lost:
            raise ProgramFailed(
                f"standard input cannot be given to the program once more: {self._lost}",
                "give it as a file, < FILE, which each start reads from its beginning; --repeats 1 starts a program "
                "of train-bench once",
            )
        if self._starts == 2 and self._length > AT_ONCE:
            log.warning(
                "the first repeat read its standard input, %s, as it came, and the others have it at once: give it "
                "as a file, < FILE, for the same in all",
                units.size(self._length),
            )
        return self._streamed()

    def _opened(self) -> int:
        """Opens the file once more, where it was when it was given. Elsewhere than on Linux both have one offset."""
        if self._offset is None:
            self._offset = os.lseek(self._source, 0, os.SEEK_CUR)
        again = os.open(f"/dev/fd/{self._source}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(again, True)
        os.lseek(again, self._offset, os.SEEK_SET)
        return again

    def _streamed(self) -> InputFeed:
        self._kept = self._kept or tempfile.TemporaryFile()  # noqa: SIM115 - it goes with this process
        (reading, writing), (woken, wake) = os.pipe(), os.pipe()
        os.set_blocking(writing, False)
        thread = threading.Thread(target=self._pass_on, args=(writing, woken), daemon=True)
        thread.start()
        return InputFeed(reading, wake, thread)

    def _pass_on(self, writing: int, woken: int) -> None:
        """Writes all that has come and that comes to a pipe, until the end, or until the other end of it is closed."""
        position = 0
        try:
            while data := self._after(position, woken):
                position += len(data)
                rest = memoryview(data)
                while rest:
                    if not _is_ready(writing, select.POLLOUT, woken):
                        return
                    with suppress(BlockingIOError):
                        rest = rest[os.write(writing, rest) :]
        except BrokenPipeError:  # the program does not read any more
            pass
        finally:
            os.close(writing)
            os.close(woken)

    def _after(self, position: int, woken: int) -> bytes:
        """The bytes after the first `position` ones; none at the end, or once `woken` is closed."""
        assert self._kept
        if position < self._length:
            return os.pread(self._kept.fileno(), AT_ONCE, position)
        if self._has_ended or not _is_ready(self._source, select.POLLIN, woken):
            return b""
        try:
            data = os.read(self._source, AT_ONCE)
        except BlockingIOError:  # another process has read it
            return self._after(position, woken)
        except OSError:
            data = b""
        self._has_ended = not data
        self._keep(data)
        return data

    def _keep(self, data: bytes) -> None:
        assert self._kept
        self._length += len(data)
        if not self._lost and self._length > MOST_KEPT:
            self._lost = f"more than {units.size(MOST_KEPT)} came through a pipe, which is all that is kept of it"
        if not self._lost:
            try:
                self._kept.write(data)
                self._kept.flush()
            except OSError as error:
                self._lost = f"what came through a pipe cannot be kept: {error.strerror}"


def _is_ready(descriptor: int, event: int, woken: int) -> bool:
    """Waits until a descriptor can be read or written. Returns False if it is to be given up instead."""
    poll = select.poll()
    poll.register(descriptor, event)
    poll.register(woken, 0)  # the end of the other side is reported in any case
    found = dict(poll.poll())
    return woken not in found


OWN = StandardInput()
"""The standard input of this process."""
