"""Records the allocations of a training step on any device, with a dispatch mode.

A dispatch mode is called for each operator below autograd and autocast, and so sees every tensor that an operator
returns. It does not see what a kernel allocates and frees before it returns, nor the workspaces of libraries. With fake
tensors, nothing is computed or allocated, and the history is the same. (torch.distributed._tools.MemTracker works in
the same way, but records only sums, whereas a model of the allocator needs the order of allocations.)
"""

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

from gpubench.errors import ModelError
from gpubench.memory.history import Allocation, Category, Counts, History, Mark, Phase, Reading
from gpubench.ranks import Ranks
from gpubench.settings.schema import CompletedTrainSettings
from gpubench.worker.channel import Activity
from gpubench.worker.models import Workload, build
from gpubench.worker.precision import Arithmetic, arithmetic
from gpubench.worker.timing import HostClock, StepTimer
from gpubench.worker.train_bench import build_loop, open_feed
from gpubench.worker.training import Batches, Epochs, Loop, Trainer


class Tracker(TorchDispatchMode):
    """A context manager that records the allocations on one device while it is active."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device.type
        self._held: dict[int, tuple[Allocation | None, weakref.ref[Any]]] = {}
        """The last allocation of each live storage and a weak reference to it, by the address of its C++ object.

        The allocation is None for a storage that was resized to 0 bytes or is disregarded.
        """
        self._allocations: list[Allocation] = []
        self._marks = [Mark(0, "start")]
        self._position = 0
        self._readings: list[Reading] = []
        self._closed = False
        self._before = _counters() if self._device == "cuda" else None
        self._counts: Counts | None = None
        self._read()
        self._has_loss = True
        self._modules: list[str] = []
        self._names: dict[int, str] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper such as DTensor, which dispatches again with the tensors inside
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._see(tensor, func)
        return result

    @property
    def phase(self) -> Phase:
        return self._marks[-1].phase

    def note(self, size: int, category: Category, operator: str, *, kept: bool = True) -> None:
        """Records memory that belongs to no tensor, allocated now and freed at once unless it is `kept`."""
        allocation = self._begin(size, operator, "")
        allocation.category = category
        if not kept:
            self._end(allocation)

    def disregard(self, tensor: Tensor) -> None:
        """Does not record the memory of a tensor, because it is not on the device that the tensor stands for."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._held[key] = None, weakref.ref(storage, lambda gone: self._release(key, gone))

    def enter(self, phase: Phase, step: int | None = None) -> None:
        """Starts `phase` of `step`, by default of the current step."""
        self._read()
        self._marks.append(Mark(self._position, phase, self._marks[-1].step if step is None else step))

    def claim(self, tensors: Iterable[Tensor], category: Category, module: str | None = None) -> None:
        """Sets the category and module of `tensors`, also of those that existed before the tracker."""
        for outer in tensors:
            for tensor in _tensors(outer):
                allocation = self._see(tensor, None)
                if allocation:
                    allocation.category = category
                    allocation.module = allocation.module if module is None else module

    def claim_model(self, module: nn.Module) -> None:
        """Sets the category and module of parameters and buffers."""
        for path, part in module.named_modules():
            self.claim(part.parameters(recurse=False), "parameters", path)
            self.claim(part.buffers(recurse=False), "buffers", path)

    def claim_gradients(self, module: nn.Module) -> None:
        """Sets the category of gradients, and their module to that of their parameter.

        A bucket with the gradients of several modules belongs to the module that contains them.
        """
        for parameter, path in _owners(module).items():
            for tensor in () if parameter.grad is None else _tensors(parameter.grad):
                allocation = self._see(tensor, None)
                if allocation:
                    is_shared = allocation.category == "gradients"
                    allocation.module = _common_path(allocation.module, path) if is_shared else path
                    allocation.category = "gradients"

    def claim_state(self, optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
        """Sets the category of the optimizer's state, and its module to that of its parameter."""
        owners = _owners(module)
        for parameter, state in optimizer.state.items():
            found = [value for value in state.values() if isinstance(value, Tensor)]
            self.claim(found, "optimizer_state", owners.get(parameter, ""))

    @contextmanager
    def following(self, module: nn.Module, *, has_loss: bool = True) -> Iterator[None]:
        """Records the submodule of `module` that allocates; what follows the module's forward pass is its loss."""
        self._has_loss = has_loss
        self._names = {id(part): path for path, part in module.named_modules()}
        before = nn.modules.module.register_module_forward_pre_hook(self._enter_module)
        after = nn.modules.module.register_module_forward_hook(self._leave_module, always_call=True)
        try:
            with watch_resizes(self._resized):
                yield
        finally:
            before.remove()
            after.remove()
            self._modules.clear()

    def close(self) -> None:
        """Ends the history, before the objects that hold the memory are destroyed."""
        if not self._closed:
            self.enter("unknown")
            if self._before:
                self._counts = _since(self._before)
        self._closed = True

    def history(self) -> History:
        """Returns the history up to `close`, or up to now."""
        self.close()
        return History(self._allocations, self._marks, self._position, self._readings, self._counts)

    def _read(self) -> None:
        """Reads the allocator's counters since the last reading. They are on the host, so this does not synchronise."""
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
        """Returns the allocation of `tensor`, which begins now if it is new; None if it has no memory."""
        if tensor.device.type != self._device or self._closed:
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._held.get(key)
        if known and known[1]() is storage:
            self._resized(storage)  # an operator may have enlarged it in place
            return self._held[key][0]
        size = storage.nbytes()
        if not size:
            return None
        operator = "" if func is None else f"aten::{func.overloadpacket.__name__}"
        shape = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        allocation = self._begin(size, operator, shape)
        self._held[key] = allocation, weakref.ref(storage, lambda gone: self._release(key, gone))
        return allocation

    def _begin(self, size: int, operator: str, shape: str) -> Allocation:
        mark = self._marks[-1]
        module = self._modules[-1] if self._modules else ""
        allocation = Allocation(size, self._position, None, "unknown", mark.phase, mark.step, module, operator, shape)
        self._position += 1
        self._allocations.append(allocation)
        return allocation

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
        """Updates a resized storage. FSDP2 resizes the storages of gathered parameters to 0 bytes between uses."""
        known = self._held.get(storage._cdata)
        if self._closed or not known or known[1]() is not storage:
            return
        before, size = known[0], storage.nbytes()
        if before is None or (before.end is None and before.size == size):
            return
        self._end(before)
        if size:
            after = self._begin(size, before.operator, before.shape)
            after.category, after.module = before.category, before.module
            self._held[storage._cdata] = after, known[1]

    def _claim_gathered(self, module: nn.Module, path: str) -> None:
        """Sets the category of parameters that are gathered from all ranks while the module computes with them."""
        for parameter in module.parameters(recurse=False):
            for tensor in _tensors(parameter):
                allocation = self._see(tensor, None)
                if allocation and allocation.category == "unknown":
                    allocation.category, allocation.module = "parameters", path

    def _enter_module(self, module: nn.Module, inputs: object) -> None:
        path = self._names.get(id(module))
        if path is not None and self.phase == "loss":
            self.enter("forward")  # the module is called again
        self._modules.append(path if path is not None else self._modules[-1] if self._modules else "")

    def _leave_module(self, module: nn.Module, inputs: object, output: object) -> None:
        if path := self._names.get(id(module)):
            self._claim_gathered(module, path)
        if self._modules:
            self._modules.pop()
        if self._has_loss and not self._modules and self._marks[-1].phase == "forward":
            self.enter("loss")


@contextmanager
def hide_shape_propagation() -> Iterator[None]:
    """Hides from dispatch modes how DTensor computes the shape of an operator's result.

    DTensor does this once for each operator and shape, with fake tensors of the full size, which no rank allocates.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    plain = ShardingPropagator._propagate_tensor_meta_non_cached

    def unseen(propagator: ShardingPropagator, schema: Any) -> Any:
        with _disable_current_modes():
            return plain(propagator, schema)

    ShardingPropagator._propagate_tensor_meta_non_cached = unseen  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = plain  # type: ignore[method-assign]


@contextmanager
def watch_resizes(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Calls `resized` after each `resize_` of a storage, which dispatch modes do not see.

    FSDP2 allocates in this way. torch.distributed._tools.MemTracker watches it by the same method.
    """
    plain = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        plain(storage, size)
        resized(storage)
        return storage

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]


