"""Reads what the workers of a DataLoader use, from /proc. What the system does not tell is None."""

from __future__ import annotations

import os
import resource
import sys
from typing import Dict, Iterable, List, Optional

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def cpu_seconds(workers: Iterable[int]) -> float:
    """Returns the CPU time of this process, of its children that have ended, and of `workers`, which are pids.

    Those that a fork server has started, and that have ended, are the server's.
    """
    found = 0.0
    server = sys.modules.get("multiprocessing.forkserver")
    if pid := getattr(getattr(server, "_forkserver", None), "_forkserver_pid", None):
        found += sum(_ticks(pid)[2:])
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(who)
        found += used.ru_utime + used.ru_stime
    for pid in workers:
        found += sum(_ticks(pid)[:2])
    return found


def _ticks(pid: int) -> List[float]:
    """Returns the CPU time of a process, as user and system, and that of its children that have ended, in seconds."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return [int(ticks) / _TICKS for ticks in file.read().rpartition(b")")[2].split()[11:15]]
    except (OSError, ValueError):  # it has ended, or the system is not Linux
        return []


def core_delay() -> int:
    """Returns the nanoseconds for which the calling thread has waited for a core so far; 0 if that is unknown."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def memory(pid: int) -> Optional[Dict[str, int]]:
    """Returns the bytes of memory of a process: "pss", its share of what it holds; "private", what it alone holds;
    "shared", what others hold too; "shm", its share of shared memory, in which batches are handed over."""
    found: Dict[str, int] = {}
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                name, _, rest = line.partition(b":")
                words = rest.split()
                if len(words) == 2 and words[1] == b"kB":
                    found[name.decode()] = int(words[0]) * 1024
    except (OSError, ValueError):
        return None
    if "Pss" not in found:
        return None
    return {
        "pss": found["Pss"],
        "private": found.get("Private_Clean", 0) + found.get("Private_Dirty", 0),
        "shared": found.get("Shared_Clean", 0) + found.get("Shared_Dirty", 0),
        "shm": found.get("Pss_Shmem", 0),
    }


def read_bytes() -> Optional[Dict[str, int]]:
    """Returns the bytes that this process has read so far: "asked" by its calls, and from the "disk"."""
    found = {}
    try:
        with open("/proc/self/io", "rb") as file:
            for line in file:
                name, _, number = line.partition(b":")
                found[name.decode()] = int(number)
        return {"asked": found["rchar"], "disk": found["read_bytes"]}
    except (OSError, ValueError, KeyError):
        return None
