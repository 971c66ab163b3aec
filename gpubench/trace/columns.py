"""A trace as columns of numbers, sets of time intervals, and types and shapes of tensors.

Times are integer nanoseconds on the trace's clock. A missing value in a column of numbers is -1.

A set of nanoseconds is a `Spans`, an array of half-open intervals that is sorted and disjoint, and whose intervals do
not touch; `union` makes one of any intervals. Its arithmetic is exact.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Ns = NDArray[np.int64]
Ids = NDArray[np.int32]
Mask = NDArray[np.bool_]

MISSING = -1


class SliceKind(IntEnum):
    OPERATOR = 0
    """An ATen operator, an autograd node, or anything else that the dispatcher or `RecordFunction` records."""
    ANNOTATION = 1
    """A mark such as `record_function`, ProfilerStep or Optimizer.step; in old traces these are operators."""
    PYTHON = 2
    RUNTIME = 3
    """A call into the CUDA or HIP runtime or driver."""


class WorkKind(IntEnum):
    KERNEL = 0
    COPY = 1
    SET = 2


@dataclass(frozen=True)
class Intervals:
    start: Ns
    end: Ns

    def __len__(self) -> int:
        return len(self.start)

    def spans(self, chosen: "Mask | Ids | NDArray[np.intp]") -> "Spans":
        return union(self.start[chosen], self.end[chosen])


@dataclass(frozen=True)
class CpuSlices(Intervals):
    """The CPU's slices, sorted by thread, then start, then longest first, so that parents precede their children."""

    kind: NDArray[np.int8]
    name: Ids
    """The index of the name in `Trace.names`."""
    thread: Ids
    """The index of the thread in `Trace.threads`."""
    correlation: Ns
    """The correlation number of the device work that a RUNTIME slice launched."""
    sequence: Ns
    """The number of an operator's autograd node, which its backward operator shares."""
    forward_thread: Ns
    """The profiler's number of the thread that ran a backward operator's forward operator; otherwise 0 or -1."""
    signature: Ids
    """The index in `Trace.signatures` of an operator's recorded inputs."""
    stack: Ids
    """The index in `Trace.names` of the Python stack that old traces record at each operator."""
    message: Ids
    """The index in `Trace.messages` of the collective that a slice describes."""


@dataclass(frozen=True)
class DeviceWork(Intervals):
    """Kernels, copies and memsets of all devices and streams, sorted by start, then end."""

    kind: NDArray[np.int8]
    name: Ids
    device: Ids
    stream: Ids
    correlation: Ns
    bytes: Ns
    blocks: Ns
    """The number of thread blocks in a kernel's grid."""
    threads: Ns
    """The number of threads in a block."""
    message: Ids
    """The index in `Trace.messages` of the description of a kernel's collective."""


class CollectiveMessage(NamedTuple):
    """The description of a collective, as a kernel of it or record_param_comms has it."""

    name: str
    """The name of the backend, such as allreduce."""
    group: str
    """The name of the process group; an empty string if it is not recorded."""
    ranks: str
    """The numbers of the group's ranks, such as "[0, 1]"; of large groups only some."""
    group_size: int | None
    elements_in: int | None
    elements_out: int | None
    dtype: str
    number: int | None
    """The sequence number of the collective in its process group."""


@dataclass(frozen=True)
class Signature:
    """The inputs of an operator, as in the trace: one entry per argument."""

    dims: list[Any]
    types: list[str]
    strides: list[Any] = field(default_factory=list)
    concrete: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class DeviceProperties:
    id: int | None
    name: str
    multiprocessors: int | None
    memory: int | None
    """The size of the memory in bytes."""
    compute_capability: tuple[int, int] | None


