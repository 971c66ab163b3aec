"""Interprets the names in a trace, and finds the part that counts and the waits that only the recording makes.

torch.profiler synchronises the device when it stops, and programs often do so when they start and stop the profiler, so
that the recorded steps begin and end with an idle device. The program makes no such waits without recording.
"""

import re
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from gpubench.trace.columns import MISSING, Ids, Mask, Ns, SliceKind, Spans, Trace, WorkKind, overlap
from gpubench.trace.families import is_unknown
from gpubench.trace.launching import slices_around

_DATA_LOADER = r"enumerate\(DataLoader\)"
_PROFILER_STEP = r"ProfilerStep#\d"
_OPTIMIZER = r"Optimizer\.step#"
_ZERO_GRAD = r"Optimizer\.zero_grad#"
_ALLOCATOR = (
    r"(cuda|hip)(Ext)?(Malloc|Free|HostAlloc|HostMalloc|HostFree|HostRegister|HostUnregister|Mem(Create|Map|Unmap|Release))"
    r"|(cu|hip)Mem(Alloc|Free|Create|Map|Unmap|Release|SetAccess|Address|Host)"
)
_BLOCKING = r"(cuda|cu|hip|ze)\w*Synchronize|(cuda|cu|hip)Memcpy(?!\w*Async)|ur(EventWait|QueueFinish)$"
_COPYING = r"(cuda|cu|hip)Memcpy"
COMPILATION = r"(_compile\.)?compile_inner( \(dynamo_timed\))?$"
COMPILING = rf"{COMPILATION}|entire_(frame|backward)_compile( |$)|.*\(dynamo_timed\)$"
_LAUNCHING = r"(cu|cuda|hip)(Ext|Module|ExtModule|Graph)?Launch(?!HostFunc)|urEnqueueKernel|zeCommandListAppendLaunch"
_DEVICE_WIDE = r"(cuda|hip)DeviceSynchronize|(cu|hip)CtxSynchronize|urQueueFinish$|zeCommandQueueSynchronize"
_COMMUNICATION = r"_?c10d(_functional)?::|(nccl|rccl|gloo|mpi|ucc|xccl|hccl):|symm_mem::|ProcessGroup"
# Few of these block the CPU: collectives on a device are enqueued and return at once.
_COMMUNICATION_WAIT = (
    r"(gloo|mpi|ucc):|_?c10d(_functional)?::(wait_tensor|work_wait|barrier|monitored_barrier)|ProcessGroup\w*::?wait"
)
# Inductor names a fused kernel after the operators around it, including collectives, though it is not one.
_COMMUNICATION_KERNEL = (
    r"^(?!triton_\w*fused).*("
    r"(?i:nccl|rccl|hccl|oneccl|mscclpp|nvshmem|deep_ep|multimem_|symm_mem|cross_device_reduce|quickreduce"
    r"|custom_ar(?![a-z])|(one|two)_?shot_?(all|reduce)|reduce_?scatter|userbuffers"
    r"|(inter|intra)node|a2a_?(prepare|dispatch|combine))"
    r"|(?<![A-Za-z])ep::|(?<![A-Za-z])Ep(Dispatch|Combine)"
    r"|((?<![A-Za-z])all|All|ALL)_?(?i:reduce|gather|to_?all))"
)
_COLLECTIVE_OPERATOR = (
    r"_?c10d(_functional)?::(?!wait|work_wait)|symm_mem::"
    r"|(?!aten::|fsdp::)\w+::\w*(all_?reduce|all_?gather|reduce_?scatter|all_?(to|2)_?all)"
)
"""Operators of PyTorch, and those of others such as vllm::all_reduce, that launch what communicates."""

Transfer = Literal["host_to_device", "device_to_host", "peer_to_peer", "host_to_host"]
"""A copy over a link, such as PCIe or NVLink: its speed says nothing of the device's memory, and fusing saves none of
it. A copy within one device's memory is none."""

# Names of CUPTI and roctracer ("Memcpy HtoD"), of HIP ("CopyHostToDevice") and of PTI for XPU ("Memcpy M2D").
_TRANSFERS: dict[Transfer, str] = {
    "host_to_device": r".*(Hto[DA]|HostToDevice|\b[HMS]2D\b)",
    "device_to_host": r".*([DA]toH|DeviceToHost|\bD2[HMS]\b)",
    "peer_to_peer": r".*(PtoP|PeerToPeer|\bP2P\b)",
    "host_to_host": r".*(HtoH|HostToHost|\b[HMS]2[HMS]\b)",
}
_PATTERNS = {kind: re.compile(pattern) for kind, pattern in _TRANSFERS.items()}


def transfer(copy: str) -> Transfer | None:
    """Over which link a copy goes, by its name; None for one within a device, or if the name does not say."""
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.match(copy)), None)


