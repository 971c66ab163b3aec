"""A worker's end of the connection to the host.

The address is `unix:PATH` on one machine and `tcp:HOST:PORT#SECRET` from another. The host leaves it in the environment
of the workers that it starts, and in the rendezvous store for those of other machines.

Three rules keep the timed process undisturbed: events are buffered until somebody calls `flush` between steps; the
thread that listens sleeps in the kernel; the heartbeat costs some tens of microseconds a second. When the host goes
away, for whatever reason, the worker ends at once: no orphan keeps a GPU. A cable that is cut says nothing, so on the
way to another machine the kernel gives up after as long a silence as the host does.
"""

import faulthandler
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Self

import msgspec

from gpubench import events
from gpubench.errors import HostLost
from gpubench.ranks import machine

ADDRESS_VARIABLE = "_GPUBENCH_HOST"
HEARTBEAT_SECONDS = 1.0
LAST_WORD_SECONDS = 10.0
CONNECT_SECONDS = 30.0
HOST_GONE = 75  # EX_TEMPFAIL: the host that would have explained is no longer there

EVERYONE = -1  # in place of a rank: all of them


class Doing(NamedTuple):
    """What a rank is at."""

    words: str
    waits_for: int | None = None
    """The rank without which it cannot go on, or `EVERYONE`."""
    within: float | None = None
    """Seconds that it may take; None leaves it to the patience of the run."""


class Activity:
    """What this process is doing now; written by the loop, read by the heartbeat and by whoever explains a failure."""

    def __init__(self) -> None:
        self.step: int | None = None
        self._state: Doing | Callable[[], Doing] = Doing("starting")  # replaced whole: other threads read it

    @property
    def now(self) -> Doing:
        state = self._state
        return state if isinstance(state, Doing) else state()

    @property
    def doing(self) -> str:
        return self.now.words

    @doing.setter
    def doing(self, words: str) -> None:
        self._state = Doing(words)

    def enter(self, words: str, *, waits_for: int | None = None, within: float | None = None) -> None:
        """See `Doing`."""
        self._state = Doing(words, waits_for, within)

    def watch(self, other: Callable[[], Doing]) -> None:
        """The loop waits for another thread, and `other` tells what that one is doing."""
        self._state = other

    def heartbeat(self, rank: int) -> events.Heartbeat:
        words, waits_for, within = self.now
        return events.Heartbeat(rank=rank, doing=words, step=self.step, waits_for=waits_for, within=within)


