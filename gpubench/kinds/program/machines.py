"""Programs whose ranks run on several machines, each of which has a host of its own.

The host of the machine with rank 0 records the run, and no host knows in advance whether it is that one. When rank 0
reports to its host that there are ranks on other machines, the host opens a TCP port with a secret, and rank 0 puts the
address into the store of its process group. The ranks of another machine find it there and pass it to their own host,
which then relays between them and the port: their events, and the job that the host of rank 0 sends. It still
supervises the program on its machine, and records nothing.

Between two repeats each host waits until the launchers of all machines have exited. A launcher that starts earlier
would join the rendezvous of the previous repeat.
"""

import logging
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple

import msgspec
import psutil

from gpubench import channel, events
from gpubench.errors import GpubenchError, ProgramFailed, UsageError
from gpubench.host.launch import GRACE, TICK, Workers
from gpubench.host.supervision import Peer
from gpubench.settings.keys import flatten, in_words

PARTING_SECONDS = 10.0
"""For how much longer than their launchers have to exit a host waits for the others."""
VERDICT_SECONDS = 10.0
"""The seconds for which a host whose program has failed waits for the host of rank 0 to say where it failed first."""
TORCHRUN_SECONDS = 40.0
"""The seconds in which a launcher ends after one of its ranks: torchrun gives the others 30 s to end."""
SLOWER = 15.0
"""The seconds by which a host without rank 0 waits longer for progress, so that the host of rank 0 says who stopped."""
COMPARED = ("training.", "measurement.", "profiling.", "data.", "performance.")
"""The settings that have to be the same on all machines."""
EVERYWHERE = "start the same gpubench command on every machine at about the same time"

log = logging.getLogger("gpubench.program")


class Relay:
    """The connection of a host to the one on rank 0's machine, on behalf of one rank of this machine."""

    def __init__(self, rank: Peer, hello: events.Hello) -> None:
        """Connects to `hello.home`. Raises ProgramFailed if nothing is there."""
        assert hello.home is not None
        address, _, secret = hello.home.partition("#")
        kind, _, self._where = address.partition(":")
        self.rank = rank
        self.job: events.Job | None = None
        """What the host of rank 0 has answered."""
        self.ended: events.RepeatEnded | None = None
        self.closed = False
        self._lines = events.LineBuffer()
        if kind != "tcp" or not self._where.rpartition(":")[2].isdecimal():
            raise ProgramFailed(f"rank {hello.rank} has not found the gpubench of rank 0's machine", EVERYWHERE)
        try:
            self.connection = channel.open_connection(kind, self._where)
        except (OSError, OverflowError, UnicodeError) as error:  # the last two for what is not an address
            raise ProgramFailed(
                f"cannot reach rank 0's host at {self._where}: {channel.reason(error)}",
                "firewalls must allow TCP between the machines on all ports, because each repeat uses a new port",
            ) from None
        self.connection.settimeout(None)
        self.send(msgspec.structs.replace(hello, secret=secret, home=None))

    def __str__(self) -> str:
        return self.job.host if self.job else self._where

    def send(self, message: events.Message) -> None:
        """Sends an event. A connection that is lost is noticed by `receive`."""
        try:
            self.connection.sendall(events.encode(message))
        except OSError as error:
            log.debug("%s: %s", self, channel.reason(error))

    def receive(self) -> bool:
        """Reads what has arrived. Returns whether the job was in it.

        Sets `closed` when the connection ends, or when something else than a host is at its other end.
        """
        before = self.job
        try:
            data = self.connection.recv(1 << 20)
            for line in self._lines.take(data):
                self._take(line)
        except (OSError, msgspec.DecodeError):
            data = b""
        self.closed = not data
        return self.job is not before

    def _take(self, line: bytes) -> None:
        if self.job is None:
            self.job = events.parse(line, events.Job)
            channel.limit_silence(self.connection, self.job.silence)
        else:
            self.ended = events.parse(line, events.RepeatEnded)


