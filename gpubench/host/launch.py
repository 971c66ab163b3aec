"""The host's end: starts the workers of a run, listens to all of them, and leaves none behind.

One rank is a plain subprocess; several on this machine are started by `python -m torch.distributed.run`. Under the
user's own torchrun only rank 0's worker is started here and the others connect.
"""

import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import IO, Self

import msgspec
import psutil

from gpubench import channel, events
from gpubench.host.door import LONGEST_GREETING, Door
from gpubench.host.peers import Peer, blame, stalled
from gpubench.ranks import Ranks

TICK = 0.1  # seconds between looks at the clock when nothing arrives
GRACE = 1.0  # seconds in which a second voice may explain the first failure better
SHUTDOWN = 10.0  # seconds that a worker may take to leave after its last word

output_log = logging.getLogger("gpubench.worker.output")


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
        self._unfinished = b""
        self._started = time.monotonic()
        one_machine = not under_torchrun or Ranks.from_environment().local_world_size == world_size
        self._door: Door | None = Door(world_size, one_machine)
        self._selector.register(self._door.listener, selectors.EVENT_READ, self._accept)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
        several = world_size > 1 and not under_torchrun
        self._child = subprocess.Popen(
            [sys.executable, *(launcher if several else []), "-m", "gpubench.worker"],
            env={**os.environ, **environment, channel.ADDRESS_VARIABLE: self._door.address},
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
        return [peer.hello.pid for peer in self.peers.values() if peer.hello and peer.here]

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
        self._close_door()
        family = _family(self._child.pid)  # before the parent of them all is gone
        try:
            self._child.wait(patience)
        except subprocess.TimeoutExpired:
            if patience:
                output_log.warning("the workers did not leave within %.0f s of their last word: ended", patience)
        for peer in list(self.peers.values()):
            peer.connection.close()  # a worker ends when its host hangs up, on whatever machine it is
        for process in family:
            _ignore_gone(process.kill)
        _ignore_gone(lambda: os.killpg(self._child.pid, signal.SIGKILL))  # orphans that it left in its group
        self._child.wait()
        self._selector.close()
        assert self._child.stdout
        self._keep_output(self._child.stdout.read())
        self._keep_output(b"\n")
        self._child.stdout.close()

    def _accept(self, _: socket.socket) -> Iterator[events.Message]:
        if self._door and (peer := self._door.open()):
            self._selector.register(peer.connection, selectors.EVENT_READ, lambda _: self._read(peer))
        return iter(())

    def _read(self, peer: Peer) -> Iterator[events.Message]:
        if peer.connection.fileno() < 0:
            return  # hung up on a moment ago, when others were heard
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
            if peer.hello is None and not self._greet(peer, bytes(line)):
                return
            try:
                message = events.decode(bytes(line))
            except msgspec.DecodeError:
                self._hang_up(peer)
                return
            self._note(peer, message)
            yield message
        if peer.hello is None and len(peer.buffer) > LONGEST_GREETING:
            self._hang_up(peer)

    def _greet(self, peer: Peer, line: bytes) -> bool:
        """Accepts a connection whose greeting has the secret and the number of a rank that is still missing."""
        if self._door is None or not self._door.admit(peer, line, self.peers):
            self._hang_up(peer)
            return False
        assert peer.hello
        peer.heard = peer.progressed = time.monotonic()
        self.peers[peer.hello.rank] = peer
        peer.connection.setblocking(True)
        with suppress(OSError):  # one that died as it greeted is noticed like any other
            peer.connection.sendall(events.encode(self._job))
        peer.connection.setblocking(False)
        if len(self.peers) == self.world_size:
            self._close_door()
        return True

    def _close_door(self) -> None:
        if self._door is None:
            return
        self._selector.unregister(self._door.listener)
        for stranger in self._door.close():
            self._hang_up(stranger)
        self._door = None

    def _note(self, peer: Peer, message: events.Message) -> None:
        now = time.monotonic()
        peer.heard = now
        if isinstance(message, events.Heartbeat):
            peer.waits_for, peer.within = message.waits_for, message.within
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
        if self._door:
            self._door.turn_away(peer)
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
        """Raises the error that explains it, once a rank has failed, vanished or stopped making progress."""
        now, ended = time.monotonic(), self._child.poll() is not None
        for stranger in self._door.overdue(now) if self._door else ():
            self._hang_up(stranger)
        unfinished = len(self.peers) < self.world_size or not all(peer.done for peer in self.peers.values())
        lost = any(peer.lost is not None for peer in self.peers.values())
        if self._failures or lost or (ended and unfinished):
            self._trouble_since = self._trouble_since or now
            if now - self._trouble_since >= GRACE:
                raise blame(self.peers, self.world_size, self._failures, self._child.poll(), self.output)
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
            self._hear_out(GRACE / self.world_size)  # one after the other, or their lines would mix

    def _hear_out(self, seconds: float) -> None:
        """Keeps what the workers print."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for key, _ in self._selector.select(min(TICK, seconds)):
                if key.fileobj is self._child.stdout:
                    key.data(key.fileobj)


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return []


def _ignore_gone(action: Callable[[], object]) -> None:
    with suppress(psutil.NoSuchProcess, OSError):
        action()
