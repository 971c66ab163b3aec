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
    """From the first ProfilerStep to the end of the last.

    Without any, from the first to the last work of the device; of a trace without such work, of the host.
    """
    steps = _steps(trace, lexicon)
    if steps:
        return Window(steps[0].start, steps[-1].end, steps)
    start, end = (trace.host.start, trace.host.end) if trace.host_only else (trace.device.start, trace.device.end)
    if not len(start):
        return Window(0, 0, [])
    return Window(int(start.min()), int(end.max()), [])


def _steps(trace: Trace, lexicon: Lexicon) -> list[StepWindow]:
    host = trace.host
    found = np.flatnonzero(lexicon.profiler_step[host.name] & (host.end > host.start))
    found = found[np.argsort(host.start[found], kind="stable")]
    first = np.concatenate(([True], np.diff(host.start[found]) > 0)) if len(found) else found
    found = found[first]
    starts, last = host.start[found].tolist(), host.end[found[-1:]].tolist()
    numbers = [_number(trace.names[name]) for name in host.name[found].tolist()]
    return [StepWindow(*step) for step in zip(numbers, starts, starts[1:] + last, strict=True)]


def _number(name: str) -> int:
    match = _NUMBER.match(name)
    return int(match[1]) if match else 0
