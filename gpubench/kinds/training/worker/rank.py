"""The worker of `gpubench train-bench`: builds the model, trains or runs it in each repeat, and reports events."""

import logging
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import Store

from gpubench import events
from gpubench.channel import EVERYONE, Activity, calendar
from gpubench.probe.length import Length
from gpubench.ranks import Ranks
from gpubench.settings.data_sources import refuse_short, steps_in_unit
from gpubench.settings.defaults import refuse_beside_loader, refuse_beside_optimizer
from gpubench.settings.loading import apply_overrides
from gpubench.settings.schema import CompletedTrainSettings, Precision
from gpubench.temporary import folder_of_worker
from gpubench.worker import distributed
from gpubench.worker.compute_rates import count_flops, measure_peak, time_reference_workload
from gpubench.worker.dataloader import Feed, to_device
from gpubench.worker.datasets import open_dataset
from gpubench.worker.environment import capture_env_metadata
from gpubench.worker.loop import Event, Loop, build_predictor, build_trainer, length_of, run_steps
from gpubench.worker.memory_peaks import free_memory
from gpubench.worker.models import Workload, build
from gpubench.worker.precision import arithmetic, refuse, restore_float32_matmul, set_float32_matmul
from gpubench.worker.process import Assignment
from gpubench.worker.profiler import RecordedTimer, Recording, annotate_modules, recorded
from gpubench.worker.timing import StepTimer, clock_of

log = logging.getLogger("gpubench.train_bench")

METHOD = "torch.utils.flop_counter.FlopCounterMode over {}"


def inspect(loop: Loop, feed: Feed, activity: Activity) -> Iterator[Event]:
    """Counts FLOPs, measures the attainable peak and traces the graph, after the timed steps.

    All ranks take part in counting FLOPs, because a sharded model needs them; only rank 0 reports.
    """
    settings = loop.settings
    batch = next(feed.epoch(0), None)
    if batch is None:  # the stream of samples has ended
        log.warning("FLOPs are not counted: the data has ended")
        return
    batch = to_device(batch, loop.device, channels_last=settings.performance.channels_last)
    if settings.measurement.count_flops:
        activity.doing = "counting FLOPs"
        counted = _flops(loop, batch)
        if loop.ranks.is_rank_zero:
            yield counted
    if not loop.ranks.is_rank_zero:
        return
    if settings.measurement.measure_peak:
        activity.doing = "measuring the peak"
        yield _peak(loop.device, _DTYPES[settings.precision])
    if settings.logging.graph and settings.distributed.strategy == "ddp":
        activity.doing = "tracing the graph"
        if graph := _graph(loop.workload.module, batch):
            yield events.GraphTraced(rank=0, graph=graph)


_DTYPES = {
    Precision.fp32: torch.float32,
    Precision.tf32: torch.float32,
    Precision.amp: torch.float16,
    Precision.bf16: torch.bfloat16,
}


def _flops(loop: Loop, batch: Any) -> events.FlopsCounted:
    """Counts the FLOPs of one sample: model FLOPs without recomputation, and hardware FLOPs with it."""
    samples, method = loop.settings.training.batch_size, METHOD.format(loop.PASSES)

    def unknown(reason: str) -> events.FlopsCounted:
        return events.FlopsCounted(
            rank=0, model_flops_per_sample=None, hardware_flops_per_sample=None, method=method, reason=reason
        )

    try:
        performed = work = count_flops(lambda: loop.compute(batch))
        if loop.disable_checkpointing:
            loop.disable_checkpointing()
            work = count_flops(lambda: loop.compute(batch))
    except Exception as error:  # the user's model may raise any exception; the measured times are valid without FLOPs
        log.warning("FLOPs could not be counted: %s", error)
        return unknown(f"{type(error).__name__}: {error}")
    if not work.total:
        return unknown("FlopCounterMode counts none of the model's operators")
    return events.FlopsCounted(
        rank=0,
        model_flops_per_sample=work.total / samples,
        hardware_flops_per_sample=performed.total / samples,
        method=method,
        by_operator=work.by_operator,
    )


