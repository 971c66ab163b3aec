"""What a worker of `gpubench train-bench` does: builds the model, trains it for each repeat, and says how it went."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from gpubench import distributed, events
from gpubench.assignment import Assignment
from gpubench.calendar import calendar
from gpubench.channel import Activity
from gpubench.configuration import apply_overrides
from gpubench.data import Feed, open_dataset
from gpubench.environment import capture_env_metadata
from gpubench.inspection import inspect
from gpubench.models import Workload, build
from gpubench.precision import arithmetic, refuse, set_float32_matmul
from gpubench.profiler import RecordedTimer, Recording, annotate_modules, recorded
from gpubench.ranks import Ranks
from gpubench.settings import TrainSettings
from gpubench.sources import refuse_short, steps_in_unit
from gpubench.timing import StepTimer, clock_of
from gpubench.trainer import Trainer, build_trainer
from gpubench.training import Event, train
from gpubench.yardstick import time_yardstick


def work(given: Assignment) -> Iterator[Event]:
    """Every repeat of the job, as events."""
    job, ranks, store, activity = given.job, given.ranks, given.store, given.activity
    settings = TrainSettings.model_validate(job.settings)
    device = set_up(settings, ranks, store)
    if ranks.is_rank_zero:
        yield events.EnvironmentCaptured(rank=0, environment=capture_env_metadata())
    for repeat in job.repeats:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        run = profile_repeat if repeat == job.profiled else run_repeat
        yield from run(settings, ranks, device, activity, repeat, job)
    # Not after an error: leaving the group can wait for ranks that will never come, before the error is told.
    distributed.cleanup_ddp()


def set_up(settings: TrainSettings, ranks: Ranks, store: Store | None) -> torch.device:
    """The process as the settings ask, and the group of ranks joined; returns this rank's device."""
    assert settings.device
    assert settings.precision
    if settings.performance.cpu_threads:
        torch.set_num_threads(settings.performance.cpu_threads)
    device = distributed.pick_device(settings.device, ranks)
    set_float32_matmul(settings.precision, settings.performance.matmul_precision)
    torch.backends.cudnn.benchmark = settings.performance.cudnn_benchmark
    refuse(settings.precision, device)
    distributed.setup_ddp(settings.distributed, ranks, store, device)
    distributed.introduce(ranks, device)
    return device


def run_repeat(
    settings: TrainSettings,
    ranks: Ranks,
    device: torch.device,
    activity: Activity,
    repeat: int,
    job: events.Job,
) -> Iterator[Event]:
    """Builds the model anew, trains it, and then looks at what needs no clock."""
    began = time.perf_counter()
    timer: StepTimer[Any] = StepTimer(clock_of(device), activity, repeat, ranks.rank)
    trainer, feed = prepare(settings, ranks, device, activity, timer)
    parameters = list(trainer.workload.module.parameters())
    yield events.ModelBuilt(
        rank=ranks.rank,
        repeat=repeat,
        parameters=sum(p.numel() for p in parameters),
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        sample_shape=trainer.workload.sample_shape,
        tokens_per_sample=trainer.workload.sequence_length,
        seconds=time.perf_counter() - began,
    )
    activity.doing = "starting the data"
    with feed:
        refuse_short(settings, feed.batches_per_epoch)
        on_cpu = device.type == "cpu"  # a GPU's clocks are on record
        before = time_yardstick() if on_cpu else 0.0
        yield from train(trainer, feed, repeat, calendar(job)())
        if on_cpu:
            yield events.YardstickRead(rank=ranks.rank, repeat=repeat, seconds=(before + time_yardstick()) / 2)
        if repeat == 0:
            yield from inspect(trainer, feed, activity)


def profile_repeat(
    settings: TrainSettings,
    ranks: Ranks,
    device: torch.device,
    activity: Activity,
    repeat: int,
    job: events.Job,
) -> Iterator[Event]:
    """The same loop for as long as the profiler's schedule takes, and the traces it leaves."""
    profiling = settings.profiling
    if not profiling.keep_compile:
        settings = apply_overrides(settings, {"performance.compile": False})
    with TemporaryDirectory(prefix="gpubench-") as folder:
        timer: StepTimer[Any] = StepTimer(clock_of(device), activity, repeat, ranks.rank)
        loop: AbstractContextManager[Any] = nullcontext()
        recording = None
        if profiling.all_ranks or ranks.is_rank_zero:
            loop = recording = Recording(profiling, device, ranks.rank, Path(folder))
            timer = RecordedTimer(clock_of(device), activity, repeat, ranks.rank, recording)
        trainer, feed = prepare(settings, ranks, device, activity, timer)
        if recording and profiling.modules and not settings.performance.compile:
            annotate_modules(trainer.workload.module)
        activity.doing = "starting the data"
        try:
            with feed, loop:
                unit = steps_in_unit(settings, feed.batches_per_epoch)
                if recording:
                    recording.unit = unit
                yield from train(trainer, feed, repeat, calendar(job)(), unit * profiling.units)
        except Exception:
            yield from recorded(recording.files() if recording else [], ranks.rank, repeat)  # the cycles before it
            raise
        activity.doing = "handing over the trace"
        yield from recorded(recording.files() if recording else [], ranks.rank, repeat)


def prepare(
    settings: TrainSettings, ranks: Ranks, device: torch.device, activity: Activity, timer: StepTimer[Any]
) -> tuple[Trainer, Feed]:
    """The model ready to train, and its data."""
    assert settings.precision
    activity.doing = "building the model"
    workload = build(settings.model, settings.data, settings.seed)
    trainer = build_trainer(settings, ranks, device, workload, arithmetic(settings.precision, device), timer)
    activity.doing = "opening the data"
    return trainer, open_feed(settings, ranks, device, workload)


def open_feed(settings: TrainSettings, ranks: Ranks, device: torch.device, workload: Workload) -> Feed:
    dataset = open_dataset(
        settings.data,
        workload.task,
        workload.image_size or settings.data.image_size,
        workload.sequence_length or settings.data.sequence_length,
        workload.vocabulary,
        workload.classes,
    )
    batch_size = settings.training.batch_size
    assert batch_size
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
        channels_last=bool(settings.performance.channels_last),
    )