class RankEnd(NamedTuple):
    """The end of a rank that had not taken all steps."""

    peer: Peer
    when: float
    """The monotonic time at which it was noticed, in seconds."""
    killed: bool
    """Whether its process ended without running Python's exit handlers."""


class SpreadWorkers(Workers):
    """The processes of one repeat that this machine's host has started, of which some may be on other machines."""

    _ranks: range | None = None
    """The ranks that report to this host; None while no rank has connected."""
    _is_elsewhere = False
    """Whether rank 0 is on another machine."""
    _ended: events.RepeatEnded | None = None
    """How the repeat has ended, as the host of rank 0 reports it."""
    _has_port = False
    """Whether this host, that of rank 0, awaits ranks of other machines."""
    _wanted: int | None = None
    """The number of steps after which the probe ends the program; None if the program ends by itself."""
    _first_to_end: RankEnd | None = None
    """The first rank that has ended before it had taken all steps."""
    _fails = False
    """Whether an error has ended the repeat on this machine."""

    def __init__(
        self, job: events.Job, world_size: int | None, environment: Mapping[str, str], stall_timeout: float
    ) -> None:
        self._relays: dict[int, Relay] = {}
        self._left: set[int] = set()
        """The ranks of other machines whose host has said that its launcher has exited."""
        super().__init__(job, world_size, environment, stall_timeout)

    @property
    def world_size(self) -> int:
        """The number of ranks that report to this host; 1 while it is unknown."""
        return len(self.ranks)

    @property
    def ranks(self) -> range:
        """The ranks that report to this host."""
        return range(super().world_size) if self._ranks is None else self._ranks

    @property
    def awaits_machines(self) -> bool:
        """Whether ranks of other machines have not connected yet."""
        return self._has_port and len(self.peers) < self.world_size

    @property
    def elsewhere(self) -> list[Peer]:
        """The ranks on other machines."""
        return [peer for peer in self.peers.values() if _is_relayed(peer)]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._fails, was_told = error is not None, self._ended is not None
        try:
            if error:
                self._report(error)
            if isinstance(error, ProgramFailed):
                self._read_until(self._has_verdict, VERDICT_SECONDS)
        finally:
            super().__exit__(kind, error, trace)
        if self._relays and not error and not self._ended:
            raise self._lost(next(iter(self._relays.values())))
        if self._ended and self._ended.error and not was_told and self._ended.host != socket.gethostname():
            raise self._failed_elsewhere(self._ended) from None

    def receive(self) -> Iterator[events.Message]:
        """Yields the events that have arrived. Those for the host of another machine are relayed to it instead.

        Raises ProgramFailed if the host of another machine has ended the repeat early, or is lost.
        """
        for key, _ in self._selector.select(TICK):
            for message in key.data(key.fileobj):
                relay = self._relays.get(message.rank)
                if relay is None:
                    yield message
                elif not isinstance(message, events.Hello):  # the relay has begun with it
                    relay.send(message)
        now = time.monotonic()
        self._disconnect_overdue(now)
        self._check_relays()
        self._check_elsewhere(now)

    def _answer(self, peer: Peer, hello: events.Hello) -> None:
        job = self._job
        if hello.ranks_here is not None:
            self._refuse_open_ended(job)
        if _is_relayed(peer):
            channel.limit_silence(peer.connection, job.silence)
        elif hello.home is not None and not self._is_own(hello.home):
            self._relay(peer, hello)
            return
        elif hello.rank == 0 and hello.ranks_here is not None and self._listener:
            listening, address = self._listener.open_port()
            self._has_port = True
            self._selector.register(listening, selectors.EVENT_READ, self._accept)
            job = msgspec.structs.replace(job, address=address)
        peer.connection.sendall(events.encode(msgspec.structs.replace(job, host=socket.gethostname())))

    @staticmethod
    def _refuse_open_ended(job: events.Job) -> None:
        if job.settings["measurement"]["target_precision"] is not None:
            raise UsageError(
                "--target-precision needs all ranks of the program on one machine, because the hosts of the others do "
                "not know how precise the result is",
                "give a number of --repeats",
            )

    def _is_own(self, address: str) -> bool:
        """Whether `address` is of this host, which may have started the launchers of several machines."""
        return self._listener is not None and self._listener.owns(address)

    def _relay(self, peer: Peer, hello: events.Hello) -> None:
        """Begins to relay for a rank. It gets its job when that has arrived."""
        assert hello.ranks_here
        if not self._is_elsewhere:
            first, number = hello.ranks_here
            self._is_elsewhere, self._ranks = True, range(first, first + number)
            self._stall_timeout += SLOWER
        self._relays[hello.rank] = relay = Relay(peer, hello)
        self._selector.register(relay.connection, selectors.EVENT_READ, lambda _: self._read_relay(relay))

    def _read_relay(self, relay: Relay) -> Iterator[events.Message]:
        if relay.receive():
            assert relay.job
            check_same(relay.job, self._job)
            relay.rank.connection.setblocking(True)
            with suppress(OSError):  # the rank has died
                relay.rank.connection.sendall(events.encode(relay.job))
            relay.rank.connection.setblocking(False)
            yield events.Elsewhere(rank=-1, host=relay.job.host)
        self._ended = self._ended or relay.ended
        if relay.closed:
            self._selector.unregister(relay.connection)

    def _check_relays(self) -> None:
        if self._ended and self._ended.error:
            raise self._failed_elsewhere(self._ended)
        for relay in self._relays.values():
            if relay.closed and not self._ended:
                raise self._lost(relay)

    def _check_elsewhere(self, now: float) -> None:
        limit = GRACE if self.failed_elsewhere else TORCHRUN_SECONDS  # this machine may have had the error first
        for when, failure in self._failures:
            peer = self.peers.get(failure.rank)
            if peer and peer.hello and not failure.secondary and now - when > limit:
                self._ended = events.RepeatEnded(failure.message, peer.hello.host)
                raise self._failed_elsewhere(self._ended)
        for peer in self.elsewhere:
            if peer.lost and now - peer.lost > GRACE:
                message = f"the connection to {peer} is lost, {peer.where}"
                raise ProgramFailed(message, "its machine or its gpubench has ended, or the network between them")

    @property
    def failed_elsewhere(self) -> bool:
        """Whether the first rank that ended early is on another machine, whose host reports the reason."""
        return self._first_to_end is not None and _is_relayed(self._first_to_end.peer)

    def _failed_elsewhere(self, ended: events.RepeatEnded) -> ProgramFailed:
        return ProgramFailed(f"on {ended.host}, {ended.error}", f"see the output of gpubench on {ended.host}")

    def _lost(self, relay: Relay) -> ProgramFailed:
        if relay.job is None:
            hint = "its gpubench has ended, or the machines share a rendezvous with another run"
            return ProgramFailed(f"{relay}, which has rank 0, refused a rank of this machine", hint)
        message = f"the connection to {relay}, which has rank 0, is lost"
        return ProgramFailed(message, "see the output of gpubench there; its run directory holds the measurements")

    def _report(self, error: BaseException) -> None:
        """Sends the hosts of the other machines the reason why this one ends the repeat."""
        message = error.message if isinstance(error, GpubenchError) else "gpubench has failed"
        if isinstance(error, KeyboardInterrupt):
            message = "gpubench was interrupted"
        for relay in self._relays.values():
            if not relay.closed:
                relay.send(_failure(relay.rank, message, getattr(error, "hint", None)))
        self._end_elsewhere(self._ended or events.RepeatEnded(message, socket.gethostname()))

    def _end_elsewhere(self, ended: events.RepeatEnded) -> None:
        for peer in self.elsewhere:
            try:
                peer.connection.sendall(events.encode(ended))
            except OSError as lost:
                log.debug("%s: %s", peer, channel.reason(lost))

    def _note(self, peer: Peer, message: events.Message) -> None:
        super()._note(peer, message)
        is_early = isinstance(message, events.Done) and self._wanted is not None and peer.position[1] != self._wanted
        if is_early or isinstance(message, events.Failed):
            self._note_end(peer, killed=isinstance(message, events.Failed) and message.secondary)

    def _note_end(self, peer: Peer, *, killed: bool) -> None:
        """Remembers that a rank has ended early. Exceptions of others may arrive before the notice of a killed rank."""
        first, now = self._first_to_end, time.monotonic()
        if first is None or (killed and not first.killed and now - first.when < GRACE):
            self._first_to_end = RankEnd(peer, now, killed)

    def _hang_up(self, peer: Peer) -> None:
        if peer.hello and not peer.done:
            self._note_end(peer, killed=True)
            if relay := self._relays.get(peer.hello.rank):  # at once, so that its time is known
                relay.send(_failure(peer, "its connection has ended", None, secondary=True))
        if peer.done and _is_relayed(peer):  # its host does not know yet that the repeat has ended
            self._selector.unregister(peer.connection)
            assert peer.hello
            self._left.add(peer.hello.rank)
        else:
            super()._hang_up(peer)

    def _take_leave(self, processes: Iterable[psutil.Process], timeout: float) -> None:
        """Waits until the launchers of all machines have exited, unless an error has ended the repeat."""
        if self._fails or not (self._relays or self.elsewhere):
            return
        self._kill(processes)
        for relay in self._relays.values():
            if not relay.closed:
                with suppress(OSError):  # it has been reset
                    relay.connection.shutdown(socket.SHUT_WR)
        if not self._read_until(self._have_all_left, timeout + PARTING_SECONDS):
            log.warning("the program on another machine has not ended %.0f s after the last step", timeout)
        self._end_elsewhere(events.RepeatEnded(None, socket.gethostname()))

    def _end(self, processes: Iterable[psutil.Process]) -> None:
        for relay in self._relays.values():
            relay.connection.close()
        super()._end(processes)

    def _read_until(self, is_over: Callable[[], bool], seconds: float) -> bool:
        """Reads and drops what arrives until `is_over`, or for `seconds`. Returns `is_over`."""
        until = time.monotonic() + seconds
        while not is_over() and time.monotonic() < until:
            for key, _ in self._selector.select(TICK):
                for _ in key.data(key.fileobj):
                    pass
        return is_over()

    def _has_verdict(self) -> bool:
        return self._ended is not None or all(relay.closed for relay in self._relays.values())

    def _have_all_left(self) -> bool:
        return all(relay.closed for relay in self._relays.values()) and all(
            peer.lost or (peer.hello and peer.hello.rank in self._left) for peer in self.elsewhere
        )


