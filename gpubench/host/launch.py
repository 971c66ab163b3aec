"""Starts the workers of a run, listens to all of them, and leaves none behind.

Workers connect to a Unix socket on one machine, and to a TCP port with a secret from other machines. A client without
the secret gets no answer, delays nobody and is disconnected within seconds. The port closes once all ranks are
connected.

Every rank on this machine is a subprocess with the variables that torchrun would give it. Under the user's own torchrun
only rank 0's worker is started here and the others connect.
"""

import logging
import os
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import msgspec
import psutil

from gpubench import events
from gpubench.host.supervision import Peer, blame, stalled
from gpubench.ranks import STORE_SOCKET, Ranks
from gpubench.worker import channel

LONGEST_HANDSHAKE = 4096  # bytes
HANDSHAKE_SECONDS = 10.0  # deadline for a handshake; a rank sends its own as soon as it connects
MOST_UNAUTHENTICATED = 64  # unauthenticated clients at a time, besides the expected ranks


class Listener:
    """The listening socket of a run, and the clients that have not completed the handshake."""

    def __init__(self, world_size: int, one_machine: bool) -> None:
        """Listens on a Unix socket if `one_machine`, otherwise on a TCP port."""
        self._world_size = world_size
        self._folder = private_folder()
        self._unauthenticated: list[Peer] = []  # oldest first
        self.socket, self.address, self.secret = listen(self._folder if one_machine else None)

    def accept(self) -> Peer | None:
        """Accepts a connection, not authenticated yet. Returns None if the client has already disconnected."""
        try:
            connection, _ = self.socket.accept()
        except OSError:
            return None
        connection.setblocking(False)
        client = Peer(connection, heard=time.monotonic())
        self._unauthenticated.append(client)
        return client

    def authenticate(self, client: Peer, line: bytes, present: Container[int]) -> bool:
        """Sets the client's `hello` and returns True if `line` is a valid handshake.

        A handshake is valid if it has the run's secret and world size, and a rank that is not in `present`.
        """
        hello = _read(line)
        known = (
            hello is not None
            and secrets.compare_digest(hello.secret.encode(), self.secret.encode())
            and hello.world_size == self._world_size
            and 0 <= hello.rank < self._world_size
            and hello.rank not in present
        )
        if known:
            client.hello = hello
            self._unauthenticated.remove(client)
        return known

    def forget(self, client: Peer) -> None:
        """Removes a client whose connection has ended or is about to be closed."""
        with suppress(ValueError):
            self._unauthenticated.remove(client)

    def overdue(self, now: float) -> list[Peer]:
        """The clients to disconnect: those past the handshake deadline, and the oldest if there are too many."""
        crowd = max(0, len(self._unauthenticated) - MOST_UNAUTHENTICATED - self._world_size)
        return [
            one
            for number, one in enumerate(self._unauthenticated)
            if number < crowd or now - one.heard > HANDSHAKE_SECONDS
        ]

    def close(self) -> list[Peer]:
        """Stops listening. Returns the clients that are still unauthenticated."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self.socket.close()
        return list(self._unauthenticated)


def _read(line: bytes) -> events.Hello | None:
    try:
        message = events.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return None
    return message if isinstance(message, events.Hello) else None


def private_folder() -> Path:
    """Creates a folder that only this user can enter. Its path is short enough for a Unix socket's 107 bytes."""
    usual = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="gpubench-", dir=usual if len(os.fsencode(usual)) < 80 else "/tmp"))


def listen(folder: Path | None) -> tuple[socket.socket, str, str]:
    """Returns (listening socket, address for the workers, secret).

    The socket is a Unix socket in `folder`, or a TCP socket if `folder` is None.
    """
    if folder:
        path = folder / "socket"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen()
        return listener, f"unix:{path}", ""
    # Workers on other machines must reach this socket, so loopback is not enough. A client without the secret gets
    # no answer.
    both = socket.has_dualstack_ipv6()
    listener = socket.create_server(
        ("", 0), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both, backlog=socket.SOMAXCONN
    )
    listener.setblocking(False)  # a client may disconnect before its connection is accepted
    secret = secrets.token_hex(16)
    host = os.environ.get("MASTER_ADDR") or socket.getfqdn()
    return listener, f"tcp:{host}:{listener.getsockname()[1]}#{secret}", secret


EXIT_TICK = 0.01  # seconds between looks at workers that are about to exit
TICK = 0.1  # seconds between checks of the deadlines when no event arrives
GRACE = 1.0  # seconds to wait after the first sign of a failure, in which another rank may report its cause
SHUTDOWN = 10.0  # seconds that a worker may take to exit after its last event

output_log = logging.getLogger("gpubench.worker.output")


