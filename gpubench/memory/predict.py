"""Predict the memory of a training step on a GPU that is not here, by running it on tensors without memory.

All tensors are fake CPU tensors, since a CPU build of PyTorch cannot trace a backward pass on fake CUDA tensors. What
CUDA does differently is added: operators in `cuda_kernels`, and memory outside of operators in `allocator`.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from gpubench import releases
from gpubench.errors import GpubenchError, ModelError
from gpubench.findings import Finding, Findings
from gpubench.memory import cuda_kernels
from gpubench.memory.advice import advise, with_prediction
from gpubench.memory.allocator import blas_workspace
from gpubench.memory.batch_sizes import MOST, BatchSizes, fit, largest, overrides, search
from gpubench.memory.cuda_kernels import RULES, Applied, as_cuda
from gpubench.memory.footprint import Correction, Footprint
from gpubench.memory.history import Allocation, History, classify
from gpubench.memory.sharding import assumptions, pretended
from gpubench.memory.target import Target, predicted
from gpubench.memory.tracker import Tracker, follow, load
from gpubench.ranks import Ranks
from gpubench.settings.loading import apply_overrides, flatten
from gpubench.settings.schema import (
    CompletedMemorySettings,
    CompletedTrainSettings,
    DataSettings,
    ModelSettings,
    Precision,
)
from gpubench.worker.channel import Activity
from gpubench.worker.dataloader import map_tensors
from gpubench.worker.models import Workload, build
from gpubench.worker.precision import Arithmetic, Autocast, arithmetic
from gpubench.worker.train_bench import open_feed
from gpubench.worker.training import Epochs, optimizer_impl

RECURRENT = "cuDNN computes it in memory of its own, whose size is unknown"


def build_without_memory(model: ModelSettings, data: DataSettings, seed: int) -> Workload:
    """Return what `build` returns, made under a FakeTensorMode."""
    with _buildable():
        workload = build(model, data, seed)
        if any(_parted(tensor) for tensor in (*workload.module.parameters(), *workload.module.buffers())):
            workload.module._apply(lambda tensor: tensor.detach())
    return workload


def refuse_unknown(module: nn.Module, cuda: bool) -> None:
    """Raise ModelError for modules that cannot be predicted. On a CPU, oneDNN's LSTM has hidden memory too."""
    kinds = nn.RNNBase if cuda else nn.LSTM
    for path, part in module.named_modules():
        if isinstance(part, kinds):
            raise ModelError(
                f"{type(part).__name__} at {path or 'the top'} cannot be predicted: "
                f"{RECURRENT if cuda else 'oneDNN computes it in memory that no tensor shows'}",
                "measure it on the device",
            )


def _parted(tensor: Tensor) -> bool:
    """Say whether views of the tensor would not share its storage, as with fakes that copy.deepcopy made."""
    return bool(tensor.untyped_storage()._cdata != tensor.detach().untyped_storage()._cdata)


@contextmanager
def _buildable() -> Iterator[None]:
    """Make initialisation and Module.to() work with tensors without memory.

    Where torch redraws weights until their values fit, they stay as they are, as torch does for meta tensors.
    Module.to() replaces parameters instead of swapping them, which fakes do not support.
    """
    drawing, apply = torch.nn.init._no_grad_trunc_normal_, nn.Module._apply
    torch.nn.init._no_grad_trunc_normal_ = lambda tensor, *_, **__: tensor
    nn.Module._apply = _applied  # type: ignore[method-assign]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # by copy.deepcopy
            yield
    finally:
        torch.nn.init._no_grad_trunc_normal_, nn.Module._apply = drawing, apply  # type: ignore[method-assign]


def _applied(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """As `nn.Module._apply`, in its order: the children first. Parameters are replaced, and tied ones stay tied."""
    return _replaced(module, function, recurse, {})


def _replaced(
    module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool, made: dict[Tensor, nn.Parameter]
) -> nn.Module:
    if recurse:
        for part in module.children():
            _replaced(part, function, recurse, made)
    for name, parameter in module._parameters.items():
        if parameter is not None:
            if parameter not in made:
                new = nn.Parameter(function(parameter.detach()), parameter.requires_grad)
                for key, value in parameter.__dict__.items():
                    new.__dict__.setdefault(key, value)  # what a model notes on its parameters
                made[parameter] = made[new] = new
            module._parameters[name] = made[parameter]
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


HOST = torch.device("cpu")
OF_FAKES = ("packing",)
"""Rules that correct effects of tensors without values, on any device."""
PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "_int_mm", "linear"})
"""Operators that cuBLAS computes, for which it takes a workspace."""


