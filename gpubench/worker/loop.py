"""Prepares a model for training or inference, and runs the steps of one repeat as a generator of events."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, ClassVar, Protocol, cast

import msgspec
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from gpubench import events
from gpubench.errors import DataError, ModelError, NonFiniteLoss
from gpubench.events import Step, WorkCounted
from gpubench.probe.counted import Counted
from gpubench.probe.length import DECISIONS, Length, fitting
from gpubench.ranks import Ranks
from gpubench.settings.data_sources import plan
from gpubench.settings.defaults import sharded_sgd
from gpubench.settings.schema import CompletedTrainSettings, TrainSettings
from gpubench.settings.sections import PerformanceSettings, TrainingSettings
from gpubench.worker import distributed
from gpubench.worker.callables import USER_ERRORS
from gpubench.worker.checkpointing import checkpoint_activations
from gpubench.worker.dataloader import Feed, tensors, to_device
from gpubench.worker.memory_peaks import SetupPeaks, end_of_setup, peaks
from gpubench.worker.models import Workload
from gpubench.worker.precision import Arithmetic
from gpubench.worker.timing import EXPOSED_COMMUNICATION, StepTimer


class Batches(Protocol):
    """An endless iterator over batches. `epoch` is the number of the current pass over the data."""

    epoch: int

    def __next__(self) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Loop(ABC):
    PASSES: ClassVar[str]
    """What a step computes on one batch, in words."""
    settings: CompletedTrainSettings
    ranks: Ranks
    device: torch.device
    workload: Workload
    module: nn.Module
    """The workload's module on the device, wrapped and compiled according to the settings."""
    arithmetic: Arithmetic
    timer: StepTimer[Any]
    disable_checkpointing: Callable[[], None] | None = None
    """A function that undoes activation checkpointing; None without checkpointing."""
    counted: Counted = field(default_factory=Counted)
    """The work that the steps have done."""

    @abstractmethod
    def step(self, batches: Batches, samples: int) -> None:
        """Runs one step, with a mark at the start of every phase. `samples` is the number of samples in it."""

    @abstractmethod
    def compute(self, batch: Any) -> None:
        """Runs PASSES over one batch with the plain module, outside of the steps, and changes no weight."""


@dataclass(frozen=True, kw_only=True)
class Trainer(Loop):
    PASSES = "one real forward and backward pass"
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler | None = None
    """The user's own learning rate scheduler, which steps after every update."""

    def step(self, batches: Batches, samples: int) -> None:
        """Runs one optimizer step over `grad_accumulation` batches, with a mark at the start of every phase.

        `samples` is the number of samples in all of them. The step does not synchronise with the device.
        """
        timer, accumulation = self.timer, self.settings.training.grad_accumulation
        channels_last = self.settings.performance.channels_last
        total: Tensor | None = None
        for micro in range(accumulation):
            if micro:
                timer.enter("data_wait")
            batch = next(batches)
            timer.enter("host_to_device")
            batch = to_device(batch, self.device, non_blocking=True, channels_last=channels_last)
            self._count(batch)
            timer.enter("forward")
            reduces = micro == accumulation - 1 or self.settings.distributed.sync_gradients == "each"
            with nullcontext() if reduces else distributed.without_sync(self.module):
                with self.arithmetic.forward():
                    loss = checked_loss(self.workload.loss(self.module, batch)) / accumulation
                timer.enter("backward")
                self.arithmetic.backward(loss)
            self.counted.passes += 1
            total = loss.detach() if total is None else total + loss.detach()
        timer.enter("optimizer")
        if (most := self.settings.training.clip_grad_norm) is not None:
            self.arithmetic.unscale(self.optimizer)
            nn.utils.clip_grad_norm_(self.workload.module.parameters(), most)
        self.arithmetic.step(self.optimizer)
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.counted.end_part()
        assert total is not None
        scale = self.arithmetic.scale()
        timer.issued(batches.epoch, samples, [total] if scale is None else [total, scale])
        if self.settings.training.read_loss:
            total.item()

    def _count(self, batch: Any) -> None:
        """Counts what the model is given."""
        first = next(tensors(batch), None)
        if first is not None:
            self.counted.give(len(first) if first.dim() else 1, first.numel())
            self.counted.batches += 1

    def compute(self, batch: Any) -> None:
        module = self.workload.module
        try:
            with self.arithmetic.forward():
                loss = self.workload.loss(module, batch)
            loss.backward()
        finally:
            module.zero_grad(set_to_none=True)


