"""Reads allocations from a file of torch.cuda.memory._dump_snapshot.

A snapshot holds the allocator's events since the recording began, as far back as its ring buffer of max_entries
reaches, and its state at the end. What was allocated before the first event follows from both. Without a recording
there is only the state.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from gpubench import units
from gpubench.errors import DataError
from gpubench.memory.allocation_log import (
    LARGEST,
    LASTING,
    Allocation,
    AllocationLog,
    AllocatorMove,
    Counts,
    DeviceLog,
    FailedRequest,
    Held,
    Phase,
    PhaseStart,
    assembled,
    classify,
    filled,
    steps,
)
from gpubench.memory.allocator import Rules
from gpubench.memory.analysis import footprints
from gpubench.memory.footprint import Footprint
from gpubench.memory.unpickling import HOW, plain


class Frame(Struct, frozen=True, gc=False):
    """One level of a stack, of Python or C++."""

    name: str = ""
    filename: str = ""
    line: int = 0
    """0 or less, or 2^64 - 1, where Python knows no line, as in some frames since Python 3.13."""


class FrameInfo(Struct, frozen=True, gc=False):
    """The information of one frame. Stacks share their frames, so that there are few of these."""

    python: bool
    mark: Phase | None = None
    builds: bool = False
    """Whether it is a Python frame in which parts of a model are made or loaded."""
    called: bool = False
    """Whether it is a Python frame that autograd's engine may call: of a node written in Python, or of a mode that sees
    each operator, which the engine takes along into its own threads, and the wrapper that PyTorch puts around it."""
    place: str = ""
    """The file:line of a Python frame, or the file alone if the line is unknown."""
    users: bool = False
    engine: bool = False
    """Whether it is a C++ frame of autograd's engine."""
    operator: str = ""
    workspace: bool = False
    softmax: bool = False
    """Whether it is a Python frame of a softmax, of PyTorch's or written out, other than one of a loss."""


@dataclass(frozen=True)
class StackInfo:
    phase: Phase | None = None
    """The phase; None if no frame shows it."""
    operator: str = ""
    """The operator, such as "aten::mm", if C++ frames were recorded, and whether a softmax called it."""
    where: str = ""
    """The innermost frame of the user's code, such as "gpt/model.py:54", or else the innermost Python frame."""
    workspace: bool = False
    """Whether it allocates a workspace of cuBLAS or cuBLASLt, if C++ frames were recorded."""
    builds: bool = False
    """Whether it makes or loads a part of a model."""