class Workers:
    """The worker processes of one or more repeats: a context manager that ends all of them on exit."""

    def __init__(
        self,
        job: events.Job,
        world_size: int,
        environment: Mapping[str, str],
        stall_timeout: float,
        under_torchrun: bool = False,
    ) -> None:
        """Starts the workers. `environment` is added to this process's own; `stall_timeout` is in seconds."""
        self.world_size = world_size
        self.peers: dict[int, Peer] = {}
        self._job = job
        self._stall_timeout = stall_timeout
        self._selector = selectors.DefaultSelector()
        self._failures: list[tuple[float, events.Failed]] = []
        self._trouble_since: float | None = None
        self._output: deque[str] = deque(maxlen=60)
        self._unfinished = b""
        self._started = time.monotonic()
        one_machine = not under_torchrun or Ranks.from_environment().local_world_size == world_size
        self._listener: Listener | None = Listener(world_size, one_machine)
        self._selector.register(self._listener.socket, selectors.EVENT_READ, self._accept)
        self._children, self._printed = _start(
            1 if under_torchrun else world_size, {**environment, channel.ADDRESS_VARIABLE: self._listener.address}
        )
        self._selector.register(self._printed, selectors.EVENT_READ, self._read_output)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(patience=SHUTDOWN if kind is None else 0.0)

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers on this machine."""
        return [peer.hello.pid for peer in self.peers.values() if peer.hello and peer.here]

    @property
    def output(self) -> list[str]:
        """The last lines that the workers printed."""
        return list(self._output)

    def stream(self) -> Iterator[events.Message | None]:
        """Yields the workers' events in order of arrival, and None about every `TICK` seconds.

        Ends when every rank has sent Done. Raises the error that a rank reported, or WorkerLost for a rank that died
        without a report, never connected, or makes no progress.
        """
        while sum(peer.done for peer in self.peers.values()) < self.world_size:
            for key, _ in self._selector.select(TICK):
                yield from key.data(key.fileobj)
            self._look_for_trouble()
            yield None

    def close(self, patience: float) -> None:
        """Ends every process of the run. The workers have `patience` seconds to exit by themselves."""
        self._close_listener()
        family = [
            process for child in self._children for process in _family(child.pid)
        ]  # before their parents are gone
        if not self._wait(patience) and patience:
            output_log.warning("the workers did not exit within %.0f s of their last event: killed", patience)
        for peer in list(self.peers.values()):
            peer.connection.close()  # a worker on any machine exits when the host closes its connection
        for process in family:
            _ignore_gone(process.kill)
        _kill(self._children)
        self._selector.close()
        self._keep_output(self._printed.read())
        self._keep_output(b"\n")  # ends the last line
        self._printed.close()

    def _accept(self, _: socket.socket) -> Iterator[events.Message]:
        if self._listener and (peer := self._listener.accept()):
            self._selector.register(peer.connection, selectors.EVENT_READ, lambda _: self._read(peer))
        return iter(())

    def _read(self, peer: Peer) -> Iterator[events.Message]:
        if peer.connection.fileno() < 0:
            return  # closed a moment ago, while the events of other connections were read
        try:
            data = peer.connection.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._hang_up(peer)
            return
        peer.buffer += data
        *lines, rest = peer.buffer.split(b"\n")
        peer.buffer = rest
        for line in lines:
            if peer.hello is None and not self._authenticate(peer, bytes(line)):
                return
            try:
                message = events.decode(bytes(line))
            except msgspec.DecodeError:
                self._hang_up(peer)
                return
            self._note(peer, message)
            yield message
        if peer.hello is None and len(peer.buffer) > LONGEST_HANDSHAKE:
            self._hang_up(peer)

    def _authenticate(self, peer: Peer, line: bytes) -> bool:
        """Makes the client a rank of the run if `line` is a valid handshake, and otherwise disconnects it."""
        if self._listener is None or not self._listener.authenticate(peer, line, self.peers):
            self._hang_up(peer)
            return False
        assert peer.hello
        peer.heard = peer.progressed = time.monotonic()
        self.peers[peer.hello.rank] = peer
        peer.connection.setblocking(True)
        with suppress(OSError):  # a rank that died during the handshake is detected like any other
            peer.connection.sendall(events.encode(self._job))
        peer.connection.setblocking(False)
        if len(self.peers) == self.world_size:
            self._close_listener()
        return True

    def _close_listener(self) -> None:
        if self._listener is None:
            return
        self._selector.unregister(self._listener.socket)
        for client in self._listener.close():
            self._hang_up(client)
        self._listener = None

    def _note(self, peer: Peer, message: events.Message) -> None:
        now = time.monotonic()
        peer.heard = now
        if isinstance(message, events.Heartbeat):
            peer.waits_for, peer.within = message.waits_for, message.within
            peer.patience_factor = message.patience_factor
            if (message.doing, message.step) != peer.position:
                peer.position = (message.doing, message.step)
                peer.progressed = now
        elif isinstance(message, events.Failed):
            peer.position = (message.doing, message.step)
            self._failures.append((now, message))
        else:
            peer.progressed = now
            peer.done = peer.done or isinstance(message, events.Done)
            if isinstance(message, events.Planned):
                peer.position = ("the first step", None)
            elif isinstance(message, events.StepsMeasured) and message.steps:
                peer.position = ("a step", message.steps[-1].step + 1)

    def _hang_up(self, peer: Peer) -> None:
        if self._listener:
            self._listener.forget(peer)
        self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer.hello and not peer.done:
            peer.lost = time.monotonic()

    def _read_output(self, pipe: IO[bytes]) -> Iterator[events.Message]:
        data = pipe.read()
        if data == b"":
            self._selector.unregister(pipe)
        self._keep_output(data)
        return iter(())

    def _keep_output(self, data: bytes | None) -> None:
        *lines, self._unfinished = (self._unfinished + (data or b"")).split(b"\n")
        for line in lines:
            if text := line.decode(errors="replace").rstrip():
                self._output.append(text)
                output_log.info("%s", text)

    def _look_for_trouble(self) -> None:
        """Raises the most likely cause once a rank has failed, died or stopped making progress."""
        now, codes = time.monotonic(), [child.poll() for child in self._children]
        for client in self._listener.overdue(now) if self._listener else ():
            self._hang_up(client)
        ended = [rank for rank, code in enumerate(codes) if code is not None]
        unfinished = any(rank not in self.peers or not self.peers[rank].done for rank in ended)
        lost = any(peer.lost is not None for peer in self.peers.values())
        if self._failures or lost or unfinished:
            self._trouble_since = self._trouble_since or now
            if now - self._trouble_since >= GRACE:
                raise blame(self.peers, self.world_size, self._failures, codes, self.output)
        elif stall := stalled(self.peers, self.world_size, now, self._started, self._stall_timeout):
            self._dump_stacks()
            raise stall

    def _dump_stacks(self) -> None:
        for peer in self.peers.values():
            assert peer.hello
            if peer.done:
                continue
            if peer.here:
                _ignore_gone(lambda pid=peer.hello.pid: os.kill(pid, signal.SIGUSR1))  # type: ignore[misc]
            else:
                _ignore_gone(lambda line=peer.connection: line.send(events.encode(events.DumpStacks())))  # type: ignore[misc]
            self._keep_printing(GRACE / self.world_size)  # one rank after the other, or their lines would mix

    def _wait(self, patience: float) -> bool:
        """Waits for the workers to exit, and reads what they print: a full pipe would block them.

        Returns whether all of them exited within `patience` seconds.
        """
        ends = time.monotonic() + patience
        while any(child.poll() is None for child in self._children):
            if time.monotonic() >= ends:
                return False
            self._keep_output(self._printed.read())
            time.sleep(EXIT_TICK)
        return True

    def _keep_printing(self, seconds: float) -> None:
        """Keeps what the workers print in the next `seconds`."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for key, _ in self._selector.select(min(TICK, seconds)):
                if key.fileobj is self._printed:
                    key.data(key.fileobj)


