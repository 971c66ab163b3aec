"""What a process takes, with all that it starts."""

import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

import psutil

MB = 1e6
GLANCE = 0.05  # seconds between two looks at what is in memory


@dataclass(frozen=True)
class Spent:
    seconds: float
    processor: float
    """Seconds that processors worked."""
    megabytes: float
    """The most that was in memory, of all processes together."""


def observe(command: Sequence[str], environment: Mapping[str, str]) -> tuple[str, Spent]:
    """What `command` printed, and what it took, start-up included.

    Raises subprocess.CalledProcessError, with what it said, if it fails.
    """
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:
        began, most = time.perf_counter(), 0
        process = subprocess.Popen(command, stdout=printed, stderr=errors, env=environment)
        ended, status, used = os.wait4(process.pid, os.WNOHANG)
        while not ended:
            most = max(most, _resident(process.pid))
            time.sleep(GLANCE)
            ended, status, used = os.wait4(process.pid, os.WNOHANG)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        said, complaint = _read(printed), _read(errors)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, list(command), said, complaint)
    megabytes = max(most, used.ru_maxrss * 1024) / MB
    return said, Spent(seconds, used.ru_utime + used.ru_stime, megabytes)


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _resident(process: int) -> int:
    total = 0
    try:
        root = psutil.Process(process)
        for one in (root, *root.children(recursive=True)):
            total += one.memory_info().rss
    except psutil.Error:  # one of them has just ended
        pass
    return total