_CLASS = r"(?:.*\.)?"  # newer interpreters include the class in a function's name
_MARKS: tuple[tuple[Phase, str, str], ...] = (
    ("zero_grad", r"(optim/\w+|nn/modules/module)\.py", r"zero_grad"),
    ("optimizer", r"optim/(?!lr_scheduler|swa_utils)\w+\.py", r"step|wrapper"),
    ("optimizer", r"(cuda/)?amp/grad_scaler\.py", r"step|unscale_|update"),
    ("optimizer", r"nn/utils/clip_grad\.py", r".*"),
    ("backward", r"(autograd/__init__|autograd/graph|_tensor)\.py", r"backward|grad|_engine_run_backward"),
    ("backward", r"utils/checkpoint\.py", r"backward|unpack_hook|recompute_fn"),
    ("loss", r"nn/modules/loss\.py", r".*"),
    ("model", r"nn/modules/module\.py", r"_apply|to|to_empty|cuda|_?load_(state_dict|from_state_dict)"),
    ("model", r"nn/(init\.py|modules/\w+\.py)", r"__init__|reset_parameters|\w+_"),
    ("data", r"utils/data/.*", r".*"),
    ("forward", r"nn/modules/module\.py", r"_call_impl|_wrapped_call_impl|_slow_forward"),
)
"""Functions of PyTorch, with their files, that identify a phase; the first match counts."""
_BUILDS = re.compile(rf"{_CLASS}__init__$")
_LOADS = re.compile(
    r"(?:.*/)?(transformers/(modeling_utils|core_model_loading)|accelerate/(utils/modeling|big_modeling)|safetensors/\w+"
    r"|diffusers/(models/model(ing|_loading)_utils|loaders/\w+))\.py$"
)
_PATTERNS = [
    (phase, re.compile(rf"(?:.*/)?torch/{file}$"), re.compile(rf"{_CLASS}(?:{name})$")) for phase, file, name in _MARKS
]
_ENGINE = re.compile(r"torch::autograd::(python::Python)?Engine::|THPEngine_run_backward")
_CALLED = re.compile(r"(?:.*/)?torch/(autograd/function|_compile)\.py$")
_MODE = re.compile(rf"{_CLASS}__torch_dispatch__$")
_SOFTMAX = re.compile(rf"{_CLASS}(?!log_)\w*(?<!log_)softmax\w*$")
_WORKSPACE = re.compile(r"getCUDABlasLtWorkspace|getNewWorkspace|cublasSetWorkspace|getCurrentCUDABlasHandle")
_OPERATOR = re.compile(r"at::_ops::(?!(?:new_)?empty|resize)(?P<name>\w+?)(?:_[A-Z]\w*|_out)?::(?:call|redispatch)\b")
_LIBRARY = re.compile(
    r"(.*/)?(site-packages|dist-packages|python\d\.\d+|torch/(nn|autograd|utils|optim|cuda|amp|distributed|_\w+))/"
    r"|(.*/)?python\d+/lib/|.*torch/\w+\.py$|<",
    re.IGNORECASE,
)


LONGEST = 1000
"""The number of characters of a name or path that are searched."""


LAST_LINE = 2**31 - 1
"""The largest number of a line that Python's own code objects can hold."""


def frame_info(frame: Frame) -> FrameInfo:
    name, file = frame.name[:LONGEST], frame.filename[-LONGEST:].replace("\\", "/")
    if not (file.endswith(".py") or file.startswith("<")):
        operator = _OPERATOR.search(name)
        return FrameInfo(
            python=False,
            engine=_ENGINE.search(name) is not None,
            operator=f"aten::{operator['name']}" if operator else "",
            workspace=_WORKSPACE.search(name) is not None,
        )
    marks = (phase for phase, path, function in _PATTERNS if path.match(file) and function.match(name))
    mark = next(marks, None)
    return FrameInfo(
        python=True,
        mark=mark,
        builds=mark == "model" or _BUILDS.match(name) is not None or _LOADS.match(file) is not None,
        called=_CALLED.match(file) is not None or _MODE.match(name) is not None,
        place=f"{'/'.join(file.split('/')[-2:])}{f':{frame.line}' if 0 < frame.line <= LAST_LINE else ''}",
        users=_LIBRARY.match(file) is None,
        softmax=_SOFTMAX.match(name) is not None,
    )


def stack_info(stack: Sequence[FrameInfo]) -> StackInfo:
    """Reduces a stack, whose innermost frame comes first, to what it says about an allocation.

    The innermost phase counts, but recomputation in the backward pass counts as backward.
    """
    python = [one for one in stack if one.python]
    users = (one.place for one in python if one.users)
    operator = next((one.operator for one in stack if one.operator), "")
    if "softmax" not in operator and any(one.softmax for one in python):
        operator = f"{operator} in softmax".lstrip()
    return StackInfo(
        phase=_phase(python, any(one.engine for one in stack)),
        operator=operator,
        where=next(users, python[0].place if python else ""),
        workspace=any(one.workspace for one in stack),
        builds=any(one.builds for one in python),
    )


def _phase(python: Sequence[FrameInfo], engine: bool) -> Phase | None:
    marks = [one.mark for one in python if one.mark]
    innermost = marks[0] if marks else None
    # On autograd's own threads the outermost Python frame is one that the engine called; else it is a module's.
    backward = engine or "backward" in marks or (bool(python) and python[-1].called)
    return "backward" if backward and innermost in (None, "forward", "loss") else innermost