def _peak(device: torch.device, dtype: torch.dtype) -> events.PeakMeasured:
    """Measures the attainable peak. It is None if the model leaves too little memory for the matrices."""
    try:
        peak = measure_peak(device, dtype)
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError, or cuBLAS cannot allocate its workspace
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        log.warning("the peak could not be measured: %s", reason)
        name = str(dtype).removeprefix("torch.")
        return events.PeakMeasured(rank=0, flops_per_s=None, dtype=name, size=None, reason=reason)
    return events.PeakMeasured(rank=0, flops_per_s=peak.flops_per_s, dtype=peak.dtype, size=peak.size)


class _Positional(nn.Module):
    """Wraps a model to take positional inputs and return one tensor, as tracing requires."""

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.module = module
        self._names = names

    def forward(self, *inputs: Tensor) -> Tensor:
        out = self.module(**dict(zip(self._names, inputs, strict=True))) if self._names else self.module(inputs[0])
        if isinstance(out, Tensor):
            return out
        first: Tensor = out[0] if isinstance(out, tuple) else next(iter(out.values()))
        return first


_ARGUMENTS = {"input_ids": "input_ids", "clean": "sample", "timesteps": "timestep", "text": "encoder_hidden_states"}
"""The names of the built-in models' parameters, by the names of the tensors in a batch."""


def _graph(module: nn.Module, batch: Any) -> bytes | None:
    """Traces the model's graph for TensorBoard with one sample; None if it cannot be traced.

    Tracing runs the model several times without gradients, always in float32.
    """
    from torch.utils.tensorboard._pytorch_graph import graph

    if isinstance(batch, dict):
        arguments = {_ARGUMENTS[name]: part for name, part in batch.items() if name in _ARGUMENTS}
        names, inputs = tuple(arguments), tuple(arguments.values())
    else:
        names, inputs = (), (batch[0] if isinstance(batch, tuple | list) else batch,)
    if not inputs:
        log.debug("the model graph is not traced: the names of its inputs are unknown")
        return None
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # deprecation of tracing, data-dependent branches
            definition, _ = graph(_Positional(module, names), tuple(tensor[:1] for tensor in inputs))
        serialised: bytes = definition.SerializeToString()
        return serialised
    except Exception as error:
        log.debug("the model graph cannot be traced: %s", error)
        return None


AUTOTUNING = 3.0
"""The factor on the time limit for progress with max-autotune, which may time kernels for a quarter of an hour."""
MARGIN = 60.0  # seconds by which a collective's limit exceeds the host's, so that the host can name the rank that hangs
COMPILE_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def work(assignment: Assignment) -> Iterator[Event]:
    """Runs every repeat of the job and yields the events."""
    job, ranks, store, activity = assignment.job, assignment.ranks, assignment.store, assignment.activity
    settings = CompletedTrainSettings.model_validate(job.settings)
    # Read first, because torch sets some of these variables later.
    unset = [name for name in COMPILE_CACHES if name not in os.environ]
    activity.enter("connecting to the other ranks", waits_for=EVERYONE if store else None)
    device = set_up(settings, ranks, store)
    if ranks.is_rank_zero:
        decided = distributed.decided(settings.distributed)
        yield events.EnvironmentCaptured(rank=0, environment=capture_env_metadata(), settings=decided)
    kept = [name for name in COMPILE_CACHES if name not in unset]
    if kept and settings.performance.compile and ranks.is_rank_zero and 0 in job.repeats:
        log.warning("%s is set: the time of the first step depends on the content of this cache", " and ".join(kept))
    for repeat in job.repeats:
        allow_for_setup(settings, activity)
        distributed.release_collectives()  # the other ranks wait here while rank 0 inspects
        free_memory(device)
        run = profile_repeat if repeat == job.profiled else run_repeat
        with empty_compile_caches(unset):
            for event in run(settings, ranks, device, activity, repeat, job):
                if isinstance(event, events.Planned) and event.warmup is not None:
                    job = msgspec.structs.replace(job, length=(event.warmup, event.steps, event.each_update))
                yield event
    # This is not done after an error, because leaving the group could wait for failed ranks and delay the report.
    distributed.cleanup_ddp()


