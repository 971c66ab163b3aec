"""The probe's connection to the host: the handshake of `gpubench.channel`, without a package outside of Python.

The measured process has no thread for it: events are sent between two steps, some times a second.

A program on several machines has a host on each. Rank 0 puts the address of its host into the store of the process
group, and the ranks of other machines tell it to their own hosts, which relay to it.
"""

from __future__ import annotations

import base64
import os
import socket
from contextlib import suppress
from datetime import timedelta
from json import JSONEncoder, loads
from pathlib import Path
from socket import gethostname
from time import monotonic, sleep, time
from typing import Any, Callable, Iterable, Optional

from . import HOSTS_VARIABLE
from .connection import Connection, Taken

FLUSH_SECONDS = 0.2
CONNECT_SECONDS = 10.0
CHUNK = 4 * 2**20  # largest number of bytes of a file in one event
HOME_SECONDS = 60.0
"""The seconds for which a rank of another machine looks for the address of rank 0's host."""
HOME_KEY = "gpubench/host"
"""The key of that address in the store."""
_ENCODER = JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False)


class Host:
    """The connection of a rank to the host."""

    gone = False
    """Whether the host has ended before this rank. It has not where the program has closed the connection."""

    def __init__(
        self, address: str, rank: int, world_size: int, open_store: Optional[Callable[[], Any]] = None
    ) -> None:
        """Performs the handshake and waits for the job.

        Raises ConnectionRefusedError if the host was killed, and another OSError if it refuses this rank.

        `open_store` returns the store of the process group; it is called if there are ranks on other machines.
        """
        self.rank = rank
        self.world_size = world_size
        self.is_spread = False
        """Whether there are ranks on other machines."""
        self.folder = os.path.dirname(address)
        """The host's own folder, in which a file goes when the host does."""
        self._pending: list[bytes] = []
        self._flushed_at = 0.0
        self._heard = b""
        """What the host has said since the handshake, as far as it has not been taken up."""
        self._token: int | None = 0
        """The number of the newest token of the host, the first of which is the job, until it is taken."""
        self._length: tuple[int, int, bool] | None = None
        hello = {
            "event": "hello",
            "rank": rank,
            "world_size": world_size,
            "pid": os.getpid(),
            "host": gethostname(),
            "machine": machine(),
            "secret": "",
        }
        store = None
        first, here = _ranks_here(rank, world_size)
        if here < world_size:
            self.is_spread = True
            store = _opened(open_store)
            hello["ranks_here"] = [first, here]
            if first:
                _open(address).close()  # a rank whose host is gone does not look for that of rank 0
                hello["home"] = _find(store)
        self._connection: Connection | None = _open(address)  # the host disconnects who does not say hello in time
        self._connection.sendall(_line(hello))
        while b"\n" not in self._heard:
            if not self._receive(self._connection):
                raise ConnectionAbortedError("the host refused this rank")
        answer, _, self._heard = self._heard.partition(b"\n")
        self.job: dict[str, Any] = loads(answer)
        unix, since = self.job["clock"]
        self._to_unix = unix - since if self.job["machine"] == machine() else time() - monotonic()
        if self.job.get("address") and not _publish(store, self.job["address"]):
            self.warn("rank 0 cannot tell the ranks of other machines where its host is")

    def unix(self, ns: int) -> float:
        """Returns a value of `time.monotonic_ns` in seconds since the epoch, by the host's clock."""
        return float(self._to_unix + ns / 1e9)

    def put(self, event: str, **fields: Any) -> None:
        """Buffers an event until the next flush."""
        self._pending.append(_line({"event": event, "rank": self.rank, **fields}))

    def put_encoded(self, event: str, name: str, parts: Iterable[str], **fields: Any) -> None:
        """Buffers an event with a list whose parts are in JSON already, and some other fields."""
        more = "".join(f',"{key}":{_ENCODER.encode(value)}' for key, value in fields.items())
        line = f'{{"event":"{event}","rank":{self.rank},"{name}":[{",".join(parts)}]{more}}}\n'
        self._pending.append(line.encode(errors="replace"))

    def send_file(self, event: str, data: bytes, **fields: Any) -> None:
        """Sends the content of a file as events of at most CHUNK bytes each, of which the last one is marked."""
        for start in range(0, len(data), CHUNK):
            piece = base64.b64encode(data[start : start + CHUNK]).decode()
            self.put(event, **fields, data=piece, last=start + CHUNK >= len(data))
            self.flush()

    def warn(self, message: str) -> None:
        """Adds a warning to the run's log."""
        self.put("log", time=time(), level=30, logger="gpubench.program", message=message)

    def due(self, now: float) -> bool:
        """Tells whether the last flush was more than FLUSH_SECONDS ago. `now` is the time of the monotonic clock."""
        return now > self.flush_at

    @property
    def flush_at(self) -> float:
        """When the next flush is due, on the monotonic clock."""
        return self._flushed_at + FLUSH_SECONDS

    def flush(self) -> None:
        """Sends the buffered events, and reads what the host has sent meanwhile."""
        data, self._pending = b"".join(self._pending), []
        self._flushed_at = monotonic()
        if self._connection is None:
            return
        try:
            self._connection.sendall(data)
        except Taken:  # the host sees that the connection has ended while this process has not
            self.close()
        except OSError as error:
            if error.errno is None:  # no call of the system has failed: a handler of a signal has raised TimeoutError
                raise
            self.gone = isinstance(error, ConnectionError)  # otherwise the program has closed it at this instant
            self.close()
        self._listen()

    def told_length(self) -> tuple[int, int, bool] | None:
        """Returns the fields of `length.Length` if the host has told them since the handshake, without waiting."""
        self._listen()
        return self._length

    def take_token(self) -> int | None:
        """Returns the number of the host's newest token, as far as the flushes have read them; None the next time.

        The host has sent it before this call, however long it took to arrive.
        """
        token, self._token = self._token, None
        return token

    def _listen(self) -> None:
        """Reads what the host has sent, without waiting."""
        if self._connection is None:
            return
        with suppress(OSError):  # nothing has arrived, or the connection is lost, which the next flush finds out
            self._receive(self._connection, socket.MSG_DONTWAIT)
        *lines, self._heard = self._heard.split(b"\n")
        for line in lines:
            told = loads(line)
            if "token" in told:
                self._token = told["token"]
            else:
                self._length = told["warmup"], told["steps"], told["each_update"]

    def _receive(self, connection: Connection, flags: int = 0) -> int:
        """Reads some of what the host has sent, and returns how many bytes."""
        arrived = bytearray(4096)
        size = connection.recv_into(arrived, 0, flags)
        self._heard += arrived[:size]
        return size

    def close(self) -> None:
        if self._connection:
            with suppress(OSError):
                self._connection.close()
            self._connection = None