Size = Annotated[int, Meta(ge=0, lt=LARGEST)]


class SnapshotBlock(Struct, gc=False):
    size: Size
    requested_size: Size | None = None
    """The bytes requested; missing before PyTorch 2.1."""
    state: str = "inactive"
    frames: Any = ()

    @property
    def asked(self) -> int:
        return self.size if self.requested_size is None else self.requested_size


class Segment(Struct, gc=False):
    address: int
    total_size: Size
    device: int = 0
    blocks: list[SnapshotBlock] = []
    frames: Any = ()


class SnapshotEvent(Struct, gc=False):
    action: str
    addr: int = 0
    size: Annotated[int, Meta(ge=0)] = 0
    """The bytes requested; for segments, the bytes of the segment. Only requests that failed may exceed `Size`."""
    time_us: int = 0
    device_free: Size | None = None
    """The bytes that the driver had left, if memory was short."""
    frames: Any = ()


class Annotation(Struct, gc=False):
    """The beginning or end of a torch.profiler.record_function, also of the optimizer's own."""

    name: str = ""
    stage: str = ""
    """Whether it is the beginning or the end: START or END."""
    time_us: int = 0


class Snapshot(Struct):
    segments: list[Segment]
    device_traces: list[list[SnapshotEvent]] = []
    """The events by device number."""
    external_annotations: list[Annotation] = []


def load(path: Path) -> Snapshot:
    """Raises DataError for a file that is not a snapshot, is damaged, holds code, or does not fit in memory."""
    found = plain(path)
    if isinstance(found, list):  # as torch.cuda.memory.memory_snapshot() returns it
        found = {"segments": found}
    try:
        snapshot = msgspec.convert(found, Snapshot)
    except msgspec.ValidationError as error:
        raise DataError(f"{path} is a pickle of something else, or damaged: {error}", HOW) from None
    for event in chain.from_iterable(snapshot.device_traces):
        if event.size >= LARGEST and event.action != _FAILED:
            raise DataError(f"{path} is damaged: {event.action} of {event.size:,} bytes", HOW)
    return snapshot


class StackCache:
    """The information of the stacks of one file, cached because many events share stacks and frames."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._frames: dict[int, FrameInfo] = {}
        self._stacks: dict[tuple[int, ...], StackInfo] = {}

    def info(self, frames: Any) -> StackInfo:
        """The information of a stack, whose frames must outlive this object. Raises DataError if invalid."""
        try:
            key = tuple(map(id, frames))
            if key not in self._stacks:
                self._stacks[key] = stack_info([self._frame(one) for one in frames])
        except (TypeError, msgspec.ValidationError) as error:
            raise DataError(f"{self._path} is damaged, or is not a memory snapshot: a stack: {error}", HOW) from None
        return self._stacks[key]

    def _frame(self, frame: Any) -> FrameInfo:
        if id(frame) not in self._frames:
            self._frames[id(frame)] = frame_info(msgspec.convert(frame, Frame))
        return self._frames[id(frame)]


_NAMES: tuple[tuple[Phase, re.Pattern[str]], ...] = (
    ("optimizer", re.compile(r"optimizer\.step#|optim(izer)?(_?step)?$")),
    ("zero_grad", re.compile(r"optimizer\.zero_grad#|zero_grad$")),
    ("data", re.compile(r"enumerate\(dataloader\)|data(_?wait|_?load(er|ing))?$")),
    ("forward", re.compile(r"(forward|fwd)(_pass)?$")),
    ("loss", re.compile(r"loss$")),
    ("backward", re.compile(r"(backward|bwd)(_pass)?$")),
)
"""The phases by PyTorch's own annotations and the usual names of users, in lower case."""


