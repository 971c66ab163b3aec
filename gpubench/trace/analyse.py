"""Computes the profile of a loaded trace."""

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from gpubench import units
from gpubench.trace import ranks, serving
from gpubench.trace.anomaly import anomaly_checks
from gpubench.trace.attention import attention
from gpubench.trace.columns import EMPTY, MISSING, SliceKind, Spans, Trace, WorkKind, clip, union
from gpubench.trace.copies import copies, synchronisations
from gpubench.trace.cpu import compiled, cpu_parts, loads_in_workers, modules, stretches
from gpubench.trace.device import (
    breakdowns,
    critical_path,
    device_spans,
    drivers,
    held,
    idle_by_call,
    idle_causes,
    idle_within,
    recorded,
    unrecorded_launches,
)
from gpubench.trace.families import is_unknown, kernel_name
from gpubench.trace.first_calls import described, first_calls
from gpubench.trace.kernels import fusible, kernels
from gpubench.trace.launching import with_one_clock
from gpubench.trace.load import of_cpu_tool
from gpubench.trace.names import StepWindow, step_runs
from gpubench.trace.operators import operators
from gpubench.trace.phases import NAMES, Phases, cpu_spans, optimizing, phase_of, phases, zeroing_idle
from gpubench.trace.profile import (
    CAUSES,
    ON_HOST,
    Box,
    Cause,
    HostPart,
    Lane,
    Profile,
    ProfiledStep,
    RankProfile,
    StepTimeline,
    WallBreakdown,
)
from gpubench.trace.ranks import collectives
from gpubench.trace.reservations import reservations
from gpubench.trace.slices import ProgramSlices, launches, nearest_around, owner
from gpubench.trace.unused import unused_gradients

BEHIND = 0.05
"""The fraction of the window's work launched outside it above which a note says that CPU and device differ."""
_LAUNCH = re.compile(r"(cu|cuda|cudaGraph|hip|hipExt|hipExtModule|hipModule)Launch|nccl:")
NAMED = 4  # unread categories, or kernels, that a note names
UNKNOWN = 0.1  # of the window: a smaller share of kernels of unknown kind is not told
LOST = 0.01
"""The fraction of the window's launches without work above which a note says so."""
WAITED = 0.01
"""The fraction of the window from which on a note reports the recording's own waits. The idle time after shorter waits
is too short for a finding."""


def missing(program: ProgramSlices) -> dict[str, str]:
    """The facts that the trace lacks, each with the option of torch.profiler that records it."""
    trace = program.trace
    found = {}
    if not trace.signatures:
        found["shapes"] = "record_shapes"
    if not ((trace.cpu.kind == SliceKind.PYTHON).any() or (trace.cpu.stack != MISSING).any()):
        found["stacks"] = "with_stack"
    if not program.window.steps:
        found["steps"] = "schedule"
    return found


def unread_of_devices(trace: Trace) -> list[str]:
    """The unread categories of events that may be a device's, those with most events first."""
    named = sorted(trace.unread, key=lambda category: -trace.unread[category])
    return [category for category in named if not of_cpu_tool(category)]


def work_is_missing(trace: Trace) -> bool:
    """Whether a trace without device work launches some, so that the work was not recorded."""
    return trace.cpu_only and any(_LAUNCH.match(name) for name in trace.names)


def notes(program: ProgramSlices) -> Iterator[str]:
    """Yields the notes for the reader, one sentence each."""
    trace, window = program.trace, program.window
    if trace.cpu_only:
        lacking = "no work of CUDA, ROCm or XPU" if unread_of_devices(trace) else "no GPU work"
        launched = ", though it was launched" if work_is_missing(trace) else ""
        yield f"there is {lacking} in the trace{launched}: {ON_HOST}"
    if not window.steps:
        span = "CPU slices" if trace.cpu_only else "GPU work"
        yield f"no ProfilerStep is marked: the window is from the first to the last of the {span}"
    steps = [len(run) for run in step_runs(trace, program.lexicon)]
    if len(steps) > 1:
        yield f"steps are missing in between: the window is the {len(window.steps)} consecutive ones of {sum(steps)}"
    yield from _unrecorded(program)
    unlinked = int((program.started & (program.links < 0)).sum())
    if unlinked:
        yield f"{unlinked:,} of {int(program.started.sum()):,} pieces of GPU work have no launch in the trace"
    yield from _behind(program)
    yield from _of_recording(program)
    if len(np.unique(trace.device.device)) > 1:
        yield f"{units.counted(len(np.unique(trace.device.device)), 'GPU')} were used: their times are combined"
    if found := serving.passes(program):
        yield serving.in_words(found)
    if trace.shifted:
        away = units.seconds(abs(trace.shifted) / 1e9)
        yield (
            f"the clock of the GPU is {away} away from that of the CPU: its times are shifted so that no work begins "
            "before its launch, and how long work is queued is uncertain"
        )
    yield from _of_unknown_kernels(program)
    yield from _not_described(trace)
    yield from _of_events(trace)
    if compiled(program):
        yield "compiled: torch.compile hides the operators; a recording without it shows them"


