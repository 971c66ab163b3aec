"""Finds what a program does only once, in its first steps, such as loading code, trying algorithms and compiling.

A steady step has none of it. It is recognised by what the trace shows, on threads that drive the device:

- load: calls that load code, such as cuModuleLoadData. CUDA and HIP load a kernel's code when it is first launched,
  so that launches of a kernel that was not launched before count from SLOW on: a launch takes about 10 us. Those of a
  CUDA graph do not count, which may take milliseconds each time.
- initialise: calls that create or query something, from SLOW on, and calls that allocate or free memory, from
  SLOW_ALLOCATION on, if they are FEW, take OUTLIER times as long as the median of the other calls of this name, and
  hold most of the time of that name: calls that go on through the window are not first calls.
- operator: calls of ATen's operators that launch a kernel for the first time, and spend SLOW_OPERATOR outside all calls
  of the runtime that were recorded.
- autotune: convolutions that wait for the device, which they do only to measure algorithms against each other.
- capture: the capture of a CUDA graph, whose launches do not run, and its instantiation.
- compile: compilation by torch.compile, if it is in no step after the first.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpubench.trace.columns import MISSING, Ids, Mask, SliceKind, Spans, WorkKind, clip, union
from gpubench.trace.profile import FirstCall, FirstKind
from gpubench.trace.slices import ProgramSlices, outermost

SLOW = 1_000_000
"""Nanoseconds: a hundred times what a launch takes. Loading the code of a kernel takes milliseconds and more."""
SLOW_OPERATOR = 10_000_000
"""Nanoseconds that an operator takes by itself: no call of the runtime shows what it did."""
SLOW_ALLOCATION = 10_000_000
"""Nanoseconds: cudaMalloc and cudaFree take up to a few milliseconds each time."""
OUTLIER = 20
FEW = 5

_LOADING = re.compile(r"(cu|cuda|hip)((Module|Library)(Load|GetKernel|EnumerateKernels)|Link(Create|Add|Complete))")
_INITIALISING = re.compile(
    r"(cu|cuda|hip)(Init|SetDevice|Ctx(Create|SetCurrent)|DevicePrimaryCtx|DeviceGet|GetDevice|Stream(Create|Get)"
    r"|EventCreate|FuncGetAttributes|FuncSetAttribute|GetFuncBySymbol|ModuleGet|Occupancy|MemPool|Graph(Create|Exec)"
    r"|Pointer|DriverGet|RuntimeGet|Ipc)"
)
_INSTANTIATION = re.compile(r"(cu|cuda|hip)GraphInstantiate")
_CAPTURE = re.compile(r"(cu|cuda|hip)Stream(?P<edge>Begin|End)Capture")
_CONVOLUTION = re.compile(r"aten::(\w*_)?conv(olution|_transpose)?[123]?d?(_\w+)?$|\w*Convolution\w*Backward\d*$")

Places = NDArray[np.intp]


class Calls(NamedTuple):
    kind: FirstKind
    slices: Ids
    """For a capture, the calls that begin one."""
    spans: Spans


def first_calls(program: ProgramSlices, driving: Mask) -> list[Calls]:
    """Finds all such calls on the threads of `driving`, a mask over `Trace.cpu`."""
    found = [_of(program, kind, places) for kind, places in _by_call(program, driving)]
    return [one for one in [*found, captures(program, driving), _compilations(program)] if len(one.spans)]


def described(program: ProgramSlices, found: list[Calls]) -> list[FirstCall]:
    """The calls of the window by what they did, most time first."""
    trace, launched = program.trace, _first_launches(program)
    totals: defaultdict[tuple[FirstKind, str], list[int]] = defaultdict(lambda: [0, 0])
    for kind, slices, _ in found:
        ends, window = program.nest.end[slices], program.window
        here = (ends > window.start) & (trace.cpu.start[slices] < window.end)
        for slice_ in slices[here].tolist():
            name = trace.names[trace.cpu.name[slice_]]
            kernel = trace.names[launched[slice_]] if kind == "load" and slice_ in launched else ""
            total = totals[kind, f"{name} of {kernel}" if kernel else name]
            total[0] += 1
            start, end = (
                max(int(trace.cpu.start[slice_]), window.start),
                min(int(program.nest.end[slice_]), window.end),
            )
            total[1] += end - start
    for one in found:
        if one.kind == "capture":  # its calls only begin it
            for key in [key for key in totals if key[0] == "capture"]:
                totals[key][1] = clip(one.spans, program.window.start, program.window.end).length
    calls = [FirstCall(kind, what, number, cpu) for (kind, what), (number, cpu) in totals.items()]
    return sorted(calls, key=lambda one: (-one.host, one.what))


def _of(program: ProgramSlices, kind: FirstKind, places: Places) -> Calls:
    cpu = program.trace.cpu
    return Calls(kind, places.astype(np.int32), union(cpu.start[places], program.nest.end[places]))


def _by_call(program: ProgramSlices, driving: Mask) -> Iterator[tuple[FirstKind, Places]]:
    trace, cpu = program.trace, program.trace.cpu
    time = program.nest.end - cpu.start
    runtime = driving & (cpu.kind == SliceKind.RUNTIME)
    first = np.zeros(len(cpu), np.bool_)
    first[list(_first_launches(program))] = True
    whole_graphs = trace.names_where(lambda name: "GraphLaunch" in name)
    launching = runtime & (program.lexicon.launching & ~whole_graphs)[cpu.name]
    loading = runtime & trace.names_where(_LOADING.match)[cpu.name]
    yield "load", np.flatnonzero(loading | (launching & first & (time >= SLOW) & ~_prompt(program)))
    creating = runtime & trace.names_where(_INITIALISING.match)[cpu.name] & (time >= SLOW)
    allocating = runtime & program.lexicon.allocator[cpu.name] & (time >= SLOW_ALLOCATION)
    yield "initialise", _outliers(program, creating | allocating, runtime)
    plain = program.operators & trace.names_where(lambda name: name.startswith("aten::"))[cpu.name]
    launchers = np.zeros(len(cpu), np.bool_)
    launchers[_around(program, np.flatnonzero(first & driving))] = True
    yield "operator", np.flatnonzero(plain & launchers & (program.nest.own >= SLOW_OPERATOR))
    convolution = program.operators & trace.names_where(_CONVOLUTION.search)[cpu.name]
    waits = np.flatnonzero(runtime & program.lexicon.blocking[cpu.name] & ~program.lexicon.copying[cpu.name])
    around = outermost(program.nest, convolution)[waits]
    yield "autotune", np.unique(around[around >= 0])


def _prompt(program: ProgramSlices) -> Mask:
    """The calls whose work began within SLOW, and so did not have to be loaded."""
    linked = np.flatnonzero(program.links >= 0)
    calls = program.links[linked]
    soon = program.trace.device.start[linked] < program.trace.cpu.start[calls] + SLOW
    found = np.zeros(len(program.trace.cpu), np.bool_)
    found[calls[soon]] = True
    return found


def _first_launches(program: ProgramSlices) -> dict[int, int]:
    """The name of each kernel by the call that launches it before all others of that name."""
    trace = program.trace
    works = np.flatnonzero((program.links >= 0) & (trace.device.kind == WorkKind.KERNEL))
    works = works[np.argsort(trace.cpu.start[program.links[works]], kind="stable")]
    names, place = np.unique(trace.device.name[works], return_index=True)
    unlinked = np.unique(trace.device.name[(program.links < 0) & (trace.device.kind == WorkKind.KERNEL)])
    known = ~np.isin(names, unlinked)  # a kernel without a launch in the trace may have come first
    return dict(zip(program.links[works[place[known]]].tolist(), names[known].tolist(), strict=True))


def _around(program: ProgramSlices, slices: Places) -> Places:
    around = program.operator[slices]
    return around[around >= 0].astype(np.intp)


def _outliers(program: ProgramSlices, chosen: Mask, runtime: Mask) -> Places:
    """The calls that are outliers among those of their name, as the module's docstring defines it."""
    cpu = program.trace.cpu
    time, found = program.nest.end - cpu.start, [np.empty(0, np.intp)]
    for name in np.unique(cpu.name[chosen]).tolist():
        alike = np.flatnonzero(runtime & (cpu.name == name))
        slow = np.flatnonzero(chosen & (cpu.name == name))
        usual = np.setdiff1d(alike, slow)
        typical = np.median(time[usual]) if len(usual) else 0
        slow = slow[time[slow] >= OUTLIER * typical]
        if len(slow) <= FEW and 2 * time[slow].sum() >= time[alike].sum():
            found.append(slow)
    return np.concatenate(found)