@dataclass(frozen=True)
class Predicted:
    history: History
    applied: Applied
    """How often each rule changed something."""


class _Tracker(Tracker):
    """A tracker that adds the memory that libraries take outside of operators."""

    def __init__(self, target: Target) -> None:
        super().__init__(HOST)
        self._workspace = blas_workspace(target.capability) if target.cuda else 0
        self._host = (torch.ops.aten.lift_fresh.default,) if target.cuda else ()
        """Operators with which torch.tensor() makes tensors that stay on the host, as optimizers' step counters."""
        self._handles: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        name = func.overloadpacket.__name__
        if name in PRODUCTS and self._workspace and self.phase in ("forward", "loss", "backward"):
            self._take_workspace(f"aten::{name}")
        return made

    def _take_workspace(self, operator: str) -> None:
        kept = releases.installed().keeps_blas_workspaces
        # Each thread has its own cuBLAS handle, and autograd runs the backward pass in another thread.
        thread = "backward" if self.phase == "backward" else "main"
        if not kept or thread not in self._handles:
            self._handles.add(thread)
            self.note(self._workspace, "workspaces", operator, kept=kept)

    def _see(self, tensor: Tensor, func: Any) -> Allocation | None:
        if func in self._host:
            self.disregard(tensor)
        return super()._see(tensor, func)


class _Scaled(Autocast):
    """amp without a gradient scaler, which would read values that fake tensors do not have.

    A scaler adds only scalars to the memory, because it scales in place.
    """

    dtype = torch.float16


def predict(
    settings: CompletedTrainSettings,
    target: Target,
    activity: Activity,
    steps: int,
    without: Sequence[str] = (),
) -> Predicted:
    """Return the history of `steps` steps of complete settings, as on `target`.

    `without` names corrections to leave out. Raises ModelError with the name of an operator that cannot be traced.
    """
    settings = _as_predicted(settings, target)
    tracker = _Tracker(target)
    world_size = settings.distributed.world_size
    ranks = Ranks(0, 0, world_size, world_size)
    try:
        with ExitStack() as stack:
            if world_size > 1:
                stack.enter_context(pretended(world_size))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            built = _moved(settings, tracker) if target.cuda else build_without_memory
            stack.enter_context(tracker)
            numbers = _arithmetic(settings.precision)
            trainer = load(settings, ranks, HOST, activity, tracker, numbers, built)
            refuse_unknown(trainer.workload.module, target.cuda)
            left_out = without if target.cuda else [rule.name for rule in RULES if rule.name not in OF_FAKES]
            with as_cuda(without=left_out, capability=target.capability) as applied:
                follow(trainer, _batches(settings, ranks, trainer.workload), tracker, steps)
            history = tracker.history()
        if target.cuda:
            history.notes += releases.installed().notes
            history.notes += cuda_kernels.assumptions(target.capability) if applied["attention"] else []
            history.notes += assumptions(settings.distributed) if world_size > 1 else []
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise _unpredictable(str(error.func)) from error
    except ModelError as error:  # raised as the model was built
        if not isinstance(error.__cause__, DataDependentOutputException | DynamicOutputShapeException):
            raise
        raise _unpredictable(str(error.__cause__.func)) from error
    except RuntimeError as error:
        if ".numpy() is not supported" not in str(error):
            raise
        raise _unpredictable(".numpy()") from error
    return Predicted(history, applied)


def _moved(
    settings: CompletedTrainSettings, tracker: Tracker
) -> Callable[[ModelSettings, DataSettings, int], Workload]:
    """Builds the model now, and returns what moves it to the GPU: building it takes memory of the host alone."""
    workload = build_without_memory(settings.model, settings.data, settings.seed)

    def move(*_: object) -> Workload:
        for tensor in (*workload.module.parameters(), *workload.module.buffers()):
            tracker.disregard(tensor)
        _applied(workload.module, torch.ops.aten._to_copy.default)
        return workload

    return move


def _unpredictable(reading: str) -> ModelError:
    return ModelError(
        f"the step cannot be predicted: {reading} reads values, which tensors without memory do not have",
        "measure it on a machine with a GPU, or remove what reads values (.item(), .numpy(), boolean masks, unique)",
    )


def samples(settings: CompletedTrainSettings) -> int | None:
    """Return the number of samples for each rank; None if the data is synthetic or the number is unknown."""
    if settings.data.source.startswith("synthetic"):
        return None
    one = _one_sample(settings)
    with FakeTensorMode(allow_non_fake_inputs=True):
        workload = build_without_memory(settings.model, settings.data, settings.seed)
    world_size = settings.distributed.world_size
    with open_feed(one, Ranks(0, 0, world_size, world_size), HOST, workload) as feed:
        return feed.batches_per_epoch