@dataclass(frozen=True, kw_only=True)
class Predictor(Loop):
    """Everything that a step of inference needs. Several ranks each have a model of their own."""

    PASSES = "one real forward pass"

    def step(self, batches: Batches, samples: int) -> None:
        """Runs one forward pass, and waits for the device, because an answer is of use only once it is there."""
        timer = self.timer
        batch = next(batches)
        timer.enter("host_to_device")
        batch = to_device(batch, self.device, non_blocking=True, channels_last=self.settings.performance.channels_last)
        timer.enter("forward")
        with torch.inference_mode(), self.arithmetic.forward():
            self.workload.forward(self.module, batch)
        timer.synchronize()
        timer.issued(batches.epoch, samples, [])

    def compute(self, batch: Any) -> None:
        with torch.no_grad(), self.arithmetic.forward():
            self.workload.forward(self.workload.module, batch)


def checked_loss(loss: object) -> Tensor:
    """Raises ModelError unless `loss` is a scalar tensor with a gradient; returns it without dimensions."""
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss.reshape(())
    found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    if isinstance(loss, Tensor) and loss.numel() == 1:
        found = "a scalar that depends on no tensor with a gradient"
    raise ModelError(f"the loss must be a scalar tensor with a gradient, but is {found}", "see loss(module, batch)")


def build_trainer(
    settings: CompletedTrainSettings,
    ranks: Ranks,
    device: torch.device,
    workload: Workload,
    arithmetic: Arithmetic,
    timer: StepTimer[Any],
) -> Trainer:
    """Moves the model to the device, wraps and compiles it, and creates its optimizer."""
    which = settings.model.activation_checkpointing
    forget = checkpoint_activations(workload.module, which) if which else None
    plain = placed(workload.module, settings.performance, device)
    module = compiled(
        distributed.wrap(
            plain, settings.distributed, settings.precision, device, lambda: timer.enter(EXPOSED_COMMUNICATION)
        ),
        settings.performance,
    )
    if workload.optimizer is None:
        optimizer, scheduler = make_optimizer(settings, plain, device), None
    else:
        optimizer, scheduler = own_optimizer(workload.optimizer, trained_parameters(plain))
    counted = Counted()
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: counted.update(optimizer))
    return Trainer(
        settings=settings,
        ranks=ranks,
        device=device,
        workload=replace(workload, module=plain),
        module=module,
        optimizer=optimizer,
        scheduler=scheduler,
        arithmetic=arithmetic,
        timer=timer,
        disable_checkpointing=forget,
        counted=counted,
    )


def build_predictor(
    settings: CompletedTrainSettings,
    ranks: Ranks,
    device: torch.device,
    workload: Workload,
    arithmetic: Arithmetic,
    timer: StepTimer[Any],
) -> Predictor:
    """Moves the model, which is in evaluation mode, to the device, and compiles it."""
    plain = placed(workload.module, settings.performance, device)
    return Predictor(
        settings=settings,
        ranks=ranks,
        device=device,
        workload=replace(workload, module=plain),
        module=compiled(plain, settings.performance),
        arithmetic=arithmetic,
        timer=timer,
    )


def placed(module: nn.Module, performance: PerformanceSettings, device: torch.device) -> nn.Module:
    """Moves the module to the device, in the memory format of the settings."""
    plain = module if device.type == "cpu" else module.to(device)
    if performance.channels_last:
        to_channels_last(plain)
    return plain


def compiled(module: nn.Module, performance: PerformanceSettings) -> nn.Module:
    if not performance.compile:
        return module
    return cast("nn.Module", torch.compile(module, mode=performance.compile_mode))


