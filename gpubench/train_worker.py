"""What a worker of `gpubench train-bench` does: builds the model, trains it for each repeat, and says how it went."""

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from gpubench import distributed, events
from gpubench.calendar import calendar
from gpubench.channel import Activity
from gpubench.data import Feed, open_dataset
from gpubench.environment import capture_env_metadata
from gpubench.inspection import inspect
from gpubench.models import build
from gpubench.precision import arithmetic, refuse, set_float32_matmul
from gpubench.ranks import Ranks
from gpubench.settings import TrainSettings
from gpubench.timing import StepTimer, clock_of
from gpubench.training import Event, build_trainer, train
from gpubench.yardstick import time_yardstick


def work(job: events.Job, ranks: Ranks, store: Store | None, activity: Activity) -> Iterator[Event]:
    """Every repeat of the job, as events."""
    settings = TrainSettings.model_validate(job.settings)
    assert settings.device
    assert settings.precision
    if settings.performance.cpu_threads:
        torch.set_num_threads(settings.performance.cpu_threads)
    device = distributed.pick_device(settings.device, ranks)
    set_float32_matmul(settings.precision, settings.performance.matmul_precision)
    torch.backends.cudnn.benchmark = settings.performance.cudnn_benchmark
    refuse(settings.precision, device)
    distributed.setup_ddp(settings.distributed, ranks, store, device)
    if ranks.is_rank_zero:
        yield events.EnvironmentCaptured(rank=0, environment=capture_env_metadata())
    for repeat in job.repeats:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        yield from run_repeat(settings, ranks, device, activity, repeat, job)
    # Not after an error: leaving the group can wait for ranks that will never come, before the error is told.
    distributed.cleanup_ddp()


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
    activity.doing = "building the model"
    workload = build(settings.model, settings.data, settings.seed)
    activity.doing = "opening the data"
    dataset = open_dataset(
        settings.data,
        workload.task,
        workload.image_size or settings.data.image_size,
        workload.sequence_length or settings.data.sequence_length,
        workload.vocabulary,
        workload.classes,
    )
    timer: StepTimer[Any] = StepTimer(clock_of(device), activity, repeat, ranks.rank)
    assert settings.precision
    rules = arithmetic(settings.precision, device)
    trainer = build_trainer(settings, ranks, device, workload, rules, timer)
    parameters = list(workload.module.parameters())
    yield events.ModelBuilt(
        rank=ranks.rank,
        repeat=repeat,
        parameters=sum(p.numel() for p in parameters),
        trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        sample_shape=workload.sample_shape,
        tokens_per_sample=workload.sequence_length,
        seconds=time.perf_counter() - began,
    )
    activity.doing = "starting the data"
    batch_size = settings.training.batch_size
    assert batch_size
    torch.manual_seed(settings.seed + ranks.rank)
    with Feed(
        settings.data,
        dataset,
        workload.make_batch,
        batch_size,
        ranks.rank,
        ranks.world_size,
        settings.seed,
        device,
        channels_last=bool(settings.performance.channels_last),
    ) as feed:
        on_cpu = device.type == "cpu"  # a GPU's clocks are on record
        before = time_yardstick() if on_cpu else 0.0
        yield from train(trainer, feed, repeat, calendar(job)())
        if on_cpu:
            yield events.YardstickRead(rank=ranks.rank, repeat=repeat, seconds=(before + time_yardstick()) / 2)
        if repeat == 0:
            yield from inspect(trainer, feed, activity)
