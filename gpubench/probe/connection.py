"""A socket that is used and closed only while its descriptor is its own.

Code of the user runs beside the sockets of gpubench. It may close descriptors that it has not opened, as daemons do, or
replace them by dup2. The numbers then belong to its own files and sockets, which must not get what gpubench sends, and
must not be closed.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from typing import Any

COOKIE = 57
"""SO_COOKIE of Linux: an option whose value no two sockets have in common, which the module socket does not name."""
NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
"""The program may have set SIGPIPE to its default, which ends the process."""


class Taken(OSError):
    """Raised for a connection that the code of the user has closed, whether or not its number is in use again."""


class Connection(socket.socket):
    """A connected socket. Once its descriptor is not its own, it sends and receives nothing and closes nothing.

    Its identity is compared right before each use: on Linux by its cookie, because that call does not release the
    interpreter's lock, so that no other thread can close the descriptor meanwhile; elsewhere by device and inode.
    """

    _identity: object = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._identity = self._found()

    def _found(self, fstat: Any = os.fstat) -> object:
        """Returns what the descriptor stands for now; None if it is closed."""
        try:
            if sys.platform == "linux":
                return self.getsockopt(socket.SOL_SOCKET, COOKIE, 8)
        except OSError:  # closed, no socket, or not the kernel of Linux itself
            pass
        try:
            status = fstat(self.fileno())
        except (OSError, ValueError):
            return None
        return status.st_dev, status.st_ino

    @property
    def is_own(self) -> bool:
        """Whether the descriptor still stands for this socket."""
        return self._identity is not None and self._found() == self._identity

    def _check(self) -> None:
        if not self.is_own:
            raise Taken("the connection was closed by the code that is measured")

    def sendall(self, data: Any, flags: int = 0) -> None:
        """Sends all of `data`. Raises Taken if the descriptor is not that of this socket any more."""
        rest = memoryview(data)
        while rest:
            self._check()
            rest = rest[self.send(rest, flags | NO_SIGNAL) :]

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        """Reads for `makefile`. Raises Taken if the descriptor is not that of this socket any more."""
        self._check()
        return super().recv_into(*args, **kwargs)

    def shutdown(self, how: int) -> None:
        """Shuts the connection down. Raises Taken if the descriptor is not that of this socket any more."""
        self._check()
        super().shutdown(how)

    def close(self) -> None:
        """Closes the descriptor if it is still that of this socket."""
        if self.is_own:
            super().close()
        else:
            self.detach()

    def __del__(self) -> None:
        """Closes it as `close` does; without this method the socket would close whatever has its number."""
        with suppress(Exception):  # at the end of the interpreter, when modules are gone
            self.close()
