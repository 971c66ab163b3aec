"""How a rank of a program has ended: what the host has seen of it, and the sentences that say so.

A rank leaves the run by the event Done, which its exit handler sends. Otherwise its connection ends, and the host looks
at the process: it may have ended, be another program by now, or run on without the connection.
"""

from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import psutil

from gpubench import events, units
from gpubench.host.supervision import Peer

START_OF_STACK = 28
"""The field of /proc/PID/stat with an address that differs in each program; see proc_pid_stat(5)."""


class Ending(StrEnum):
    """What was seen of a rank whose connection has ended although it had not left the run."""

    closed = "closed"
    replaced = "replaced"
    died = "died"


class Image(NamedTuple):
    """Identifies a process and the program that it runs."""

    created: float
    stack: int


WORDS = {
    Ending.closed: "the connection to gpubench was closed in the program",
    Ending.replaced: "the process was replaced by another program, as by os.execv,",
    Ending.died: "the process ended without Python's exit handlers, as by os._exit,",
}
AFTERWARDS = {
    Ending.closed: "what it did afterwards is not measured",
    Ending.replaced: "what it did afterwards is not measured",
    Ending.died: "its last steps may be missing",
}
HINTS = {
    Ending.closed: "let the program close only what it has opened, or close all else before its first {step}; an "
    "exception that a handler of a signal raises within gpubench's code closes it too",
    Ending.replaced: "let the program replace its process before its first {step}",
    Ending.died: "let the program end by itself or by sys.exit",
}


def image(pid: int) -> Image | None:
    """Identifies the program that a process of this machine runs; None if it has ended or is ending."""
    try:
        process = psutil.Process(pid)
        created = process.create_time()
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return Image(created, _start_of_stack(pid, process))
    except (psutil.Error, OSError):
        return None


def _start_of_stack(pid: int, process: psutil.Process) -> int:
    """The address at which the stack begins. Where it cannot be read, the command line stands for it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found = int(fields[START_OF_STACK - 3])  # the first one after the name is number 3
    except FileNotFoundError:  # not Linux
        found = 0
    return found or hash(tuple(process.cmdline()))


def ending_of(pid: int, before: Image) -> Ending:
    """What has become of a process that had the image `before` and whose connection has ended."""
    now = image(pid)
    if now is None or now.created != before.created:
        return Ending.died
    if now.stack == hash(()):  # it has given its memory back and is about to end
        return Ending.died
    return Ending.closed if now == before else Ending.replaced


def left(peer: Peer, ending: Ending, repeat: int, wanted: int | None) -> events.RankLeft:
    """Describes to a recorder how a rank left the run without reporting its end."""
    assert peer.hello
    doing, steps = peer.position
    received = (steps or 0) if doing == "a step" else 0
    return events.RankLeft(rank=peer.hello.rank, repeat=repeat, how=ending.value, steps=received, wanted=wanted)


def taken(steps: int, wanted: int | None, step: str) -> str:
    """Formats a number of steps, of those `wanted` if they are known: "8 of 30 optimizer steps"."""
    if wanted is None or steps > wanted:
        return plural(steps, step)
    return f"{steps} of {plural(wanted, step)}"


def plural(number: int, step: str) -> str:
    """Formats a number of steps: "1 call of a model", "2 calls of a model"."""
    head, of, rest = step.partition(" of ")
    return f"{units.counted(number, head)}{of}{rest}"


def in_words(found: events.RankLeft, step: str, ranks: int = 1) -> str:
    """How a rank has left the run, and when. `step` is what its steps are called."""
    rank = f"rank {found.rank}: " if ranks > 1 else ""
    seen = taken(found.steps, found.wanted, step)
    return f"{rank}{WORDS[Ending(found.how)]} when {seen} had been received"


def warning(found: events.RankLeft, step: str, ranks: int) -> str:
    return f"{in_words(found, step, ranks)}; {AFTERWARDS[Ending(found.how)]}"


def hint(found: events.RankLeft, step: str) -> str:
    return HINTS[Ending(found.how)].format(step=step)