def _one_sample(settings: CompletedTrainSettings) -> CompletedTrainSettings:
    return apply_overrides(settings, {"training.batch_size": 1, "data.workers": 0, "data.pin_memory": False})


def _as_predicted(settings: CompletedTrainSettings, target: Target) -> CompletedTrainSettings:
    """Return the settings with the target's defaults made explicit, so that the local CPU does not choose others."""
    changes: dict[str, Any] = {"performance.compile": False, "training.read_loss": False}
    changes["training.optimizer_impl"] = optimizer_impl(settings, target.cuda)
    return apply_overrides(settings, changes)


def _arithmetic(precision: Precision) -> Arithmetic:
    return _Scaled(HOST) if precision is Precision.amp else arithmetic(precision, HOST)


def _batches(settings: CompletedTrainSettings, ranks: Ranks, workload: Workload) -> Any:
    """Return the batches: synthetic ones are on the device; of other data one sample is read, whose shape is used."""
    if settings.data.source == "synthetic":
        return Epochs(open_feed(settings, ranks, HOST, workload), settings.training.batch_size)
    if workload.make_batch is not None and settings.data.source == "synthetic-host":
        make_batch, size = workload.make_batch, settings.training.batch_size
        return Copied(lambda: make_batch(size))
    one = _one_sample(settings)
    with _disable_current_modes(), open_feed(one, ranks, HOST, workload) as feed:
        sample = next(feed.epoch(0))
    return Copied(lambda: map_tensors(lambda tensor: _grown(tensor, settings.training.batch_size), sample))


def _grown(tensor: Tensor, batch_size: int) -> Tensor:
    """Return a new tensor like `tensor`, which is of one sample, for a whole batch."""
    shape = (batch_size, *tensor.shape[1:]) if tensor.dim() else ()
    return torch.empty(shape, dtype=tensor.dtype, device=HOST)


class Copied:
    """Batches that are copied to the device one by one."""

    epoch = 0

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._make()


LEAST = 0.005
"""A fraction of the memory: a fix that is predicted to save less is not proposed."""
SETTLED = 3
"""Steps until the allocator has all the memory it needs: the second one still splits blocks of the first."""


@dataclass(frozen=True)
class Forecast:
    settings: CompletedMemorySettings
    target: Target
    activity: Activity

    def footprint(self) -> Footprint:
        """Return the footprint; on request with the effect of each correction."""
        whole, applied = self._run(self.settings.memory.steps)
        corrections = [Correction(rule.name, rule.reason, None) for rule in RULES if rule.name in applied]
        if self.settings.memory.explain:
            corrections = [msgspec.structs.replace(one, size=self._adds(one.name, whole)) for one in corrections]
        return msgspec.structs.replace(whole, corrections=[*corrections, *whole.corrections])

    def advice(self, found: Footprint) -> Findings:
        """Return the advice for `found`, measured or predicted; a fix saves the difference of two predictions."""
        advised = advise(found, flatten(self.settings.model_dump(mode="json")))
        if not any(finding.fix for finding in advised.findings):
            return advised
        predicted_already = found.source == "predicted" and self.settings.memory.steps >= SETTLED
        before = found if predicted_already else self._run(SETTLED)[0]
        findings = [self._predicted(finding, before) for finding in advised.findings]
        return msgspec.structs.replace(advised, findings=[finding for finding in findings if finding])

    def batch_sizes(self) -> BatchSizes:
        """Return the batch sizes that fit into the target, with the spare memory left free."""
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
        classify(found.history)
        expandable = self.settings.performance.expandable_segments
        notes = ["torch.compile is not modelled: it fuses operators, and so keeps less"]
        notes = notes if self.settings.performance.compile else []
        return predicted(found.history, self.target, expandable=expandable, notes=notes), found.applied

    def _adds(self, rule: str, whole: Footprint) -> int:
        self.activity.doing = f"predicting without {rule}"
        without, _ = self._run(self.settings.memory.steps, (rule,))
        return whole.peak.level.allocated - without.peak.level.allocated

    def _predicted(self, finding: Finding, before: Footprint) -> Finding | None:
        """Return the finding with the saving of its fix; None if the fix saves next to nothing."""
        if not finding.fix:
            return finding
        try:
            after, _ = self.with_settings(finding.fix)._run(SETTLED)
        except GpubenchError as error:  # for example checkpointing of a model without blocks
            return msgspec.structs.replace(finding, fix={}, evidence=[*finding.evidence, f"not here: {error.message}"])
        return with_prediction(finding, before, after) if after.most < before.most * (1 - LEAST) else None
