"""What the host knows about its workers: their connections, their activity, and which of them caused a failure."""

import logging
import re
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import psutil

from gpubench import errors, events, units
from gpubench.channel import EVERYONE
from gpubench.errors import GpubenchError, HandoffError, SettingsError, UsageError, WorkerLost
from gpubench.ranks import machine

STARTUP = 120.0  # seconds that a worker always has to import torch and connect, on a busy machine too
SHORTEST_SILENCE = 5.0  # seconds by which a busy machine may delay a heartbeat
LONGEST_SILENCE = 30.0  # seconds without a heartbeat (one per second) after which a rank counts as lost

log = logging.getLogger("gpubench.host.supervision")


def silence(time_limit: float) -> float:
    """The seconds without a message after which host and rank consider each other lost.

    `time_limit` is the time limit for progress, in seconds.
    """
    return max(SHORTEST_SILENCE, min(LONGEST_SILENCE, time_limit))


@dataclass(eq=False)
class Peer:
    """A connection, which belongs to a rank after the handshake. Times are monotonic, in seconds."""

    connection: socket.socket
    hello: events.Hello | None = None
    """The handshake; None before it."""
    lines: events.LineBuffer = field(default_factory=events.LineBuffer)
    """The lines that it sends."""
    heard: float = 0.0
    """The time of the last message."""
    progressed: float = 0.0
    """The time of the last change of `position`, or of the last event that reports work."""
    position: tuple[str, int | None] = ("starting", None)
    """The activity and the step in the last heartbeat."""
    waits_for: int | None = None
    within: float | None = None
    patience_factor: float = 1.0
    ready: bool = False
    """Whether the rank has built what it runs, so that it no longer imports or loads."""
    done: bool = False
    """Whether the rank has sent Done."""
    lost: float | None = None
    """The time at which the connection ended before Done."""
    released: bool = False
    """Whether what was received until then is measured all the same."""

    @property
    def left(self) -> bool:
        """Whether nothing more is expected of the rank."""
        return self.done or self.released

    @property
    def here(self) -> bool:
        """Whether the rank runs on this machine, so that its pid is valid here."""
        return self.hello is not None and self.hello.machine == machine()

    @property
    def may_be_loading(self) -> bool:
        """Whether a running process explains a silence: to import or load may keep Python from sending heartbeats."""
        return not self.ready and self.here and self.hello is not None and not is_stopped(self.hello.pid)

    def time_limit(self, run_limit: float) -> float:
        """The seconds after which this rank must have made progress; `run_limit` is the run's time limit."""
        return self.within or run_limit * self.patience_factor

    def __str__(self) -> str:
        assert self.hello
        return f"rank {self.hello.rank} (pid {self.hello.pid} on {self.hello.host})"

    @property
    def where(self) -> str:
        """The current activity in words, such as "in backward of step 3"."""
        doing, step = self.position
        doing = units.words(doing)
        if doing == "a step":
            return f"in step {step}"
        if self.waits_for is not None:
            return doing
        return f"in {doing}" if step is None else f"in {doing} of step {step}"


def blame(
    peers: Mapping[int, Peer],
    world_size: int,
    failures: Sequence[tuple[float, events.Failed]],
    exit_codes: Sequence[int | None],
    output: Sequence[str],
) -> GpubenchError:
    """Finds the earliest cause of a failure: an error that a rank has reported, or the death of a rank.

    A broken collective is returned only if there is no other cause. The message begins with the ranks that had the
    error, unless all had it. `failures` holds (time received, event). `exit_codes` are those of the ranks that were
    started on this machine: negative for a signal, None for a running process. `output` is their last output.
    """
    causes: list[tuple[bool, float, GpubenchError]] = []
    reporters: dict[str, list[int]] = {}
    for _, failure in failures:
        reporters.setdefault(failure.message, []).append(failure.rank)
    machines = {peer.hello.machine for peer in peers.values() if peer.hello}
    for when, failure in failures:
        error_class = errors.by_name(failure.kind)
        named = _names_its_ranks(error_class, failure, len(machines))
        ranks = "" if named else _ranks(reporters[failure.message], world_size)
        causes.append((failure.secondary, when, error_class(ranks + failure.message, failure.hint)))
    reported = {failure.rank for _, failure in failures}
    for number, peer in peers.items():
        if peer.lost is not None and number not in reported:
            error = _lost(
                str(peer), "ended its connection", f"; its last report was {peer.where}", [number], exit_codes, output
            )
            causes.append((False, peer.lost, error))
    if causes:
        return min(causes, key=lambda cause: cause[:2])[2]
    missing = [rank for rank in range(world_size) if rank not in peers]
    gone = [rank for rank in missing if rank < len(exit_codes) and exit_codes[rank] is not None] or missing
    return _lost(f"rank {', '.join(map(str, gone)) or '?'}", "ended", " before it reported", gone, exit_codes, output)


