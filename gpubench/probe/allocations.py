"""Records the allocations on one device: what a dispatch mode shows of them, in the order in which they happen.

A dispatch mode is called for each operator below autograd and autocast, and so sees every tensor that an operator
returns. It does not see what a kernel allocates and frees before it returns, nor the workspaces of libraries; where the
device has a counting allocator, its counters are read at each mark.
"""

from __future__ import annotations

import weakref
from itertools import accumulate, takewhile
from typing import Any, Callable, Iterable, Iterator, Mapping, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .device import counters
from .modules import named_modules, own_buffers, own_parameters

PASS = ("forward", "loss", "backward")
READING = ("at", "allocated", "reserved", "peak_allocated", "peak_reserved")


class Unreadable(TypeError):
    """Raised for a tensor whose memory PyTorch does not show. The argument says what kind of tensor it is."""


class RecordedAllocation:
    """One allocation, with the fields of `gpubench.memory.allocation_log.Allocation`."""

    __slots__ = ("begin", "category", "end", "module", "operator", "shape", "size", "where")

    def __init__(self, size: int, begin: int, module: str, operator: str, shape: str, where: str) -> None:
        self.size = size
        self.begin = begin
        self.end: int | None = None
        self.category = "unknown"
        self.module = module
        self.operator = operator
        self.shape = shape
        self.where = where


class PhaseMark(NamedTuple):
    """The start of `phase` at a position, with the fields of `gpubench.memory.allocation_log.PhaseStart`."""

    at: int
    phase: str
    step: int | None = None