def announced(times: Sequence[int], annotations: Sequence[Annotation]) -> list[Phase | None]:
    """The phase of each of the ascending `times`, from the innermost annotation around it that names a phase.

    An annotation counts as open in the microseconds in which it begins and ends.
    """
    borders = sorted(
        ((one.time_us, one.stage == "END", phase) for one in annotations if (phase := _phase_named(one.name))),
        key=lambda border: border[:2],
    )
    found: list[Phase | None] = []
    open_: list[Phase] = []
    coming = 0
    for time in times:
        while coming < len(borders) and borders[coming][:2] <= (time, False):
            _, ends, phase = borders[coming]
            coming += 1
            if not ends:
                open_.append(phase)
            elif phase in open_:
                del open_[len(open_) - 1 - open_[::-1].index(phase)]
        found.append(open_[-1] if open_ else None)
    return found


def _phase_named(name: str) -> Phase | None:
    bare = name.strip("#. ").lower()
    return next((phase for phase, pattern in _NAMES if pattern.match(bare)), None)


FEWEST = 100
"""The smallest number of events that may be a limit. Smaller numbers are often round by chance."""

_GIVEN, _REQUESTED, _COMPLETED, _FAILED = "alloc", "free_requested", "free_completed", "oom"
_RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


def read(path: Path) -> list[DeviceLog]:
    """Reads the log of each device with events in the snapshot at `path`, with the categories of `classify`.

    Sizes are those requested. Readings are of blocks: the sizes of blocks held at the end are known; others are the
    requested sizes, rounded up to 512 bytes. Raises DataError for a file that is not a snapshot, is damaged, holds
    code, does not fit in memory, or in which nothing is allocated. Without events it has what is held.
    """
    found, stacks = load(path), StackCache(path)
    devices = [
        _history(number, events, found, stacks)
        for number, events in enumerate(found.device_traces)
        if any(event.action == _GIVEN for event in events)
    ]
    if devices:
        return devices
    held = sorted({one.device for one in found.segments if any(True for _ in _held(one))})
    if not held:
        raise DataError(f"{path} has no history, and nothing is allocated", HOW)
    return [_state(number, found, stacks) for number in held]


def _history(number: int, events: Sequence[SnapshotEvent], found: Snapshot, stacks: StackCache) -> DeviceLog:
    segments = [one for one in found.segments if one.device == number]
    held = {address: block for one in segments for address, block in _held(one)}
    reserved = sum(one.total_size for one in segments)
    moving = list(_moving(events))
    last = {events[index].addr: index for index in moving}
    there = [_there(block, stacks) for address, block in held.items() if address not in last]
    blocks = {last[address]: block.size for address, block in held.items() if address in last}
    phases = _phases([events[index] for index in moving], found, stacks)
    levels = _levels(events, reserved)
    failed = [
        (bisect_left(moving, index), _failed(event, stacks.info(event.frames)))
        for index, event in enumerate(events)
        if event.action == _FAILED
    ]
    moves = [
        _move(events[index], phase, step, blocks.get(index), levels[index + 1], stacks)
        for index, phase, step in zip(moving, phases, steps(phases), strict=True)
    ]
    log = assembled(moves, there, levels[0], failed)
    classify(log)
    before = sum(one.size for one in log.allocations if one.category == "before")
    proof = _overwritten(number, found)
    loss = proof or (_full(number, found) if before or levels[0] else "")
    log.truncated, log.truncation_proven, log.late = bool(loss), bool(proof), bool(before) and not loss
    log.counts = _counts(events, segments)
    lost = sum(events[index].action == _GIVEN for address, index in last.items() if address not in held)
    log.notes = [*_beginning(number, found, before, loss), *_unreleased(lost), *_failures(events)]
    return DeviceLog(number, log)


def _state(number: int, found: Snapshot, stacks: StackCache) -> DeviceLog:
    """Makes the log of a device without events: what is held, each of a kind that its stack shows."""
    segments = [one for one in found.segments if one.device == number]
    blocks = [block for one in segments for _, block in _held(one)]
    held = [_still_held(block, place, stacks.info(block.frames)) for place, block in enumerate(blocks)]
    given = np.cumsum([0, *(block.size for block in blocks)], dtype=np.int64)
    log = AllocationLog(
        held,
        [PhaseStart(0, "unknown")],
        len(held),
        counts=_counts([], segments),
        levels=(given, np.full(len(given), sum(one.total_size for one in segments), np.int64)),
        notes=[
            "the file has no history, only what was held when it was taken: what the peak was, and what is temporary, "
            "cannot be known; torch.cuda.memory._record_memory_history() before the model is built records it"
        ],
        is_state=True,
    )
    return DeviceLog(number, log)