def _names_its_ranks(kind: type[GpubenchError], failure: events.Failed, machines: int) -> bool:
    """Whether the message is complete without the rank that reported it.

    All ranks have the same settings, the ranks of one machine have the same files and devices, and the error of a
    hand-off names the sender and the receiver.
    """
    everywhere = (SettingsError, HandoffError) if machines > 1 else (UsageError, HandoffError)
    return issubclass(kind, everywhere) or failure.message.startswith(f"rank {failure.rank} ")


def _ranks(numbers: Sequence[int], world_size: int) -> str:
    """Formats "rank 3: " or "ranks 1 and 3: "; the empty string for all ranks."""
    if len(numbers) == world_size:
        return ""
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {units.listed(map(str, sorted(numbers)))}: "


KILLED = "the kernel kills a process when the machine runs out of memory: see dmesg, or try a smaller batch"
"""The hint after SIGKILL."""


def _lost(
    subject: str, verb: str, when: str, ranks: Sequence[int], exit_codes: Sequence[int | None], output: Sequence[str]
) -> WorkerLost:
    """The error for `ranks`; its message uses `verb` if no exit code of them is known."""
    codes = [exit_codes[rank] for rank in ranks if rank < len(exit_codes)]
    code = next((code for code in codes if code is not None), None)
    if code is not None:
        verb = exit_in_words(code)
    hint = "run.log holds the worker's output"
    if code == -signal.SIGKILL:
        hint = KILLED
    elif line := last_line(output):
        hint += f"; its last line: {line}"
    return WorkerLost(f"{subject} {verb}{when}", hint)


TRACEBACK = "Traceback (most recent call last):"
EXCEPTION = re.compile(r"(\[rank\d+\]: )?[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit)\b")
"""The beginning of the line with which Python reports an error. Libraries may write more lines after it."""


def last_line(output: Sequence[str]) -> str:
    """The line of the last Python exception, or else the last line with letters or digits.

    It is cut to a length for a message; "" if there is none.
    """
    lines = [line.strip() for line in reversed(output) if any(character.isalnum() for character in line)]
    raised = (line for line in lines if EXCEPTION.match(line)) if TRACEBACK in lines else iter(())
    return next(raised, next(iter(lines), ""))[:200]


def exit_in_words(code: int) -> str:
    """Formats a subprocess's return code as "exited with code 1" or "was killed by SIGKILL"."""
    return f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no names
        return f"signal {number}"