def _unrecorded(program: ProgramSlices) -> Iterator[str]:
    """Yields notes on work that ran and was not recorded."""
    window = program.window
    holes = {"begins": ("before it", window.before), "ends": ("after it", window.after)}
    for does, (where, left) in holes.items():
        if left:
            yield (
                f"the window {does} where recorded work {does}: {units.seconds(left / 1e9)} {where}, in which work was "
                "queued and almost none recorded, is left out"
            )
    lost = unrecorded_launches(program)
    lost = lost[program.inside[lost]]
    launches = program.lexicon.launching[program.trace.cpu.name] & program.inside
    if len(lost) > LOST * launches.sum():
        yield (
            f"{len(lost):,} of {int(launches.sum()):,} launches have no GPU work in the trace: it was not recorded, "
            "and idle time after such a launch may have been work"
        )


def _of_unknown_kernels(program: ProgramSlices) -> Iterator[str]:
    """Yields a note on kernels of which neither the name nor an operator says what they do, if they may matter.

    They may be communication, whose kernels have names of their libraries.
    """
    trace, device, started = program.trace, program.trace.device, program.started
    communicates = program.lexicon.communication_kernel[device.name]
    alone = (trace.world_size or 1) > 1 and started.any() and not (communicates & started).any()
    unknown = started & (device.kind == WorkKind.KERNEL) & ~communicates
    unknown &= owner(trace, program.nest, program.links) == MISSING
    unknown &= trace.names_where(is_unknown)[device.name]
    time = np.bincount(device.name[unknown], (device.end - device.start)[unknown], len(trace.names))
    share = float(time.sum()) / program.window.wall if program.window.wall else 0.0
    longest = [name for name in np.argsort(-time, kind="stable")[:NAMED].tolist() if time[name]]
    said = f"kernels of unknown kind take {units.percent(share)} of the time"
    if longest:
        said += f", {units.listed(kernel_name(trace.names[name]) for name in longest)}"
    if alone:
        said = f"rank {trace.rank or 0} of {trace.world_size}, and no communication was recorded" + (
            f": {said}" if longest else ""
        )
    if alone or share >= UNKNOWN:
        yield said


def _of_recording(program: ProgramSlices) -> Iterator[str]:
    waits = np.flatnonzero(program.recorder_waits & program.inside)
    waited = int((program.trace.cpu.end - program.trace.cpu.start)[waits].sum())
    if waited > WAITED * program.window.wall:
        spent, call = units.seconds(waited / 1e9), program.trace.names[program.trace.cpu.name[waits[0]]]
        yield f"the recording itself waited {spent} for the GPU ({call}): findings leave out the idle time after that"


def _of_events(trace: Trace) -> Iterator[str]:
    """Yields notes on events that were not read as they are in the file."""
    if trace.unread:
        named = sorted(trace.unread, key=lambda category: -trace.unread[category])
        more = [f"{len(named) - NAMED} more categories"] if len(named) > NAMED else []
        number = sum(trace.unread.values())
        yield f"events of {units.listed([*named[:NAMED], *more])} are not read ({number:,} of {trace.events:,})"
    if trace.repeated:
        yield (
            f"{trace.repeated:,} of {trace.events:,} events are exact duplicates (thread or stream, time, name and "
            "number): each is counted once"
        )
    if trace.dropped:
        yield f"{trace.dropped:,} of {trace.events:,} events are invalid, and were left out"
    if trace.truncated:
        yield "the file is truncated: its events are complete, but what follows them is missing"


def _not_described(trace: Trace) -> Iterator[str]:
    """Yields notes on devices without a description, whose ceilings are unknown or those of another device."""
    known = {one.id for one in trace.devices}
    for number in np.unique(trace.device.device).tolist() if trace.devices else ():
        which = f"the trace describes no device {number}" if number >= 0 else "some work has no device number"
        if number not in known and (taken := trace.described(number)):
            yield f"{which}: it is assumed to be the {taken.name} that is described"
        elif number not in known:
            yield f"{which}, and the described devices differ: its peaks are unknown"


