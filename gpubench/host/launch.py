"""Starts the workers of a run in their environment, receives their events, and ends all of them.

Workers connect to a Unix socket if all are on one machine, and otherwise to a TCP port, with a secret. A client without
the secret gets no answer, does not delay the workers, and is disconnected within seconds. The port is closed when all
ranks are connected.

Every rank on this machine is a subprocess with the variables that torchrun would set. Under the user's own torchrun,
only rank 0's worker is started here, and the others connect.
"""

import logging
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, NoReturn, Self

import msgspec
import psutil

from gpubench import channel, events, releases, units
from gpubench.errors import InvalidEvent
from gpubench.host.guardian import Guardian, tracks_resources
from gpubench.host.supervision import Peer, Setups, blame, stalled
from gpubench.logs import WORKER_OUTPUT
from gpubench.ranks import STORE_SOCKET, Ranks, launched_by_torchrun
from gpubench.settings.schema import CompletedSettings, Device
from gpubench.temporary import FOLDER_VARIABLE, OwnedFolder

LONGEST_HANDSHAKE = events.LONGEST_GREETING  # bytes
HANDSHAKE_SECONDS = 10.0  # time limit of a handshake, which a rank sends as soon as it is connected
MOST_UNAUTHENTICATED = 64  # largest number of unauthenticated clients besides the expected ranks


class Listener:
    """The listening sockets of a run, and the clients that have not completed the handshake yet."""

    def __init__(self, world_size: int | None, folder: Path | None) -> None:
        """Listens on a Unix socket in `folder`, or on a TCP port if it is None.

        If `world_size` is None, it becomes that of the first rank.
        """
        self.world_size = world_size
        self._unauthenticated: dict[Peer, str] = {}
        """The clients with the secrets that they have to know, oldest first."""
        self._secrets: dict[socket.socket, str] = {}
        listening, self.address = self._listen(folder)
        self.sockets = [listening]

    def open_port(self) -> tuple[socket.socket, str]:
        """Also listens on a TCP port. Returns its socket and its address."""
        listening, address = self._listen(None)
        self.sockets.append(listening)
        return listening, address

    def owns(self, address: str) -> bool:
        _, _, secret = address.partition("#")
        return bool(secret) and secret in self._secrets.values()

    def _listen(self, folder: Path | None) -> tuple[socket.socket, str]:
        listening, address, self._secrets[listening] = listen(folder)
        return listening, address

    def accept(self, listening: socket.socket) -> Peer | None:
        """Accepts a connection, without authentication. Returns None if the client has already disconnected."""
        try:
            connection, _ = listening.accept()
        except OSError:
            return None
        connection.setblocking(False)
        client = Peer(connection, heard=time.monotonic())
        self._unauthenticated[client] = self._secrets[listening]
        return client

    def greeting(self, client: Peer, line: bytes) -> events.Greeting | None:
        """The first message of the client; None if it does not know its secret, or sends nothing valid."""
        return events.greeting(line, self._unauthenticated[client])

    def admit(self, client: Peer, hello: events.Hello, present: Container[int]) -> bool:
        """Sets the client's `hello` if it has the run's world size, and a rank that is not in `present`."""
        valid = hello.world_size == (self.world_size or hello.world_size) and hello.rank not in present
        if valid:
            client.hello, self.world_size = hello, hello.world_size
            del self._unauthenticated[client]
        return valid

    def forget(self, client: Peer) -> None:
        """Removes a client whose connection is closed or about to be closed."""
        self._unauthenticated.pop(client, None)

    def overdue(self, now: float) -> list[Peer]:
        """The clients to disconnect: those past the time limit, and the oldest if there are too many."""
        excess = max(0, len(self._unauthenticated) - MOST_UNAUTHENTICATED - (self.world_size or 1))
        return [
            client
            for number, client in enumerate(self._unauthenticated)
            if number < excess or now - client.heard > HANDSHAKE_SECONDS
        ]

    def close_ports(self) -> list[Peer]:
        """Stops listening on TCP ports. Returns the clients of them that are not authenticated yet."""
        ports = [listening for listening in self.sockets if listening.family != socket.AF_UNIX]
        self.sockets = [listening for listening in self.sockets if listening not in ports]
        for listening in ports:
            listening.close()
        return [client for client, secret in self._unauthenticated.items() if secret]

    def close(self) -> list[Peer]:
        """Stops listening. Returns the clients that are not authenticated yet."""
        for listening in self.sockets:
            if listening.family == socket.AF_UNIX:
                Path(listening.getsockname()).unlink(missing_ok=True)
            listening.close()
        return list(self._unauthenticated)

    @property
    def connections(self) -> list[socket.socket]:
        """The sockets over which something may come that no rank has sent."""
        return [*self.sockets, *(client.connection for client in self._unauthenticated)]