@dataclass(frozen=True)
class Trace:
    """One trace file: one process of a program, recorded by torch.profiler."""

    label: str
    """The name of the file."""
    rank: int | None
    world_size: int | None
    backend: str | None
    devices: list[DeviceProperties]
    names: list[str]
    threads: list[tuple[str, str]]
    """The (process, thread) pairs, with the trace's numbers."""
    signatures: list[Signature]
    cpu: CpuSlices
    device: DeviceWork
    settings: dict[str, Any]
    """The profiler's options, as far as the file has them: record_shapes, with_stack, profile_memory."""
    events: int
    """The number of events in the file, of any kind."""
    dropped: int
    """The number of invalid events, which were left out."""
    repeated: int = 0
    """The number of events that occur again, equal in everything that is read; they count once."""
    unread: dict[str, int] = field(default_factory=dict)
    """The number of events by unknown category, such as that of a device other than CUDA's, ROCm's and XPU's."""
    messages: list[CollectiveMessage] = field(default_factory=list)
    """The collectives that are described."""
    shifted: int = 0
    """The nanoseconds by which the device's times were shifted, because its clock was another one than the CPU's."""
    truncated: bool = False
    """Whether the file is truncated after its events, so that what follows them, such as settings, is incomplete."""

    def described(self, device: int) -> DeviceProperties | None:
        """The trace's description of the device with this number; None if it is missing or ambiguous.

        If no description has the number but all describe the same kind of device, that kind is assumed: ROCm numbers
        the machine's devices in its events, and the devices visible to the program in the descriptions.
        """
        own = next((one for one in self.devices if one.id == device), None)
        alike = len({one.name for one in self.devices}) == 1
        return own or (self.devices[0] if alike else None)

    @cached_property
    def launchers(self) -> Ids:
        """For each work of the device, the index of the runtime slice that launched it, -1 if the trace has none.

        Correlations of 0 and below mean none. The works of a CUDA graph have the same launch. Of several calls with one
        number (a runtime call and the driver call in it) the one that began first counts.
        """
        cpu, device = self.cpu, self.device
        calls = np.flatnonzero((cpu.kind == SliceKind.RUNTIME) & (cpu.correlation > 0))
        calls = calls[np.lexsort((cpu.start[calls], cpu.correlation[calls]))]
        if not len(calls):
            return np.full(len(device), MISSING, np.int32)
        numbers = cpu.correlation[calls]
        place = np.minimum(np.searchsorted(numbers, device.correlation), len(calls) - 1)
        return np.where(numbers[place] == device.correlation, calls[place], MISSING).astype(np.int32)

    @property
    def cpu_only(self) -> bool:
        return not len(self.device)

    def names_where(self, chosen: Callable[[str], object]) -> Mask:
        """A mask over `names`: those for which `chosen` returns something true."""
        return np.fromiter((bool(chosen(name)) for name in self.names), np.bool_, len(self.names))


Integer = TypeVar("Integer", bound=np.integer[Any])


def at(column: NDArray[Integer], places: NDArray[np.integer[Any]], otherwise: int = MISSING) -> NDArray[Integer]:
    """The value of a column at each of the places, which are indices; `otherwise` for a place of -1."""
    if not len(column):
        return np.full(len(places), otherwise, column.dtype)
    return np.where(places >= 0, column[places], column.dtype.type(otherwise))


def sum_at(places: NDArray[np.integer[Any]], amounts: Ns, count: int) -> Ns:
    """The sum of the amounts at each of `count` places; amounts at -1 are left out."""
    total = np.zeros(count, np.int64)
    known = places >= 0
    np.add.at(total, places[known], amounts[known])
    return total


@dataclass(frozen=True)
class Spans(Intervals):
    @property
    def length(self) -> int:
        """The number of nanoseconds in the set."""
        return int((self.end - self.start).sum())


EMPTY = Spans(np.empty(0, np.int64), np.empty(0, np.int64))


def span(start: int, end: int) -> Spans:
    """One interval; an empty set if it has no length."""
    if end <= start:
        return EMPTY
    return Spans(np.array([start], np.int64), np.array([end], np.int64))


