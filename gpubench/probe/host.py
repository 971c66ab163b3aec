"""The probe's connection to the host: the handshake of `gpubench.worker.channel`, without a package outside of Python.

The measured process has no thread for it: events are sent between two steps, some times a second.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

FLUSH_SECONDS = 0.2
CONNECT_SECONDS = 10.0
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class Host:
    """The connection of a rank to the host."""

    gone = False
    """Whether the host has ended before this rank."""

    def __init__(self, address: str, rank: int, world_size: int) -> None:
        """Performs the handshake and waits for the job.

        Raises ConnectionRefusedError if the host was killed, and another OSError if it refuses this rank.
        """
        self.rank = rank
        self._pending: list[bytes] = []
        self._flushed_at = 0.0
        self._connection: socket.socket | None = _open(address)
        hello = {
            "event": "hello",
            "rank": rank,
            "world_size": world_size,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "machine": machine(),
            "secret": "",
        }
        self._connection.sendall(_line(hello))
        with self._connection.makefile("rb") as answers:
            answer = answers.readline()
        if not answer:
            raise ConnectionAbortedError("the host refused this rank")
        self.job: dict[str, Any] = json.loads(answer)
        unix, monotonic = self.job["clock"]
        self._to_unix = unix - monotonic if self.job["machine"] == machine() else time.time() - time.monotonic()

    def unix(self, ns: int) -> float:
        """Returns a value of `time.monotonic_ns` in seconds since the epoch, by the host's clock."""
        return float(self._to_unix + ns / 1e9)

    def put(self, event: str, **fields: Any) -> None:
        """Buffers an event until the next flush."""
        self._pending.append(_line({"event": event, "rank": self.rank, **fields}))

    def warn(self, message: str) -> None:
        """Adds a warning to the run's log."""
        self.put("log", time=time.time(), level=30, logger="gpubench.program", message=message)

    def due(self) -> bool:
        """Returns whether the last flush was more than FLUSH_SECONDS ago."""
        return time.monotonic() - self._flushed_at > FLUSH_SECONDS

    def flush(self) -> None:
        """Sends the buffered events."""
        data, self._pending = b"".join(self._pending), []
        self._flushed_at = time.monotonic()
        if self._connection is None:
            return
        try:
            self._connection.sendall(data)
        except OSError as error:
            self.gone = isinstance(error, ConnectionError)  # otherwise the program has closed the connection
            self.close()

    def close(self) -> None:
        if self._connection:
            with suppress(OSError):  # the program may have closed the file descriptor
                self._connection.close()
            self._connection = None


def machine() -> str:
    """Returns the identifier of `gpubench.ranks.machine`."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def _open(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(CONNECT_SECONDS)
    try:
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    connection.settimeout(None)
    return connection


def _line(message: dict[str, Any]) -> bytes:
    return _ENCODER.encode(message).encode() + b"\n"
