"""Samples which line of the program's own code runs, in a thread that looks at the stack of another one.

This happens in a repeat that is not measured. The thread is not one of the module threading, all of which a program may
join, and handles no signals. It reads stacks and changes nothing but how often threads may take turns, for which a
thread that computes in Python would otherwise have 5 ms: a shorter piece of Python would never be seen.
"""

from __future__ import annotations

import _thread
import json
import linecache
import os
import random
import signal
import sys
from collections import Counter
from contextlib import suppress
from multiprocessing import parent_process
from time import monotonic
from types import FrameType
from typing import Any, Callable, NamedTuple, Optional

from torch.utils.data._utils import fetch, worker

from .observed import SourcePlaces

INTERVAL = 0.002
"""The mean time between two samples in seconds. It varies, so that samples do not keep in step with a loop."""
TURN = 0.00005
"""The longest turn of a thread in seconds while samples are taken."""
MOST_SAMPLES = 20_000
MOST_ROWS = 4096
"""The largest number of different places that are counted."""
MOST_FUNCTIONS = 20
"""The largest number of functions that the host is told of, those with most samples."""
MOST_TEXT = 120
"""The largest number of characters of a line of source or a name."""
FIRST_WRITE, LAST_WRITE = 0.05, 0.5
"""The seconds until a worker writes its samples for the first time, and the longest until it does so again."""
ENDING_SECONDS = 1.0
"""The longest wait for the thread to end."""
_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
_PROBE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
_FETCH, _WORKER = fetch.__file__, worker.__file__


class StackRow(NamedTuple):
    """What was running in a sample."""

    phase: str
    path: str
    """The file of the innermost function of the program; empty if a library makes samples without the program."""
    function: str
    first: int
    """The first line of the function."""
    line: int
    within: str
    """The function of another package that it had called; empty if it was in none that is written in Python."""


_TYPES = (str, str, str, int, int, str, int)
"""The types of the fields of a row and of their number."""


class Samples:
    """Counts of what was running."""

    def __init__(self) -> None:
        self.taken = self.waiting = self.processes = 0
        """`waiting` counts the samples in which a worker waits for its next batch to make."""
        self.rows: Counter[StackRow] = Counter()

    def add(self, row: StackRow, number: int = 1) -> None:
        if row in self.rows or len(self.rows) < MOST_ROWS:
            self.rows[row] += number

    def text(self) -> str:
        return json.dumps([self.taken, self.waiting, [[*row, number] for row, number in self.rows.items()]])

    def merge(self, text: str) -> None:
        """Adds what `text` of another process has returned. Raises ValueError or TypeError if it has not."""
        taken, waiting, rows = json.loads(text)
        found = [(StackRow(*row), number) for *row, number in rows]
        if any(tuple(map(type, (*row, number))) != _TYPES for row, number in found):
            raise ValueError("no samples")
        self.taken, self.waiting, self.processes = self.taken + taken, self.waiting + waiting, self.processes + 1
        for row, number in found:
            self.add(row, number)

    def json(self, places: SourcePlaces) -> dict[str, Any]:
        """Returns the fields of `gpubench.sampled.Sampled`."""
        functions: dict[tuple[str, str, str, int], Counter[tuple[int, str]]] = {}
        for row, number in self.rows.items():
            functions.setdefault(row[:4], Counter())[row.line, row.within] += number
        most = sorted(functions.items(), key=lambda each: -sum(each[1].values()))[:MOST_FUNCTIONS]
        return {
            "processes": self.processes,
            "samples": self.taken,
            "waiting": self.waiting,
            "functions": [_described(places, *key, lines) for key, lines in most],
        }


def _described(
    places: SourcePlaces, phase: str, path: str, function: str, first: int, lines: Counter[tuple[int, str]]
) -> dict[str, Any]:
    by_line: Counter[int] = Counter()
    by_callee: Counter[str] = Counter()
    for (line, within), number in lines.items():
        by_line[line] += number
        by_callee[within] += number
    samples = sum(lines.values())
    line, on_line = by_line.most_common(1)[0]
    within, most = by_callee.most_common(1)[0]
    return {
        "phase": phase,
        "file": places.shown(path)[-MOST_TEXT:] if path else "",
        "function": function[:MOST_TEXT],
        "first_line": first,
        "samples": samples,
        "line": line,
        "on_line": on_line,
        "source": source(path, line),
        "within": within[:MOST_TEXT] if 2 * most >= samples else "",
    }


def source(path: str, line: int) -> str:
    """Returns a line of a source file; an empty string if it cannot be read."""
    text = linecache.getline(path, line).strip() if path else ""
    return "".join(each if each.isprintable() else " " for each in text)[:MOST_TEXT]


def row_of(frame: Optional[FrameType], phase: str, places: SourcePlaces) -> Optional[StackRow]:
    """Returns what runs in the stack of an innermost frame; None if no code of the program is involved.

    That is the innermost function of the program or, if a library makes a batch without one, the function of the
    library that makes it.
    """
    callee: Optional[FrameType] = None
    while frame is not None:
        path = frame.f_code.co_filename
        if path == _WORKER:  # beyond are frames from before the fork
            return None
        if path == _FETCH:
            return StackRow(phase, "", _name(callee), 0, 0, "") if callee is not None else None
        if places.is_own(path):
            return _own_row(frame, phase, places, _name(callee) if callee is not None else "")
        if not is_of_probe(frame):
            callee = frame
        frame = frame.f_back
    return None


