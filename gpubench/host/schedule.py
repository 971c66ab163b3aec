"""Runs a benchmark: chooses which repeat of which run is next, and when the runs end."""

import logging
import signal
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from gpubench.channel import calendar
from gpubench.errors import GpubenchError, Interrupted, ProgramFailed, RunDirectoryLost, RunFailed
from gpubench.host import order as orders
from gpubench.host import signals
from gpubench.host.launch import Workers
from gpubench.host.recorder import Recorder, S
from gpubench.host.sampler import Telemetry
from gpubench.probe.length import Length
from gpubench.ranks import launched_by_torchrun
from gpubench.runs import directory
from gpubench.runs.summary import Summary, relative_half_width
from gpubench.settings.loading import Configuration
from gpubench.settings.sections import RepeatSettings

FLUSH_SECONDS = 1.0
AIM = 36.0
"""The time that the steps of all repeats take where their number is open, in seconds. With the start of their processes
a measurement takes about a minute."""
MOST_EACH = 12.0
"""The largest part of it that one repeat takes: a third."""

EXPECTED = 12
"""The repeats among which the time is shared where it is decided on the way how many there are."""

log = logging.getLogger("gpubench.host.schedule")

Order = Sequence[int] | Callable[[Sequence[Recorder[Any]]], Iterator[int]]
"""The number of a recorder for each repeat to make, in this order, or a function that yields them one after the other.

The function chooses by what the recorders have so far, because a number is taken when the repeat before it has ended.
"""


@dataclass(frozen=True)
class Outcome:
    """A finished run, with the error that ended it, if any."""

    recorder: Recorder[Any]
    status: str
    summary: Summary
    error: GpubenchError | None


def run(
    recorders: Sequence[Recorder[Any]],
    watch: Callable[[Recorder[Any]], None],
    *,
    independent: bool = False,
    order: Order = (),
) -> list[Outcome]:
    """Runs all repeats of the recorders, and closes their directories. Several runs are interleaved.

    `watch` is called about ten times a second with the current recorder. An error ends all runs; the measurements so
    far are kept, and every outcome that it affects has the error. With `independent`, a failed run does not end the
    others, unless it is the first one, which the others are compared with. `order` has the number of a recorder for
    each repeat, in the order to run them in; then no failed run ends the others.
    """
    error: BaseException | None = None
    failures: dict[int, BaseException] = {}
    with signals.end_the_run():
        try:
            _measure_all(recorders, watch, independent, order, failures)
        except KeyboardInterrupt as interrupt:
            error = _failure_before(interrupt) or Interrupted("interrupted", _kept(recorders))
        except BaseException as caught:
            error = caught
    with signals.ignored():  # a second Ctrl-C must not interrupt the closing
        if isinstance(error, RunFailed):
            for recorder in recorders:
                recorder.diagnose(failed=True)  # from the traces recorded so far
        outcomes = []
        elsewhere = next((recorder.elsewhere for recorder in recorders if recorder.elsewhere), None)
        for recorder in recorders:
            recorder.elsewhere = elsewhere  # also of those that have not been run before an error
            own = failures.get(id(recorder))
            outcomes.append(_close(recorder, own if isinstance(own, GpubenchError) else error, own is not None))
    if launched_by_torchrun():  # torchrun ends all ranks when one has exited, but this one still has to report
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if error and not isinstance(error, GpubenchError):
        raise error  # a bug; the measurements are kept
    return outcomes


def _kept(recorders: Sequence[Recorder[Any]]) -> str:
    """The hint of an interruption: what the run directories keep, if anything was measured by then."""
    if any(recorder.has_results for recorder in recorders):
        return "the run directory keeps the results so far"
    return "nothing was measured yet: start it again"


def _failure_before(interrupt: KeyboardInterrupt) -> RunFailed | None:
    """The failure that had ended the run before the signal arrived, or None.

    When a run fails, the host closes its connections, the ranks exit, and torchrun sends SIGTERM to the host. The
    signal is then a consequence of the failure and not its cause.
    """
    before = interrupt.__context__
    while before and not isinstance(before, RunFailed):
        before = before.__context__
    return before if isinstance(before, RunFailed) else None


