"""Which part of a trace counts, and where its steps begin and end."""

import re
from dataclasses import dataclass

import numpy as np

from gpubench.trace.columns import Trace
from gpubench.trace.names import Lexicon

_NUMBER = re.compile(r"ProfilerStep#(\d{1,18})")


@dataclass(frozen=True)
class StepWindow:
    number: int
    start: int
    end: int
    """Where the next step starts, so that steps tile the window."""


@dataclass(frozen=True)
class Window:
    """[start, end) in nanoseconds, on the trace's own clock."""

    start: int
    end: int
    steps: list[StepWindow]

    @property
    def wall(self) -> int:
        return self.end - self.start


def window(trace: Trace, lexicon: Lexicon) -> Window:
    """From the first ProfilerStep to the end of the last, of the longest run of steps with consecutive numbers.

    What lies between others was not recorded. Without any step, from the first to the last work of the device; of a
    trace without such work, of the host.
    """
    runs = step_runs(trace, lexicon)
    if runs:
        steps = max(runs, key=len)
        return Window(steps[0].start, steps[-1].end, steps)
    start, end = (trace.host.start, trace.host.end) if trace.host_only else (trace.device.start, trace.device.end)
    if not len(start):
        return Window(0, 0, [])
    return Window(int(start.min()), int(end.max()), [])


def step_runs(trace: Trace, lexicon: Lexicon) -> list[list[StepWindow]]:
    """The steps of the trace, split where their numbers are not consecutive; one inside another is no step."""
    host = trace.host
    found = np.flatnonzero(lexicon.profiler_step[host.name] & (host.end > host.start))
    if not len(found):
        return []
    found = found[np.lexsort((-host.end[found], host.start[found]))]
    reach = np.maximum.accumulate(host.end[found])
    found = found[np.concatenate(([True], reach[1:] > reach[:-1]))]
    numbers = np.array([_number(trace.names[name]) for name in host.name[found].tolist()], np.int64)
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    runs = zip(np.split(found, breaks), np.split(numbers, breaks), strict=True)
    return [_tiled(host.start[run].tolist(), int(host.end[run[-1]]), named.tolist()) for run, named in runs]


def _tiled(starts: list[int], last: int, numbers: list[int]) -> list[StepWindow]:
    return [StepWindow(*step) for step in zip(numbers, starts, [*starts[1:], last], strict=True)]


def _number(name: str) -> int:
    match = _NUMBER.match(name)
    return int(match[1]) if match else 0