class Ledger:
    """The allocations on one device, the phases in which they happen, and what the allocator's counters say."""

    def __init__(self, device: torch.device, modules: list[str] | None = None) -> None:
        """Begins the record of `device`, which may have no index and then stands for the current device.

        `modules` are the paths of the modules that are running, the innermost one last; the caller keeps them up to
        date.
        """
        self._device = device
        self._held: dict[int, tuple[RecordedAllocation | None, weakref.ref[Any]]] = {}
        """The last allocation of each live storage and a weak reference to it, by the address of its C++ object.

        The allocation is None for a storage that was resized to 0 bytes or is disregarded.
        """
        self._allocations: list[RecordedAllocation] = []
        self._marks = [PhaseMark(0, "start")]
        self._position = 0
        self._readings: list[tuple[int, int, int, int, int]] = []
        """The fields of `gpubench.memory.allocation_log.AllocatorReading`, one for each mark."""
        self._closed = False
        self._modules: list[str] = [] if modules is None else modules
        self._read()

    @property
    def phase(self) -> Any:
        return self._marks[-1].phase

    def note(self, size: int, category: str, operator: str, *, kept: bool = True) -> None:
        """Records memory that belongs to no tensor, allocated now and freed at once unless it is `kept`."""
        allocation = self._begin(size, operator, "")
        allocation.category = category
        if not kept:
            self._end(allocation)

    def disregard(self, tensor: Tensor) -> None:
        """Excludes the memory of a tensor, because it is not on the device that the tensor stands for."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._held[key] = None, weakref.ref(storage, lambda gone: self._release(key, gone))

    def enter(self, phase: str, step: int | None = None) -> None:
        """Starts `phase` of `step`, by default of the current step."""
        self._read()
        self._marks.append(PhaseMark(self._position, phase, self._marks[-1].step if step is None else step))

    def claim(self, tensors_: Iterable[Tensor], category: str, module: str | None = None) -> None:
        """Sets the category and module of tensors, also of those that existed before the recording."""
        for outer in tensors_:
            for tensor in tensors(outer):
                allocation = self.see(tensor, None)
                if allocation:
                    allocation.category = category
                    allocation.module = allocation.module if module is None else module

    def claim_model(self, module: nn.Module) -> None:
        """Sets the category and module of parameters and buffers."""
        for path, part in named_modules(module):
            self.claim(own_parameters(part), "parameters", path)
            self.claim(own_buffers(part), "buffers", path)

    def claim_gradients_of(self, owners: Mapping[Tensor, str]) -> None:
        """Sets the category of the gradients of parameters, and their module to that of their parameter.

        A bucket with the gradients of several modules belongs to the module that contains them.
        """
        for parameter, path in owners.items():
            for tensor in () if parameter.grad is None else tensors(parameter.grad):
                allocation = self.see(tensor, None)
                if allocation:
                    is_shared = allocation.category == "gradients"
                    allocation.module = common_path(allocation.module, path) if is_shared else path
                    allocation.category = "gradients"

    def claim_state_of(self, optimizer: torch.optim.Optimizer, owners: Mapping[Tensor, str]) -> None:
        """Sets the category of the optimizer's state, and its module to that of its parameter."""
        for parameter, state in optimizer.state.items():
            module = owners.get(parameter, "") if isinstance(parameter, Tensor) else ""
            self.claim(_leaves(state), "optimizer_state", module)

    def claim_gathered(self, module: nn.Module, path: str) -> None:
        """Sets the category of parameters that are gathered from all ranks while the module computes with them."""
        for parameter in module.parameters(recurse=False):
            for tensor in tensors(parameter):
                allocation = self.see(tensor, None)
                if allocation and allocation.category == "unknown":
                    allocation.category, allocation.module = "parameters", path

    def claim_inputs(self, value: Any) -> None:
        """Sets the category of the tensors in `value` that were allocated outside of a forward pass."""
        for tensor in tensors(value):
            allocation = self.see(tensor, None)
            if allocation and allocation.category == "unknown" and self._phase_of(allocation) not in PASS:
                allocation.category = "inputs"

    def amend(self, names: Mapping[str, str], step: int | None) -> None:
        """Renames the last phases, as long as `names` has them, and makes them part of `step`."""
        for number in range(len(self._marks) - 1, -1, -1):
            mark = self._marks[number]
            if mark.phase not in names:
                break
            self._marks[number] = PhaseMark(mark.at, names[mark.phase], step)

    def claim_since(self, count: int, category: str) -> None:
        """Sets the category of all allocations after the first `count`."""
        for allocation in self._allocations[count:]:
            allocation.category = category

    @property
    def count(self) -> int:
        """The number of allocations so far."""
        return len(self._allocations)

    @property
    def peak(self) -> int:
        """The largest number of bytes that were held at a time."""
        changes = [(one.begin, one.size) for one in self._allocations]
        changes += [(one.end, -one.size) for one in self._allocations if one.end is not None]
        return max(accumulate(size for _, size in sorted(changes)), default=0)

    def document(self, rounds: int, names: Mapping[str, str]) -> dict[str, Any]:
        """Returns the fields of `gpubench.memory.allocation_log.AllocationLog`.

        `rounds` is the number of marked steps that make a step, and `names` has the phases that are renamed.
        """
        marks = [
            (at, names.get(phase, phase), None if step is None else step // rounds) for at, phase, step in self._marks
        ]
        return {
            "allocations": list(self._described(marks)),
            "marks": [dict(zip(PhaseMark._fields, mark)) for mark in marks],
            "length": self._position,
            "readings": [dict(zip(READING, reading)) for reading in self._readings],
        }

    def _described(self, marks: list[tuple[int, str, int | None]]) -> Iterator[dict[str, Any]]:
        number = 0
        for one in self._allocations:
            while number + 1 < len(marks) and marks[number + 1][0] <= one.begin:
                number += 1
            _, phase, step = marks[number]
            fields = {name: getattr(one, name) for name in RecordedAllocation.__slots__}
            yield {**fields, "phase": phase, "step": step}

    def _phase_of(self, allocation: RecordedAllocation) -> str:
        """Returns the phase in which a recent allocation was made."""
        return next((mark.phase for mark in reversed(self._marks) if mark.at <= allocation.begin), "start")

    def close(self) -> None:
        """Ends the recording, before the objects that hold the memory are destroyed."""
        if not self._closed:
            self.enter("unknown")
        self._closed = True

    def _read(self) -> None:
        """Reads the allocator's counters since the last reading. The CPU holds them, so this does not synchronise."""
        if found := counters(self._device):
            self._readings.append((self._position, *found))

    def see(self, tensor: Tensor, func: Any, where: Callable[[], str] = str) -> RecordedAllocation | None:
        """Returns the allocation of `tensor`, which begins now if it is new; None if it has no memory here.

        `where` returns the line of the program that allocates it.
        """
        device = self._device
        other = tensor.device.type != device.type or (device.index is not None and tensor.device != device)
        if other or self._closed:
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._held.get(key)
        if known and known[1]() is storage:
            self.resized(storage)  # an operator may have enlarged it in place
            return self._held[key][0]
        size = storage.nbytes()
        if not size:
            return None
        operator = "" if func is None else f"aten::{func.overloadpacket.__name__}"
        shape = f"{str(tensor.dtype).replace('torch.', '', 1)}{list(tensor.shape)}"
        allocation = self._begin(size, operator, shape, where())
        self._held[key] = allocation, weakref.ref(storage, lambda gone: self._release(key, gone))
        return allocation

    def _begin(self, size: int, operator: str, shape: str, where: str = "") -> RecordedAllocation:
        module = self._modules[-1] if self._modules else ""
        allocation = RecordedAllocation(size, self._position, module, operator, shape, where)
        self._position += 1
        self._allocations.append(allocation)
        return allocation

    def _release(self, key: int, gone: weakref.ref[Any]) -> None:
        known = self._held.get(key)
        if known and known[1] is gone and not self._closed:
            del self._held[key]
            if known[0]:
                self._end(known[0])

    def _end(self, allocation: RecordedAllocation) -> None:
        if allocation.end is None:
            allocation.end = self._position
            self._position += 1

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Updates a resized storage. FSDP2 resizes the storages of gathered parameters to 0 bytes between uses."""
        known = self._held.get(storage._cdata)
        if self._closed or not known or known[1]() is not storage:
            return
        before, size = known[0], storage.nbytes()
        if before is None or (before.end is None and before.size == size):
            return
        self._end(before)
        if size:
            after = self._begin(size, before.operator, before.shape, before.where)
            after.category, after.module = before.category, before.module
            self._held[storage._cdata] = after, known[1]


def owners_in(module: nn.Module) -> dict[Tensor, str]:
    """Returns the path of each parameter's module; of a shared parameter, that of the last module."""
    return {parameter: path for path, part in named_modules(module) for parameter in own_parameters(part)}


def common_path(first: str, second: str) -> str:
    """Returns the common beginning of two module paths."""
    pairs = zip(first.split("."), second.split("."))
    return ".".join(name for name, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in `value` that have memory; instead of a wrapper such as DTensor, the tensors inside.

    Raises Unreadable for a tensor whose memory PyTorch does not show.
    """
    for leaf in _leaves(value):
        if is_traceable_wrapper_subclass(leaf):
            for name in leaf.__tensor_flatten__()[0]:
                yield from tensors(getattr(leaf, name))
        elif leaf.layout is torch.sparse_coo:
            yield from (leaf._indices(), leaf._values())
        elif leaf.layout is not torch.strided or leaf.is_nested:
            raise Unreadable("nested tensors" if leaf.is_nested else f"tensors of layout {leaf.layout}")
        else:
            yield leaf


def _leaves(value: Any) -> Iterator[Any]:
    """Yields the tensors in nested sequences and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _leaves(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _leaves(part)
