"""Follows every tensor of a training step: when its memory is asked for, by what, and when it is given back.

A dispatch mode sees each operator after autograd and autocast, so every tensor that an operator hands out. What a
kernel takes for itself and gives back before it returns stays unseen, as do libraries' workspaces. Tensors may be fake:
then nothing is computed and nothing held, and the same history comes out (torch.distributed._tools.MemTracker counts in
the same way; it keeps sums where an allocator needs the order).
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

from gpubench.errors import ModelError
from gpubench.memory.history import Allocation, Category, Counts, History, Mark, Phase, Reading
from gpubench.tracker.sharding import watching


class Tracker(TorchDispatchMode):
    """The history of one device in one process, from its first use as a context manager to its last."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device.type
        self._held: dict[int, tuple[Allocation | None, weakref.ref[Any]]] = {}
        """The last of each storage that lives, by its address as a C++ object; the reference tells when it no longer
        does. A storage that was resized to nothing has none that is held, and one that is disregarded has none."""
        self._allocations: list[Allocation] = []
        self._marks = [Mark(0, "start")]
        self._position = 0
        self._readings: list[Reading] = []
        self._closed = False
        self._before = _counters() if self._device == "cuda" else None
        self._counts: Counts | None = None
        self._read()
        self._modules: list[str] = []
        self._names: dict[int, str] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper, as DTensor: it comes again with what it wraps
        made = func(*args, **(kwargs or {}))
        for tensor in _tensors(made):
            self._see(tensor, func)
        return made

    @property
    def phase(self) -> Phase:
        return self._marks[-1].phase

    def note(self, size: int, category: Category, operator: str) -> None:
        """Memory that no tensor shows, taken now and kept."""
        self._begin(size, operator, "").category = category

    def disregard(self, tensor: Tensor) -> None:
        """Its memory is none of the device's."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._held[key] = None, weakref.ref(storage, lambda gone: self._release(key, gone))

    def enter(self, phase: Phase, step: int | None = None) -> None:
        """What comes from here on belongs to `phase`; of the step in hand where `step` is None."""
        self._read()
        self._marks.append(Mark(self._position, phase, self._marks[-1].step if step is None else step))

    def claim(self, tensors: Iterable[Tensor], category: Category, module: str | None = None) -> None:
        """Says what `tensors` are, and whose. Memory that was there before the tracker is taken in."""
        for whole in tensors:
            for tensor in _tensors(whole):
                held = self._see(tensor, None)
                if held:
                    held.category = category
                    held.module = held.module if module is None else module

    def claim_model(self, module: nn.Module) -> None:
        """Parameters and buffers, and from here on every gradient as it is complete."""
        for path, part in module.named_modules():
            self.claim(part.parameters(recurse=False), "parameters", path)
            self.claim(part.buffers(recurse=False), "buffers", path)

    def claim_gradients(self, module: nn.Module) -> None:
        """Each by the module whose parameter it is for; a bucket of many by the module around them all."""
        for parameter, path in _owners(module).items():
            for tensor in () if parameter.grad is None else _tensors(parameter.grad):
                held = self._see(tensor, None)
                if held:
                    held.module = _around(held.module, path) if held.category == "gradients" else path
                    held.category = "gradients"

    def claim_state(self, optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
        """What the optimizer keeps, by the module whose parameters it is for."""
        owners = _owners(module)
        for parameter, state in optimizer.state.items():
            found = [value for value in state.values() if isinstance(value, Tensor)]
            self.claim(found, "optimizer_state", owners.get(parameter, ""))

    @contextmanager
    def following(self, module: nn.Module) -> Iterator[None]:
        """Allocations know which part of `module` asked for them, and what follows its forward pass is the loss."""
        self._names = {id(part): path for path, part in module.named_modules()}
        before = nn.modules.module.register_module_forward_pre_hook(self._enter_module)
        after = nn.modules.module.register_module_forward_hook(self._leave_module, always_call=True)
        try:
            with watching(self._resized):
                yield
        finally:
            before.remove()
            after.remove()
            self._modules.clear()

    def close(self) -> None:
        """Ends the history: what is given back from here on, as everything is taken down, is no part of it."""
        if not self._closed:
            self.enter("unknown")
            if self._before:
                self._counts = _since(self._before)
        self._closed = True

    def history(self) -> History:
        """What was seen until the tracker was closed, or until now."""
        self.close()
        return History(self._allocations, self._marks, self._position, self._readings, self._counts)

    def _read(self) -> None:
        """What the allocator says of the time up to now: its counters are the host's, nothing waits for them."""
        if self._device != "cuda":
            return
        self._readings.append(
            Reading(
                at=self._position,
                allocated=torch.cuda.memory_allocated(),
                reserved=torch.cuda.memory_reserved(),
                peak_allocated=torch.cuda.max_memory_allocated(),
                peak_reserved=torch.cuda.max_memory_reserved(),
            )
        )
        torch.cuda.reset_peak_memory_stats()

    def _see(self, tensor: Tensor, func: Any) -> Allocation | None:
        """The allocation behind `tensor`, which begins now if it is not known; None where it takes no memory."""
        if tensor.device.type != self._device or self._closed:
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._held.get(key)
        if known and known[1]() is storage:
            self._resized(storage)  # an operator may have made it larger in place
            return self._held[key][0]
        size = storage.nbytes()
        if not size:
            return None
        operator = "" if func is None else f"aten::{func.overloadpacket.__name__}"
        made = self._begin(size, operator, f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}")
        self._held[key] = made, weakref.ref(storage, lambda gone: self._release(key, gone))
        return made

    def _begin(self, size: int, operator: str, shape: str) -> Allocation:
        mark = self._marks[-1]
        module = self._modules[-1] if self._modules else ""
        made = Allocation(size, self._position, None, "unknown", mark.phase, mark.step, module, operator, shape)
        self._position += 1
        self._allocations.append(made)
        return made

    def _release(self, key: int, gone: "weakref.ref[Any]") -> None:
        known = self._held.get(key)
        if known and known[1] is gone and not self._closed:
            del self._held[key]
            if known[0]:
                self._end(known[0])

    def _end(self, allocation: Allocation) -> None:
        if allocation.end is None:
            allocation.end = self._position
            self._position += 1

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """FSDP2 keeps the storages of gathered parameters, and takes away their memory while they are not needed."""
        known = self._held.get(storage._cdata)
        if self._closed or not known or known[1]() is not storage:
            return
        before, size = known[0], storage.nbytes()
        if before is None or (before.end is None and before.size == size):
            return
        self._end(before)
        if size:
            made = self._begin(size, before.operator, before.shape)
            made.category, made.module = before.category, before.module
            self._held[storage._cdata] = made, known[1]

    def _claim_gathered(self, module: nn.Module, path: str) -> None:
        """Parameters that were put together from the shards of all ranks, as long as the module computes with them."""
        for parameter in module.parameters(recurse=False):
            for tensor in _tensors(parameter):
                held = self._see(tensor, None)
                if held and held.category == "unknown":
                    held.category, held.module = "parameters", path

    def _enter_module(self, module: nn.Module, inputs: object) -> None:
        path = self._names.get(id(module))
        if path is not None and self.phase == "loss":
            self.enter("forward")  # the model is called a second time
        self._modules.append(path if path is not None else self._modules[-1] if self._modules else "")

    def _leave_module(self, module: nn.Module, inputs: object, output: object) -> None:
        if path := self._names.get(id(module)):
            self._claim_gathered(module, path)
        if self._modules:
            self._modules.pop()
        if not self._modules and self._marks[-1].phase == "forward":
            self.enter("loss")


