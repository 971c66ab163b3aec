"""One step as a picture: boxes for the host's phases, the work of every stream, and why the device was idle."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from gpubench.trace.columns import WorkKind
from gpubench.trace.intervals import Spans, clip, union
from gpubench.trace.nesting import nearest_around
from gpubench.trace.phases import NAMES, Phases, host_spans
from gpubench.trace.profile import Box, Cause, Lane, Timeline
from gpubench.trace.program import Program
from gpubench.trace.windows import StepWindow

SMALLEST = 2000
"""A gap or a box of less than this part of the step cannot be seen at the width of a page."""
MOST_BOXES = 600

_STYLES = ("compute", "communication", "copy", "set")
_COMPUTE, _COMMUNICATION, _COPY, _SET = range(len(_STYLES))

Labelled = list[tuple[Spans, str, str]]
"""Spans, the name of their boxes, and their style."""


def timeline(program: Program, phases: Phases, idle: Mapping[Cause, Spans]) -> Timeline | None:
    """The step of median length, or without steps the window; None where it has no length. Times are nanoseconds.

    What is alike and nearer than 1/2000 of the step is one box; smaller boxes, and the shortest beyond 600, are left
    out and counted.
    """
    step = _median_step(program)
    wall = step.end - step.start
    if wall <= 0:
        return None
    lanes = {"host": _phases(program, phases)}
    if program.trace.host_only:
        lanes["operators"] = _operators(program)
    lanes |= _streams(program)
    lanes["idle"] = [(spans, cause, cause) for cause, spans in idle.items()]
    drawn = {name: _boxes(rows, step) for name, rows in lanes.items()}
    every = [(lane, box) for lane, boxes in drawn.items() for box in boxes]
    visible = [one for one in every if one[1].end - one[1].start >= wall / SMALLEST]
    kept = set(sorted(visible, key=lambda one: one[1].start - one[1].end)[:MOST_BOXES])
    shown = [Lane(lane, [box for box in boxes if (lane, box) in kept]) for lane, boxes in drawn.items()]
    return Timeline(step.number, wall, [lane for lane in shown if lane.boxes], len(every) - len(kept))


def _median_step(program: Program) -> StepWindow:
    window = program.window
    steps = sorted(window.steps, key=lambda step: step.end - step.start)
    return steps[len(steps) // 2] if steps else StepWindow(0, window.start, window.end)


def _phases(program: Program, phases: Phases) -> Labelled:
    return [(spans, name, name) for name, spans in zip(NAMES, host_spans(program, phases), strict=True)]


def _operators(program: Program) -> Labelled:
    """The outermost ones of the main thread."""
    host, names = program.trace.host, program.trace.names
    top = program.operators & (host.thread == program.main_thread)
    top &= nearest_around(program.nest, program.operator) < 0
    found: Labelled = []
    for name in np.unique(host.name[top]).tolist():
        ours = top & (host.name == name)
        found.append((union(host.start[ours], program.nest.end[ours]), names[name], "operators"))
    return found


def _streams(program: Program) -> dict[str, Labelled]:
    device = program.trace.device
    style = _styles(program)
    several = len(np.unique(device.device)) > 1
    lanes: dict[str, Labelled] = {}
    for number, stream in np.unique(np.stack((device.device, device.stream), axis=1), axis=0).tolist():
        here = (device.device == number) & (device.stream == stream)
        name = f"device {number} stream {stream}" if several else f"stream {stream}"
        lanes[name] = [
            (union(device.start[here & (style == one)], device.end[here & (style == one)]), label, label)
            for one, label in enumerate(_STYLES)
        ]
    return lanes


def _styles(program: Program) -> NDArray[np.int8]:
    """Of each work its place in _STYLES."""
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
    """Across gaps that are shorter than `gap`."""
    if not len(spans):
        return spans
    cut = spans.start[1:] - spans.end[:-1] >= max(gap, 1)
    return Spans(spans.start[np.concatenate(([True], cut))], spans.end[np.concatenate((cut, [True]))])