@dataclass(frozen=True)
class Lexicon:
    """Masks over `Trace.names`: `lexicon.blocking[trace.cpu.name]` is one over slices."""

    data_loader: Mask
    """Names that fetch a batch."""
    profiler_step: Mask
    optimizer: Mask
    zero_grad: Mask
    allocator: Mask
    """Runtime calls that allocate or free memory, of the device or page-locked."""
    blocking: Mask
    """Runtime calls that return when the device is done."""
    launching: Mask
    """Runtime calls that launch kernels."""
    copying: Mask
    """Runtime calls that copy."""
    compiling: Mask
    """Names of what torch.compile does once for each graph."""
    device_wide: Mask
    """Blocking calls that wait for all work of the device, such as torch.cuda.synchronize."""
    communication_cpu: Mask
    collective_operator: Mask
    """Operators that launch what communicates."""
    communication_wait: Mask
    """Calls that return when the other ranks are done."""
    communication_kernel: Mask
    """Kernels that communicate, by their names or by what launches them; see `_launched_to_communicate`."""
    pageable_upload: Mask
    """Copies to the device from memory that is not page-locked."""
    pageable_download: Mask
    """Copies from the device to memory that is not page-locked, whose calls block."""
    upload: Mask
    """Copies from any CPU memory to the device."""
    download: Mask
    """Copies from the device to any CPU memory."""
    transfer: Mask
    """Copies over a link: see `Transfer`."""

    @classmethod
    def of(cls, trace: Trace) -> Self:
        return cls(
            data_loader=_mask(_DATA_LOADER, trace),
            profiler_step=_mask(_PROFILER_STEP, trace),
            optimizer=_mask(_OPTIMIZER, trace),
            zero_grad=_mask(_ZERO_GRAD, trace),
            allocator=_mask(_ALLOCATOR, trace),
            blocking=_mask(_BLOCKING, trace),
            launching=_mask(_LAUNCHING, trace),
            copying=_mask(_COPYING, trace),
            compiling=_mask(COMPILING, trace),
            device_wide=_mask(_DEVICE_WIDE, trace),
            communication_cpu=_mask(_COMMUNICATION, trace),
            collective_operator=_mask(_COLLECTIVE_OPERATOR, trace),
            communication_wait=_mask(_COMMUNICATION_WAIT, trace),
            communication_kernel=_mask(_COMMUNICATION_KERNEL, trace) | _launched_to_communicate(trace),
            pageable_upload=_mask(r".*Memcpy.*\(Pageable -> ", trace),
            pageable_download=_mask(r".*Memcpy.*-> Pageable\)", trace),
            upload=trace.names_where(lambda name: transfer(name) == "host_to_device"),
            download=trace.names_where(lambda name: transfer(name) == "device_to_host"),
            transfer=trace.names_where(lambda name: transfer(name) is not None),
        )


def _mask(pattern: str, trace: Trace) -> Mask:
    return trace.names_where(re.compile(pattern).match)


def _launched_to_communicate(trace: Trace) -> Mask:
    """A mask over `Trace.names`: kernels whose names do not say what they do, and whose launches say it.

    They are described as a collective, or only ever launched by operators that communicate. The names of kernels that
    communicate are an open set, because libraries bring their own.
    """
    device = trace.device
    kernels = device.kind == WorkKind.KERNEL
    collective = (trace.cpu.kind == SliceKind.OPERATOR) & _mask(_COLLECTIVE_OPERATOR, trace)[trace.cpu.name]
    launched = kernels & (device.message != MISSING)
    if collective.any():
        launched |= kernels & (slices_around(trace, collective, trace.launchers) != MISSING)
    size = len(trace.names)
    always = np.bincount(device.name[kernels], minlength=size) == np.bincount(device.name[launched], minlength=size)
    found = np.zeros(size, np.bool_)
    found[[name for name in np.unique(device.name[launched]).tolist() if is_unknown(trace.names[name])]] = True
    communicates: Mask = found & always
    return communicates


_NUMBER = re.compile(r"ProfilerStep#(\d{1,18})")


@dataclass(frozen=True)
class StepWindow:
    number: int
    start: int
    end: int
    """The start of the next step, so that steps tile the window."""


@dataclass(frozen=True)
class Window:
    """[start, end) in nanoseconds, on the trace's own clock."""

    start: int
    end: int
    steps: list[StepWindow]
    before: int = 0
    """The nanoseconds left out before the window, in which work ran that was not recorded."""
    after: int = 0
    """The same after the window."""

    @property
    def wall(self) -> int:
        return self.end - self.start


