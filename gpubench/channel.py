"""The connection of a worker to the host, the worker's heartbeat, and the clock for its events.

The address is `unix:PATH` on one machine and `tcp:HOST:PORT#SECRET` from another. The host puts it in the environment
of the workers that it starts, and in the rendezvous store for the workers on other machines.

The connection takes little time of the timed process: events are buffered until the loop calls `flush` between steps,
the listening thread sleeps in the kernel, and the heartbeat takes some tens of microseconds per second.

When the connection to the host ends, the worker exits at once, so that it does not keep a GPU occupied. A broken link
to another machine does not end a connection, so TCP keepalive ends it, after the same time as on the host's side.
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
from gpubench.events import Job
from gpubench.probe.connection import Connection, Taken
from gpubench.ranks import machine


def calendar(job: Job) -> Callable[[], float]:
    """A clock that gives seconds since the epoch.

    On the host's machine it is the host's clock at the start of the run plus the monotonic time since, which
    corrections of the clock by NTP do not affect.
    """
    if job.machine != machine():
        return time.time
    unix, monotonic = job.clock
    return lambda: unix + time.monotonic() - monotonic


ADDRESS_VARIABLE = "_GPUBENCH_HOST"
HEARTBEAT_SECONDS = 1.0
FAILURE_SECONDS = 10.0
CONNECT_SECONDS = 30.0
HOST_GONE = 75  # EX_TEMPFAIL, the exit code of a worker whose host is gone

EVERYONE = -1  # in place of a rank number: all ranks


class Doing(NamedTuple):
    """The current activity of a rank."""

    words: str
    waits_for: int | None = None
    """The rank that this rank waits for, or `EVERYONE`."""
    within: float | None = None
    """The time limit of the activity in seconds; None for the run's own limit."""


class Activity:
    """The current activity of this process. The loop sets it; the heartbeat and error messages read it."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.patience_factor = 1.0
        """The factor by which the run's time limit for progress is multiplied, for example during compilation."""
        # Always replaced as a whole, because other threads read it.
        self._state: Doing | Callable[[], Doing] = Doing("starting")

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
        """Sets the current activity. The arguments are the fields of `Doing`."""
        self._state = Doing(words, waits_for, within)

    def watch(self, other: Callable[[], Doing]) -> None:
        """Makes `other` determine the current activity, while the loop waits for another thread."""
        self._state = other

    def heartbeat(self, rank: int) -> events.Heartbeat:
        words, waits_for, within = self.now
        return events.Heartbeat(
            rank=rank,
            doing=words,
            step=self.step,
            waits_for=waits_for,
            within=within,
            patience_factor=self.patience_factor,
        )