def _start(ranks: int, environment: Mapping[str, str]) -> tuple[list["subprocess.Popen[bytes]"], IO[bytes]]:
    """Starts `ranks` workers. Returns them in order of rank, and one pipe with the output of all of them."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    children: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        stack.callback(os.close, writing)
        store = stack.enter_context(socket.create_server(("127.0.0.1", 0))) if ranks > 1 else None
        try:
            for rank in range(ranks):
                child = subprocess.Popen(
                    [sys.executable, "-m", "gpubench.worker.process"],
                    env={**os.environ, **environment, **(_as_torchrun(rank, ranks, store) if store else {})},
                    stdin=subprocess.DEVNULL,
                    stdout=writing,
                    stderr=writing,
                    pass_fds=[store.fileno()] if store and rank == 0 else (),
                    start_new_session=True,  # only the host receives Ctrl-C
                )
                children.append(child)
        except BaseException:
            _kill(children)
            os.close(reading)
            raise
    return children, os.fdopen(reading, "rb", buffering=0)


def _as_torchrun(rank: int, ranks: int, store: socket.socket) -> dict[str, str]:
    """The environment variables that torchrun would set for a rank.

    Rank 0 holds the rendezvous store, on a socket that this process has bound already.
    """
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.getsockname()[1]),
    }
    return variables | ({STORE_SOCKET: str(store.fileno())} if rank == 0 else {})


def _kill(children: Iterable["subprocess.Popen[bytes]"]) -> None:
    """Kills the process groups of the children, with all their descendants in them."""
    for child in children:
        _ignore_gone(lambda pid=child.pid: os.killpg(pid, signal.SIGKILL))  # type: ignore[misc]
        child.wait()


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return []


def _ignore_gone(action: Callable[[], object]) -> None:
    with suppress(psutil.NoSuchProcess, OSError):
        action()
