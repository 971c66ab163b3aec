"""The processes of a program that train, or infer, and are not measured: what they run, and the sentence about them.

The ranks of a program are those that connect first with one number of ranks. Whatever else takes a step is reported: a
process that trains without a process group, a later program of a shell script, a fork of a rank.
"""

import shlex
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import psutil

from gpubench import events, units

LONGEST = 300
"""The characters of a command line in a sentence."""
MOST_NAMED = 3
"""The commands that a sentence names."""
SPAWNED = "--multiprocessing-fork"
"""The argument of a process that multiprocessing has started anew."""


class StartedProcess(NamedTuple):
    """A process and the words that it was started with."""

    pid: int
    words: tuple[str, ...]


def ancestry(pid: int, root: int) -> list[StartedProcess]:
    """The processes that led from `root` to `pid`, both included; `pid` alone if it is not below `root`."""
    found: list[StartedProcess] = []
    with suppress(psutil.Error):
        process: psutil.Process | None = psutil.Process(pid)
        while process is not None:
            found.append(StartedProcess(process.pid, tuple(process.cmdline())))
            if process.pid == root:
                return found[::-1]
            process = process.parent()
    return found[:1]


def unmeasured(
    found: Sequence[StartedProcess], measured: Sequence[StartedProcess], repeat: int, *, later: bool
) -> events.Unmeasured:
    """Describes a process that is not measured to a recorder, by its ancestry and that of a rank.

    `later` means that all ranks had ended before its first step.
    """
    common = {each.pid for each in measured}
    own = next((each for each in found if each.pid not in common), None)
    first = next((each for each in measured if each.pid not in {each.pid for each in found}), measured[-1])
    known = {each.words for each in measured}
    is_own = own is not None and bool(own.words) and own.words not in known and SPAWNED not in own.words
    if SPAWNED in first.words:  # what multiprocessing has started is said by what has started that
        first = next((each for each in reversed(measured) if SPAWNED not in each.words), first)
    return events.Unmeasured(
        rank=-1,
        repeat=repeat,
        command=_said(own if own and is_own else first),
        is_own=is_own,
        measured=_said(first),
        later=later,
    )


def _said(command: StartedProcess) -> str:
    said = shlex.join(command.words)
    return said if len(said) <= LONGEST else f"{said[: LONGEST - 3]}..."


def warning(found: Sequence[events.Unmeasured], ranks: int, *, inference: bool) -> str | None:
    """Warns of processes that are not measured, and says which one is. `found` are those of all measured repeats.

    Of several repeats, the one with the most such processes is described.
    """
    if not found:
        return None
    number = Counter(one.repeat for one in found)
    most = max(number, key=lambda repeat: (number[repeat], -repeat))
    told = [one for one in found if one.repeat == most]
    did = "called a model" if inference else "trained"
    measured = f"the first to take a step, of {told[0].measured}" if ranks == 1 else f"the ranks of {told[0].measured}"
    parts = [
        f"{len(told) + ranks} processes of the program {did}, and {ranks} {'was' if ranks == 1 else 'were'} measured: "
        f"{measured}"
    ]
    if copies := [one for one in told if not one.is_own]:
        several = len(copies) > 1
        later = ", which began later," if all(one.later for one in copies) else ""
        parts.append(
            f"the {'others' if several else 'other one'} of the same command{later} {'are' if several else 'is'} not "
            f"counted; to measure {'one of them' if several else 'it'}, let no other process of the command do so, or "
            "make them ranks of one torch.distributed process group, which are measured together"
        )
    if others := Counter(one.command for one in told if one.is_own):
        named = [
            f"{command}{f' ({count} processes)' * (count > 1)}" for command, count in others.most_common(MOST_NAMED)
        ]
        more = [f"{len(others) - MOST_NAMED} more"] * (len(others) > MOST_NAMED)
        parts.append(
            f"not measured: {units.listed([*named, *more])}; give one such command alone after -- to measure it"
        )
    return "; ".join(parts)