def started_together() -> int:
    """The number of hosts that a batch system or MPI has started together with this one, itself included."""
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if (number := os.environ.get(name, "")).isdecimal():
            return max(1, int(number))
    return 1


def _is_relayed(peer: Peer) -> bool:
    """Whether the rank is on another machine, from whose host the connection comes."""
    return peer.connection.family != socket.AF_UNIX


def _failure(peer: Peer, message: str, hint: str | None, *, secondary: bool = False) -> events.Failed:
    assert peer.hello
    doing, step = peer.position
    return events.Failed(
        rank=peer.hello.rank,
        kind=ProgramFailed.__name__,
        message=message,
        hint=hint,
        traceback=None,
        doing=doing,
        step=step,
        secondary=secondary,
    )


def check_same(theirs: events.Job, ours: events.Job) -> None:
    """Raises UsageError unless the host of rank 0 measures the same steps of the same repeat in the same way."""
    there, here = (flatten(job.settings) | {"repeat": _repeat(job)} for job in (theirs, ours))
    for key in (*(key for key in here if key.startswith(COMPARED)), "repeat"):
        if here[key] != there.get(key):
            name = socket.gethostname()
            mine, other = in_words(here[key]), in_words(there.get(key))
            raise UsageError(f"{key} is {mine} on {name} and {other} on {theirs.host}", EVERYWHERE)


def _repeat(job: events.Job) -> Any:
    return job.repeats[0] if job.profiled is None else "the recorded one"