def _still_held(block: SnapshotBlock, place: int, stack: StackInfo) -> Allocation:
    phase = stack.phase or ("model" if stack.builds else "unknown")
    kind = "workspaces" if stack.workspace else LASTING.get(phase, "unknown")
    return Allocation(block.asked, place, None, kind, "unknown", operator=stack.operator, where=stack.where)


def _failed(event: SnapshotEvent, stack: StackInfo) -> FailedRequest:
    return FailedRequest(event.size, event.device_free, stack.operator, stack.where)


def _counts(events: Sequence[SnapshotEvent], segments: Sequence[Segment]) -> Counts:
    """Counts the recorded events. A retry leaves no event that distinguishes it from empty_cache()."""
    actions = Counter(event.action for event in events)
    free = [block.size for one in segments for block in one.blocks if block.state == "inactive"]
    return Counts(
        allocations=actions[_GIVEN],
        frees=actions[_REQUESTED] or actions[_COMPLETED],
        ooms=actions[_FAILED],
        largest_free=max(free, default=0),
    )


def _held(segment: Segment) -> Iterator[tuple[int, SnapshotBlock]]:
    """Yields the allocated blocks of a segment with their addresses."""
    address = segment.address
    for block in segment.blocks:
        if block.state != "inactive":
            yield address, block
        address += block.size


def _there(block: SnapshotBlock, stacks: StackCache) -> Held:
    where = stacks.info(block.frames).where
    return Allocation(block.asked, begin=0, category="before", phase="start", where=where), block.size


def _moving(events: Sequence[SnapshotEvent]) -> list[int]:
    """Indices of the events that allocate or free memory.

    A block is free when its free is completed, as other streams may still use it; if completions are not recorded, when
    it was requested.
    """
    found, completed = [], set()
    for index in range(len(events) - 1, -1, -1):
        action, address = events[index].action, events[index].addr
        if action == _COMPLETED:
            completed.add(address)
        moves = action in (_GIVEN, _COMPLETED) or (action == _REQUESTED and address not in completed)
        if action in (_GIVEN, _REQUESTED):
            completed.discard(address)
        if moves:
            found.append(index)
    return found[::-1]


def _levels(events: Sequence[SnapshotEvent], reserved: int) -> list[int]:
    """The bytes of segments before the first event and after each one; after the last one it is `reserved`."""
    level = reserved
    levels = [level]
    for event in reversed(events):
        level = max(0, level - _RESERVES.get(event.action, 0) * event.size)
        levels.append(level)
    return levels[::-1]


def _phases(events: Sequence[SnapshotEvent], found: Snapshot, stacks: StackCache) -> list[Phase]:
    """The phases, from stacks, else from annotations, else from the neighbouring events.

    Autograd's own threads have no Python frames: if other events of the same kind have a stack, one without any is of
    the backward pass. A free that is recorded without a stack of its own has that of its allocation, which says nothing
    about it.
    """
    stacked = {event.action for event in events if event.frames}
    by_name = announced([event.time_us for event in events], found.external_annotations)
    known: list[Phase | None] = []
    given: dict[int, Any] = {}
    for event, name in zip(events, by_name, strict=True):
        if event.action == _GIVEN:
            given[event.addr] = event.frames
        elif event.frames and event.frames is given.get(event.addr):
            known.append(name)
            continue
        bare = not event.frames and event.action in stacked
        known.append(stacks.info(event.frames).phase or name or ("backward" if bare else None))
    return filled(known)


