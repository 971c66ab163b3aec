"""What a reader of a profile must know: what the trace lacks, and what it can be mistaken for."""

from collections.abc import Iterator

import numpy as np

from gpubench import units
from gpubench.trace.columns import MISSING, HostKind
from gpubench.trace.compiled import compiled
from gpubench.trace.launches import started_in
from gpubench.trace.program import Program


def missing(program: Program) -> dict[str, str]:
    """What could not be told, and the option of torch.profiler that would bring it."""
    trace = program.trace
    found = {}
    if not trace.signatures:
        found["shapes"] = "record_shapes"
    if not ((trace.host.kind == HostKind.PYTHON).any() or (trace.host.stack != MISSING).any()):
        found["stacks"] = "with_stack"
    if not program.window.steps:
        found["steps"] = "schedule"
    return found


def notes(program: Program) -> list[str]:
    """A sentence each."""
    return list(_notes(program))


def _notes(program: Program) -> Iterator[str]:
    trace, window = program.trace, program.window
    if trace.host_only:
        yield "there is no GPU work in the trace: what follows is the host's time"
    if not window.steps:
        span = "host slices" if trace.host_only else "GPU work"
        yield f"no ProfilerStep is marked: the window is from the first to the last of the {span}"
    started = started_in(trace, window)
    unlinked = int((started & (program.links < 0)).sum())
    if unlinked:
        yield f"{unlinked:,} of {int(started.sum()):,} pieces of GPU work were launched outside of the trace"
    if len(np.unique(trace.device.device)) > 1:
        yield f"{units.counted(len(np.unique(trace.device.device)), 'GPU')} worked: their time is taken together"
    if trace.dropped:
        yield f"{trace.dropped:,} of {trace.events:,} events make no sense, and were left out"
    if compiled(program):
        yield "compiled: torch.compile hides the operators; recorded without it the trace tells them apart"
