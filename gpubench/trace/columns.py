"""A trace as columns: what the host did, what the device did, and the words for both.

Times are integer nanoseconds, as the trace counts them. Whatever is missing is -1 in a column of numbers.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ns = NDArray[np.int64]
Ids = NDArray[np.int32]
Mask = NDArray[np.bool_]

MISSING = -1


class HostKind(IntEnum):
    OPERATOR = 0
    """An ATen operator, an autograd node, anything the dispatcher or `RecordFunction` saw."""
    ANNOTATION = 1
    """`record_function`, ProfilerStep, enumerate(DataLoader), Optimizer.step; in old traces these are operators."""
    PYTHON = 2
    RUNTIME = 3
    """A call into the CUDA or HIP runtime or driver."""


class WorkKind(IntEnum):
    KERNEL = 0
    COPY = 1
    SET = 2


@dataclass(frozen=True)
class HostSlices:
    """What the host did, sorted by thread, then start, then longest first: parents stand before their children."""

    kind: NDArray[np.int8]
    name: Ids
    """Index into `Trace.names`."""
    thread: Ids
    """Index into `Trace.threads`."""
    start: Ns
    end: Ns
    correlation: Ns
    """Of a RUNTIME slice: which device work it launched."""
    sequence: Ns
    """Of an operator: the number of the autograd node that its backward shares."""
    forward_thread: Ns
    """Of a backward operator: the profiler's number of the thread that ran its forward; 0 or missing otherwise."""
    signature: Ids
    """Index into `Trace.signatures`, for operators whose inputs were recorded."""
    stack: Ids
    """Index into `Trace.names`: the Python stack that old traces write at each operator."""

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class DeviceWork:
    """Kernels, copies and memsets of all devices and streams, sorted by start, then end."""

    kind: NDArray[np.int8]
    name: Ids
    device: Ids
    stream: Ids
    start: Ns
    end: Ns
    correlation: Ns
    bytes: Ns
    blocks: Ns
    """Thread blocks of a kernel's grid."""
    threads: Ns
    """Threads in a block."""
    collective: Ids
    """Index into `Trace.names`: what the backend calls the collective that a kernel is part of, as allreduce."""

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class Signature:
    """The inputs of an operator as the trace has them: one entry an argument."""

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
    """Bytes."""
    compute_capability: tuple[int, int] | None


@dataclass(frozen=True)
class Trace:
    """One file: one process of a program, as torch.profiler recorded it."""

    label: str
    """The file's name."""
    rank: int | None
    world_size: int | None
    backend: str | None
    devices: list[DeviceProperties]
    names: list[str]
    threads: list[tuple[str, str]]
    """(process, thread) as the trace calls them."""
    signatures: list[Signature]
    host: HostSlices
    device: DeviceWork
    settings: dict[str, Any]
    """What the profiler was asked to record, as far as the file says: record_shapes, with_stack, profile_memory."""
    events: int
    """In the file, of whatever kind."""
    dropped: int
    """Events that make no sense, and were left out."""
    repeated: int = 0
    """Events that are in the file a second time, alike in all that is read: they count once."""
    unread: dict[str, int] = field(default_factory=dict)
    """Events of categories that nothing is known of, as those of devices other than CUDA's, ROCm's and XPU's."""
    truncated: bool = False
    """The file ends early, behind its events: of what stands there, as settings, some or all is missing."""

    def described(self, device: int) -> DeviceProperties | None:
        """What the trace says of the device with this number; None where it says nothing, or not for certain.

        Where no description has the number and all are of one kind of device, it is taken for one of that kind: ROCm
        numbers the devices of the machine in its events, and in the descriptions those that the program can see.
        """
        own = next((one for one in self.devices if one.id == device), None)
        alike = len({one.name for one in self.devices}) == 1
        return own or (self.devices[0] if alike else None)

    @property
    def host_only(self) -> bool:
        return not len(self.device)