def listen(folder: Path | None) -> tuple[socket.socket, str, str]:
    """Makes a listening socket, and returns it with its address for the workers and its secret.

    The socket is a Unix socket in `folder`, or a TCP socket if `folder` is None.
    """
    if folder:
        path = folder / "socket"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen()
        return listener, f"unix:{path}", ""
    # Not on loopback, because workers on other machines must reach this socket.
    both = socket.has_dualstack_ipv6()
    listener = socket.create_server(
        ("", 0), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both, backlog=socket.SOMAXCONN
    )
    listener.setblocking(False)  # a client may disconnect before its connection is accepted
    secret = secrets.token_hex(16)
    machine = os.environ.get("MASTER_ADDR") or socket.getfqdn()
    return listener, f"tcp:{machine}:{listener.getsockname()[1]}#{secret}", secret


OF_SETUP = (events.Hello, events.Log, events.EnvironmentCaptured)
"""The events that a rank sends before it has imported and built everything."""
MOST_READ = 1 << 20  # bytes of output read at once, so that a worker that prints without end does not block the host
LONGEST_LINE = 1 << 16  # bytes of a line of output of which more is not looked at
EXIT_TICK = 0.01  # seconds between two checks whether the workers have exited
TICK = 0.1  # seconds between two checks of the time limits if no event arrives
GRACE = 1.0  # seconds after the first sign of a failure in which another rank may report the cause
SHUTDOWN = 10.0  # seconds in which a worker must exit after its last event
TIDYING_SECONDS = 1.0  # in which what tracks the resources of killed processes removes them