def _move(
    event: SnapshotEvent, phase: Phase, step: int | None, block: int | None, reserved: int, stacks: StackCache
) -> AllocatorMove:
    size = Rules().rounded(event.size) if block is None else block
    if event.action != _GIVEN:
        return AllocatorMove(event.addr, size, phase, step, size=event.size, reserved=reserved)
    return AllocatorMove(
        event.addr, size, phase, step, _given(event, phase, step, stacks.info(event.frames)), reserved=reserved
    )


def _given(event: SnapshotEvent, phase: Phase, step: int | None, stack: StackInfo) -> Allocation:
    """Makes the allocation of an event, whose kind its lifetime tells later.

    What is made between parts of the model, such as data for later, need not be one of them: its stack has to show it.
    """
    beside = phase == "model" and bool(event.frames) and not stack.builds
    return Allocation(
        event.size,
        begin=0,
        category="workspaces" if stack.workspace else "unknown",
        phase="unknown" if beside else phase,
        step=step,
        operator=stack.operator,
        where=stack.where,
    )


def _overwritten(number: int, found: Snapshot) -> str:
    """The evidence that events are missing; an empty string if there is none.

    A block keeps the stack of its allocation, and a segment that of its own, only if the allocator was recording
    (context_when_allocated of c10/cuda/CUDACachingAllocator.cpp): then their events were recorded too.
    """
    given, reserved = (
        {event.addr for event in found.device_traces[number] if event.action in actions}
        for actions in ([_GIVEN], [action for action, change in _RESERVES.items() if change > 0])
    )
    mine = [one for one in found.segments if one.device == number]
    blocks = sum(bool(block.frames) and address not in given for one in mine for address, block in _held(one))
    segments = sum(bool(one.frames) and one.address not in reserved for one in mine)
    known = [units.counted(count, name) for count, name in ((blocks, "block"), (segments, "segment")) if count]
    return f"the allocation of {' and '.join(known)} was recorded, but is missing from the events" if known else ""


def _full(number: int, found: Snapshot) -> str:
    """The sign that the ring buffer was full. All devices share max_entries, which is not in the file."""
    counts = [len(events) for events in found.device_traces]
    count = counts[number]
    if count < max(counts) or count < FEWEST:
        return ""
    if counts.count(count) > 1:
        return f"several devices have {count:,} events each, probably max_entries"
    return f"it has {count:,} events, probably max_entries" if _is_round(count) else ""


def _is_round(count: int) -> bool:
    """Whether a count looks like a user's limit: a digit and zeros, whole thousands, or a power of two."""
    digits, power = count % 10 ** (len(str(count)) - 1) == 0, count & (count - 1) == 0
    return digits or power or count % 1000 == 0


def _beginning(number: int, found: Snapshot, before: int, loss: str) -> Iterator[str]:
    """Yields notes on what is missing before the first event, and on how to record it."""
    counts = [len(events) for events in found.device_traces]
    there = f"{units.size(before)} were allocated before the first of its {counts[number]:,} events"
    if loss:
        missing = f"{loss}; {there}" if before else loss
        yield f"{missing}; record with a larger max_entries, or fewer steps"
    elif before:
        whole = "no event was lost" if counts[number] < max(counts) else "nothing suggests that events were lost"
        yield (
            f"{there}, and {whole}; call torch.cuda.memory._record_memory_history before the model is built to see "
            "what they hold"
        )


def _unreleased(lost: int) -> Iterator[str]:
    if lost:
        yield f"no free was recorded of {units.counted(lost, 'allocation')}: assumed to be held to the end"


def _failures(events: Sequence[SnapshotEvent]) -> Iterator[str]:
    for number, event in enumerate(events, 1):
        if event.action == _FAILED:
            left = "" if event.device_free is None else f", with {units.size(event.device_free)} left on the device"
            yield f"out of memory at event {number:,} of {len(events):,}: {units.size(event.size)} requested{left}"


def of_snapshot(path: Path) -> list[Footprint]:
    """The footprint of each device in a snapshot of the CUDA allocator. Raises what `read` does."""
    return footprints(read(path), "snapshot")
