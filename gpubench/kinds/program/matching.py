"""Searches text for the numbers that a regular expression names, in a process with a limit on its CPU time.

For some patterns, Python's `re` takes years for a line, and returns to Python, where signals are handled, only at the
end. So this file is also a script, which the system ends when its time is up, whatever became of the host.
"""

import json
import re
import resource
import signal
import subprocess
import sys
from contextlib import suppress

LONGEST = 1000
"""The bytes of a line that are searched."""
MOST = 1000
"""The values of a number that are returned."""
LARGEST = 1e60
MEMORY = 1 << 30
"""The bytes of memory that the process may use."""
CLOCK = 10
"""The process also ends after this many times its limit by the clock, as one that somebody has stopped uses no CPU."""


def numbers(pattern: str, output: bytes, seconds: float) -> list[list[float]] | None:
    """Returns the numbers of each named group, or else of the first group, in the lines of `output`.

    What follows the last end of a line is left out.

    Returns None if the search is not done after `seconds` of CPU time, or takes more than MEMORY.
    """
    try:
        ended = subprocess.run(
            [sys.executable, "-I", "-S", __file__, str(seconds)],
            input=json.dumps(pattern).encode() + b"\n" + output,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the host
            timeout=CLOCK * seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    return None if ended.returncode else json.loads(ended.stdout)


def _found(pattern: re.Pattern[str], output: bytes) -> list[list[float]]:
    found: dict[str | int, list[float]] = {group: [] for group in pattern.groupindex or (1,)}
    for line in re.split(rb"[\r\n]", output)[:-1]:
        for match in pattern.finditer(line[:LONGEST].decode(errors="replace")):
            for group, values in found.items():
                try:
                    value = float(match[group])
                except (TypeError, ValueError):  # the group has taken no part, or is not a number
                    continue
                if len(values) < MOST and abs(value) < LARGEST:
                    values.append(value)
    return list(found.values())


def _main(seconds: float) -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a program can be started with a signal that is ignored or blocked
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    signal.setitimer(signal.ITIMER_PROF, seconds)
    with suppress(OSError, ValueError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    pattern = re.compile(json.loads(sys.stdin.buffer.readline()))
    print(json.dumps(_found(pattern, sys.stdin.buffer.read())))


if __name__ == "__main__":
    _main(float(sys.argv[1]))
