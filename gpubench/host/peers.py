"""The host's view of its workers: their connections, what each was last heard doing, and which one is to blame."""

import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpubench import errors, events, units
from gpubench.channel import EVERYONE
from gpubench.errors import GpubenchError, HandoverError, SettingsError, UsageError, WorkerLost
from gpubench.ranks import machine

STARTUP = 120.0  # seconds for torch to load and report on a busy machine, at the least
BEATS = 5.0  # seconds without a heartbeat that a busy machine may take, whatever the deadline
SILENCE = 30.0  # seconds without a heartbeat (one a second) before a rank counts as stopped


def silence(patience: float) -> float:
    """Seconds without a heartbeat after which a rank, or on its side the host, is lost to one with this `patience`."""
    return max(BEATS, min(SILENCE, patience))


@dataclass(eq=False)
class Peer:
    """One connection, and once it has said hello, one rank."""

    connection: socket.socket
    hello: events.Hello | None = None
    buffer: bytearray = field(default_factory=bytearray)
    heard: float = 0.0
    progressed: float = 0.0
    position: tuple[str, int | None] = ("starting", None)
    waits_for: int | None = None
    within: float | None = None
    done: bool = False
    lost: float | None = None

    @property
    def here(self) -> bool:
        """Whether its pid is one of this machine."""
        return self.hello is not None and self.hello.machine == machine()

    def __str__(self) -> str:
        assert self.hello
        return f"rank {self.hello.rank} (pid {self.hello.pid} on {self.hello.host})"

    @property
    def where(self) -> str:
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
    exit_code: int | None,
    output: Sequence[str],
) -> GpubenchError:
    """The earliest cause: a rank's own error, or one that vanished; a broken collective only if there is nothing else.

    The message begins with the ranks that met the error, where not all of them did. `failures` come with the time they
    were heard; `exit_code` is that of the process that was started, negative for a signal, and `output` its last lines.
    """
    causes: list[tuple[bool, float, GpubenchError]] = []
    speakers: dict[str, list[int]] = {}
    for _, failure in failures:
        speakers.setdefault(failure.message, []).append(failure.rank)
    machines = {peer.hello.machine for peer in peers.values() if peer.hello}
    for when, failure in failures:
        error_class = errors.by_name(failure.kind)
        named = _names_its_ranks(error_class, failure, len(machines))
        ranks = "" if named else _ranks(speakers[failure.message], world_size)
        causes.append((failure.secondary, when, error_class(ranks + failure.message, failure.hint)))
    reported = {failure.rank for _, failure in failures}
    for number, peer in peers.items():
        if peer.lost is not None and number not in reported:
            error = _lost(f"{peer} died; it was last heard of {peer.where}", world_size, exit_code, output)
            causes.append((False, peer.lost, error))
    if causes:
        return min(causes, key=lambda cause: cause[:2])[2]
    missing = ", ".join(str(rank) for rank in range(world_size) if rank not in peers)
    return _lost(f"rank {missing or '?'} ended before it reported", world_size, exit_code, output)


def _names_its_ranks(kind: type[GpubenchError], failure: events.Failed, machines: int) -> bool:
    """Whether the rank that reported the failure first is of no interest: every rank has the same settings, those of
    one machine have the same files and devices, and what is wrong with a hand-over names both of its ends."""
    everywhere = (SettingsError, HandoverError) if machines > 1 else (UsageError, HandoverError)
    return issubclass(kind, everywhere) or failure.message.startswith(f"rank {failure.rank} ")


def _ranks(numbers: Sequence[int], world_size: int) -> str:
    """ "rank 3: ", "ranks 1 and 3: "; nothing where it is all of them."""
    if len(numbers) == world_size:
        return ""
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {units.listed(map(str, sorted(numbers)))}: "


def _lost(what: str, world_size: int, exit_code: int | None, output: Sequence[str]) -> WorkerLost:
    if world_size == 1 and exit_code is not None and exit_code < 0:
        what += f": killed by {signal.Signals(-exit_code).name}"
    hint = "run.log holds the worker's output"
    if world_size == 1 and exit_code == -signal.SIGKILL:
        hint = "the kernel does this when the machine runs out of memory: see dmesg, or try a smaller batch"
    elif words := [line.strip() for line in output if any(character.isalnum() for character in line)]:
        hint += f"; its last line: {words[-1][:200]}"
    return WorkerLost(what, hint)


def stalled(
    peers: Mapping[int, Peer], world_size: int, now: float, started: float, patience: float
) -> WorkerLost | None:
    """The rank that stopped: unheard of since `started`, without a heartbeat, or for `patience` without progress.

    Times are monotonic, in seconds.
    """
    missing = ", ".join(str(rank) for rank in range(world_size) if rank not in peers)
    if missing and now - started > max(STARTUP, patience):
        return WorkerLost(
            f"rank {missing} has not reported {now - started:.0f} s after the start",
            "run.log holds what the workers said; measurement.stall_timeout sets the patience",
        )
    running = [peer for peer in peers.values() if not peer.done]
    silent = [peer for peer in running if now - peer.heard > silence(peer.within or patience)]
    stuck = [peer for peer in running if now - peer.progressed > (peer.within or patience)]
    # A rank that waits for one that gets on is only late.
    stuck = [peer for peer in stuck if (cause := _cause(peer, peers)).done or cause in silent or cause in stuck]
    if not silent and not stuck:
        return None
    # Ranks that wait for another are stuck too: blame the silent one, or the one furthest behind.
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
    return WorkerLost("; ".join(clauses), f"run.log holds every rank's stack; {setting} sets the patience")


def _cause(peer: Peer, peers: Mapping[int, Peer]) -> Peer:
    """The rank at the end of the chain of those that wait for one another, beginning with `peer`."""
    chain = [peer]
    while (wanted := chain[-1].waits_for) is not None and not chain[-1].done:
        if wanted == EVERYONE:  # as long as any of them gets on, all is well
            busy = [
                other for other in peers.values() if not (other in chain or other.done or other.waits_for == EVERYONE)
            ]
            other = max(busy, key=lambda other: other.progressed, default=None)
        else:
            other = peers.get(wanted)
        if other is None or other in chain:
            break
        chain.append(other)
    return chain[-1]


def _rank(peer: Peer) -> str:
    assert peer.hello
    return f"rank {peer.hello.rank}"