_COUNTERS = {
    "allocations": "allocation.all.allocated",
    "frees": "allocation.all.freed",
    "retries": "num_alloc_retries",
    "ooms": "num_ooms",
}
"""Of `Counts`, as torch.cuda.memory_stats names them."""


def _counters() -> dict[str, int]:
    """Of the process so far."""
    stats = torch.cuda.memory_stats()
    return {name: stats.get(key, 0) for name, key in _COUNTERS.items()}


def _since(before: Mapping[str, int]) -> Counts:
    """What was counted since `before`, and the largest block that is free now."""
    now, device = _counters(), torch.cuda.current_device()
    free = [
        block["size"]
        for segment in _segments()
        for block in segment["blocks"]
        if segment["device"] == device and block["state"] == "inactive"
    ]
    return Counts(**{name: now[name] - before[name] for name in now}, largest_free=max(free, default=0))


def _segments() -> Any:
    try:
        return torch.cuda.memory_snapshot(include_traces=False)
    except TypeError:  # of a PyTorch that always adds the traces
        return torch.cuda.memory_snapshot()


def _owners(module: nn.Module) -> dict[Tensor, str]:
    """Of each parameter the path of the module that has it; the last of several."""
    return {one: path for path, part in module.named_modules() for one in part.parameters(recurse=False)}


def _around(one: str, other: str) -> str:
    """The path that two paths begin with."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    return ".".join(name for name, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Those with memory of their own: of a wrapper, what it wraps."""
    leaves = (value,) if isinstance(value, Tensor) else tree_iter(value)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            continue
        if is_traceable_wrapper_subclass(leaf):
            for name in leaf.__tensor_flatten__()[0]:
                yield from _tensors(getattr(leaf, name))
        elif leaf.layout is torch.sparse_coo:
            yield from (leaf._indices(), leaf._values())
        elif leaf.layout is not torch.strided or leaf.is_nested:
            kind = "nested tensors" if leaf.is_nested else f"tensors of layout {leaf.layout}"
            raise ModelError(f"{kind} cannot be followed: where their memory lies is not told", "use dense tensors")
        else:
            yield leaf
