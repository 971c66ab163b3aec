"""Ends the processes of a run whose host was killed, as the host would have ended them.

A worker or a program of the user ends when it notices that its host is gone, but not the processes that it has started
itself. So each host that starts processes also starts a shell, which waits at a pipe and takes a millisecond to start.
If the pipe closes before the host has written "over", the host was killed, and the shell becomes this file, run as a
script.

The processes of a run are those with its mark in their environment, and those of the sessions that they or the host
have started. A program gets time to run its `finally` blocks and exit handlers.
"""

import os
import subprocess
import sys
import time
from contextlib import suppress

import psutil

SECONDS_TO_END = 35.0
"""The seconds in which a program must end. Its probe ends it after 30."""
AGAIN = 0.2
"""The seconds between two looks at the processes."""
LONGEST_WAIT = 5.0
"""The seconds for which the host waits for the end of its shell, which takes less than a millisecond."""
SCRIPT = """
pids=
while read -r line; do
    [ "$line" = over ] && exit 0
    pids="$pids $line"
done
exec "$@" $pids
"""


class Guardian:
    """The shell that waits for the end of this process."""

    def __init__(self, name: str, value: str) -> None:
        """`name` and `value` are those of an environment variable that the processes of the run have in common."""
        script = [sys.executable, "-P", __file__, f"{name}={value}"]
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", SCRIPT, "sh", *script],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,  # what ends the host's group must not end it
        )

    def watch(self, pid: int) -> None:
        """Remembers a process that leads a session of its own."""
        self._write(f"{pid}\n")

    def dismiss(self) -> None:
        """Ends the shell, when all processes of the run have ended."""
        self._write("over\n")
        assert self._shell.stdin
        with suppress(OSError):
            self._shell.stdin.close()
        try:
            self._shell.wait(LONGEST_WAIT)
        except subprocess.TimeoutExpired:  # somebody has stopped it
            self._shell.kill()
            self._shell.wait()

    def _write(self, line: str) -> None:
        assert self._shell.stdin
        with suppress(OSError):  # somebody has ended it
            self._shell.stdin.write(line.encode())
            self._shell.stdin.flush()


def end_all(mark: str, pids: set[int]) -> None:
    """Waits for the processes `pids`, and ends all that belong to their run."""
    name, _, value = mark.partition("=")
    marked = [process for process in _all() if _has(process, name, value)]
    leaders = [process for process in marked if process.pid in pids]
    # The number of a session is not used again while one of its processes lives, even if its leader has ended. A host
    # that is killed as it starts a process has not told of it, but that has the mark.
    sessions = {pid for pid in pids if _has_ended(pid)} | {each.pid for each in marked if _session(each) == each.pid}
    until = time.monotonic() + SECONDS_TO_END
    while leaders and time.monotonic() < until:
        time.sleep(AGAIN)
        leaders = [leader for leader in leaders if _lives(leader)]
    members = _members(name, value, sessions)
    while members and time.monotonic() < until + SECONDS_TO_END:
        others = [each for each in members if not tracks_resources(each)]
        for process in others or members:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(AGAIN)
        members = _members(name, value, sessions)  # also those that were started in the meantime


def tracks_resources(process: psutil.Process) -> bool:
    """Whether a process is one of multiprocessing that removes semaphores and shared memory once all others ended."""
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False


def _members(name: str, value: str, sessions: set[int]) -> list[psutil.Process]:
    return [each for each in _all() if _session(each) in sessions or _has(each, name, value)]


def _all() -> list[psutil.Process]:
    """The processes of this user that have not ended, without this one."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            is_own = process.uids().effective == os.geteuid() and process.pid != os.getpid()
            if is_own and _lives(process):
                found.append(process)
    return found


def _lives(process: psutil.Process) -> bool:
    """Whether a process has not ended. In a container, nobody may reap one that has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _has_ended(pid: int) -> bool:
    try:
        return not _lives(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return True


def _has(process: psutil.Process, name: str, value: str) -> bool:
    try:
        return process.environ().get(name) == value
    except (psutil.Error, OSError):
        return False


def _session(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except OSError:
        return 0


if __name__ == "__main__":
    end_all(sys.argv[1], set(map(int, sys.argv[2:])))
