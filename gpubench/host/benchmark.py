"""A benchmark from the host's side: which repeat of which run is next, and when there have been enough."""

import logging
import os
import signal
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from gpubench import devices, runs
from gpubench.calendar import calendar
from gpubench.configuration import Configuration
from gpubench.defaults import local_ranks
from gpubench.errors import GpubenchError, Interrupted, RunFailed
from gpubench.estimates import relative_half_width
from gpubench.events import Job
from gpubench.host.launch import Workers
from gpubench.host.peers import silence
from gpubench.host.recording import Recorder, S
from gpubench.ranks import launched_by_torchrun, machine
from gpubench.settings import Device, RepeatSettings, RunSettings
from gpubench.summary import Summary
from gpubench.telemetry import Telemetry

FLUSH_SECONDS = 1.0
ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""PyTorch reads the first of these that is set, and no other."""

log = logging.getLogger("gpubench.host.benchmark")


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    recorder: Recorder[Any]
    status: str
    summary: Summary
    error: GpubenchError | None


def run(
    recorders: Sequence[Recorder[Any]], watch: Callable[[Recorder[Any]], None], *, independent: bool = False
) -> list[Outcome]:
    """Runs every recorder's repeats, interleaved A B B A where there are several, and closes their directories.

    `watch` is called about ten times a second with the recorder in hand. An error ends all runs: what was measured is
    kept, and the error stands in every outcome it touched. Of `independent` runs one that fails leaves the others to
    go on, unless it is the first, which they are laid beside.
    """
    error: BaseException | None = None
    failures: dict[int, BaseException] = {}
    with _on_signals(_interrupt, signal.SIGTERM, signal.SIGHUP):  # a batch system's notice is as good as Ctrl-C
        try:
            _measure_all(recorders, watch, independent, failures)
        except KeyboardInterrupt as interrupt:
            error = _failure_before(interrupt) or Interrupted("interrupted", "what had been measured by then is kept")
        except BaseException as caught:
            error = caught
    with _on_signals(signal.SIG_IGN, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # impatience must not stop this
        if isinstance(error, RunFailed):
            for recorder in recorders:
                recorder.diagnose()  # what was recorded until then
        outcomes = []
        for recorder in recorders:
            own = failures.get(id(recorder))
            outcomes.append(_close(recorder, own if isinstance(own, GpubenchError) else error, own is not None))
    if launched_by_torchrun():  # it ends all ranks with the first that exits, and this one has yet to report
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if error and not isinstance(error, GpubenchError):
        raise error  # a bug: what was measured is kept all the same
    return outcomes


def _failure_before(interrupt: KeyboardInterrupt) -> RunFailed | None:
    """What had ended the run when the signal came. The host hangs up on the ranks of a run that has failed, and
    torchrun sends it SIGTERM once one of them has left: that is a consequence and not the cause."""
    before = interrupt.__context__
    while before and not isinstance(before, RunFailed):
        before = before.__context__
    return before if isinstance(before, RunFailed) else None


def _measure_all(
    recorders: Sequence[Recorder[Any]],
    watch: Callable[[Recorder[Any]], None],
    independent: bool,
    failures: dict[int, BaseException],
) -> None:
    """Every repeat, and what the recorded ones show. `failures` gets what happened in a recorder's own, by its id."""
    for recorder, repeats, profiled in schedule(recorders, failures):
        if id(recorder) in failures:
            continue
        try:
            measure(recorder, repeats, profiled, watch)
        except BaseException as error:
            failures[id(recorder)] = error
            if not independent or recorder is recorders[0] or not isinstance(error, RunFailed):
                raise
    for recorder in recorders:
        recorder.diagnose()


def open_runs(
    recorder: Callable[[Configuration[S], Sequence[str]], Recorder[S]],
    configurations: Sequence[Configuration[S]],
    argv: Sequence[str],
) -> list[Recorder[S]]:
    """A run directory for each; all or none goes on. Raises what `Recorder` does."""
    recorders: list[Recorder[S]] = []
    try:
        for configuration in configurations:
            recorders.append(recorder(configuration, argv))  # noqa: PERF401 - what was opened must be closed
    except BaseException as error:
        for opened in recorders:
            _close(opened, error, touched=False)
        raise
    for opened in recorders:
        others = [other.writer.path.name for other in recorders if other is not opened]
        opened.writer.update(interleaved_with=others)
    return recorders


def schedule(
    recorders: Sequence[Recorder[Any]], failures: Container[int] = ()
) -> Iterator[tuple[Recorder[Any], list[int], int | None]]:
    """Whose turn it is, with which repeats, and which one of them is recorded by the profiler: the last, if any.

    Fresh processes for each, or all at once in those of torchrun. `failures` may grow meanwhile, by the ids of
    recorders, for which no other is repeated.
    """
    if launched_by_torchrun():
        for recorder in recorders:
            recorder.writer.update(repeat_kind="in-process")
            number = recorder.settings.measurement.repeats
            yield recorder, list(range(number)), number if recorder.settings.profiling.enabled else None
        return
    number = 0
    while number == 0 or any(needs_more(one, number) for one in recorders if id(one) not in failures):
        for recorder in recorders if number % 2 == 0 else reversed(recorders):
            yield recorder, [number], None
        number += 1
    for recorder in recorders:
        if recorder.settings.profiling.enabled:
            yield recorder, [], number