def _measure_all(
    recorders: Sequence[Recorder[Any]],
    watch: Callable[[Recorder[Any]], None],
    independent: bool,
    order: Order,
    failures: dict[int, BaseException],
) -> None:
    """Runs every repeat, then diagnoses the profiled ones. Adds the error of a recorder to `failures`, by its id()."""
    places: set[str | None] = set()
    _share_time([recorder for recorder in recorders if recorder.is_open], EXPECTED if callable(order) else len(order))
    for recorder, repeats, profiled in schedule(recorders, failures, order):
        if id(recorder) in failures:
            continue
        if recorder.is_open and recorder.length is None:
            recorder.length = _length_of_others(recorder, recorders)
        recorder.ends = None if order else expected_end(recorders, time.monotonic())
        try:
            measure(recorder, repeats, profiled, watch)
        except BaseException as error:
            failures[id(recorder)] = error
            recorder.has_failed = True
            if order:
                ends_all = not isinstance(error, GpubenchError)
            else:
                ends_all = not independent or recorder is recorders[0] or not isinstance(error, RunFailed)
            if ends_all:
                raise
        places.add(recorder.elsewhere)
        if len(places) > 1:
            raise ProgramFailed(
                "rank 0 was on different machines in two repeats, so that each has a part of the results",
                "torchrun --node-rank N --master-addr HOST in place of a rendezvous keeps it on machine 0",
            )
    for recorder in recorders:
        recorder.diagnose()


def _share_time(recorders: Sequence[Recorder[Any]], runs: int) -> None:
    """Shares the time among all repeats of runs whose number of steps is open. `runs` is the number of repeats to make,
    0 if it is that of the settings.

    A repeat takes as long with a target precision as without: only their number is then open as well.
    """
    repeats = runs or sum(recorder.settings.measurement.repeats for recorder in recorders)
    for recorder in recorders:
        recorder.seconds_each = min(AIM / repeats, MOST_EACH)


def expected_end(recorders: Sequence[Recorder[Any]], now: float) -> float | None:
    """The time at which all repeats should have ended, if each takes the mean time of those made so far.

    None before the first one has ended, and where their number depends on the results.
    """
    took = [seconds for recorder in recorders for seconds in recorder.seconds]
    settings = [recorder.settings for recorder in recorders]
    if not took or launched_by_torchrun() or any(each.measurement.target_precision for each in settings):
        return None
    planned: int = sum(each.measurement.repeats + each.profiling.enabled for each in settings)
    return now + max(1, planned - len(took)) * fmean(took)


def _length_of_others(recorder: Recorder[Any], recorders: Sequence[Recorder[Any]]) -> Length | None:
    """The length of the repeats of an interleaved run that takes steps of the same size; None if none has one.

    So both sides of a comparison have the same steps, also where the time of a step depends on its number.
    """
    return next((other.length for other in recorders if other.length and other.scale == recorder.scale), None)


def open_runs(
    recorder: Callable[[Configuration[S], Sequence[str]], Recorder[S]],
    configurations: Sequence[Configuration[S]],
    argv: Sequence[str],
) -> list[Recorder[S]]:
    """Opens a run directory for each configuration. If one fails, closes the others and raises the error."""
    recorders: list[Recorder[S]] = []
    try:
        for configuration in configurations:
            recorders.append(recorder(configuration, argv))  # noqa: PERF401 - open ones must be closed after an error
    except BaseException as error:
        for opened in recorders:
            _close(opened, error, is_own=False)
        raise
    for opened in recorders:
        others = [other.writer.path.name for other in recorders if other is not opened]
        opened.writer.update(interleaved_with=others)
    return recorders


def schedule(
    recorders: Sequence[Recorder[Any]], failures: Container[int] = (), order: Order = ()
) -> Iterator[tuple[Recorder[Any], list[int], int | None]]:
    """Yields (recorder, repeats to measure, repeat to profile or None) in the order in which they run.

    Each repeat has new processes, except under the user's own torchrun, where all repeats of a run share its processes.
    `failures` has the id() of each failed recorder, which gets no more repeats, and may grow during the iteration.
    `order` has the number of a recorder for each repeat; by default all repeats are interleaved in rounds.
    """
    if launched_by_torchrun():
        for recorder in recorders:
            recorder.writer.update(repeat_kind="in-process")
            number = recorder.settings.measurement.repeats
            yield recorder, list(range(number)), number if recorder.settings.profiling.enabled else None
        return
    made = [0] * len(recorders)
    places = order(recorders) if callable(order) else order
    for place in places or _interleaved(recorders, failures):
        yield recorders[place], [made[place]], None
        made[place] += 1
    for recorder, number in zip(recorders, made, strict=True):
        if recorder.settings.profiling.enabled:
            yield recorder, [], number


