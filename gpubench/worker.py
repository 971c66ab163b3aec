"""The worker process: meets the others, asks the host what to do, does it, and says what went wrong, if anything."""

import faulthandler
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch._C._distributed_c10d import Store

from gpubench import distributed, events
from gpubench.channel import ADDRESS_VARIABLE, Activity, Channel
from gpubench.data import Feed, open_dataset
from gpubench.distributed import HOST_ADDRESS
from gpubench.environment import capture_env_metadata
from gpubench.errors import GpubenchError, OutOfMemory
from gpubench.inspection import inspect
from gpubench.logs import fields_of
from gpubench.models import build
from gpubench.precision import arithmetic, refuse, set_float32_matmul
from gpubench.ranks import Ranks
from gpubench.settings import TrainSettings
from gpubench.timing import StepTimer, clock_of
from gpubench.training import Event, build_trainer, train
from gpubench.yardstick import time_yardstick

FLUSH_SECONDS = 0.2
MEET_SECONDS = 120.0

log = logging.getLogger("gpubench.worker")


def main() -> int:
    """Runs this process as one rank. The host is named by the environment, or for ranks of the user's own torchrun by
    rank 0 through the rendezvous store."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    ranks, activity = Ranks.from_environment(), Activity()
    activity.doing = "meeting the other ranks"
    address = os.environ.get(ADDRESS_VARIABLE)
    store = None
    if address:
        channel, job = Channel.connect(address, ranks.rank, ranks.world_size, activity)
        store = distributed.meet(ranks, MEET_SECONDS)
        if store and ranks.is_rank_zero:
            store.set(HOST_ADDRESS, address)
    else:
        store = distributed.meet(ranks, MEET_SECONDS)
        assert store
        channel, job = Channel.connect(store.get(HOST_ADDRESS).decode(), ranks.rank, ranks.world_size, activity)
    _log_through(channel)
    try:
        for event in work(job, ranks, store, activity):
            channel.put(event)
            channel.flush(FLUSH_SECONDS if isinstance(event, events.StepsMeasured) else 0.0)
        channel.close()
    except (Exception, SystemExit) as error:  # a model of the user's own may call sys.exit
        channel.fail(explain(error, ranks, activity))
        return 1
    finally:
        sys.stdout.flush()
    return 0


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
        yield from train(trainer, feed, repeat, calendar(job))
        if on_cpu:
            yield events.YardstickRead(rank=ranks.rank, repeat=repeat, seconds=(before + time_yardstick()) / 2)
        if repeat == 0:
            yield from inspect(trainer, feed, activity)


def calendar(job: events.Job) -> float:
    """Now, in seconds since the epoch: on the host's machine by the host's clock, whatever NTP has done since."""
    if job.host != socket.gethostname():
        return time.time()
    unix, monotonic = job.clock
    return unix + time.monotonic() - monotonic


def explain(error: BaseException, ranks: Ranks, activity: Activity) -> events.Failed:
    """What the host needs to tell the user. An error that nobody foresaw keeps its traceback."""
    expected = isinstance(error, GpubenchError)
    if not expected and is_out_of_memory(error):
        error = out_of_memory(error, activity)
        expected = True
    where = activity.doing.replace("_", " ") + ("" if activity.step is None else f" of step {activity.step}")
    return events.Failed(
        rank=ranks.rank,
        kind=type(error).__name__,
        message=str(error)
        if expected
        else ": ".join(filter(None, [f"{type(error).__name__} in {where}", gist(error)])),
        hint=error.hint if isinstance(error, GpubenchError) else "run.log holds the traceback",
        traceback="".join(traceback.format_exception(error)),
        doing=activity.doing,
        step=activity.step,
        secondary=distributed.is_broken_collective(error),
    )


def gist(error: BaseException) -> str:
    """The one line of an exception that says most: the first, or of one that DataLoader brought from its worker the
    last, above which it put the whole traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return ""
    return lines[-1] if lines[0].startswith("Caught ") else lines[0]


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    signs = (
        "can't allocate memory",
        "out of memory",
        "_STATUS_ALLOC_FAILED",
    )  # CPU allocator; driver; cuBLAS and cuDNN
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def out_of_memory(error: BaseException, activity: Activity) -> OutOfMemory:
    where = activity.doing.replace("_", " ") + ("" if activity.step is None else f" of step {activity.step}")
    peak = ""
    if torch.cuda.is_available():
        allocated, free = torch.cuda.max_memory_allocated(), torch.cuda.mem_get_info()
        peak = f"; peak allocated {allocated / 2**30:.2f} GiB of {free[1] / 2**30:.2f} GiB"
    first_line = (str(error).splitlines() or ["no memory left"])[0]
    return OutOfMemory(
        f"out of memory in {where}{peak}: {first_line}",
        "try a smaller --batch-size with training.grad_accumulation, --precision bf16, or "
        "--model.activation_checkpointing=true",
    )


class _ToHost(logging.Handler):
    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + "".join(traceback.format_exception(*record.exc_info))
        self._channel.put(
            events.Log(
                rank=self._channel.rank,
                time=record.created,
                level=record.levelno,
                logger=record.name,
                message=message,
                fields=fields_of(record),
            )
        )


def _log_through(channel: Channel) -> None:
    root = logging.getLogger("gpubench")
    root.setLevel(1)
    root.propagate = False
    root.addHandler(_ToHost(channel))
    logging.captureWarnings(True)


def leave(code: int) -> NoReturn:
    """Ends the process, its work being done and told.

    One of several ranks leaves without C++'s farewell: torch 2.13 was seen to abort there with gloo ("terminate called
    without an active exception", one in five on a busy machine), and torchrun then calls the whole run failed.
    """
    if Ranks.from_environment().world_size == 1:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