def set_up(settings: CompletedTrainSettings, ranks: Ranks, store: Store | None) -> torch.device:
    """Applies the settings of the process, joins the process group, and returns this rank's device."""
    torch.set_num_threads(settings.performance.cpu_threads)
    device = distributed.pick_device(settings.device, ranks)
    set_float32_matmul(settings.precision, settings.performance.matmul_precision)
    torch.backends.cudnn.benchmark = settings.performance.cudnn_benchmark
    refuse(settings.precision, device)
    distributed.setup_ddp(settings.distributed, ranks, store, device, setup_timeout(settings))
    distributed.introduce(ranks, device)
    return device


def allow_for_setup(settings: CompletedTrainSettings, activity: Activity) -> None:
    """Sets the longer time limits for building, compiling and warm-up. `loop.run_steps` ends them."""
    activity.patience_factor = patience_factor(settings)
    distributed.limit_collectives(setup_timeout(settings))


def patience_factor(settings: CompletedTrainSettings) -> float:
    """The factor by which `measurement.stall_timeout` is multiplied until the end of the warm-up."""
    performance = settings.performance
    autotunes = performance.compile and performance.compile_mode.startswith("max-autotune")
    return AUTOTUNING if autotunes else 1.0


def setup_timeout(settings: CompletedTrainSettings) -> float:
    """The time limit of a collective until the end of the warm-up, in seconds.

    It is longer than the host's time limit for a rank. Ranks that have compiled wait in their first collective for
    those that still compile. If a rank hangs, the host names it and prints its stack, whereas NCCL would only abort the
    waiting ranks.
    """
    stall_timeout = settings.measurement.stall_timeout * patience_factor(settings)
    return max(settings.distributed.timeout, stall_timeout + MARGIN)


@contextmanager
def empty_compile_caches(variables: Sequence[str]) -> Iterator[None]:
    """Sets environment variables for cache folders of torch.compile to new, empty folders.

    Every repeat then compiles everything. Otherwise later repeats and later runs would use what the first one has
    compiled, and the times of their first steps would not be comparable.
    """
    with folder_of_worker() as folder:
        os.environ.update({name: str(Path(folder, name.lower())) for name in variables})
        try:
            yield
        finally:
            for name in variables:
                os.environ.pop(name, None)


def run_repeat(
    settings: CompletedTrainSettings,
    ranks: Ranks,
    device: torch.device,
    activity: Activity,
    repeat: int,
    job: events.Job,
) -> Iterator[Event]:
    """Builds the model, runs its steps for one repeat, and after the first repeat calls `inspect`."""
    began = time.perf_counter()
    timer: StepTimer[Any] = StepTimer(clock_of(device), activity, repeat, ranks.rank)
    loop, feed = prepare(settings, ranks, device, activity, timer)
    parameters = list(loop.workload.module.parameters())
    yield events.ModelBuilt(
        rank=ranks.rank,
        repeat=repeat,
        parameters=sum(p.numel() for p in parameters),
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        sample_shape=loop.workload.sample_shape,
        tokens_per_sample=loop.workload.sequence_length,
        seconds=time.perf_counter() - began,
    )
    activity.doing = "loading the first batch"
    with feed:
        refuse_short(settings, feed.batches_per_epoch)
        on_cpu = device.type == "cpu"  # for a GPU, telemetry records the clocks
        before = time_reference_workload() if on_cpu else 0.0
        length = (
            Length(*job.length) if job.length else length_of(settings.training, feed.batches_per_epoch, job.seconds)
        )
        yield from run_steps(loop, feed, repeat, calendar(job)(), length)
        if on_cpu:
            yield events.ReferenceWorkloadTimed(
                rank=ranks.rank, repeat=repeat, seconds=(before + time_reference_workload()) / 2
            )
        if repeat == 0:
            yield from inspect(loop, feed, activity)


