"""The host's end: starts the workers of a run, listens to all of them, and explains it when one goes missing.

One rank is a plain subprocess; several on this machine are started by `python -m torch.distributed.run`. Under the
user's own torchrun only rank 0's worker is started here and the others connect. Workers talk over a private Unix
socket on one machine, and over TCP with a secret made for the run from others.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import msgspec
import psutil

from gpubench import channel, errors, events
from gpubench.errors import GpubenchError, WorkerLost
from gpubench.ranks import Ranks

TICK = 0.1  # seconds between looks at the clock when nothing arrives
SILENCE = 30.0  # seconds without a heartbeat (one a second) before a rank counts as stopped
STARTUP = 120.0  # seconds for torch to load and report on a busy machine, at the least
GRACE = 1.0  # seconds in which a second voice may explain the first failure better
SHUTDOWN = 10.0  # seconds that a worker may take to leave after its last word
LONGEST_GREETING = 4096

output_log = logging.getLogger("gpubench.worker.output")


@dataclass
class Peer:
    """One connection, and once it has said hello, one rank."""

    connection: socket.socket
    hello: events.Hello | None = None
    buffer: bytearray = field(default_factory=bytearray)
    heard: float = 0.0
    progressed: float = 0.0
    position: tuple[str, int | None] = ("starting", None)
    done: bool = False
    lost: float | None = None

    def __str__(self) -> str:
        assert self.hello
        return f"rank {self.hello.rank} (pid {self.hello.pid} on {self.hello.host})"

    @property
    def where(self) -> str:
        doing, step = self.position
        doing = doing.replace("_", " ")
        return f"in {doing}" if step is None else f"in {doing} of step {step}"


class Workers:
    """The processes of one or more repeats; a context manager that leaves none of them behind."""

    def __init__(
        self,
        job: events.Job,
        world_size: int,
        environment: Mapping[str, str],
        stall_timeout: float,
        under_torchrun: bool = False,
    ) -> None:
        """`environment` is added to this process's own. `stall_timeout` is in seconds."""
        self.world_size = world_size
        self.peers: dict[int, Peer] = {}
        self._job = job
        self._stall_timeout = stall_timeout
        self._selector = selectors.DefaultSelector()
        self._failures: list[tuple[float, events.Failed]] = []
        self._trouble_since: float | None = None
        self._output: deque[str] = deque(maxlen=60)
        self._started = time.monotonic()
        self._folder = Path(tempfile.mkdtemp(prefix="gpubench-"))
        one_machine = not under_torchrun or Ranks.from_environment().local_world_size == world_size
        self._listener, address, self._secret = listen(self._folder if one_machine else None)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
        several = world_size > 1 and not under_torchrun
        self._child = subprocess.Popen(
            [sys.executable, *(launcher if several else []), "-m", "gpubench.worker"],
            env={**os.environ, **environment, channel.ADDRESS_VARIABLE: address},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is the host's to handle
        )
        assert self._child.stdout
        os.set_blocking(self._child.stdout.fileno(), False)
        self._selector.register(self._child.stdout, selectors.EVENT_READ, self._read_output)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(patience=SHUTDOWN if kind is None else 0.0)

    @property
    def pids(self) -> list[int]:
        """Worker processes on this machine."""
        here = socket.gethostname()
        return [peer.hello.pid for peer in self.peers.values() if peer.hello and peer.hello.host == here]

    @property
    def output(self) -> list[str]:
        """The last lines that the workers printed."""
        return list(self._output)

    def stream(self) -> Iterator[events.Message | None]:
        """What the workers say, in order of arrival, and None about every `TICK` seconds.

        Ends when every rank has said that it is done. Raises the error a rank reported, or WorkerLost for one that
        died in silence, was never heard of, or makes no progress.
        """
        while sum(peer.done for peer in self.peers.values()) < self.world_size:
            for key, _ in self._selector.select(TICK):
                yield from key.data(key.fileobj)
            self._look_for_trouble()
            yield None

    def close(self, patience: float) -> None:
        """Ends every process of the run, after `patience` seconds for those that are leaving anyway."""
        family = _family(self._child.pid)  # before the parent of them all is gone
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(patience)
        for peer in list(self.peers.values()):
            peer.connection.close()  # a worker ends when its host hangs up, on whatever machine it is
        self._listener.close()
        for process in family:
            _ignore_gone(process.kill)
        _ignore_gone(lambda: os.killpg(self._child.pid, signal.SIGKILL))  # orphans that it left in its group
        self._child.wait()
        self._selector.close()
        assert self._child.stdout
        self._keep_output(self._child.stdout.read())
        self._child.stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _accept(self, listener: socket.socket) -> Iterator[events.Message]:
        connection, _ = listener.accept()
        connection.setblocking(False)
        peer = Peer(connection)
        self._selector.register(connection, selectors.EVENT_READ, lambda _: self._read(peer))
        return iter(())

    def _read(self, peer: Peer) -> Iterator[events.Message]:
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
            try:
                message = events.decode(bytes(line))
            except msgspec.DecodeError:
                self._hang_up(peer)
                return
            if peer.hello is None and not self._greet(peer, message):
                return
            self._note(peer, message)
            yield message
        if peer.hello is None and len(peer.buffer) > LONGEST_GREETING:
            self._hang_up(peer)

    def _greet(self, peer: Peer, message: events.Message) -> bool:
        """Lets a stranger in if it is a rank that is missing and knows the secret."""
        known = (
            isinstance(message, events.Hello)
            and secrets.compare_digest(message.secret, self._secret)
            and message.world_size == self.world_size
            and 0 <= message.rank < self.world_size
            and message.rank not in self.peers
        )
        if not known:
            self._hang_up(peer)
            return False
        assert isinstance(message, events.Hello)
        peer.hello = message
        peer.heard = peer.progressed = time.monotonic()
        self.peers[message.rank] = peer
        peer.connection.setblocking(True)
        peer.connection.sendall(events.encode(self._job))
        peer.connection.setblocking(False)
        return True

    def _note(self, peer: Peer, message: events.Message) -> None:
        now = time.monotonic()
        peer.heard = now
        if isinstance(message, events.Heartbeat):
            if (message.doing, message.step) != peer.position:
                peer.position = (message.doing, message.step)
                peer.progressed = now
        elif isinstance(message, events.Failed):
            peer.position = (message.doing, message.step)
            self._failures.append((now, message))
        else:
            peer.progressed = now
            peer.done = peer.done or isinstance(message, events.Done)

    def _hang_up(self, peer: Peer) -> None:
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
        for line in (data or b"").decode(errors="replace").splitlines():
            if line.strip():
                self._output.append(line)
                output_log.debug("%s", line)

    def _look_for_trouble(self) -> None:
        now = time.monotonic()
        lost = [peer for peer in self.peers.values() if peer.lost is not None]
        gone = self._child.poll() is not None and not all(peer.done for peer in self.peers.values())
        never_came = self._child.poll() is not None and not self.peers
        if self._failures or lost or gone or never_came:
            self._trouble_since = self._trouble_since or now
            if now - self._trouble_since >= GRACE:
                raise self._explain(lost)
            return
        self._look_for_stalls(now)

    def _explain(self, lost: list[Peer]) -> GpubenchError:
        """The earliest cause: a rank's own error, or one that vanished; a broken collective only if nothing else."""
        causes: list[tuple[float, GpubenchError]] = []
        reported = {failure.rank for _, failure in self._failures}
        for when, failure in self._failures:
            causes.append((when + (1e6 if failure.secondary else 0), self._as_error(failure)))
        for peer in lost:
            assert peer.hello
            assert peer.lost is not None
            if peer.hello.rank not in reported:
                causes.append((peer.lost, self._lost(f"{peer} died; it was last heard of {peer.where}")))
        if not causes:
            missing = [rank for rank in range(self.world_size) if rank not in self.peers]
            return self._lost(f"rank {', '.join(map(str, missing)) or '?'} ended before it reported")
        return min(causes, key=lambda cause: cause[0])[1]

    def _as_error(self, failure: events.Failed) -> GpubenchError:
        rank = f"rank {failure.rank}: " if self.world_size > 1 else ""
        return errors.by_name(failure.kind)(rank + failure.message, failure.hint)

    def _lost(self, what: str) -> WorkerLost:
        code = self._child.poll()
        if self.world_size == 1 and code is not None and code < 0:
            what += f": killed by {signal.Signals(-code).name}"
        hint = "run.log holds the worker's output"
        if self.world_size == 1 and code == -signal.SIGKILL:
            hint = "the kernel does this when the machine runs out of memory: see dmesg, or try a smaller batch"
        elif self._output:
            hint += f"; its last line: {self._output[-1].strip()[:200]}"
        return WorkerLost(what, hint)

    def _look_for_stalls(self, now: float) -> None:
        waited = now - self._started
        missing = [rank for rank in range(self.world_size) if rank not in self.peers]
        if missing and waited > max(STARTUP, self._stall_timeout):
            names = ", ".join(map(str, missing))
            raise self._lost(f"rank {names} has not reported {waited:.0f} s after the start")
        running = [peer for peer in self.peers.values() if not peer.done]
        silent = [peer for peer in running if now - peer.heard > min(SILENCE, self._stall_timeout)]
        stuck = [peer for peer in running if now - peer.progressed > self._stall_timeout]
        if not silent and not stuck:
            return
        # Ranks that wait for another are stuck too: blame the silent one, or the one furthest behind.
        culprit = min(silent or stuck, key=lambda peer: -1 if peer.position[1] is None else peer.position[1])
        self._dump_stacks()
        since = now - (culprit.heard if silent else culprit.progressed)
        state = "has been silent" if silent else "has made no progress"
        raise WorkerLost(
            f"{culprit} {state} for {since:.0f} s, {culprit.where}",
            "run.log holds every rank's stack; measurement.stall_timeout sets the patience",
        )

    def _dump_stacks(self) -> None:
        here = socket.gethostname()
        for peer in self.peers.values():
            assert peer.hello
            if peer.done:
                continue
            if peer.hello.host == here:
                _ignore_gone(lambda pid=peer.hello.pid: os.kill(pid, signal.SIGUSR1))  # type: ignore[misc]
            else:
                _ignore_gone(lambda line=peer.connection: line.send(events.encode(events.DumpStacks())))  # type: ignore[misc]
        until = time.monotonic() + GRACE
        while time.monotonic() < until:
            for key, _ in self._selector.select(TICK):
                if key.fileobj is self._child.stdout:
                    key.data(key.fileobj)


def listen(folder: Path | None) -> tuple[socket.socket, str, str]:
    """(listening socket, address for the workers, secret): a Unix socket in `folder`, or TCP where it is None."""
    if folder:
        path = folder / "socket"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen()
        return listener, f"unix:{path}", ""
    # Workers on other machines must reach this one, so it cannot stay on loopback; strangers get no answer.
    listener = socket.create_server(("", 0))
    secret = secrets.token_hex(16)
    host = socket.getfqdn() if not (address := os.environ.get("MASTER_ADDR")) else address
    return listener, f"tcp:{host}:{listener.getsockname()[1]}#{secret}", secret


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return []


def _ignore_gone(action: Callable[[], object]) -> None:
    with suppress(psutil.NoSuchProcess, OSError):
        action()