def tell(address: str, what: str) -> None:
    """Tells the host what this process, which is not one of its ranks, has done; does nothing if the host is gone."""
    with suppress(OSError):
        connection = _open(address)
        with suppress(OSError):
            connection.sendall(_line({"event": "seen", "rank": -1, "pid": os.getpid(), "what": what}))
        connection.close()


def machine() -> str:
    """Returns the identifier of `gpubench.ranks.machine`."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return gethostname()


def _ranks_here(rank: int, world_size: int) -> tuple[int, int]:
    """Returns (first rank, number of ranks) of those that this rank's host has started; all if that is unknown.

    They are numbered without a gap: by torchrun, whose variables count only if they are of this very rank, or by a
    program that a batch system has started several times, with as many ranks each time.
    """
    try:
        known, local, here = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        if known == rank and 0 <= local < here <= world_size:
            return rank - local, here
    except (KeyError, ValueError):
        pass
    here, rest = divmod(world_size, int(os.environ.get(HOSTS_VARIABLE, 1)))
    return (0, world_size) if rest else (rank - rank % here, here)


def _opened(open_store: Optional[Callable[[], Any]]) -> Any:
    try:
        return open_store() if open_store else None
    except Exception:  # there is no process group, or it has no store in this release of PyTorch
        return None


def _publish(store: Any, address: str) -> bool:
    """Puts the host's address into the store, by the name that the launchers know of this machine."""
    kind, _, where = address.partition(":")
    host, _, port = where.rpartition(":")
    try:
        store.set(HOME_KEY, f"{kind}:{os.environ.get('MASTER_ADDR') or host}:{port}")
    except Exception:  # the store is the program's, and so is its failure
        return False
    return True


def _has_home(store: Any) -> bool:
    if hasattr(store, "check"):
        return bool(store.check([HOME_KEY]))
    try:  # older releases of PyTorch
        store.wait([HOME_KEY], timedelta(seconds=1))
    except RuntimeError:
        return False
    return True


def _find(store: Any) -> str:
    """Returns the address that rank 0 puts into the store, or "" if it is not there in time.

    It polls the key, because a call that waits would keep other threads from the store.
    """
    until = monotonic() + HOME_SECONDS
    try:
        while monotonic() < until:
            if _has_home(store):
                return str(store.get(HOME_KEY), "utf-8")
            sleep(0.05)
    except Exception:  # the store is the program's, and so is its failure
        pass
    return ""


def _open(address: str) -> Connection:
    connection = Connection(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(CONNECT_SECONDS)
    try:
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    connection.settimeout(None)
    return connection


def _line(message: dict[str, Any]) -> bytes:
    # Names of files may hold lone surrogates, which JSON lacks.
    return _ENCODER.encode(message).encode(errors="replace") + b"\n"