class Channel:
    """Sends events to the host, and ends the process when the host is gone."""

    def __init__(self, connection: Connection, rank: int, activity: Activity, host: str | None = None) -> None:
        """`host` is the address of the host if it runs on another machine, and otherwise None."""
        self.rank = rank
        self._host = host
        self.activity = activity
        self._connection = connection
        self._incoming = connection.makefile("rb")
        self._pending: list[bytes] = []
        self._pending_lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._closing = threading.Event()
        self._flushed_at = 0.0
        self._listener = threading.Thread(target=self._listen, daemon=True, name="gpubench-listen")

    @classmethod
    def connect(cls, address: str, rank: int, world_size: int, activity: Activity) -> tuple[Self, events.Job]:
        """Performs the handshake and waits for the job. Raises HostLost if the host is unreachable or refuses it."""
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
            connection = open_connection(kind, where)
            connection.sendall(events.encode(hello))
            channel = cls(connection, rank, activity, where if _is_remote(connection) else None)
            answer = channel._incoming.readline(events.LONGEST_LINE)
        except OSError as error:
            raise HostLost(
                f"rank {rank} cannot reach rank 0's host at {where}: {reason(error)}",
                "firewalls must allow TCP between the machines of a run on all ports, because each run uses a new port",
            ) from None
        if not answer:
            channel._incoming.close()
            connection.close()
            raise HostLost(
                f"rank 0's host at {where} refused the connection of rank {rank}",
                "a host accepts each rank of its own run once: check whether another run uses the same rendezvous",
            )
        try:
            job = events.parse(answer, events.Job)
        except msgspec.DecodeError:
            raise HostLost(
                f"what rank {rank} has reached at {where} is not a host of gpubench",
                "check whether another program uses the port, or another version of gpubench the same rendezvous",
            ) from None
        connection.settimeout(None)
        if channel._host:
            limit_silence(connection, job.silence)
        channel._listener.start()
        threading.Thread(target=channel._beat, daemon=True, name="gpubench-heartbeat").start()
        return channel, job

    def put(self, event: events.Message) -> None:
        """Buffers an event until the next flush. Any thread may call it."""
        line = events.encode(event)
        with self._pending_lock:
            self._pending.append(line)

    def flush(self, at_most_every: float = 0.0) -> None:
        """Sends the buffered events, unless the last flush was less than `at_most_every` seconds ago."""
        if not self._pending or (at_most_every and time.monotonic() - self._flushed_at < at_most_every):
            return
        with self._pending_lock:
            pending, self._pending = self._pending, []
        self._write(b"".join(pending))
        self._flushed_at = time.monotonic()

    def send(self, event: events.Message) -> None:
        """Sends the buffered events and then this one."""
        self.put(event)
        self.flush()

    def fail(self, event: events.Message) -> None:
        """Sends the event of a failure, and waits until the host closes the connection or FAILURE_SECONDS have passed.

        torchrun ends all ranks when the first one exits, and with them the host, which still has to report the error.
        """
        self._closing.set()
        self.send(event)
        self._listener.join(FAILURE_SECONDS)

    def close(self) -> None:
        """Sends Done and closes the connection.

        The host may close it at the same time, because it exits once it has received Done from every rank.
        """
        self.flush()
        self._closing.set()
        self.send(events.Done(rank=self.rank))
        with suppress(OSError):  # the host has already closed it, or a model its descriptor
            self._connection.shutdown(socket.SHUT_WR)

    def _write(self, data: bytes) -> None:
        with self._send_lock:
            try:
                self._connection.sendall(data)
            except Taken as error:
                self._abandon(reason(error))
            except OSError as error:
                if not self._closing.is_set():  # a heartbeat may fail after the end
                    self._abandon(reason(error))

    def _beat(self) -> None:
        while not self._closing.wait(HEARTBEAT_SECONDS):
            self._write(events.encode(self.activity.heartbeat(self.rank)))

    def _listen(self) -> None:
        lost = None
        try:
            while self._incoming.readline(events.LONGEST_GREETING):
                faulthandler.dump_traceback()  # DumpStacks is the only event that a host sends
        except OSError as error:
            lost = reason(error)
        if not self._closing.is_set():
            self._abandon(lost)

    def _abandon(self, lost: str | None) -> None:
        """Ends the process. If the host is on another machine, first prints where to find the cause."""
        if self._host:
            how = f"is lost: {lost}" if lost else "ended the run"
            hint = "see the output on that machine for the cause; its run directory holds the measurements"
            self._print(f"the host at {self._host} {how}\nhint: {hint}")
        elif not self._connection.is_own:  # the host knows no more than that the connection has ended
            self._print("the model or its data has closed the file descriptor of the connection to gpubench")
        os._exit(HOST_GONE)

    def _print(self, message: str) -> None:
        with suppress(OSError):
            os.write(2, f"error: rank {self.rank}: {message}\n".encode())


def reason(error: Exception) -> str:
    """The error in words, without its number."""
    return getattr(error, "strerror", None) or str(error)


def open_connection(kind: str, where: str) -> Connection:
    """Opens the connection, with a timeout that applies until the host has answered."""
    if kind == "tcp":
        host, _, port = where.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS) as opened:
            connection = Connection(fileno=opened.detach())
        connection.settimeout(CONNECT_SECONDS)
        return connection
    connection = Connection(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(where)
    return connection


def _is_remote(connection: socket.socket) -> bool:
    return connection.family != socket.AF_UNIX and connection.getpeername()[0] != connection.getsockname()[0]


def limit_silence(connection: socket.socket, seconds: float) -> None:
    """Makes a TCP connection fail after about `seconds` without an answer from the other end.

    By default Linux retries for a quarter of an hour (tcp_retries2 in tcp(7)), and never notices a broken link while
    there is nothing to send.
    """
    beat = max(1, int(seconds / 4))
    options = {"TCP_KEEPIDLE": beat, "TCP_KEEPINTVL": beat, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": int(seconds * 1000)}
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if hasattr(socket, name):  # not every operating system has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