_COUNTERS = {
    "allocations": "allocation.all.allocated",
    "frees": "allocation.all.freed",
    "retries": "num_alloc_retries",
    "ooms": "num_ooms",
}
"""The keys of torch.cuda.memory_stats, by the fields of `Counts`."""


def _counters() -> dict[str, int]:
    """Returns the allocator's counters since the start of the process."""
    stats = torch.cuda.memory_stats()
    return {name: stats.get(key, 0) for name, key in _COUNTERS.items()}


def _since(before: Mapping[str, int]) -> Counts:
    """Returns the counts since `before`, and the largest block that is free now."""
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
    except TypeError:  # this PyTorch has no option to leave out the traces
        return torch.cuda.memory_snapshot()


def _owners(module: nn.Module) -> dict[Tensor, str]:
    """Returns the path of each parameter's module; of a shared parameter, that of the last module."""
    return {parameter: path for path, part in module.named_modules() for parameter in part.parameters(recurse=False)}


def _common_path(first: str, second: str) -> str:
    """Returns the common beginning of two module paths."""
    pairs = zip(first.split("."), second.split("."), strict=False)
    return ".".join(name for name, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in `value` that have memory; instead of a wrapper such as DTensor, the tensors inside."""
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
            raise ModelError(f"{kind} cannot be recorded: PyTorch does not show their memory", "use dense tensors")
        else:
            yield leaf


PHASES: dict[str, Phase] = {
    "data_wait": "data",
    "host_to_device": "data",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
}
"""The memory phase of each timed phase. Communication is part of the backward pass."""


class PhaseMarks(StepTimer[int]):
    """A replacement for `StepTimer` that measures no time, and gives the tracker the phases of the steps."""

    def __init__(self, tracker: Tracker, activity: Activity, repeat: int, rank: int) -> None:
        super().__init__(HostClock(), activity, repeat, rank)
        self._tracker = tracker
        self._doing = activity

    def begin(self, step: int) -> None:
        self._doing.step, self._doing.doing = step, "data_wait"
        self._tracker.enter("data", step)

    def enter(self, phase: str) -> None:
        if phase in PHASES:
            self._doing.doing = phase
            self._tracker.enter(PHASES[phase])

    def issued(self, epoch: int, samples: int, readings: list[Tensor]) -> None:
        """Drops the readings, because they would use memory that training does not use."""


def load(
    settings: CompletedTrainSettings,
    ranks: Ranks,
    device: torch.device,
    activity: Activity,
    tracker: Tracker,
    arithmetic: Arithmetic,
    build: Callable[..., Workload] = build,
) -> Loop:
    """Returns the model, ready for its first step. The tracker records it from its first weight on.

    `build` takes the arguments of `models.build`.
    """
    activity.doing = "building the model"
    tracker.enter("model")
    workload = build(settings.model, settings.data, settings.seed, inference=settings.inference)
    marks = PhaseMarks(tracker, activity, 0, ranks.rank)
    loop = build_loop(settings, ranks, device, workload, arithmetic, marks)
    tracker.claim_model(loop.workload.module)
    activity.doing = "opening the dataset"
    tracker.enter("data")
    return loop


def follow(loop: Loop, batches: Batches, tracker: Tracker, steps: int) -> None:
    """Runs `steps` steps, and records their phases and the categories of their tensors in `tracker`."""
    training, module = loop.settings.training, loop.workload.module
    claiming = _claiming(loop, tracker) if isinstance(loop, Trainer) else nullcontext()
    with tracker.following(module, has_loss=isinstance(loop, Trainer)), claiming:
        for step in range(steps):
            loop.timer.begin(step)
            loop.step(batches, training.grad_accumulation * training.batch_size)
    tracker.close()


@contextmanager
def _claiming(trainer: Trainer, tracker: Tracker) -> Iterator[None]:
    """Sets the categories of gradients and optimizer state in each step, and records when zeroing begins."""
    module, optimizer = trainer.workload.module, trainer.optimizer

    def before(*_: object) -> None:
        tracker.claim_gradients(module)

    def after(*_: object) -> None:
        tracker.claim_state(optimizer, module)
        tracker.enter("zero_grad")

    removals: list[Callable[[], None]] = [
        optimizer.register_step_pre_hook(before).remove,
        optimizer.register_step_post_hook(after).remove,
    ]
    try:
        yield
    finally:
        for remove in removals:
            remove()


EVENTS = 1_000_000
"""The largest number of entries in the allocator's own recording. A step of a large model has some ten thousand."""

log = logging.getLogger("gpubench.memory.tracker")


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device as the driver reports it, in bytes."""

    capacity: int
    other: int
    """The memory in use outside this process's allocator: by the context, libraries and other processes."""


def measure(
    settings: CompletedTrainSettings,
    ranks: Ranks,
    device: torch.device,
    activity: Activity,
    tracker: Tracker,
    steps: int,
) -> None:
    """Builds the model and runs `steps` steps under `tracker`, which is closed at the end or at an error."""
    with hide_shape_propagation() if ranks.world_size > 1 else nullcontext(), tracker:
        try:
            computing = arithmetic(settings.precision, device, inference=settings.inference)
            loop = load(settings, ranks, device, activity, tracker, computing)
            with open_feed(settings, ranks, device, loop.workload) as feed:
                follow(loop, Epochs(feed, settings.training.batch_size), tracker, steps)
        except BaseException:
            tracker.close()  # before the objects that hold the memory are destroyed
            raise


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Returns the device's memory; None on a CPU, whose memory is shared with other programs."""
    if device.type != "cuda":
        return None
    free, capacity = torch.cuda.mem_get_info(device)
    return DeviceMemory(capacity, max(0, capacity - free - torch.cuda.memory_reserved(device)))


@contextmanager
def recorded(device: torch.device, path: Path) -> Iterator[None]:
    """Writes a snapshot of the CUDA allocator with its history to `path`, also after an error; nothing on a CPU."""
    if device.type != "cuda":
        yield
        return
    # Python stacks only: with C++ stacks a large snapshot takes minutes to write.
    torch.cuda.memory._record_memory_history(max_entries=EVENTS, stacks="python")
    try:
        yield
    finally:
        with suppress(OSError):
            torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