def union(start: Ns, end: Ns) -> Spans:
    """The union of any intervals in any order; intervals without length are dropped."""
    real = end > start
    start, end = start[real], end[real]
    if not len(start):
        return EMPTY
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate(([True], start[1:] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return Spans(start[first], reach[last])


def join(*sets: Spans) -> Spans:
    return union(np.concatenate([one.start for one in sets]), np.concatenate([one.end for one in sets]))


def intersect(a: Spans, b: Spans) -> Spans:
    if not len(a) or not len(b):
        return EMPTY
    # Each interval of `a` overlaps those of `b` from the first one that ends after its start to the last one that
    # starts before its end; `b` is disjoint, so that both its starts and its ends are sorted.
    first = np.searchsorted(b.end, a.start, side="right")
    beyond = np.searchsorted(b.start, a.end, side="left")
    count = np.maximum(beyond - first, 0)
    ours = np.repeat(np.arange(len(a)), count)
    theirs = np.arange(len(ours)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
    return Spans(np.maximum(a.start[ours], b.start[theirs]), np.minimum(a.end[ours], b.end[theirs]))


def subtract(a: Spans, b: Spans) -> Spans:
    """The part of `a` that is not in `b`."""
    if not len(a) or not len(b):
        return a
    low, high = min(int(a.start[0]), int(b.start[0])), max(int(a.end[-1]), int(b.end[-1]))
    return intersect(a, complement(b, low, high))


def complement(a: Spans, start: int, end: int) -> Spans:
    """The part of [start, end) that is not in `a`."""
    edges_start = np.concatenate(([start], np.clip(a.end, start, end)))
    edges_end = np.concatenate((np.clip(a.start, start, end), [end]))
    real = edges_end > edges_start
    return Spans(edges_start[real], edges_end[real])


def clip(a: Spans, start: int, end: int) -> Spans:
    """The part of `a` in [start, end)."""
    return intersect(a, span(start, end))


def overlap(start: Ns, end: Ns, a: Spans) -> Ns:
    """The nanoseconds that each of the intervals [start, end) has in common with `a`."""
    return _measured_until(a, end) - _measured_until(a, start)


def _measured_until(a: Spans, at: Ns) -> Ns:
    """The length of the part of `a` before each instant."""
    if not len(a):
        return np.zeros(len(at), np.int64)
    before = np.concatenate(([0], np.cumsum(a.end - a.start)))
    place = np.searchsorted(a.start, at, side="right")
    inside = np.where(place > 0, np.minimum(at, a.end[np.maximum(place - 1, 0)]) - a.start[np.maximum(place - 1, 0)], 0)
    return before[np.maximum(place - 1, 0)] + np.maximum(inside, 0)


TYPES = {
    "float": ("float32", 4),
    "double": ("float64", 8),
    "c10::Half": ("float16", 2),
    "c10::BFloat16": ("bfloat16", 2),
    "c10::Float8_e4m3fn": ("float8_e4m3fn", 1),
    "c10::Float8_e5m2": ("float8_e5m2", 1),
    "long int": ("int64", 8),
    "long": ("int64", 8),
    "long long": ("int64", 8),
    "int": ("int32", 4),
    "short": ("int16", 2),
    "signed char": ("int8", 1),
    "unsigned char": ("uint8", 1),
    "bool": ("bool", 1),
    "c10::complex<float>": ("complex64", 8),
    "c10::complex<double>": ("complex128", 16),
}
"""PyTorch's name and the size in bytes of a tensor's elements, by their C++ type."""

_NUMBERS = re.compile(r"\[(-?\d{1,18}(?:, ?-?\d{1,18})*)\]$")


@dataclass(frozen=True)
class Tensor:
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    strides: tuple[int, ...] | None

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """The bytes of its elements in memory: a dimension of stride 0 has one element."""
        if self.strides is None or len(self.strides) != len(self.shape) or not self.elements:
            return self.elements * self.itemsize
        return self.itemsize * math.prod(size for size, step in zip(self.shape, self.strides, strict=True) if step)


def tensor(signature: Signature, argument: int) -> Tensor | None:
    """The tensor at a place among the inputs, from 0; None if there is none or it is not known to be one."""
    if argument >= len(signature.dims) or argument >= len(signature.types):
        return None
    shape, known = _sizes(signature.dims[argument]), TYPES.get(signature.types[argument])
    if shape is None or known is None:
        return None
    strides = _sizes(signature.strides[argument]) if argument < len(signature.strides) else None
    return Tensor(shape, *known, strides)


def tensors(signature: Signature) -> list[Tensor]:
    found = [tensor(signature, argument) for argument in range(len(signature.dims))]
    return [one for one in found if one is not None]


def numbers(signature: Signature, argument: int) -> list[int] | None:
    """A list of integers among the inputs, such as "[1, 1]"; None if values were not recorded."""
    match = _NUMBERS.match(_value(signature, argument))
    return [int(one) for one in match[1].split(",")] if match else None


def flag(signature: Signature, argument: int) -> bool | None:
    return {"True": True, "False": False}.get(_value(signature, argument))


def shapes_text(signature: Signature) -> str:
    """The shapes as "[64, 3, 224, 224] [64, 3, 7, 7]", without scalars and what is not a tensor."""
    return " ".join(str(dims) for dims in signature.dims if isinstance(dims, list) and dims)


def dtype_text(signature: Signature) -> str:
    """The type of the first tensor; "" if none is known."""
    return next((TYPES[one][0] for one in signature.types if one in TYPES), "")


def _value(signature: Signature, argument: int) -> str:
    return str(signature.concrete[argument]) if argument < len(signature.concrete) else ""


def _sizes(found: Any) -> tuple[int, ...] | None:
    if not isinstance(found, list) or not all(type(size) is int and 0 <= size < 2**40 for size in found):
        return None
    return tuple(found)