def is_of_probe(frame: FrameType) -> bool:
    """Tells whether a frame is of this package."""
    return frame.f_code.co_filename.startswith(_PROBE)


def _own_row(frame: FrameType, phase: str, places: SourcePlaces, within: str) -> StackRow:
    line = frame.f_lineno or 0
    while frame.f_code.co_name in _COMPREHENSIONS:
        outer = frame.f_back
        while outer is not None and not places.is_own(outer.f_code.co_filename):
            outer = outer.f_back
        if outer is None or outer.f_code.co_filename != frame.f_code.co_filename:
            break
        frame = outer
    code = frame.f_code
    name = getattr(code, "co_qualname", code.co_name).rpartition("<locals>.")[2]
    return StackRow(phase, places.absolute(code.co_filename), name, code.co_firstlineno, line, within)


def _name(frame: FrameType) -> str:
    module = frame.f_globals.get("__name__", "")
    return f"{module}.{getattr(frame.f_code, 'co_qualname', frame.f_code.co_name)}"


class StackSampler:
    """Samples one thread of this process."""

    def __init__(self, thread: int, places: SourcePlaces, phase: Callable[[], str] = str) -> None:
        """`phase` returns the phase of the loop that the thread is in, and is called in another thread."""
        self.samples = Samples()
        self.thread = thread
        self._places = places
        self.phase = phase
        self._going: Any = None
        """A lock that is held while samples are to be taken; None while none are."""
        self._ended: Any = None
        """A lock that the sampling thread releases at its end."""
        self._turn = 0.0
        """How long the turn of a thread was before."""

    def start(self, tick: Optional[Callable[[], None]] = None) -> None:
        """Begins, or goes on, unless it does already. `tick` is called after each sample."""
        if self._going is not None or self.samples.taken >= MOST_SAMPLES:
            return
        going, ended = _thread.allocate_lock(), _thread.allocate_lock()
        going.acquire()
        ended.acquire()
        try:
            _thread.start_new_thread(self._run, (going, ended, tick))
        except RuntimeError:  # no more threads can be started
            return
        self._turn = sys.getswitchinterval()
        self._ended, self._going = ended, going
        sys.setswitchinterval(min(self._turn, TURN))

    def stop(self) -> None:
        """Ends the sampling thread, which `start` can begin anew. It can be called from any thread."""
        going, self._going = self._going, None
        if going is None:
            return
        going.release()
        self._ended.acquire(timeout=ENDING_SECONDS)
        if abs(sys.getswitchinterval() - min(self._turn, TURN)) < 1e-6:  # otherwise the program has set it since
            sys.setswitchinterval(self._turn)

    def _run(self, going: Any, ended: Any, tick: Optional[Callable[[], None]]) -> None:
        with suppress(Exception):  # nothing of it may reach the program
            if hasattr(signal, "pthread_sigmask"):
                signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            draw = random.Random().uniform
            for _ in range(MOST_SAMPLES):
                if going.acquire(timeout=draw(0.5 * INTERVAL, 1.5 * INTERVAL)):
                    break
                self._take()
                if tick:
                    tick()
        ended.release()

    def _take(self) -> None:
        frame = sys._current_frames().get(self.thread)
        if frame is None:  # the thread has ended
            return
        samples = self.samples
        samples.taken += 1
        row = row_of(frame, self.phase(), self._places)
        if row is not None:
            samples.add(row)
        elif not self.phase():
            samples.waiting += 1


def sample_worker(folder: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs the loop of a worker of a DataLoader, and leaves its samples in `folder` for the process that started it."""
    sampling = WorkerSampling(folder)
    with suppress(Exception):  # nothing of it may reach the program
        sampling.start()
    try:
        return call(*args, **kwargs)
    finally:
        sampling.end()


class WorkerSampling:
    """The samples of a worker, which may be killed at any time. It writes them again and again."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._path = ""
        self._sampler: Optional[StackSampler] = None
        self._wait = FIRST_WRITE
        self._due = monotonic() + FIRST_WRITE

    def start(self) -> None:
        parent = parent_process()
        started_by = parent.pid if parent and parent.pid else os.getppid()  # a server of forks may be in between
        self._path = os.path.join(self._folder, f"{_prefix(started_by)}{os.getpid()}")
        self._sampler = StackSampler(_thread.get_ident(), SourcePlaces())
        self._sampler.start(self._tick)

    def end(self) -> None:
        if self._sampler:
            self._sampler.stop()
            self._write(self._sampler)

    def _tick(self) -> None:
        if self._sampler and monotonic() >= self._due:
            self._wait = min(2 * self._wait, LAST_WRITE)
            self._due = monotonic() + self._wait
            self._write(self._sampler)

    def _write(self, sampler: StackSampler) -> None:
        with suppress(Exception):  # as in `sample_worker`
            with open(f"{self._path}.part", "w", encoding="ascii") as file:
                file.write(sampler.samples.text())
            os.replace(f"{self._path}.part", self._path)


def of_workers(folder: str) -> Samples:
    """Returns the samples that the workers of this process have left in `folder` so far."""
    found = Samples()
    prefix = _prefix(os.getpid())
    with suppress(OSError):
        for name in sorted(os.listdir(folder)):
            if name.startswith(prefix) and name[len(prefix) :].isdigit():
                with suppress(Exception), open(os.path.join(folder, name), encoding="ascii") as file:
                    found.merge(file.read())
    return found


def _prefix(parent: int) -> str:
    return f"samples-{parent}-"
