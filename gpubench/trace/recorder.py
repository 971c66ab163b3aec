"""Waits for the device that are the recording's own: the program that is recorded would not make them.

torch.profiler synchronises the device as it stops, and programs that profile often do so where they start and stop the
profiler, so that the recorded steps begin and end with an idle device.
"""

import numpy as np
from numpy.typing import NDArray

from gpubench.trace.columns import MISSING, HostKind, Ids, Mask, Ns, Trace
from gpubench.trace.intervals import Spans, overlap, union
from gpubench.trace.names import Lexicon
from gpubench.trace.windows import StepWindow, Window

Places = NDArray[np.intp]

_PROFILER = ("torch/profiler/", "torch/autograd/profiler.py")


def recorder_waits(trace: Trace, lexicon: Lexicon, links: Ids, window: Window) -> Mask:
    """Over `Trace.host`: blocking calls that the recording makes, in no operator and no annotation of the program.

    They are one of these:

    - calls outside every ProfilerStep, on the thread that has them: there only `profile.step()` and the profiler's
      start and stop run;
    - calls under a Python frame of torch.profiler;
    - synchronisations of the whole device before anything that the program does in the first step, or behind everything
      that it does in the last of several, if no other step has one in the same place;
    - without steps, those before anything and behind everything that the program does.
    """
    host = trace.host
    found = np.zeros(len(host), np.bool_)
    blocking = lexicon.blocking[host.name] & (host.kind == HostKind.RUNTIME)
    marks = lexicon.profiler_step[host.name]
    program = (host.kind == HostKind.OPERATOR) | (host.kind == HostKind.ANNOTATION)
    program &= ~marks
    program[links[links != MISSING]] = True
    framed = np.fromiter((_PROFILER[0] in name or _PROFILER[1] in name for name in trace.names), np.bool_)
    frames = framed[host.name] & (host.kind == HostKind.PYTHON)
    for thread in np.unique(host.thread[marks if marks.any() else blocking]).tolist():
        here = host.thread == thread
        doing, own = _spans(trace, here & program), _spans(trace, here & frames)
        calls = np.flatnonzero(here & blocking)
        calls = calls[~_within(host.start[calls], doing)]
        found[calls[_within(host.start[calls], own)]] = True
        if window.steps:
            found[calls[~_within(host.start[calls], _spans(trace, here & marks))]] = True
        wide = calls[lexicon.device_wide[host.name[calls]]]
        found[_at_borders(host.start[wide], host.end[wide], doing, window.steps, wide)] = True
    return found


def _at_borders(start: Ns, end: Ns, doing: Spans, steps: list[StepWindow], calls: Places) -> Places:
    """Those of `calls` that no other step than the first has at its beginning, or none but the last at its end."""
    everything = (int(min(start.min(initial=0), doing.start.min(initial=0))), int(np.iinfo(np.int64).max))
    bounds = np.array([(step.start, step.end) for step in steps] or [everything], np.int64)
    step = np.searchsorted(bounds[:, 0], start, side="right") - 1
    inside = (step >= 0) & (end <= bounds[step, 1])
    first = inside & (overlap(bounds[step, 0], start, doing) == 0)
    last = inside & (overlap(end, bounds[step, 1], doing) == 0)
    found = [np.empty(0, np.intp)]
    if set(step[first].tolist()) == {0}:
        found.append(calls[first])
    if len(steps) != 1 and set(step[last].tolist()) == {len(bounds) - 1}:  # one step alone does not tell
        found.append(calls[last])
    return np.concatenate(found)


def _spans(trace: Trace, chosen: Mask) -> Spans:
    return union(trace.host.start[chosen], trace.host.end[chosen])


def _within(at: Ns, spans: Spans) -> Mask:
    """Whether each instant lies in one of the spans."""
    if not len(spans):
        return np.zeros(len(at), np.bool_)
    place = np.searchsorted(spans.start, at, side="right") - 1
    inside: Mask = (place >= 0) & (spans.end[np.maximum(place, 0)] > at)
    return inside
