"""Predicts the memory of a training step on any GPU, by running the step on tensors without memory.

All tensors are fake CPU tensors, because a CPU build of PyTorch cannot run a backward pass on fake CUDA tensors. The
differences of CUDA are added: those of operators by `cuda_kernels`, memory outside of operators by `allocator`. For
several ranks, this process becomes rank 0 with simulated collectives.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed import distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel, distributed
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from gpubench import releases, units
from gpubench.channel import Activity
from gpubench.errors import GpubenchError, ModelError
from gpubench.findings import Finding, Findings, Saving
from gpubench.kinds.memory.predicted_device import Target, predicted
from gpubench.kinds.memory.settings import CompletedMemorySettings
from gpubench.kinds.memory.worker import attention_kernels
from gpubench.kinds.memory.worker.cuda_kernels import RULES, Applied, as_cuda
from gpubench.kinds.memory.worker.tracker import AllocationTracker, follow, hide_shape_propagation, load
from gpubench.kinds.training.worker.rank import open_feed
from gpubench.memory.allocation_log import AllocationLog, classify
from gpubench.memory.batch_sizes import MOST, BatchSizes, fit, largest, overrides, search
from gpubench.memory.footprint import Correction, Footprint
from gpubench.memory.libraries import blas_workspace
from gpubench.probe.allocations import RecordedAllocation
from gpubench.ranks import Ranks
from gpubench.settings.keys import flatten
from gpubench.settings.loading import apply_overrides
from gpubench.settings.schema import CompletedTrainSettings, Precision
from gpubench.settings.sections import DataSettings, DistributedSettings, ModelSettings
from gpubench.worker.dataloader import map_tensors
from gpubench.worker.loop import Epochs, optimizer_impl
from gpubench.worker.models import Workload, build
from gpubench.worker.precision import Arithmetic, Autocast, arithmetic

RECURRENT = "cuDNN computes it in memory of its own, whose size is unknown"


def build_without_memory(model: ModelSettings, data: DataSettings, seed: int, *, inference: bool = False) -> Workload:
    """Builds the workload of `build` with tensors without memory. Call it under a FakeTensorMode."""
    with _buildable():
        workload = build(model, data, seed, inference=inference)
        if any(_views_are_separate(tensor) for tensor in (*workload.module.parameters(), *workload.module.buffers())):
            workload.module._apply(lambda tensor: tensor.detach())
    return workload


def refuse_unknown(module: nn.Module, cuda: bool) -> None:
    """Raises ModelError for modules with memory of unknown size: recurrent ones on CUDA, and oneDNN's LSTM on a CPU."""
    kinds = nn.RNNBase if cuda else nn.LSTM
    for path, part in module.named_modules():
        if isinstance(part, kinds):
            raise ModelError(
                f"{type(part).__name__} at {path or 'the top'} cannot be predicted: "
                f"{RECURRENT if cuda else 'oneDNN computes it in memory that no tensor shows'}",
                "measure it on the device",
            )


def _views_are_separate(tensor: Tensor) -> bool:
    """Whether views of the tensor have another storage, as those of a fake tensor from copy.deepcopy have."""
    return bool(tensor.untyped_storage()._cdata != tensor.detach().untyped_storage()._cdata)


@contextmanager
def _buildable() -> Iterator[None]:
    """Makes weight initialisation and Module.to() work with tensors without memory.

    Where torch draws weights again until their values are in range, nothing is drawn, as for meta tensors. Module.to()
    replaces parameters instead of swapping their contents, which fake tensors do not support.
    """
    truncated_normal, apply = torch.nn.init._no_grad_trunc_normal_, nn.Module._apply
    torch.nn.init._no_grad_trunc_normal_ = lambda tensor, *_, **__: tensor
    nn.Module._apply = _applied  # type: ignore[method-assign]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # by copy.deepcopy
            yield
    finally:
        torch.nn.init._no_grad_trunc_normal_, nn.Module._apply = truncated_normal, apply  # type: ignore[method-assign]