def to_channels_last(module: nn.Module) -> None:
    """Converts 4-D weights and buffers to the NHWC layout in place, with the same strides as `Module.to`.

    `Module.to` itself cannot convert fake tensors in place. `contiguous` would not change the strides of weights that
    are the same in both layouts, such as those of a 1x1 convolution; DDP would then copy their gradients, because cuDNN
    returns them with the strides of NHWC.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dim() == 4:
            tensor.data = tensor.data.to(memory_format=torch.channels_last)


def optimizer_impl(settings: TrainSettings, on_gpu: bool) -> str:
    """The value of `training.optimizer_impl`, or the fastest implementation if it is auto.

    On a GPU the fastest is fused, or foreach for SGD on parameters that FSDP2 has sharded, because PyTorch has no fused
    SGD for DTensors. On a CPU it is the loop, PyTorch's default.
    """
    if settings.training.optimizer_impl != "auto":
        return settings.training.optimizer_impl
    if not on_gpu:
        return "loop"
    return "foreach" if sharded_sgd(settings) else "fused"


def make_optimizer(settings: CompletedTrainSettings, module: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    training, chosen = settings.training, optimizer_impl(settings, device.type == "cuda")
    options: dict[str, Any] = {
        "lr": training.learning_rate,
        "weight_decay": training.weight_decay,
        "foreach": chosen == "foreach",
        "fused": chosen == "fused",
    }
    parameters = trained_parameters(module)
    if training.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=training.momentum, **options)
    adam = torch.optim.Adam if training.optimizer == "adam" else torch.optim.AdamW
    return adam(parameters, **options)


def trained_parameters(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def own_optimizer(
    make: Callable[[list[nn.Parameter]], Any], parameters: list[nn.Parameter]
) -> tuple[torch.optim.Optimizer, LRScheduler | None]:
    """Makes the user's own optimizer, and its scheduler if there is one. Raises ModelError if `make` returns something
    else."""
    try:
        returned = make(parameters)
    except USER_ERRORS as error:
        if isinstance(error, MemoryError | torch.OutOfMemoryError):
            raise
        message = f"optimizer(parameters) of the model raised {type(error).__name__}: {error}"
        raise ModelError(message, "fix the error in that code; run.log has the traceback") from error
    match returned:
        case torch.optim.Optimizer():
            return returned, None
        case (torch.optim.Optimizer() as optimizer, LRScheduler() as scheduler) if not isinstance(
            scheduler, ReduceLROnPlateau
        ):
            return optimizer, scheduler
    kinds = type(returned).__name__
    if isinstance(returned, tuple):
        kinds = f"({', '.join(type(part).__name__ for part in returned)})"
    raise ModelError(
        f"optimizer(parameters) of the model returned {kinds}",
        "return a torch.optim.Optimizer, or (optimizer, scheduler) with a torch.optim.lr_scheduler whose step() takes "
        "no argument",
    )


Event = events.Message

READ_SECONDS = 0.1  # seconds between two reads of finished steps; on a GPU each read takes the CPU about 50 us
CALIBRATION_STEPS = 3  # minimum number of steps before a limit in seconds is converted to steps


@dataclass(frozen=True)
class Undecided:
    """The length of a repeat that follows from the time of its first steps."""

    after: Sequence[int]
    """The numbers of steps after which all ranks ask whether it is decided. It is after the last of them."""
    decide: Callable[[Sequence[float]], Length | None]
    """Returns the length, from the durations of the steps so far in seconds; None if it is too early."""


def length_of(training: TrainingSettings, batches_per_epoch: int | None, seconds: float | None) -> Length | Undecided:
    """How long a repeat is by the settings. `seconds` is the time of its steps, if their number is open."""
    if training.seconds is not None:
        limit, decided = training.seconds, max(training.warmup, CALIBRATION_STEPS)

        def fill(durations: Sequence[float]) -> Length:
            # Without the first step, because compiling and tuning may take as long as all other steps.
            return Length(training.warmup, decided + max(1, math.ceil(limit / median(durations[1:]))))

        return Undecided([decided], fill)
    if (steps := plan(training, batches_per_epoch)) is not None:
        return Length(training.warmup, steps)
    assert seconds
    after = [known + 1 for known in DECISIONS]  # the end of a step is known when the next one has begun
    return Undecided(after, lambda durations: fitting(seconds, durations, training.warmup_steps))


def run_steps(loop: Loop, feed: Feed, repeat: int, unix_time: float, length: Length | Undecided) -> Iterator[Event]:
    """Runs the steps of a repeat, and yields events as the device finishes them.

    The host passes every event to the `Recorder` of the run. `unix_time` is the current time in seconds since the
    epoch, from the clock for the times of the steps. Raises NonFiniteLoss with the number of the step, and DataError if
    the data does not fill one step.
    """
    called = time.perf_counter()
    rank = loop.ranks.rank
    yield _planned(rank, repeat, length)
    scale = loop.arithmetic.scale()
    reader = StepReader(None if scale is None else float(scale))
    timer = loop.timer
    setup = SetupPeaks(setup_peak_allocated=None, setup_peak_reserved=None)

    distributed.barrier()
    timer.synchronize()
    began = time.perf_counter()
    timer.start(unix_time + began - called)  # includes the wait for the other ranks
    try:
        yield from _steps(loop, Epochs(feed, loop.settings.training.batch_size), reader, repeat, length, setup)
    except Exception:
        with suppress(RuntimeError):  # finished steps are reported after an error too, if the device can still be read
            yield events.StepsMeasured(rank=rank, steps=reader.read(timer))
        raise
    timer.stop()
    wall = time.perf_counter() - began
    yield events.StepsMeasured(rank=rank, steps=reader.read(timer))
    reader.raise_if_diverged()
    counted = loop.counted.found(loop.counted.parts)
    work = msgspec.convert(counted, WorkCounted) if counted else None
    yield events.RepeatDone(rank=rank, repeat=repeat, wall=wall, work=work, **peaks(loop.device), **setup)


def _steps(
    loop: Loop,
    batches: "Epochs",
    reader: "StepReader",
    repeat: int,
    length: Length | Undecided,
    setup: SetupPeaks,
) -> Iterator[Event]:
    """Runs the steps. The generator fills in `setup` when the warm-up is issued."""
    training, rank, timer = loop.settings.training, loop.ranks.rank, loop.timer
    samples = training.grad_accumulation * training.batch_size
    step, read_next, in_setup = 0, time.perf_counter(), True
    durations: list[float] = []
    while isinstance(length, Undecided) or step < length.steps:
        timer.begin(step)
        loop.counted.last = isinstance(length, Length) and step + 1 == length.steps
        loop.step(batches, samples)
        step += 1
        deciding = isinstance(length, Undecided) and step in length.after
        if deciding:
            timer.synchronize()  # the durations of all steps so far are needed
        if deciding or time.perf_counter() >= read_next:
            finished = reader.read(timer)
            yield events.StepsMeasured(rank=rank, steps=finished)
            reader.raise_if_diverged()
            durations += [finished_step.total for finished_step in finished]
            read_next = time.perf_counter() + READ_SECONDS
        if isinstance(length, Undecided) and deciding and (decided := _agreed(length.decide(durations), loop.device)):
            length = decided
            yield _planned(rank, repeat, length)
        warmup = length.warmup if isinstance(length, Length) else training.warmup
        if in_setup and step >= max(1, warmup):
            in_setup = False
            if warmup:
                setup.update(end_of_setup(loop.device))
            timer.end_setup()
            distributed.limit_collectives(loop.settings.distributed.timeout)


def _planned(rank: int, repeat: int, length: Length | Undecided) -> events.Planned:
    if isinstance(length, Undecided):
        return events.Planned(rank=rank, repeat=repeat, steps=0)
    return events.Planned(rank=rank, repeat=repeat, steps=length.steps, warmup=length.warmup)


def _agreed(length: Length | None, device: torch.device) -> Length | None:
    """The length that rank 0 has found, on every rank. All ranks must call it."""
    steps = distributed.broadcast(length.steps if length else 0, device)
    return Length(distributed.broadcast(length.warmup if length else 0, device), steps) if steps else None


class Epochs:
    """An endless stream of batches that counts the passes over the data."""

    def __init__(self, feed: Feed, batch_size: int) -> None:
        self.epoch = 0
        self._feed = feed
        self._batch_size = batch_size
        self._batches = feed.epoch(0)
        self._count = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        for batch in self._batches:
            if not self._count:
                self._check(batch)
            self._count += 1
            return batch
        if not self._count and not self.epoch:
            raise DataError("the data ended before one batch was full", "lower --batch-size or add data")
        if not self._count:
            raise DataError(
                "the data ended, and cannot be read a second time",
                "return a new iterator from __iter__ each time, or lower training.steps",
            )
        self.epoch += 1
        self._batches = self._feed.epoch(self.epoch)
        self._count = 0
        return next(self)

    def _check(self, batch: Any) -> None:
        """Raises DataError if the batch does not have the requested size, because every rate would be wrong."""
        found = next((len(tensor) for tensor in tensors(batch) if tensor.dim()), self._batch_size)
        if found != self._batch_size:
            raise DataError(
                f"a batch of {self._batch_size} samples was requested, but its first tensor has {found}",
                "make_batch(n) must return n samples along the first dimension, and a DataLoader of your own needs "
                "training.batch_size set to the size of its batches",
            )


class StepReader:
    """Reads finished steps from the timer, and adds to each its loss and whether the gradient scaler skipped it.

    A step of inference has neither.
    """

    def __init__(self, scale: float | None) -> None:
        """`scale` is the gradient scale before the first step; None without a gradient scaler."""
        self._scale = scale
        self._diverged: NonFiniteLoss | None = None

    def read(self, timer: StepTimer[Any]) -> list[Step]:
        """The steps that the device has finished since the last call."""
        return [self._judge(step, *readings) for step, readings in timer.collect()]

    def raise_if_diverged(self) -> None:
        """Raises NonFiniteLoss with the number of the step if a loss read so far is not finite."""
        if self._diverged:
            raise self._diverged

    def _judge(self, step: Step, loss: float | None = None, scale: float | None = None) -> Step:
        if loss is None:  # of a step of inference
            return step
        finite = math.isfinite(loss)
        if not finite and not self._diverged:
            self._diverged = NonFiniteLoss(
                f"the loss became {loss} at step {step.step} (counting from 0) of repeat {step.repeat + 1}",
                "lower training.learning_rate, or compare with --precision fp32",
            )
        # The scaler lowers its scale if and only if it skips the step (torch.amp.GradScaler, backoff_factor < 1).
        skipped = scale is not None and self._scale is not None and scale < self._scale
        self._scale = scale
        return msgspec.structs.replace(step, loss=loss if finite else None, not_finite=not finite, skipped=skipped)