def window(trace: Trace, lexicon: Lexicon) -> Window:
    """The longest run of steps with consecutive numbers, from its first ProfilerStep to its last end.

    Time between other steps was not recorded. Without steps it is from the first to the last work of the device, or in
    a trace without such work of the CPU.
    """
    runs = step_runs(trace, lexicon)
    if runs:
        steps = max(runs, key=len)
        return Window(steps[0].start, steps[-1].end, steps)
    start, end = (trace.cpu.start, trace.cpu.end) if trace.cpu_only else (trace.device.start, trace.device.end)
    if not len(start):
        return Window(0, 0, [])
    return Window(int(start.min()), int(end.max()), [])


def step_runs(trace: Trace, lexicon: Lexicon) -> list[list[StepWindow]]:
    """The steps, split where numbers are not consecutive; nested steps are left out."""
    cpu = trace.cpu
    found = np.flatnonzero(lexicon.profiler_step[cpu.name] & (cpu.end > cpu.start))
    if not len(found):
        return []
    found = found[np.lexsort((-cpu.end[found], cpu.start[found]))]
    reach = np.maximum.accumulate(cpu.end[found])
    found = found[np.concatenate(([True], reach[1:] > reach[:-1]))]
    numbers = np.array([_number(trace.names[name]) for name in cpu.name[found].tolist()], np.int64)
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    runs = zip(np.split(found, breaks), np.split(numbers, breaks), strict=True)
    return [_tiled(cpu.start[run].tolist(), int(cpu.end[run[-1]]), named.tolist()) for run, named in runs]


def _tiled(starts: list[int], last: int, numbers: list[int]) -> list[StepWindow]:
    return [StepWindow(*step) for step in zip(numbers, starts, [*starts[1:], last], strict=True)]


def _number(name: str) -> int:
    match = _NUMBER.match(name)
    return int(match[1]) if match else 0


Places = NDArray[np.intp]

_PROFILER = ("torch/profiler/", "torch/autograd/profiler.py")


def recorder_waits(trace: Trace, lexicon: Lexicon, links: Ids, window: Window) -> Mask:
    """A mask over `Trace.cpu`: blocking calls of the recording, in no operator or annotation of the program.

    They are one of these:

    - calls outside every ProfilerStep, on the steps' thread: only `profile.step()` and the profiler's start and stop
    run there;

    - calls under a Python frame of torch.profiler;

    - synchronisations of the whole device before all that the program does in the first step, or after all that it does
    in the last of several, if no other step has one in the same place;

    - without steps, those before or after all that the program does.
    """
    cpu = trace.cpu
    found = np.zeros(len(cpu), np.bool_)
    blocking = lexicon.blocking[cpu.name] & (cpu.kind == SliceKind.RUNTIME)
    marks = lexicon.profiler_step[cpu.name]
    program = (cpu.kind == SliceKind.OPERATOR) | (cpu.kind == SliceKind.ANNOTATION)
    program &= ~marks
    program[links[links != MISSING]] = True
    framed = trace.names_where(lambda name: any(part in name for part in _PROFILER))
    frames = framed[cpu.name] & (cpu.kind == SliceKind.PYTHON)
    for thread in np.unique(cpu.thread[marks if marks.any() else blocking]).tolist():
        here = cpu.thread == thread
        doing, own = cpu.spans(here & program), cpu.spans(here & frames)
        calls = np.flatnonzero(here & blocking)
        calls = calls[~_within(cpu.start[calls], doing)]
        found[calls[_within(cpu.start[calls], own)]] = True
        if window.steps:
            found[calls[~_within(cpu.start[calls], cpu.spans(here & marks))]] = True
        wide = calls[lexicon.device_wide[cpu.name[calls]]]
        found[_at_borders(cpu.start[wide], cpu.end[wide], doing, window.steps, wide)] = True
    return found


def _at_borders(start: Ns, end: Ns, doing: Spans, steps: list[StepWindow], calls: Places) -> Places:
    """The `calls` at the beginning of only the first step, or at the end of only the last one."""
    everything = (int(min(start.min(initial=0), doing.start.min(initial=0))), int(np.iinfo(np.int64).max))
    bounds = np.array([(step.start, step.end) for step in steps] or [everything], np.int64)
    step = np.searchsorted(bounds[:, 0], start, side="right") - 1
    inside = (step >= 0) & (end <= bounds[step, 1])
    first = inside & (overlap(bounds[step, 0], start, doing) == 0)
    last = inside & (overlap(end, bounds[step, 1], doing) == 0)
    found = [np.empty(0, np.intp)]
    if set(step[first].tolist()) == {0}:
        found.append(calls[first])
    if len(steps) != 1 and set(step[last].tolist()) == {len(bounds) - 1}:  # a single step does not show
        found.append(calls[last])
    return np.concatenate(found)


def _within(at: Ns, spans: Spans) -> Mask:
    if not len(spans):
        return np.zeros(len(at), np.bool_)
    place = np.searchsorted(spans.start, at, side="right") - 1
    inside: Mask = (place >= 0) & (spans.end[np.maximum(place, 0)] > at)
    return inside
