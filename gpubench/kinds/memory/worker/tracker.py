"""Records the allocations of a training step of a model of gpubench on any device, with a dispatch mode.

With fake tensors, nothing is computed or allocated, and the log is the same. (torch.distributed._tools.MemTracker works
in the same way, but records only sums, whereas a model of the allocator needs the order of allocations.)
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gpubench import releases
from gpubench.channel import Activity
from gpubench.errors import ModelError
from gpubench.kinds.training.worker.rank import build_loop, open_feed
from gpubench.memory.allocation_log import Allocation, AllocationLog, AllocatorReading, Counts, Phase, PhaseStart
from gpubench.probe.allocations import Ledger, RecordedAllocation, Unreadable, owners_in, tensors
from gpubench.ranks import Ranks
from gpubench.settings.schema import CompletedTrainSettings
from gpubench.worker.loop import Batches, Epochs, Loop, Trainer
from gpubench.worker.models import Workload, build
from gpubench.worker.precision import Arithmetic, arithmetic
from gpubench.worker.timing import CpuClock, StepTimer


class AllocationTracker(Ledger, TorchDispatchMode):
    """A context manager that records the allocations on one device while it is active."""

    def __init__(self, device: torch.device) -> None:
        TorchDispatchMode.__init__(self)
        self._before = _counters() if device.type == "cuda" else None
        self._counts: Counts | None = None
        self._has_loss = True
        self._names: dict[int, str] = {}
        Ledger.__init__(self, torch.device(device.type))

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper such as DTensor, which dispatches again with the tensors inside
        result = func(*args, **(kwargs or {}))
        try:
            for tensor in tensors(result):
                self.see(tensor, func)
        except Unreadable as kind:
            message = f"{kind} cannot be recorded: PyTorch does not show their memory"
            raise ModelError(message, "use dense tensors") from None
        return result

    def claim_gradients(self, module: nn.Module) -> None:
        """Sets the category and module of the gradients of a module's parameters."""
        self.claim_gradients_of(owners_in(module))

    def claim_state(self, optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
        """Sets the category and module of the state that the optimizer keeps for a module's parameters."""
        self.claim_state_of(optimizer, owners_in(module))

    @contextmanager
    def following(self, module: nn.Module, *, has_loss: bool = True) -> Iterator[None]:
        """Records the submodule of `module` that allocates; what follows the module's forward pass is its loss."""
        self._has_loss = has_loss
        self._names = {id(part): path for path, part in module.named_modules()}
        before = nn.modules.module.register_module_forward_pre_hook(self._enter_module)
        after = nn.modules.module.register_module_forward_hook(self._leave_module, always_call=True)
        try:
            with watch_resizes(self.resized):
                yield
        finally:
            before.remove()
            after.remove()
            self._modules.clear()

    def close(self) -> None:
        """Ends the log, before the objects that hold the memory are destroyed."""
        counted = self._closed or not self._before
        super().close()
        if not counted and self._before:
            self._counts = _since(self._before)

    def allocation_log(self) -> AllocationLog:
        """The allocations up to `close`, or up to now."""
        self.close()
        marks = [PhaseStart(*mark) for mark in self._marks]  # type: ignore[arg-type]
        readings = [AllocatorReading(*reading) for reading in self._readings]
        return AllocationLog(allocations(self._allocations, marks), marks, self._position, readings, self._counts)

    def _enter_module(self, module: nn.Module, inputs: object) -> None:
        path = self._names.get(id(module))
        if path is not None and self.phase == "loss":
            self.enter("forward")  # the module is called again
        self._modules.append(path if path is not None else self._modules[-1] if self._modules else "")

    def _leave_module(self, module: nn.Module, inputs: object, output: object) -> None:
        if path := self._names.get(id(module)):
            self.claim_gathered(module, path)
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
    """The allocator's counters since the start of the process."""
    stats = torch.cuda.memory_stats()
    return {name: stats.get(key, 0) for name, key in _COUNTERS.items()}


def _since(before: Mapping[str, int]) -> Counts:
    """The counts since `before`, and the largest block that is free now."""
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


def allocations(pieces: Sequence[RecordedAllocation], marks: Sequence[PhaseStart]) -> list[Allocation]:
    """Gives each allocation the phase and the step of the last mark before it."""
    starts = [mark.at for mark in marks]
    found = []
    for one in pieces:
        mark = marks[bisect_right(starts, one.begin) - 1]
        category: Any = one.category
        about = (one.module, one.operator, one.shape, one.where)
        found.append(Allocation(one.size, one.begin, one.end, category, mark.phase, mark.step, *about))
    return found


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

    def __init__(self, tracker: AllocationTracker, activity: Activity, repeat: int, rank: int) -> None:
        super().__init__(CpuClock(), activity, repeat, rank)
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
    tracker: AllocationTracker,
    arithmetic: Arithmetic,
    build: Callable[..., Workload] = build,
) -> Loop:
    """Builds the model, ready for its first step. The tracker records it from its first weight on.

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


def follow(loop: Loop, batches: Batches, tracker: AllocationTracker, steps: int) -> None:
    """Runs `steps` steps, and records their phases and the categories of their tensors in `tracker`."""
    training, module = loop.settings.training, loop.workload.module
    claiming = _claiming(loop, tracker) if isinstance(loop, Trainer) else nullcontext()
    with tracker.following(module, has_loss=isinstance(loop, Trainer)), claiming:
        for step in range(steps):
            loop.timer.begin(step)
            loop.step(batches, training.grad_accumulation * training.batch_size)
    tracker.close()


@contextmanager
def _claiming(trainer: Trainer, tracker: AllocationTracker) -> Iterator[None]:
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

log = logging.getLogger("gpubench.memory")


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
    tracker: AllocationTracker,
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
    """The device's memory; None on a CPU, whose memory is shared with other programs."""
    if device.type != "cuda":
        return None
    free, capacity = torch.cuda.mem_get_info(device)
    return DeviceMemory(capacity, max(0, capacity - free - torch.cuda.memory_reserved(device)))


@contextmanager
def recorded(device: torch.device, path: Path) -> Iterator[None]:
    """Writes a snapshot of the CUDA allocator to `path`, also after an error; nothing on a CPU."""
    if device.type != "cuda":
        yield
        return
    context = "all" if releases.installed().records_frees_safely else "alloc"
    # Python stacks only: with C++ stacks a large snapshot takes minutes to write.
    torch.cuda.memory._record_memory_history(max_entries=EVENTS, context=context, stacks="python")
    try:
        yield
    finally:
        with suppress(OSError):
            torch.cuda.memory._dump_snapshot(str(path))
        torch.cuda.memory._record_memory_history(enabled=None)
