"""The worker process: connects to the host, receives a job, does it, and reports failures."""

import atexit
import faulthandler
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import NamedTuple, NoReturn

import torch
from torch._C._distributed_c10d import Store

from gpubench import events, units
from gpubench.channel import ADDRESS_VARIABLE, EVERYONE, HOST_GONE, Activity, Channel
from gpubench.errors import GpubenchError, HostLost, OutOfMemory
from gpubench.logs import fields_of
from gpubench.ranks import Ranks
from gpubench.worker import distributed
from gpubench.worker.distributed import HOST_ADDRESS


class Assignment(NamedTuple):
    """One rank's part of a job."""

    job: events.Job
    ranks: Ranks
    store: Store | None
    """The rendezvous store; None for a single rank."""
    activity: Activity
    """The current activity of this rank."""
    tell: Callable[[events.Message], None]
    """Sends an event to the host at once; threads may call it."""

    def carry_out(self) -> Iterator[events.Message]:
        """Does the job and yields its events. The job's module is imported only now: training needs no diffusers."""
        self.activity.enter("importing the libraries of the run")
        work: Callable[[Assignment], Iterator[events.Message]] = import_module(self.job.worker).work
        return work(self)


FLUSH_SECONDS = 0.2
RENDEZVOUS_SECONDS = 600.0  # for ranks that torchrun has started: they import torch from disks of different speed

log = logging.getLogger("gpubench.worker")


def main() -> int:
    """Runs this process as one rank, and returns its exit code."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    ranks, activity = Ranks.from_environment(), Activity()
    activity.enter("connecting to the other ranks", waits_for=EVERYONE if ranks.world_size > 1 else None)
    try:
        channel, job, store = report_to_host(ranks, activity)
    except HostLost as lost:  # there is no host that could print the error
        print(f"error: {lost}\nhint: {lost.hint}", file=sys.stderr)
        return HOST_GONE
    _log_through(channel)
    try:
        for event in Assignment(job, ranks, store, activity, channel.send).carry_out():
            channel.put(event)
            channel.flush(FLUSH_SECONDS if isinstance(event, events.StepsMeasured | events.SpansMeasured) else 0.0)
        channel.close()
    except (Exception, SystemExit) as error:  # a model of the user may call sys.exit
        channel.fail(failure(error, ranks, activity, job.lighter))
        return 1
    finally:
        sys.stdout.flush()
    return 0


def report_to_host(ranks: Ranks, activity: Activity) -> tuple[Channel, events.Job, Store | None]:
    """Connects to the host, and returns the channel, the job and the rendezvous store, None for a single rank.

    The address of the host is in the environment. Ranks that the user's own torchrun has started find it in the
    rendezvous store, where rank 0 has put it. Raises HostLost if the host is unreachable or refuses this rank.
    """
    address = os.environ.get(ADDRESS_VARIABLE)
    if address:
        channel, job = Channel.connect(address, ranks.rank, ranks.world_size, activity)
        store = distributed.open_store(ranks, distributed.UNLIMITED.total_seconds())  # the host names who is late
        if store and ranks.is_rank_zero:
            store.set(HOST_ADDRESS, address)
    else:
        store = distributed.open_store(ranks, RENDEZVOUS_SECONDS)
        assert store
        channel, job = Channel.connect(store.get(HOST_ADDRESS).decode(), ranks.rank, ranks.world_size, activity)
    return channel, job, store


def failure(error: BaseException, ranks: Ranks, activity: Activity, lighter: str) -> events.Failed:
    """The event that reports `error` to the host. An unexpected error keeps its traceback."""
    expected = isinstance(error, GpubenchError)
    if not expected and is_out_of_memory(error):
        error = out_of_memory(error, activity, lighter)
        expected = True
    unexpected = ": ".join(filter(None, [f"{type(error).__name__} in {_where(activity)}", gist(error)]))
    return events.Failed(
        rank=ranks.rank,
        kind=type(error).__name__,
        message=str(error) if expected else unexpected,
        hint=error.hint if isinstance(error, GpubenchError) else "run.log holds the traceback",
        traceback="".join(traceback.format_exception(error)),
        doing=activity.doing,
        step=activity.step,
        secondary=distributed.is_broken_collective(error),
    )


def _where(activity: Activity) -> str:
    """The current activity in words, such as "backward of step 3"."""
    return units.words(activity.doing) + ("" if activity.step is None else f" of step {activity.step}")


def gist(error: BaseException) -> str:
    """The most informative line of an exception's text.

    It is the first line, except for an exception in a DataLoader worker, whose text has the traceback before the
    message: then it is the last one.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return ""
    return lines[-1] if lines[0].startswith("Caught ") else lines[0]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means that CPU or device memory is exhausted."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    signs = ("can't allocate memory", "out of memory", "_STATUS_ALLOC_FAILED")  # CPU allocator; driver; cuBLAS, cuDNN
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def out_of_memory(error: BaseException, activity: Activity, lighter: str) -> OutOfMemory:
    """Makes an error with the activity in which it occurred and the peak memory; `lighter` is its hint."""
    where = _where(activity)
    peak = ""
    if torch.cuda.is_available():
        allocated, free = torch.cuda.max_memory_allocated(), torch.cuda.mem_get_info()
        peak = f"; peak allocated {units.size(allocated)} of {units.size(free[1])}"
    first_line = (str(error).splitlines() or ["no memory left"])[0]
    return OutOfMemory(f"out of memory in {where}{peak}: {first_line}", lighter)


class _ToHost(logging.Handler):
    """A log handler that sends records to the host."""

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
    """Makes all log records of gpubench, and warnings, go to the host."""
    root = logging.getLogger("gpubench")
    root.setLevel(1)
    root.propagate = False
    root.addHandler(_ToHost(channel))
    logging.captureWarnings(True)


def leave(code: int) -> NoReturn:
    """Ends the process after its work is done and reported.

    It runs Python's atexit functions, because a model of the user may have registered some. It does not run the
    destructors of C++, which take half a second: with several ranks on gloo, torch 2.13 sometimes aborts in them
    ("terminate called without an active exception", one exit in five on a busy machine), and torchrun then reports that
    the run has failed.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