def _interleaved(recorders: Sequence[Recorder[Any]], failures: Container[int]) -> Iterator[int]:
    """Yields the number of a recorder for each repeat, until none of them needs more."""
    for number, places in enumerate(orders.rounds(recorders)):
        if number and not any(needs_more(each, number) for each in recorders if id(each) not in failures):
            return
        yield from places


def needs_more(recorder: Recorder[Any], done: int) -> bool:
    """Whether a run needs another repeat after `done`. The target precision applies to runs with step times."""
    measurement: RepeatSettings = recorder.settings.measurement
    if measurement.target_precision is None:
        return done < measurement.repeats
    throughputs = recorder.throughputs()  # called only when needed, because it summarises all steps
    if done and not throughputs:
        return done < measurement.repeats
    if done >= measurement.max_repeats:
        return False
    half_width = relative_half_width("throughput", throughputs)
    return done < 2 or half_width is None or half_width > measurement.target_precision


def measure(
    recorder: Recorder[Any], repeats: list[int], profiled: int | None, watch: Callable[[Recorder[Any]], None]
) -> None:
    """Runs the workers for `repeats` and for the repeat to profile, and records their events."""
    measurement = recorder.settings.measurement
    planned = measurement.max_repeats if measurement.target_precision else measurement.repeats
    recorder.profiled = profiled
    if repeats:
        recorder.begin_repeat(repeats[0], planned)
    else:
        recorder.begin_recorded()
    recorder.listen_to_log(True)
    job = recorder.job(repeats)
    watched = [gpu.index for gpu in recorder.watched_gpus if gpu.index is not None]
    telemetry = Telemetry(watched, measurement.telemetry_interval, calendar(job))
    began = time.monotonic()
    try:
        with recorder.start(job) as workers:
            _listen(workers, recorder, telemetry, watch)
        for event in workers.news():
            recorder.take(event)
    finally:
        telemetry.close()
        recorder.listen_to_log(False)
        recorder.seconds.append(time.monotonic() - began)
    recorder.end_repeat()


def _listen(
    workers: Workers, recorder: Recorder[Any], telemetry: Telemetry, watch: Callable[[Recorder[Any]], None]
) -> None:
    flushed = 0.0
    watched: list[int] = []
    place = ""  # differs from every place, so that the first sample is taken before the workers use the GPUs
    for event in workers.stream():
        if event is not None:
            recorder.take(event)
            continue
        if watched != workers.pids:
            watched = workers.pids
            telemetry.watch(watched)
        now = time.monotonic()
        is_new_place = recorder.progress.place != place
        if is_new_place or telemetry.due(now):
            place = recorder.progress.place
            recorder.sample(telemetry.sample(processes=is_new_place))
        if now - flushed >= FLUSH_SECONDS:
            recorder.flush()
            flushed = now
        watch(recorder)
    recorder.sample(telemetry.sample(processes=True))  # energy needs a reading at the end of the window


def _close(recorder: Recorder[Any], error: BaseException | None, is_own: bool) -> Outcome:
    """`is_own` is whether the error occurred in a repeat of this run, and not of another one."""
    status: str = directory.COMPLETED
    summary = recorder.summary()
    if error is None and (error := recorder.refutation(summary)):
        is_own = True
    if error:
        status = directory.INTERRUPTED if isinstance(error, Interrupted) or not is_own else directory.FAILED
    expected = error if isinstance(error, GpubenchError) else RunFailed(repr(error)) if error else None
    try:
        recorder.close(status, summary, expected)
    except RunFailed as failure:  # for example a full disk; the results can still be shown
        status, expected = directory.FAILED, expected or failure
        try:
            recorder.writer.finish(status, expected.record())
        except RunDirectoryLost:
            pass  # as the error says
        except RunFailed as failure:
            log.warning("%s; run.json may still say %r although the run has failed", failure, directory.RUNNING)
    return Outcome(recorder, status, summary, expected)
