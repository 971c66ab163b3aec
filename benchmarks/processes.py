"""Run processes: measure a process with its children, limit its time, and find the reason of a failure."""

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

MB = 1e6
GLANCE = 0.05  # seconds between two readings of the memory
PATIENCE = 15.0  # seconds in which an interrupted process may clean up


@dataclass(frozen=True)
class Spent:
    seconds: float
    processor: float
    """Processor time in seconds."""
    megabytes: float
    """The peak of the resident memory: of the largest process, or of all together if all were sampled."""


def without_settings(*folders: str | Path | None, **variables: str) -> dict[str, str]:
    """Return this process's environment without settings of gpubench and with `variables`.

    Python finds modules in `folders` first, and then where it finds them here: PyTorch's image may lack what is needed.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GPUBENCH_")}
    path = os.pathsep.join(str(one) for one in (*folders, clean.get("PYTHONPATH")) if one)
    return clean | {"PYTHONPATH": path} | variables


def observe(
    command: Sequence[str], environment: Mapping[str, str] | None = None, *, family: bool = False
) -> tuple[str, Spent]:
    """Return the output of `command` and what it took, start-up included.

    Raises subprocess.CalledProcessError, with the output, if it fails.
    """
    ended, most = threading.Event(), [0]
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=printed, stderr=errors, env=environment)
        watcher = threading.Thread(target=_watch, args=(process.pid, ended, most))
        try:
            if family:
                watcher.start()
            _, status, used = os.wait4(process.pid, 0)
            seconds = time.perf_counter() - began
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            ended.set()
            if family:
                watcher.join()
            if process.returncode is None:
                process.kill()
                process.wait()
        said, complaint = _read(printed), _read(errors)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, list(command), said, complaint)
    return said, Spent(seconds, used.ru_utime + used.ru_stime, max(most[0], used.ru_maxrss * 1024) / MB)


def _watch(process: int, ended: threading.Event, most: list[int]) -> None:
    while not ended.wait(GLANCE):
        most[0] = max(most[0], _resident(process))


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


@dataclass(frozen=True)
class Ended:
    code: int | None
    """The exit code; None if it ran out of time."""
    printed: str
    errors: str
    """Empty if stderr is part of the output."""


def run_for(
    command: Sequence[str],
    limit: float,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    *,
    together: bool = False,
    patience: float = PATIENCE,
) -> Ended:
    """Run `command` in `folder` for at most `limit` seconds.

    A command that runs out of time, or whose caller is interrupted, is interrupted as by Ctrl-C, and after `patience`
    seconds killed with its family.
    """
    errors = subprocess.STDOUT if together else subprocess.PIPE
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as child:
        try:
            printed, complaint = child.communicate(timeout=limit)
            return Ended(child.returncode, printed, complaint or "")
        except subprocess.TimeoutExpired:
            return _interrupt(child, patience)
        except KeyboardInterrupt:
            _interrupt(child, patience)
            raise
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def _interrupt(child: "subprocess.Popen[str]", patience: float) -> Ended:
    """Interrupt a process as by Ctrl-C, so that it can end what it has started, and kill it if that takes too long."""
    child.send_signal(signal.SIGINT)
    try:
        printed, complaint = child.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        printed, complaint = child.communicate()
    return Ended(None, printed, complaint or "")


def reason(error: Exception) -> str:
    """Return the line of a failed process's output that gives the reason, without "error:"."""
    said = error.stderr or error.stdout if isinstance(error, subprocess.CalledProcessError) else None
    return last_words(str(said or error)).removeprefix("error: ") or repr(error)


def last_words(printed: str) -> str:
    """Return the last line with "error", or else the last line."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    named = [line for line in lines if line.lower().startswith("error:")]
    return (named or lines or [""])[-1]
