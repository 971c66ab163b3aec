"""What a reader of a profile must know: what the trace lacks, and what it can be mistaken for."""

import re
from collections.abc import Iterator

import numpy as np

from gpubench import units
from gpubench.trace.columns import MISSING, HostKind, Trace
from gpubench.trace.compiled import compiled
from gpubench.trace.producers import of_host_tool
from gpubench.trace.program import Program
from gpubench.trace.windows import step_runs

BEHIND = 0.05
"""Of the window's work: where so much more was launched in another, the host's figures are of other work."""
_LAUNCH = re.compile(r"(cu|cuda|cudaGraph|hip|hipExt|hipExtModule|hipModule)Launch|nccl:")
NAMED = 4  # categories that are not read
WAITED = 0.01
"""Of the window: the idle time behind a shorter wait is no longer than the wait, and too little for a finding."""


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


def unread_of_devices(trace: Trace) -> list[str]:
    """Categories of events that are not read and may be of a device, those with most events first."""
    named = sorted(trace.unread, key=lambda category: -trace.unread[category])
    return [category for category in named if not of_host_tool(category)]


def work_is_missing(trace: Trace) -> bool:
    """Whether a trace without device work launches kernels or NCCL's collectives: then that work was not recorded."""
    return trace.host_only and any(_LAUNCH.match(name) for name in trace.names)


def _notes(program: Program) -> Iterator[str]:
    trace, window = program.trace, program.window
    if trace.host_only:
        lacking = "no work of CUDA, ROCm or XPU" if unread_of_devices(trace) else "no GPU work"
        launched = ", though it was launched" if work_is_missing(trace) else ""
        yield f"there is {lacking} in the trace{launched}: what follows is the host's time"
    if not window.steps:
        span = "host slices" if trace.host_only else "GPU work"
        yield f"no ProfilerStep is marked: the window is from the first to the last of the {span}"
    steps = [len(run) for run in step_runs(trace, program.lexicon)]
    if len(steps) > 1:
        yield f"steps are missing in between: {len(window.steps)} of {sum(steps)} follow each other and are the window"
    unlinked = int((program.started & (program.links < 0)).sum())
    if unlinked:
        yield f"{unlinked:,} of {int(program.started.sum()):,} pieces of GPU work were launched outside of the trace"
    yield from _behind(program)
    yield from _of_recording(program)
    if len(np.unique(trace.device.device)) > 1:
        yield f"{units.counted(len(np.unique(trace.device.device)), 'GPU')} worked: their time is taken together"
    yield from _not_described(trace)
    yield from _of_events(trace)
    if compiled(program):
        yield "compiled: torch.compile hides the operators; recorded without it the trace tells them apart"


def _of_recording(program: Program) -> Iterator[str]:
    waits = np.flatnonzero(program.recorder_waits & program.inside)
    waited = int((program.trace.host.end - program.trace.host.start)[waits].sum())
    if waited > WAITED * program.window.wall:
        spent, call = units.seconds(waited / 1e9), program.trace.names[program.trace.host.name[waits[0]]]
        yield f"the recording itself waited {spent} for the GPU ({call}): no finding counts the idle time behind that"


def _of_events(trace: Trace) -> Iterator[str]:
    """What was not read as it stands in the file."""
    if trace.unread:
        named = sorted(trace.unread, key=lambda category: -trace.unread[category])
        more = [f"{len(named) - NAMED} more categories"] if len(named) > NAMED else []
        number = sum(trace.unread.values())
        yield f"events of {units.listed([*named[:NAMED], *more])} are not read ({number:,} of {trace.events:,})"
    if trace.repeated:
        yield (
            f"{trace.repeated:,} of {trace.events:,} events repeat another one exactly (thread or stream, time, name "
            "and number): each is counted once"
        )
    if trace.dropped:
        yield f"{trace.dropped:,} of {trace.events:,} events make no sense, and were left out"
    if trace.truncated:
        yield "the file ends early: its events are whole, what stands behind them is missing"


def _not_described(trace: Trace) -> Iterator[str]:
    """Devices whose properties, and with them the ceilings of the operators, are another's or not known."""
    known = {one.id for one in trace.devices}
    for number in np.unique(trace.device.device).tolist() if trace.devices else ():
        which = f"the trace describes no device {number}" if number >= 0 else "some work has no number of a device"
        if number not in known and (taken := trace.described(number)):
            yield f"{which}: it is taken for the {taken.name} that is described"
        elif number not in known:
            yield f"{which}, and those described differ: what it can do is not known"


def _behind(program: Program) -> Iterator[str]:
    """Where the window of the device is not that of the host."""
    device, linked = program.trace.device, program.links >= 0
    here = np.zeros(len(device), np.bool_)
    here[linked] = program.inside[program.links[linked]]
    elsewhere = linked & (here != program.started)
    duration = device.end - device.start
    if elsewhere.any() and duration[elsewhere].sum() > BEHIND * duration[program.started].sum():
        late = int((device.start[elsewhere] - program.trace.host.end[program.links[elsewhere]]).max())
        behind = f"the GPU ran up to {units.seconds(late / 1e9)} behind the host: " if late > 0 else ""
        rest = "calls and GPU time are of the work that began in the window, "
        rest += "time on the host is of what the host did in it"
        yield behind + rest
