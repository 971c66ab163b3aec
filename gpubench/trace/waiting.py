"""What the main thread waits for while it records nothing itself: what other threads of the process do meanwhile.

No trace records these waits. `idle` are the pieces of the main thread in which it may be waiting.
"""

import numpy as np

from gpubench.trace.columns import Mask
from gpubench.trace.intervals import EMPTY, Spans, intersect, union
from gpubench.trace.nesting import Segments
from gpubench.trace.program import Program


def for_autograd(program: Program, evaluating: Mask, idle: Segments) -> Spans:
    """In `backward()`, for autograd's thread: in each piece, from the first to the last that this thread does."""
    working = _elsewhere(program, evaluating)
    if not len(working):
        return EMPTY
    first = np.searchsorted(working.end, idle.start, side="right")
    beyond = np.searchsorted(working.start, idle.end, side="left")
    met = beyond > first
    start = np.maximum(idle.start[met], working.start[first[met]])
    return union(start, np.minimum(idle.end[met], working.end[beyond[met] - 1]))


def for_other_ranks(program: Program, idle: Segments) -> Spans:
    """For collectives that run on a thread of their own, as gloo's do."""
    communicating = _elsewhere(program, program.lexicon.communication_wait[program.trace.host.name])
    return intersect(union(idle.start, idle.end), communicating)


def _elsewhere(program: Program, mask: Mask) -> Spans:
    host = program.trace.host
    found = mask & (host.thread != program.main_thread)
    return union(host.start[found], host.end[found])
