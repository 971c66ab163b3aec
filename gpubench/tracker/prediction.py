"""The training step on tensors without memory: what it would take on a GPU that is not here.

Everything runs on fake CPU tensors, since a CPU build of PyTorch cannot trace a backward pass on fake CUDA tensors.
What CUDA does otherwise is brought in by name: see `as_cuda`, and `gpubench.memory.workspaces` for what lies below the
operators.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from gpubench.channel import Activity
from gpubench.configuration import apply_overrides
from gpubench.data.batches import map_tensors
from gpubench.errors import ModelError
from gpubench.memory.history import Allocation, History
from gpubench.memory.predicting import Target
from gpubench.memory.workspaces import blas_workspace
from gpubench.models import Workload
from gpubench.precision import Arithmetic, Autocast, arithmetic
from gpubench.ranks import Ranks
from gpubench.settings import Precision, TrainSettings
from gpubench.tracker.as_cuda import RULES, Applied, as_cuda
from gpubench.tracker.building import build_without_memory, refuse_unknown
from gpubench.tracker.loop import follow, load
from gpubench.tracker.mode import Tracker
from gpubench.tracker.sharding import assumptions, pretended
from gpubench.train_worker import open_feed
from gpubench.trainer import optimizer_impl
from gpubench.training import Epochs

HOST = torch.device("cpu")
OF_FAKES = ("packing",)
"""Rules that mend what comes of tensors without values, whatever the device."""
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "_int_mm", "linear"})
"""Operators that cuBLAS computes, for which it takes a workspace."""


@dataclass(frozen=True)
class Predicted:
    history: History
    applied: Applied
    """Which rules met something to change."""


class _Tracker(Tracker):
    """Adds what libraries take below the operators that are seen."""

    def __init__(self, target: Target) -> None:
        super().__init__(HOST)
        self._workspace = blas_workspace(target.capability) if target.cuda else 0
        self._host = (torch.ops.aten.lift_fresh.default,) if target.cuda else ()
        """Operators by which torch.tensor() makes what stays on the host, such as the step counters of optimizers."""
        self._handles: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in PRODUCTS and self._workspace:
            # Each thread has a cuBLAS handle of its own, and autograd runs the backward pass in another one.
            thread = "backward" if self.phase == "backward" else "main"
            if self.phase in ("forward", "loss", "backward") and thread not in self._handles:
                self._handles.add(thread)
                self.note(self._workspace, "workspaces", f"aten::{name}")
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _see(self, tensor: Tensor, func: Any) -> Allocation | None:
        if func in self._host:
            self.disregard(tensor)
        return super()._see(tensor, func)


class _Scaled(Autocast):
    """amp without a gradient scaler: that multiplies scalars and scales in place, and would read values that fake
    tensors have not got."""

    dtype = torch.float16


def predict(
    settings: TrainSettings,
    target: Target,
    activity: Activity,
    steps: int,
    without: Sequence[str] = (),
) -> Predicted:
    """The history of `steps` steps of complete settings, as on `target`.

    `without` names corrections to leave out. Raises ModelError naming the operator that cannot be traced.
    """
    settings = _as_predicted(settings, target)
    assert settings.precision
    tracker = _Tracker(target)
    world_size = settings.distributed.world_size
    ranks = Ranks(0, 0, world_size, world_size)
    try:
        with ExitStack() as stack:
            if world_size > 1:
                stack.enter_context(pretended(world_size))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(tracker)
            numbers = _arithmetic(settings.precision)
            trainer = load(settings, ranks, HOST, activity, tracker, numbers, build_without_memory)
            refuse_unknown(trainer.workload.module, target.cuda)
            left_out = without if target.cuda else [rule.name for rule in RULES if rule.name not in OF_FAKES]
            with as_cuda(without=left_out, capability=target.capability) as applied:
                follow(trainer, _batches(settings, ranks, trainer.workload), tracker, steps)
            history = tracker.history()
        if world_size > 1 and target.cuda:
            history.notes += assumptions(settings.distributed)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise _unpredictable(str(error.func)) from error
    except RuntimeError as error:
        if ".numpy() is not supported" not in str(error):
            raise
        raise _unpredictable(".numpy()") from error
    return Predicted(history, applied)


def _unpredictable(reading: str) -> ModelError:
    return ModelError(
        f"the step cannot be predicted: {reading} reads values, and tensors without memory have none",
        "measure it where there is a GPU, or leave out what reads values (.item(), .numpy(), boolean masks, unique)",
    )


def samples(settings: TrainSettings) -> int | None:
    """How many of the data there are for each rank; None where they are made up, or nobody knows."""
    if settings.data.source.startswith("synthetic"):
        return None
    one = _one_sample(settings)
    with FakeTensorMode(allow_non_fake_inputs=True):
        workload = build_without_memory(settings.model, settings.data, settings.seed)
    world_size = settings.distributed.world_size
    with open_feed(one, Ranks(0, 0, world_size, world_size), HOST, workload) as feed:
        return feed.batches_per_epoch


def _one_sample(settings: TrainSettings) -> TrainSettings:
    return apply_overrides(settings, {"training.batch_size": 1, "data.workers": 0, "data.pin_memory": False})


def _as_predicted(settings: TrainSettings, target: Target) -> TrainSettings:
    """What the same settings mean on the target, said so that the CPU at hand does not choose otherwise."""
    changes: dict[str, Any] = {"performance.compile": False, "training.read_loss": False}
    changes["training.optimizer_impl"] = optimizer_impl(settings, target.cuda)
    return apply_overrides(settings, changes)


def _arithmetic(precision: Precision) -> Arithmetic:
    return _Scaled(HOST) if precision is Precision.amp else arithmetic(precision, HOST)


def _batches(settings: TrainSettings, ranks: Ranks, workload: Workload) -> Any:
    """Synthetic batches lie on the device; of others one sample is read, and its shape stands for all."""
    assert settings.training.batch_size
    if settings.data.source == "synthetic":
        return Epochs(open_feed(settings, ranks, HOST, workload), settings.training.batch_size)
    if workload.make_batch is not None and settings.data.source == "synthetic-host":
        make_batch, size = workload.make_batch, settings.training.batch_size
        return Copied(lambda: make_batch(size))
    one = _one_sample(settings)
    with _disable_current_modes(), open_feed(one, ranks, HOST, workload) as feed:
        sample = next(feed.epoch(0))
    return Copied(lambda: map_tensors(lambda tensor: _grown(tensor, settings.training.batch_size or 1), sample))


def _grown(tensor: Tensor, batch_size: int) -> Tensor:
    """A new tensor like `tensor`, of one sample, for a whole batch."""
    shape = (batch_size, *tensor.shape[1:]) if tensor.dim() else ()
    return torch.empty(shape, dtype=tensor.dtype, device=HOST)


class Copied:
    """Batches that come to the device one by one."""

    epoch = 0

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._make()