def profile_repeat(
    settings: CompletedTrainSettings,
    ranks: Ranks,
    device: torch.device,
    activity: Activity,
    repeat: int,
    job: events.Job,
) -> Iterator[Event]:
    """Runs the same loop for the steps of the profiler's schedule, and yields the trace files."""
    profiling = settings.profiling
    if not profiling.keep_compile:
        settings = apply_overrides(settings, {"performance.compile": False})
    with folder_of_worker() as folder:
        timer: StepTimer[Any] = StepTimer(clock_of(device), activity, repeat, ranks.rank)
        record: AbstractContextManager[Any] = nullcontext()
        recording = None
        if profiling.all_ranks or ranks.is_rank_zero:
            record = recording = Recording(profiling, device, ranks.rank, Path(folder))
            timer = RecordedTimer(clock_of(device), activity, repeat, ranks.rank, recording)
        loop, feed = prepare(settings, ranks, device, activity, timer)
        if recording and profiling.modules and not settings.performance.compile:
            annotate_modules(loop.workload.module)
        activity.doing = "loading the first batch"
        try:
            with feed, record:
                unit = steps_in_unit(settings, feed.batches_per_epoch)
                if recording:
                    recording.unit = unit
                length = Length(settings.training.warmup, unit * profiling.units)
                yield from run_steps(loop, feed, repeat, calendar(job)(), length)
        except Exception:
            # The cycles before the failure are kept.
            yield from recorded(recording.files() if recording else [], ranks.rank, repeat)
            raise
        activity.doing = "sending the trace"
        yield from recorded(recording.files() if recording else [], ranks.rank, repeat)


def prepare(
    settings: CompletedTrainSettings, ranks: Ranks, device: torch.device, activity: Activity, timer: StepTimer[Any]
) -> tuple[Loop, Feed]:
    """Builds the model, ready for its first step, and opens its batches."""
    activity.doing = "building the model"
    workload = build(settings.model, settings.data, settings.seed, inference=settings.inference)
    if workload.optimizer is not None and not settings.inference:
        refuse_beside_optimizer(settings.training)
    restore_float32_matmul(settings.precision, settings.performance.matmul_precision)
    loop = build_loop(
        settings,
        ranks,
        device,
        workload,
        arithmetic(settings.precision, device, inference=settings.inference),
        timer,
    )
    activity.doing = "opening the dataset"
    feed = open_feed(settings, ranks, device, workload)
    if feed.own_loader:
        refuse_beside_loader(settings)
    return loop, feed


def build_loop(settings: CompletedTrainSettings, *parts: Any) -> Loop:
    """Builds the loop of inference or of training, as the settings say, of the same parts."""
    return build_predictor(settings, *parts) if settings.inference else build_trainer(settings, *parts)


def open_feed(settings: CompletedTrainSettings, ranks: Ranks, device: torch.device, workload: Workload) -> Feed:
    dataset = open_dataset(
        settings.data,
        workload.task,
        workload.image_size or settings.data.image_size,
        workload.sequence_length or settings.data.sequence_length,
        workload.vocabulary,
        workload.classes,
    )
    batch_size = settings.training.batch_size
    torch.manual_seed(settings.seed + ranks.rank)
    return Feed(
        settings.data,
        dataset,
        workload.make_batch,
        batch_size,
        ranks.rank,
        ranks.world_size,
        settings.seed,
        device,
        channels_last=settings.performance.channels_last,
    )