def _applied(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Applies `function` to all parameters and buffers, as `nn.Module._apply` does; tied parameters stay tied."""
    return _replaced(module, function, recurse, {})


def _replaced(
    module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool, replacements: dict[Tensor, nn.Parameter]
) -> nn.Module:
    if recurse:
        for part in module.children():
            _replaced(part, function, recurse, replacements)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            if parameter not in replacements:
                new = nn.Parameter(function(parameter.detach()), parameter.requires_grad)
                for key, value in parameter.__dict__.items():
                    new.__dict__.setdefault(key, value)  # attributes that the model has added
                replacements[parameter] = replacements[new] = new
            module._parameters[name] = replacements[parameter]
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


@contextmanager
def simulated_ranks(world_size: int) -> Iterator[None]:
    """Makes this process rank 0 of `world_size` ranks, with collectives that return at once and transfer nothing.

    It is made for FakeTensors. DDP and FSDP2 run unchanged, except where DDP reads the values of a tensor. An existing
    process group is not used, and restored afterwards.
    """
    with ExitStack() as stack:
        stack.enter_context(_fake_group(world_size))
        stack.enter_context(hide_shape_propagation())
        for place, name, function in (
            (distributed, "_verify_param_shape_across_processes", lambda *_: None),
            (default_hooks, "allreduce_hook", _averaged),
            (DistributedDataParallel, "_pre_forward", _rebuilding(DistributedDataParallel._pre_forward)),
        ):
            stack.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, function)
        yield


@contextmanager
def _fake_group(world_size: int) -> Iterator[None]:
    """Makes torch's fake process group the default group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    if find_spec("torch.distributed._meta_registrations") is None:  # before PyTorch 2.11
        import_module("torch.distributed._tools.fake_collectives")  # lets collectives take tensors without memory
    outer, hook = distributed_c10d._world.default_pg, sys.excepthook
    distributed_c10d._update_default_pg(None)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    own = dist.group.WORLD
    try:
        yield
    finally:
        if outer is not None:
            distributed_c10d._update_default_pg(outer)  # first, because destroying the default group destroys all
        dist.destroy_process_group(own)
        sys.excepthook = hook  # init_process_group has installed one that adds the rank to every line


def _averaged(_: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Replaces DDP's all-reduce by a finished one, in place; that of the fake group has no result."""
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _rebuilding(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a DDP._pre_forward that rebuilds the buckets with tensors that have memory."""

    def pre_forward(ddp: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            with _RealBucketIndices():  # type: ignore[no-untyped-call]
                ddp.reducer._rebuild_buckets()
        return plain(ddp, *inputs, **kwargs)

    return pre_forward


class _RealBucketIndices(TorchDispatchMode):
    """Gives memory to the int32 tensors with the indices of DDP's buckets, because DDP reads their values.

    Source: sync_bucket_indices in torch/csrc/distributed/c10d/reducer.cpp.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        is_fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if is_fake or kwargs.get("dtype", torch.int32) != torch.int32:
            return func(*args, **kwargs)
        with _disable_current_modes():
            return func(*args, **kwargs)


def _distributed_assumptions(settings: DistributedSettings) -> list[str]:
    """Sentences on the memory of a rank that a prediction for several GPUs does not include.

    The size of NCCL's buffers depends on links, channels and algorithms. Users have reported 544 MB for a group of two
    A100, 688 MB for a larger group (NCCL issue 964), and 1.6 GB for one communicator (NCCL issue 864).
    """
    found = [
        f"this is rank 0 of {settings.world_size}; the others need as much; NCCL's buffers are not included, and can "
        "need some hundred MB of each GPU or more"
    ]
    if settings.strategy == "fsdp2":
        found.append(
            "FSDP2 gathers and reduces on separate streams, for which the allocator has separate pools: it may reserve "
            "more memory than predicted"
        )
    return found


CPU = torch.device("cpu")
FOR_FAKES = ("packing",)
"""The rules of `cuda_kernels` that fake tensors need on any device."""
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "_int_mm", "linear"})
"""The operators that cuBLAS computes with a workspace."""
ALGORITHMS = (
    "with performance.cudnn_benchmark, cuDNN tries algorithms in the first steps, whose workspaces are not included: "
    "on an H100, ResNet-50 took 5.2 GiB for them in fp32 and nothing in bf16; where less memory is free, they take less"
)
"""The measurements are those of `benchmarks/reference/h100`."""


@dataclass(frozen=True)
class Prediction:
    log: AllocationLog
    applied: Applied
    """The number of changes by each rule of `cuda_kernels`."""


class _Tracker(AllocationTracker):
    """A tracker that adds the memory that libraries allocate outside of operators."""

    def __init__(self, target: Target) -> None:
        super().__init__(CPU)
        self._workspace = blas_workspace(target.capability) if target.cuda else 0
        self._on_cpu = (torch.ops.aten.lift_fresh.default,) if target.cuda else ()
        """The operators of torch.tensor(), whose tensors stay on the CPU, such as the step counters of optimizers."""
        self._handles: set[str] = set()
        self.convolves = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name = func.overloadpacket.__name__
        self.convolves = self.convolves or name == "convolution"
        if name in PRODUCTS and self._workspace and self.phase in ("forward", "loss", "backward"):
            self._take_workspace(f"aten::{name}")
        return result

    def _take_workspace(self, operator: str) -> None:
        kept = releases.installed().keeps_blas_workspaces
        # Each thread has its own cuBLAS handle, and autograd runs the backward pass in another thread.
        thread = "backward" if self.phase == "backward" else "main"
        if not kept or thread not in self._handles:
            self._handles.add(thread)
            self.note(self._workspace, "workspaces", operator, kept=kept)

    def see(self, tensor: Tensor, func: Any, where: Callable[[], str] = str) -> RecordedAllocation | None:
        if func in self._on_cpu:
            self.disregard(tensor)
        return super().see(tensor, func, where)


class _UnscaledAmp(Autocast):
    """The precision amp without a gradient scaler, which would read values that fake tensors do not have.

    The memory lacks only some scalars, because a scaler scales in place.
    """

    dtype = torch.float16


def predict(
    settings: CompletedTrainSettings,
    target: Target,
    activity: Activity,
    steps: int,
    without: Sequence[str] = (),
) -> Prediction:
    """Predicts the allocations of `steps` steps on `target`, for complete settings.

    `without` names rules to leave out. Raises ModelError with the name of an operator that cannot be predicted.
    """
    settings = _for_target(settings, target)
    tracker = _Tracker(target)
    world_size = settings.distributed.world_size
    ranks = Ranks(0, 0, world_size, world_size)
    try:
        with ExitStack() as stack:
            if world_size > 1:
                stack.enter_context(simulated_ranks(world_size))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            built = _moved(settings, tracker) if target.cuda else build_without_memory
            stack.enter_context(tracker)
            precision = _arithmetic(settings.precision)
            trainer = load(settings, ranks, CPU, activity, tracker, precision, built)
            refuse_unknown(trainer.workload.module, target.cuda)
            left_out = without if target.cuda else [rule.name for rule in RULES if rule.name not in FOR_FAKES]
            with as_cuda(without=left_out, capability=target.capability) as applied:
                follow(trainer, _batches(settings, ranks, trainer.workload), tracker, steps)
            log = tracker.allocation_log()
        if target.cuda:
            log.notes += releases.installed().notes
            log.notes += [ALGORITHMS] if tracker.convolves and settings.performance.cudnn_benchmark else []
            log.notes += attention_kernels.assumptions(target.capability) if applied["attention"] else []
            log.notes += _distributed_assumptions(settings.distributed) if world_size > 1 else []
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise _unpredictable(str(error.func)) from error
    except ModelError as error:  # raised while the model was built
        if not isinstance(error.__cause__, DataDependentOutputException | DynamicOutputShapeException):
            raise
        raise _unpredictable(str(error.__cause__.func)) from error
    except RuntimeError as error:
        if ".numpy() is not supported" not in str(error):
            raise
        raise _unpredictable(".numpy()") from error
    return Prediction(log, applied)


def _moved(settings: CompletedTrainSettings, tracker: AllocationTracker) -> Callable[..., Workload]:
    """Builds the model in CPU memory, which is not recorded, and returns a function that moves it to the GPU."""
    workload = build_without_memory(settings.model, settings.data, settings.seed, inference=settings.inference)

    def move(*_: object, **__: object) -> Workload:
        for tensor in (*workload.module.parameters(), *workload.module.buffers()):
            tracker.disregard(tensor)
        _applied(workload.module, torch.ops.aten._to_copy.default)
        return workload

    return move


def _unpredictable(reading: str) -> ModelError:
    return ModelError(
        f"the step cannot be predicted: {reading} reads values, which tensors without memory do not have",
        "measure it on a machine with a GPU, or remove operations that read values (.item(), .numpy(), boolean masks, "
        "unique)",
    )


def samples(settings: CompletedTrainSettings) -> int | None:
    """The number of samples per rank; None if the data is synthetic or the number is unknown."""
    if settings.data.source.startswith("synthetic"):
        return None
    single = _one_sample(settings)
    with FakeTensorMode(allow_non_fake_inputs=True):
        workload = build_without_memory(settings.model, settings.data, settings.seed, inference=settings.inference)
    world_size = settings.distributed.world_size
    with open_feed(single, Ranks(0, 0, world_size, world_size), CPU, workload) as feed:
        return feed.batches_per_epoch


def _one_sample(settings: CompletedTrainSettings) -> CompletedTrainSettings:
    return apply_overrides(settings, {"training.batch_size": 1, "data.workers": 0, "data.pin_memory": False})


def _for_target(settings: CompletedTrainSettings, target: Target) -> CompletedTrainSettings:
    """The settings with the defaults of the target, which would otherwise be those of the local device."""
    changes: dict[str, Any] = {"performance.compile": False, "training.read_loss": False}
    changes["training.optimizer_impl"] = optimizer_impl(settings, target.cuda)
    return apply_overrides(settings, changes)


def _arithmetic(precision: Precision) -> Arithmetic:
    return _UnscaledAmp(CPU) if precision is Precision.amp else arithmetic(precision, CPU)


def _batches(settings: CompletedTrainSettings, ranks: Ranks, workload: Workload) -> Any:
    """An endless iterator over batches.

    Synthetic batches are on the device. Of other data, one sample is read, and enlarged to a batch.
    """
    if settings.data.source == "synthetic":
        return Epochs(open_feed(settings, ranks, CPU, workload), settings.training.batch_size)
    if workload.make_batch is not None and settings.data.source == "synthetic-host":
        make_batch, size = workload.make_batch, settings.training.batch_size
        return CopiedBatches(lambda: make_batch(size))
    single = _one_sample(settings)
    with _disable_current_modes(), open_feed(single, ranks, CPU, workload) as feed:
        sample = next(feed.epoch(0))
    return CopiedBatches(lambda: map_tensors(lambda tensor: _enlarged(tensor, settings.training.batch_size), sample))


def _enlarged(tensor: Tensor, batch_size: int) -> Tensor:
    """An empty tensor for a batch, with the shape and type that `tensor` has for one sample."""
    shape = (batch_size, *tensor.shape[1:]) if tensor.dim() else ()
    return torch.empty(shape, dtype=tensor.dtype, device=CPU)


class CopiedBatches:
    """An endless iterator over batches from `make`, which are copied to the device."""

    epoch = 0

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._make()


LEAST_SAVING = 0.005
"""The smallest saving, as a fraction of the memory, for which a fix is proposed."""
SETTLED = 3
"""The number of steps after which the allocator needs no more memory. The second step still splits blocks."""


@dataclass(frozen=True)
class Forecast:
    """Predictions for a model on a target, and for changes of its settings."""

    settings: CompletedMemorySettings
    target: Target
    activity: Activity

    def footprint(self) -> Footprint:
        """The predicted footprint; with memory.explain, also the bytes that each rule adds to the peak."""
        found, applied = self._run(self.settings.memory.steps)
        corrections = [Correction(rule.name, rule.reason, None) for rule in RULES if rule.name in applied]
        if self.settings.memory.explain:
            corrections = [msgspec.structs.replace(each, size=self._adds(each.name, found)) for each in corrections]
        return msgspec.structs.replace(found, corrections=[*corrections, *found.corrections])

    def with_savings(self, advised: Findings, found: Footprint) -> Findings:
        """Adds the saving of each fix to the findings on `found`, which is measured or predicted.

        A fix saves the difference of two predictions; a finding whose fix saves next to nothing is left out.
        """
        if not any(finding.fix for finding in advised.findings):
            return advised
        predicted_already = found.source == "predicted" and self.settings.memory.steps >= SETTLED
        before = found if predicted_already else self._run(SETTLED)[0]
        findings = [self._predicted(finding, before) for finding in advised.findings]
        return msgspec.structs.replace(advised, findings=[finding for finding in findings if finding])

    def batch_sizes(self) -> BatchSizes:
        """The batch sizes that fit into the target's memory, without the share that must stay free."""
        memory = self.settings.memory
        limit = int(self.target.capacity * (1 - memory.spare))

        def total(batch_size: int) -> int:
            self.activity.doing = f"predicting a batch of {batch_size}"
            return self.with_batch_size(batch_size)._run(SETTLED)[0].most

        points = search(limit, total, samples(self.settings) or MOST)
        return BatchSizes(
            capacity=self.target.capacity,
            spare=memory.spare,
            limit=limit,
            points=points,
            line=fit(points),
            largest=largest(points, limit),
        )

    def with_batch_size(self, batch_size: int) -> "Forecast":
        return self.with_settings(overrides(batch_size, flatten(self.settings.model_dump(mode="json"))))

    def with_settings(self, changes: Mapping[str, Any]) -> "Forecast":
        return replace(self, settings=apply_overrides(self.settings, dict(changes)))

    def _run(self, steps: int, without: Sequence[str] = ()) -> tuple[Footprint, Mapping[str, int]]:
        found = predict(self.settings, self.target, self.activity, steps, without)
        classify(found.log)
        expandable = self.settings.performance.expandable_segments
        notes = ["torch.compile is not modelled; it fuses operators, and so needs less memory"]
        notes = notes if self.settings.performance.compile else []
        return predicted(found.log, self.target, expandable=expandable, notes=notes), found.applied

    def _adds(self, rule: str, found: Footprint) -> int:
        self.activity.doing = f"predicting without {rule}"
        without, _ = self._run(self.settings.memory.steps, (rule,))
        return found.peak.level.allocated - without.peak.level.allocated

    def _predicted(self, finding: Finding, before: Footprint) -> Finding | None:
        """Adds the predicted saving of its fix to a finding; None if it is below LEAST_SAVING."""
        if not finding.fix:
            return finding
        try:
            after, _ = self.with_settings(finding.fix)._run(SETTLED)
        except GpubenchError as error:  # for example checkpointing of a model without blocks
            return msgspec.structs.replace(
                finding, fix={}, evidence=[*finding.evidence, f"the fix is not possible here: {error.message}"]
            )
        return with_prediction(finding, before, after) if after.most < before.most * (1 - LEAST_SAVING) else None


def with_prediction(finding: Finding, before: Footprint, after: Footprint) -> Finding:
    """Adds the saving that two predictions give for its fix to a finding, as a fraction of the needed memory.

    The saving is negative if the fix needs more.
    """
    saved = 1 - after.most / before.most if before.most else 0.0
    sentence = f"predicted with the fix: {units.size(after.most)}; without: {units.size(before.most)}"
    return msgspec.structs.replace(finding, expected=Saving(saved), evidence=[*finding.evidence, sentence])