def needs_more(recorder: Recorder[Any], done: int) -> bool:
    """Whether a run that has `done` repeats wants another; one that times nothing has no precision to reach."""
    measurement: RepeatSettings = recorder.settings.measurement
    if measurement.target_precision is None:
        return done < measurement.repeats
    throughputs = recorder.throughputs()  # sums up all steps, so only where it is asked for
    if done and not throughputs:
        return done < measurement.repeats
    if done >= measurement.max_repeats:
        return False
    half_width = relative_half_width("throughput", throughputs)
    return done < 2 or half_width is None or half_width > measurement.target_precision


def measure(
    recorder: Recorder[Any], repeats: list[int], profiled: int | None, watch: Callable[[Recorder[Any]], None]
) -> None:
    """Starts the workers of one or more repeats, and of the one to be profiled, and listens until they are done."""
    settings = recorder.settings
    wanted = settings.measurement.max_repeats if settings.measurement.target_precision else settings.measurement.repeats
    recorder.profiled = profiled
    if repeats:
        recorder.begin_repeat(repeats[0], wanted)
    else:
        recorder.begin_recorded()
    recorder.listen_to_log(True)
    job = Job(
        worker=recorder.worker,
        lighter=recorder.lighter,
        settings=settings.model_dump(mode="json"),
        repeats=repeats if profiled is None else [*repeats, profiled],
        profiled=profiled,
        clock=recorder.clock,
        machine=machine(),
        silence=silence(recorder.patience),
        samples=recorder.samples,
    )
    telemetry = Telemetry(_gpu_indices(settings), settings.measurement.telemetry_interval, calendar(job))
    try:
        with Workers(
            job,
            recorder.processes,
            thread_environment(settings),
            settings.measurement.stall_timeout,
            under_torchrun=launched_by_torchrun(),
        ) as workers:
            _listen(workers, recorder, telemetry, watch)
    finally:
        telemetry.close()
        recorder.listen_to_log(False)
    recorder.end_repeat()


def _listen(
    workers: Workers, recorder: Recorder[Any], telemetry: Telemetry, watch: Callable[[Recorder[Any]], None]
) -> None:
    flushed = 0.0
    watched: list[int] = []
    for event in workers.stream():
        if event is not None:
            recorder.take(event)
            continue
        if watched != workers.pids:
            watched = workers.pids
            telemetry.watch(watched)
        now = time.monotonic()
        if telemetry.due(now):
            recorder.sample(telemetry.sample())
        if now - flushed >= FLUSH_SECONDS:
            recorder.flush()
            flushed = now
        watch(recorder)
    recorder.sample(telemetry.sample())  # so that the energy counter is known at the window's end too


def thread_environment(settings: RunSettings) -> Mapping[str, str]:
    """What must be in a worker's environment before torch loads. The user's own OMP settings for threads give way to
    performance.cpu_threads, which says what is recorded."""
    threads = str(settings.performance.cpu_threads)
    variables = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": settings.performance.omp_wait_policy,
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",  # models come from configurations; nothing here may wait for a network
    }
    if settings.performance.expandable_segments:
        name = next((name for name in ALLOCATORS if name in os.environ), ALLOCATORS[-1])
        variables[name] = ",".join(filter(None, [os.environ.get(name), "expandable_segments:True"]))
    if settings.device is Device.cpu:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    if not launched_by_torchrun() and settings.distributed.world_size > 1:
        variables.setdefault("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    return variables


def _gpu_indices(settings: RunSettings) -> list[int]:
    if settings.device is not Device.cuda:
        return []
    gpus = devices.visible_gpus()[: local_ranks(settings)]
    return [gpu.index for gpu in gpus if gpu.index is not None]


def join(settings: RunSettings) -> NoReturn:
    """Makes this process, one of the user's own torchrun, a worker, to its end."""
    os.environ.update(thread_environment(settings))  # before torch loads

    from gpubench import worker

    worker.leave(worker.main())


def _close(recorder: Recorder[Any], error: BaseException | None, touched: bool) -> Outcome:
    """`touched` is whether the error happened in this recorder's repeat, rather than beside it."""
    status: str = runs.COMPLETED
    summary = recorder.summary()
    if error is None and (error := recorder.refutation(summary)):
        touched = True
    if error:
        status = runs.INTERRUPTED if isinstance(error, Interrupted) or not touched else runs.FAILED
    expected = error if isinstance(error, GpubenchError) else RunFailed(repr(error)) if error else None
    try:
        recorder.close(status, summary, expected)
    except RunFailed as broken:  # the disk is full, say: the figures can still be shown
        status, expected = runs.FAILED, expected or broken
        try:
            recorder.writer.finish(status, expected.record())
        except RunFailed as unsaid:
            log.warning("%s; its status may still be %r although the run has failed", unsaid, runs.RUNNING)
    return Outcome(recorder, status, summary, expected)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@contextmanager
def _on_signals(handler: Callable[..., None] | signal.Handlers, *numbers: signal.Signals) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)