def captures(program: ProgramSlices, driving: Mask) -> Calls:
    """The captures from their first call to their last, and the instantiations of what they captured."""
    trace, cpu = program.trace, program.trace.cpu
    runtime = np.flatnonzero(driving & (cpu.kind == SliceKind.RUNTIME))
    begins, starts, ends = [], [], []
    opened: dict[int, int] = {}
    for place in runtime[np.argsort(cpu.start[runtime], kind="stable")].tolist():
        name, thread = trace.names[cpu.name[place]], int(cpu.thread[place])
        edge = _CAPTURE.match(name)
        if edge and edge["edge"] == "Begin":
            opened[thread] = place
        elif edge and thread in opened:
            begins.append(opened.pop(thread))
            starts.append(int(cpu.start[begins[-1]]))
            ends.append(int(cpu.end[place]))
        elif _INSTANTIATION.match(name):
            starts.append(int(cpu.start[place]))
            ends.append(int(cpu.end[place]))
    return Calls("capture", np.array(begins, np.int32), union(np.array(starts, np.int64), np.array(ends, np.int64)))


def _compilations(program: ProgramSlices) -> Calls:
    """The compilations; none if one of them begins in a step after the first, because it is a recompilation."""
    cpu, steps = program.trace.cpu, program.window.steps
    found = np.flatnonzero(program.lexicon.compiling[cpu.name] & program.inside)
    if len(steps) > 1 and (cpu.start[found] >= steps[1].start).any():
        found = found[:0]
    outer = found[program.nest.parent[found] == MISSING] if len(found) else found
    named = outer if len(outer) else found[:1]
    return Calls("compile", named.astype(np.int32), union(cpu.start[found], program.nest.end[found]))