class Channel:
    """Sends events to the host, and dies with it."""

    def __init__(self, connection: socket.socket, rank: int, activity: Activity, host: str | None = None) -> None:
        """`host` is the address of one on another machine, whose own words do not appear here."""
        self.rank = rank
        self._host = host
        self.activity = activity
        self._connection = connection
        self._incoming = connection.makefile("rb")
        self._pending: list[bytes] = []
        self._keeping = threading.Lock()
        self._sending = threading.Lock()
        self._closing = threading.Event()
        self._flushed_at = 0.0
        self._listener = threading.Thread(target=self._listen, daemon=True, name="gpubench-listen")

    @classmethod
    def connect(cls, address: str, rank: int, world_size: int, activity: Activity) -> tuple[Self, events.Job]:
        """Says hello and waits for the job. Raises HostLost when the host cannot be reached or turns it away."""
        address, _, secret = address.partition("#")
        kind, _, where = address.partition(":")
        hello = events.Hello(
            rank=rank,
            world_size=world_size,
            pid=os.getpid(),
            host=socket.gethostname(),
            machine=machine(),
            secret=secret,
        )
        try:
            connection = _open(kind, where)
            connection.sendall(events.encode(hello))
            channel = cls(connection, rank, activity, where if _leads_away(connection) else None)
            answer = channel._incoming.readline()
        except OSError as error:
            raise HostLost(
                f"rank {rank} cannot reach rank 0's host at {where}: {_reason(error)}",
                "no firewall may keep the machines of a run apart: the port is another one each time",
            ) from None
        if not answer:
            channel._incoming.close()
            connection.close()
            raise HostLost(
                f"rank 0's host at {where} turned rank {rank} away",
                "it takes in each rank of its own run once: see whether another run has the same rendezvous",
            )
        job = msgspec.json.decode(answer, type=events.Job)
        connection.settimeout(None)
        if channel._host:
            end_with_the_link(connection, job.silence)
        channel._listener.start()
        threading.Thread(target=channel._beat, daemon=True, name="gpubench-heartbeat").start()
        return channel, job

    def put(self, event: events.Message) -> None:
        """Keeps an event until the next flush; any thread may."""
        line = events.encode(event)
        with self._keeping:
            self._pending.append(line)

    def flush(self, at_most_every: float = 0.0) -> None:
        """Sends what was kept, unless the last flush was less than `at_most_every` seconds ago."""
        if not self._pending or (at_most_every and time.monotonic() - self._flushed_at < at_most_every):
            return
        with self._keeping:
            pending, self._pending = self._pending, []
        self._write(b"".join(pending))
        self._flushed_at = time.monotonic()

    def send(self, event: events.Message) -> None:
        """Sends an event at once, behind whatever was kept."""
        self.put(event)
        self.flush()

    def fail(self, event: events.Message) -> None:
        """Sends a last word, and stays until the host has hung up: a launcher ends all ranks when the first one exits,
        the host among them, which has yet to explain."""
        self._closing.set()
        self.send(event)
        self._listener.join(LAST_WORD_SECONDS)

    def close(self) -> None:
        """Says that all went well, and hangs up. From here on the host may go: it can before the word is out of this
        thread's hands, when the last of the other ranks has spoken."""
        self.flush()
        self._closing.set()
        self.send(events.Done(rank=self.rank))
        with suppress(OSError):  # the host was quicker
            self._connection.shutdown(socket.SHUT_WR)

    def _write(self, data: bytes) -> None:
        with self._sending:
            try:
                self._connection.sendall(data)
            except OSError as error:
                if not self._closing.is_set():  # else it was a heartbeat, a moment too late
                    self._abandon(_reason(error))

    def _beat(self) -> None:
        while not self._closing.wait(HEARTBEAT_SECONDS):
            self._write(events.encode(self.activity.heartbeat(self.rank)))

    def _listen(self) -> None:
        lost = None
        try:
            while self._incoming.readline():
                faulthandler.dump_traceback()  # DumpStacks is all a host ever asks
        except OSError as error:
            lost = _reason(error)
        if not self._closing.is_set():
            self._abandon(lost)

    def _abandon(self, lost: str | None) -> None:
        """Ends the process. What the host has to say stands on its own machine; another one is told where to look."""
        if self._host:
            how = f"is lost: {lost}" if lost else "ended the run"
            hint = "its machine's output says why, and has what was measured"
            with suppress(OSError):
                os.write(2, f"error: rank {self.rank}: the host at {self._host} {how}\nhint: {hint}\n".encode())
        os._exit(HOST_GONE)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _open(kind: str, where: str) -> socket.socket:
    """Times out until the host has answered."""
    if kind == "tcp":
        host, _, port = where.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(where)
    return connection


def _leads_away(connection: socket.socket) -> bool:
    """Whether the other end is on another machine."""
    return connection.family != socket.AF_UNIX and connection.getpeername()[0] != connection.getsockname()[0]


def end_with_the_link(connection: socket.socket, seconds: float) -> None:
    """Makes a TCP connection fail when nothing has come through for `seconds`, about.

    Linux by itself goes on sending for a quarter of an hour (tcp_retries2 in tcp(7)), and with nothing to send never
    finds out.
    """
    beat = max(1, int(seconds / 4))
    options = {"TCP_KEEPIDLE": beat, "TCP_KEEPINTVL": beat, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": int(seconds * 1000)}
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if hasattr(socket, name):  # each system has its own
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