def _behind(program: ProgramSlices) -> Iterator[str]:
    """Yields notes if the device's window differs from the CPU's."""
    device, linked = program.trace.device, program.links >= 0
    here = np.zeros(len(device), np.bool_)
    here[linked] = program.inside[program.links[linked]]
    elsewhere = linked & (here != program.started)
    duration = device.end - device.start
    if elsewhere.any() and duration[elsewhere].sum() > BEHIND * duration[program.started].sum():
        late = int((device.start[elsewhere] - program.trace.cpu.end[program.links[elsewhere]]).max())
        behind = f"the GPU ran up to {units.seconds(late / 1e9)} behind the CPU: " if late > 0 else ""
        rest = "calls and GPU time are of the work that began in the window, "
        rest += "CPU time is of what the CPU did in it"
        yield behind + rest


SMALLEST = 2000
"""The length of a step divided by that of the shortest gap or box that is visible at the width of a page."""
MOST_BOXES = 600

_STYLES = ("compute", "communication", "copy", "set")
_COMPUTE, _COMMUNICATION, _COPY, _SET = range(len(_STYLES))

Labelled = list[tuple[Spans, str, str]]
"""A list of spans, each with the name and the style of its boxes."""


def timeline(program: ProgramSlices, phases: Phases, idle: Mapping[Cause, Spans]) -> StepTimeline | None:
    """Draws the step of median length, or without steps the window; None if it has no length. Times are nanoseconds.

    Spans of one kind less than 1/2000 of the step apart become one box. Smaller boxes, and the shortest of more than
    600, are left out and counted.
    """
    step = _median_step(program)
    wall = step.end - step.start
    if wall <= 0:
        return None
    lanes: dict[str, Labelled] = {
        "host": [(spans, name, name) for name, spans in zip(NAMES, cpu_spans(program, phases), strict=True)]
    }
    if program.trace.cpu_only:
        lanes["operators"] = _operators(program)
    lanes |= _streams(program)
    lanes["idle"] = [(spans, cause, cause) for cause, spans in idle.items()]
    drawn = {name: _boxes(rows, step) for name, rows in lanes.items()}
    every = [(lane, box) for lane, boxes in drawn.items() for box in boxes]
    visible = [one for one in every if one[1].end - one[1].start >= wall / SMALLEST]
    kept = set(sorted(visible, key=lambda one: one[1].start - one[1].end)[:MOST_BOXES])
    shown = [Lane(lane, [box for box in boxes if (lane, box) in kept]) for lane, boxes in drawn.items()]
    return StepTimeline(step.number, wall, [lane for lane in shown if lane.boxes], len(every) - len(kept))