class Workers:
    """The worker processes of one or several repeats: a context manager that ends all of them on exit."""

    output_log = logging.getLogger(WORKER_OUTPUT)
    shutdown = SHUTDOWN
    """The seconds in which the processes must exit after their last event."""

    def __init__(
        self,
        job: events.Job,
        world_size: int | None,
        environment: Mapping[str, str],
        stall_timeout: float,
        under_torchrun: bool = False,
    ) -> None:
        """Starts the workers. `environment` is added to that of this process; `stall_timeout` is in seconds.

        `world_size` is None if the first rank to connect says it.
        """
        self._expected = world_size
        self.peers: dict[int, Peer] = {}
        self._job = job
        self._stall_timeout = stall_timeout
        self._selector = selectors.DefaultSelector()
        self._failures: list[tuple[float, events.Failed]] = []
        self._failing_since: float | None = None
        self._output: deque[str] = deque(maxlen=60)
        self._unfinished = b""
        self._started = time.monotonic()
        self._setups = Setups(self._started)
        self._environment = environment
        self._started_here = 1 if under_torchrun else world_size
        one_machine = not under_torchrun or Ranks.from_environment().local_world_size == world_size
        self._folder = OwnedFolder()
        self._listener: Listener | None = Listener(world_size, self._folder.path if one_machine else None)
        for listening in self._listener.sockets:
            self._selector.register(listening, selectors.EVENT_READ, self._accept)
        self._guardian = Guardian(FOLDER_VARIABLE, self._folder.name)
        try:
            self._children, self._printed = self._start(self._listener.address)
        except BaseException:
            self._guardian.dismiss()
            raise
        for child in self._children:
            self._guardian.watch(child.pid)
        self._selector.register(self._printed, selectors.EVENT_READ, self._read_output)

    @property
    def world_size(self) -> int:
        """The number of ranks; 1 while it is unknown."""
        return self._expected or 1

    def _start(self, address: str) -> tuple[list["subprocess.Popen[bytes]"], IO[bytes]]:
        """Starts the processes, which connect to `address`. Returns them, and a pipe with their output."""
        assert self._started_here
        return _start_ranks(self._started_here, {**self._environment, **self.mark, channel.ADDRESS_VARIABLE: address})

    @property
    def mark(self) -> dict[str, str]:
        """The environment variable that marks the processes of this run."""
        return {FOLDER_VARIABLE: self._folder.name}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(timeout=self.shutdown if kind is None else 0.0)

    @property
    def pids(self) -> list[int]:
        """The process ids of the connected workers on this machine."""
        return [peer.hello.pid for peer in self.peers.values() if peer.hello and peer.here]

    @property
    def output(self) -> list[str]:
        """The last lines that the workers have printed until now, also those that have not been waited for."""
        if not self._printed.closed:
            self._keep_output(self._printed.read(MOST_READ))
        return list(self._output)

    def stream(self) -> Iterator[events.Message | None]:
        """Yields the workers' events in order of arrival, and None about every `TICK` seconds.

        Ends when every rank has sent Done. Raises the error that a rank has reported, or WorkerLost if a rank died
        without a report, did not connect, or makes no progress.
        """
        while sum(peer.done for peer in self.peers.values()) < self.world_size:
            for key, _ in self._selector.select(TICK):
                yield from key.data(key.fileobj)
            self._check()
            yield None

    def close(self, timeout: float) -> None:
        """Ends every process of the run. Workers that have not exited after `timeout` seconds are killed."""
        processes = [process for child in self._children for process in _tree(child.pid)]  # while their parents exist
        try:
            if not self._wait(timeout) and timeout:
                ranks = [str(rank) for rank, child in enumerate(self._children) if child.poll() is None]
                who = f"rank {units.listed(ranks)}" if len(self._children) > 1 else "the workers"
                self.output_log.warning("%s did not exit within %.0f s of the last event: killed", who, timeout)
            self._take_leave(processes, timeout)
        finally:  # also after a Ctrl-C
            self._end(processes)

    def _end(self, processes: Iterable[psutil.Process]) -> None:
        """Closes the connections, and kills `processes` and all others of the run."""
        self._close_listener()
        for peer in list(self.peers.values()):
            peer.connection.close()  # a worker on any machine exits when the host closes its connection
        self._kill(processes)  # before the rest of the output is read, which has no end while a process prints
        self._selector.close()
        self._keep_output(self._printed.read())
        self._split(b"\n")  # ends the last line
        self._printed.close()
        self._guardian.dismiss()
        self._folder.cleanup()

    def _take_leave(self, processes: Iterable[psutil.Process], timeout: float) -> None:
        """Called before the connections are closed, when the processes of this machine have had `timeout` seconds."""

    def _kill(self, processes: Iterable[psutil.Process]) -> None:
        processes = list(processes)
        trackers = [process for process in processes if tracks_resources(process)]
        for process in processes:
            if process not in trackers:
                _ignore_gone(process.kill)
        psutil.wait_procs(trackers, TIDYING_SECONDS)
        _kill(self._children)

    def _accept(self, listening: socket.socket) -> Iterator[events.Message]:
        if self._listener and (peer := self._listener.accept(listening)):
            self._selector.register(peer.connection, selectors.EVENT_READ, lambda _: self._read(peer))
        return iter(())

    def _read(self, peer: Peer) -> Iterator[events.Message]:
        if peer.connection.fileno() < 0:
            return  # closed while the events of other connections were read
        try:
            data = peer.connection.recv(MOST_READ if peer.hello else LONGEST_HANDSHAKE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._hang_up(peer)
            return
        try:
            for line in peer.lines.take(data):
                message = events.decode_of(peer.hello.rank, line) if peer.hello else self._authenticate(peer, line)
                if message is None:
                    return
                self._note(peer, message)
                yield message
        except msgspec.DecodeError as error:
            self._hang_up(peer)
            raise InvalidEvent.of(peer, error) from None
        if peer.hello is None and len(peer.lines) > LONGEST_HANDSHAKE:
            self._hang_up(peer)

    def _authenticate(self, peer: Peer, line: bytes) -> events.Hello | None:
        """Makes the client a rank of the run if `line` is a valid handshake, and otherwise disconnects it."""
        listener = self._listener
        greeting = listener.greeting(peer, line) if listener else None
        if isinstance(greeting, events.Seen):
            self._note_seen(greeting)
        if not listener or not isinstance(greeting, events.Hello) or not listener.admit(peer, greeting, self.peers):
            if isinstance(greeting, events.Hello):
                self._note_refused(greeting)
            self._hang_up(peer)
            return None
        self._expected = greeting.world_size
        peer.heard = peer.progressed = time.monotonic()
        self.peers[greeting.rank] = peer
        peer.connection.settimeout(HANDSHAKE_SECONDS)  # it may not read
        with suppress(OSError):  # a rank that died during the handshake is detected later
            self._answer(peer, greeting)
        peer.connection.setblocking(False)
        if len(self.peers) == self.world_size:
            self._stop_admitting()
        return greeting

    def _note_seen(self, seen: events.Seen) -> None:
        """Called when a process that is not a rank reports what it has done."""

    def _note_refused(self, hello: events.Hello) -> None:
        """Called when a process is not made a rank, because the run has that rank already or another number of them."""

    def _stop_admitting(self) -> None:
        """Called when all ranks are connected."""
        self._close_listener()

    def news(self) -> list[events.Message]:
        """What has been found out since the end of the stream, in which the processes have ended; only the first call
        returns it."""
        return []

    def _answer(self, peer: Peer, hello: events.Hello) -> None:
        peer.connection.sendall(events.encode(self._job))

    def _close_listener(self) -> None:
        if self._listener is None:
            return
        for listening in self._listener.sockets:
            self._selector.unregister(listening)
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
            peer.ready = peer.ready or not isinstance(message, OF_SETUP)
            peer.done = peer.done or isinstance(message, events.Done)
            if isinstance(message, events.Planned):
                if peer.position[0] != "a step":  # the length of a repeat may become known after its first steps
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
        data = pipe.read(MOST_READ)
        if data == b"":
            self._selector.unregister(pipe)
        self._keep_output(data)
        return iter(())

    def _keep_output(self, data: bytes | None) -> None:
        self._split(data or b"")

    def _split(self, data: bytes) -> None:
        *lines, unfinished = (self._unfinished + data).split(b"\n")
        self._unfinished = unfinished[-LONGEST_LINE:]
        for line in lines:
            if text := line[-LONGEST_LINE:].decode(errors="replace").rstrip():
                self._output.append(text)
                self.output_log.info("%s", text)

    def _check(self) -> None:
        """Raises the most likely cause if a rank has failed, died or stopped making progress."""
        now, codes = time.monotonic(), [child.poll() for child in self._children]
        self._disconnect_overdue(now)
        ended = [rank for rank, code in enumerate(codes) if code is not None]
        unfinished = any(rank not in self.peers or not self.peers[rank].done for rank in ended)
        lost = any(peer.lost is not None for peer in self.peers.values())
        if self._failures or lost or unfinished:
            self._failing_since = self._failing_since or now
            if now - self._failing_since >= GRACE:
                raise blame(self.peers, self.world_size, self._failures, codes, self.output)
            return
        starting = {rank: child.pid for rank, child in enumerate(self._children) if rank not in self.peers}
        stall = self._setups.check(starting, self.peers, now, self._stall_timeout)
        stall = stall or stalled(self.peers, self.world_size, now, self._started, self._stall_timeout)
        if stall:
            self._dump_stacks()
            raise stall

    def _disconnect_overdue(self, now: float) -> None:
        for client in self._listener.overdue(now) if self._listener else ():
            self._hang_up(client)

    def _dump_stacks(self) -> None:
        for peer in self.peers.values():
            assert peer.hello
            if peer.done:
                continue
            if peer.here:
                _ignore_gone(lambda pid=peer.hello.pid: os.kill(pid, signal.SIGUSR1))  # type: ignore[misc]
            else:
                _ignore_gone(lambda line=peer.connection: line.send(events.encode(events.DumpStacks())))  # type: ignore[misc]
            self._read_output_for(GRACE / self.world_size)  # one rank after the other, so that their lines do not mix

    def _wait(self, timeout: float) -> bool:
        """Waits for the workers to exit, and reads their output, because a full pipe would block them.

        Returns whether all of them exited within `timeout` seconds.
        """
        ends = time.monotonic() + timeout
        while any(child.poll() is None for child in self._children):
            if time.monotonic() >= ends:
                return False
            self._keep_output(self._printed.read(MOST_READ))
            self._greet()
            time.sleep(EXIT_TICK)
        return True

    def _greet(self) -> None:
        """Reads what has arrived from processes that are not ranks."""
        if self._listener is None:
            return
        for key, _ in self._selector.select(0):
            if self._listener and key.fileobj in self._listener.connections:
                for _ in key.data(key.fileobj):
                    pass
        self._disconnect_overdue(time.monotonic())

    def _read_output_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for key, _ in self._selector.select(min(TICK, seconds)):
                if key.fileobj is self._printed:
                    key.data(key.fileobj)


def worker_environment(settings: CompletedSettings) -> Mapping[str, str]:
    """The environment variables that a worker needs before it imports torch.

    performance.cpu_threads replaces OMP settings of the user, so that the recorded number of threads is right.
    """
    threads = str(settings.performance.cpu_threads)
    variables = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": settings.performance.omp_wait_policy,
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",  # models are built from configurations, without a network
    }
    if settings.performance.expandable_segments:
        names = releases.installed().allocator_variables
        name = next((name for name in names if name in os.environ), names[-1])
        variables[name] = ",".join(filter(None, [os.environ.get(name), "expandable_segments:True"]))
    if settings.device is Device.cpu:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    if not launched_by_torchrun() and settings.distributed.world_size > 1:
        variables.setdefault("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    return variables


def become_worker(settings: CompletedSettings) -> NoReturn:
    """Turns this process, which the user's own torchrun has started, into a worker. Does not return."""
    os.environ.update(worker_environment(settings))  # before torch loads

    from gpubench.worker import process

    process.leave(process.main())


def _start_ranks(ranks: int, environment: Mapping[str, str]) -> tuple[list["subprocess.Popen[bytes]"], IO[bytes]]:
    """Starts `ranks` workers. Returns them in order of rank, and a pipe with the output of all of them."""
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
                    env={**os.environ, **environment, **(_torchrun_variables(rank, ranks, store) if store else {})},
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


def _torchrun_variables(rank: int, ranks: int, store: socket.socket) -> dict[str, str]:
    """The environment variables that torchrun would set for a rank.

    Rank 0 runs the rendezvous store, on a socket that this process has already bound.
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
    """Kills the process groups of the children, including descendants in the same group."""
    for child in children:
        _ignore_gone(lambda pid=child.pid: os.killpg(pid, signal.SIGKILL))  # type: ignore[misc]
        child.wait()


def _tree(pid: int) -> list[psutil.Process]:
    """The process and its descendants; an empty list if it has ended."""
    try:
        parent = psutil.Process(pid)
        return [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return []


def _ignore_gone(action: Callable[[], object]) -> None:
    """Calls `action`, and ignores the error if its process or connection no longer exists."""
    with suppress(psutil.NoSuchProcess, OSError):
        action()