def is_stopped(pid: int) -> bool:
    """Whether a process on this machine cannot go on by itself: a signal has stopped it, or it has ended."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False


class Setups:
    """Watches ranks until they have built what they run, and names those that take long over it.

    To start Python, import torch and load a model may take minutes from a cold disk, so a process that runs is only
    named. One that a signal has stopped does not go on by itself, and is lost.
    """

    def __init__(self, started: float) -> None:
        self._started = started
        self._stopped: dict[int, float] = {}
        """The time since which each rank that has not connected has been found stopped."""
        self._named: set[tuple[int, str]] = set()

    def check(
        self, starting: Mapping[int, int], peers: Mapping[int, Peer], now: float, time_limit: float
    ) -> WorkerLost | None:
        """The error for a stopped rank that has not connected, or None.

        `starting` maps the ranks that this machine has started, and that have not connected, to their process ids.
        Times are monotonic, in seconds.
        """
        limit = silence(time_limit)
        self._stopped = {rank: self._stopped.get(rank, now) for rank, pid in starting.items() if is_stopped(pid)}
        for rank, since in self._stopped.items():
            if now - since > limit:
                return WorkerLost(
                    f"rank {rank} (pid {starting[rank]}) has been stopped for {now - since:.0f} s, before it "
                    "connected: it was starting or importing torch",
                    "a signal such as SIGSTOP stops a process, and SIGCONT continues it; start the run again",
                )
        if now - self._started > limit:
            for rank, pid in starting.items():
                if rank in self._stopped:
                    continue
                self._name(rank, f"rank {rank} (pid {pid})", "starting or importing torch", max(STARTUP, time_limit))
        for rank, peer in peers.items():
            busy = not peer.ready and peer.waits_for is None and peer.patience_factor == 1.0
            if busy and now - peer.progressed > limit:
                self._name(rank, str(peer), units.words(peer.position[0]), peer.time_limit(time_limit))
        return None

    def _name(self, rank: int, who: str, where: str, limit: float) -> None:
        if (rank, where) not in self._named:
            self._named.add((rank, where))
            log.warning("%s is slow: it is still %s; the run waits up to %.0f s for it", who, where, limit)


def stalled(
    peers: Mapping[int, Peer], world_size: int, now: float, started: float, time_limit: float
) -> WorkerLost | None:
    """The error for a rank that has stopped, or None.

    A rank has stopped if it has not connected since `started`, sends no heartbeat, or has made no progress within
    `time_limit`. Times are monotonic, in seconds.
    """
    missing = ", ".join(str(rank) for rank in range(world_size) if rank not in peers)
    if missing and now - started > max(STARTUP, time_limit):
        return WorkerLost(
            f"rank {missing} has not connected {now - started:.0f} s after the start, in which it imports torch",
            "run.log holds the workers' output; measurement.stall_timeout sets the time limit",
        )
    running = [peer for peer in peers.values() if not peer.done]
    silent = [peer for peer in running if now - peer.heard > silence(peer.time_limit(time_limit))]
    silent = [peer for peer in silent if not peer.may_be_loading]
    stuck = [peer for peer in running if now - peer.progressed > peer.time_limit(time_limit)]
    if missing:  # those that wait for every rank wait for the missing ones
        stuck = [peer for peer in stuck if peer.waits_for != EVERYONE]
    # A rank that waits for one that makes progress is not stuck.
    stuck = [peer for peer in stuck if (cause := _cause(peer, peers)).done or cause in silent or cause in stuck]
    if not silent and not stuck:
        return None
    # Ranks that wait for a stopped rank are stuck too: the cause is the silent rank, or the one furthest behind.
    suspects = silent or [_cause(peer, peers) for peer in stuck]
    culprit = min(suspects, key=lambda peer: (-1 if peer.position[1] is None else peer.position[1], peer.progressed))
    if culprit.done:
        state = "has finished"
    else:
        since = now - (culprit.heard if silent else culprit.progressed)
        state = "has been silent" if silent else "has made no progress"
        state += f" for {since:.0f} s, {culprit.where}"
    waiting = [peer for peer in running if peer is not culprit and _cause(peer, peers) is culprit]
    clauses = [
        f"{culprit} {state}",
        *(f"{_rank(peer)} has been {peer.where} for {now - peer.progressed:.0f} s" for peer in waiting),
    ]
    setting = "measurement.stall_timeout" if culprit.within is None else "pipeline.deadline"
    return WorkerLost("; ".join(clauses), f"run.log holds every rank's stack; {setting} sets the time limit")


def _cause(peer: Peer, peers: Mapping[int, Peer]) -> Peer:
    """The last rank of the chain that begins with `peer` and in which each rank waits for the next one."""
    chain = [peer]
    while (awaited := chain[-1].waits_for) is not None and not chain[-1].done:
        if awaited == EVERYONE:  # the rank that has made progress most recently
            busy = [
                other for other in peers.values() if not (other in chain or other.done or other.waits_for == EVERYONE)
            ]
            other = max(busy, key=lambda other: other.progressed, default=None)
        else:
            other = peers.get(awaited)
        if other is None or other in chain:
            break
        chain.append(other)
    return chain[-1]


def _rank(peer: Peer) -> str:
    assert peer.hello
    return f"rank {peer.hello.rank}"