def _median_step(program: ProgramSlices) -> StepWindow:
    window = program.window
    steps = sorted(window.steps, key=lambda step: step.end - step.start)
    return steps[len(steps) // 2] if steps else StepWindow(0, window.start, window.end)


def _operators(program: ProgramSlices) -> Labelled:
    """The outermost operators of the main thread, by name."""
    cpu, names = program.trace.cpu, program.trace.names
    top = program.operators & (cpu.thread == program.main_thread)
    top &= nearest_around(program.nest, program.operator) < 0
    found: Labelled = []
    for name in np.unique(cpu.name[top]).tolist():
        ours = top & (cpu.name == name)
        found.append((union(cpu.start[ours], program.nest.end[ours]), names[name], "operators"))
    return found


def _streams(program: ProgramSlices) -> dict[str, Labelled]:
    device = program.trace.device
    style = _styles(program)
    several = len(np.unique(device.device)) > 1
    lanes: dict[str, Labelled] = {}
    for number, stream in np.unique(np.stack((device.device, device.stream), axis=1), axis=0).tolist():
        here = (device.device == number) & (device.stream == stream)
        name = f"device {number} stream {stream}" if several else f"stream {stream}"
        lanes[name] = [(device.spans(here & (style == one)), label, label) for one, label in enumerate(_STYLES)]
    return lanes


def _styles(program: ProgramSlices) -> NDArray[np.int8]:
    """The index in _STYLES of each work."""
    device = program.trace.device
    kernel = np.where(program.lexicon.communication_kernel[device.name], _COMMUNICATION, _COMPUTE)
    return np.where(device.kind == WorkKind.COPY, _COPY, np.where(device.kind == WorkKind.SET, _SET, kernel)).astype(
        np.int8
    )


def _boxes(rows: Labelled, step: StepWindow) -> list[Box]:
    gap = (step.end - step.start) // SMALLEST
    found = []
    for spans, name, style in rows:
        joined = _joined(clip(spans, step.start, step.end), gap)
        edges = zip((joined.start - step.start).tolist(), (joined.end - step.start).tolist(), strict=True)
        found += [Box(start, end, name, style) for start, end in edges]
    return sorted(found, key=lambda box: box.start)


def _joined(spans: Spans, gap: int) -> Spans:
    """Joins spans across gaps shorter than `gap`."""
    if not len(spans):
        return spans
    cut = spans.start[1:] - spans.end[:-1] >= max(gap, 1)
    return Spans(spans.start[np.concatenate(([True], cut))], spans.end[np.concatenate((cut, [True]))])


def analyse(traces: Sequence[Trace]) -> Profile:
    """Analyses the traces of one program, one per rank. Raises DataError if they do not belong together."""
    traces = [with_one_clock(trace) for trace in traces]
    programs = [recorded(ProgramSlices.of(trace)) for trace in traces]
    windows, lexicons = [program.window for program in programs], [program.lexicon for program in programs]
    ranks.check(traces, lexicons)
    apart = ranks.apart(traces, windows)
    found = sorted(
        (_rank(program, apart) for program in programs), key=lambda rank: -1 if rank.rank is None else rank.rank
    )
    return Profile(ranks=found, stragglers=ranks.stragglers(traces, windows, lexicons))


def _rank(program: ProgramSlices, beside: Sequence[str]) -> RankProfile:
    trace, lexicon, links, window = program.trace, program.lexicon, program.links, program.window
    known = phase_of(program)
    whole = (window.start, window.end)
    sets = None if trace.cpu_only else device_spans(trace, lexicon)
    causes = idle_causes(program) if sets else dict.fromkeys(CAUSES, EMPTY)
    parts = cpu_parts(program, known) if sets is None else {}
    optimizer, launched_by = optimizing(program, known), owner(trace, program.nest, links)
    return RankProfile(
        label=trace.label,
        rank=trace.rank,
        world_size=trace.world_size,
        device_name=_device_name(trace),
        host_only=trace.cpu_only,
        start=window.start,
        wall=window.wall,
        step_numbers=[step.number for step in window.steps],
        device=breakdowns(sets, [whole])[0] if sets else None,
        idle=idle_within(causes, [whole])[0] if sets else {},
        host=_lengths(parts, whole),
        critical_path=critical_path(program) if sets else {},
        steps=_steps(program, breakdowns(sets, _borders(program)) if sets else [], causes, parts),
        phases=phases(program, known),
        modules=modules(program, known),
        unused_gradients=unused_gradients(program, known),
        operators=operators(program),
        attention=attention(program, known),
        kernels=kernels(trace, lexicon, launched_by, window),
        fusible=fusible(trace, lexicon, launched_by, window),
        launches=launches(trace, links, window),
        copies=copies(program, known),
        synchronisations=synchronisations(program, known, idle_by_call(program, causes)),
        collectives=collectives(trace, lexicon, window, sets.exposed_communication) if sets else [],
        reservations=reservations(program),
        compiled=compiled(program),
        first_calls=described(program, first_calls(program, drivers(program))) if sets else [],
        held=held(program, causes["python_and_launch"]) if sets else [],
        python=stretches(program, known),
        anomaly=anomaly_checks(program),
        loads_in_workers=loads_in_workers(program),
        threads=len(set(trace.cpu.thread[program.operators & program.inside].tolist())),
        unread=unread_of_devices(trace),
        work_missing=work_is_missing(trace),
        zeroed_gradients=optimizer.zeroed_gradients,
        zeroing=optimizer.zeroing,
        zeroing_idle=zeroing_idle(program, clip(causes["python_and_launch"], *whole)),
        optimizer_kernels=optimizer.kernels,
        optimizer_steps=optimizer.steps,
        timeline=timeline(program, known, causes),
        missing=missing(program),
        notes=[*notes(program), *beside],
    )


def _borders(program: ProgramSlices) -> list[tuple[int, int]]:
    return [(step.start, step.end) for step in program.window.steps]


def _steps(
    program: ProgramSlices,
    devices: Sequence[WallBreakdown],
    causes: Mapping[Cause, Spans],
    parts: Mapping[HostPart, Spans],
) -> list[ProfiledStep]:
    borders = _borders(program)
    idle = idle_within(causes, borders) if devices else [{} for _ in borders]
    return [
        ProfiledStep(
            number=step.number,
            start=step.start - program.window.start,
            wall=step.end - step.start,
            device=devices[place] if devices else None,
            idle=idle[place],
            host=_lengths(parts, borders[place]),
        )
        for place, step in enumerate(program.window.steps)
    ]


def _lengths(parts: Mapping[HostPart, Spans], window: tuple[int, int]) -> dict[HostPart, int]:
    return {part: clip(spans, *window).length for part, spans in parts.items()}


def _device_name(trace: Trace) -> str | None:
    """The name of the device on which the work ran; None if there is none or it is not described."""
    found = None if trace.cpu_only else trace.described(int(trace.device.device[0]))
    return (found and found.name) or None
