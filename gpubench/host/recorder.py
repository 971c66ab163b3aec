"""Records the events of one run's workers: in the run directory at once, and in memory for the summary."""

import logging
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from gpubench import devices, events, git, units
from gpubench.configs import presets
from gpubench.diagnosis.case import ReadyData
from gpubench.diagnosis.rules import Diagnosis, of_run
from gpubench.errors import DataError, GpubenchError, InvalidEvent, RunFailed
from gpubench.findings import Findings
from gpubench.host.launch import Workers, worker_environment
from gpubench.host.loggers import MetricLogger, RunLog
from gpubench.host.supervision import silence
from gpubench.logs import CHOICES, MODIFIABLE, NOTIMPORTANT, render_logfmt
from gpubench.metrics import Metric
from gpubench.probe.length import Length
from gpubench.ranks import launched_by_torchrun, machine
from gpubench.registry import kind_of
from gpubench.runs import warnings
from gpubench.runs.directory import (
    ENVIRONMENT,
    FAILED,
    FINDINGS,
    LOG,
    PROFILE,
    TELEMETRY,
    TRACE_FILES,
    TRACES,
    RunWriter,
)
from gpubench.runs.levels import ChangedLevel
from gpubench.runs.other_load import other_load
from gpubench.runs.summary import Environment, Summary, write_summary
from gpubench.sampled import SampledCode
from gpubench.settings import identity
from gpubench.settings.defaults import has_gpu_each, local_ranks
from gpubench.settings.field import fields, setting
from gpubench.settings.keys import FILLED_IN, flatten, is_elsewhere
from gpubench.settings.loading import Configuration, idle
from gpubench.settings.schema import CompletedSettings, Device
from gpubench.telemetry import TelemetrySample, of_gpus, sampling
from gpubench.trace.profile import shares

LARGE_TRACE = 100 * 2**20  # bytes, compressed
COMPRESSION = 10  # a trace is at least this many times larger uncompressed, and viewers fail on large traces
SMALLER = "lower profiling.active, or turn off profiling.with_stack, profiling.record_shapes or profiling.modules"

log = logging.getLogger("gpubench.run")

S = TypeVar("S", bound=CompletedSettings)
T = TypeVar("T")


@dataclass
class Progress:
    """The progress of a run, for the live view."""

    repeat: int = 0
    repeats: int = 1
    ranks: int = 1
    variant: str = ""
    """The name of the run among those that it is interleaved with, such as "data.workers=2"; empty for a run alone."""
    round: str = ""
    """The round of the repeat, such as "round 2 of at most 30"; empty where repeats are numbered."""
    doing: str = "starting"
    telemetry: TelemetrySample | None = None
    recorded: bool = False
    """Whether the profiler records this repeat. Such a repeat is not measured."""
    ends: float | None = None
    """When the repeats of all runs should have ended, by the durations so far, on the monotonic clock; None if that is
    unknown."""

    @property
    def place(self) -> str:
        """The name of the current repeat, such as "data.workers=2, repeat 2 of 5"."""
        repeat = "profiling" if self.recorded else self.round or f"repeat {self.repeat + 1} of {self.repeats}"
        return f"{self.variant}, {repeat}" if self.variant else repeat


class Recorder(ABC, Generic[S]):
    """One run of any command: its directory, its metrics and its results so far."""

    lighter: ClassVar[str]
    """The hint for a run that has run out of memory."""
    progress: Progress
    samples: list[int] | None = None
    """The numbers of the samples to make, for a command that makes single samples; None for all."""
    profiled: int | None = None
    """The number of the repeat that torch.profiler records, which is not measured; None if there is none."""
    ends: float | None = None
    """`Progress.ends` of the repeats to come."""
    round: str = ""
    """`Progress.round` of the repeats to come."""
    order_seed: int | None = None
    """The seed of the order in which this run and those that it is interleaved with take turns; None before it is
    drawn."""
    elsewhere: str | None = None
    """The name of the machine whose host records the run of a program, if it is not this one."""
    is_spread = False
    """Whether a program has ranks on several machines."""
    has_failed = False
    """Whether a repeat has failed, perhaps after its last measurement."""
    seconds_each: float | None = None
    """The time that the steps of a repeat may take, if their number is open; None if it is set."""
    length: Length | None = None
    """The length of every repeat, once it is known."""
    diagnosis: Diagnosis | None = None
    """The diagnosis from the traces; None until there is one."""

    def __init__(self, configuration: Configuration[S], argv: Sequence[str]) -> None:
        """Creates the run directory of a complete configuration.

        Raises RunDirectoryError if that fails, and UsageError if a tracker cannot start.
        """
        settings, text = configuration.settings, configuration.to_yaml()
        self.settings = settings
        self.origins = configuration.origins
        self.variant = configuration.labels.variant or ""
        self._values = flatten(settings.model_dump(mode="json"))
        """The settings by dot-key, as run.json has them, with those that the ranks have decided."""
        self._git = self._code()
        # All repeats use it, even if the wall clock is changed during the run.
        self.clock = time.time(), time.monotonic()
        self.environment: dict[str, Any] = {}
        self.telemetry: list[TelemetrySample] = []
        """The samples of all watched GPUs."""
        self._listed: list[events.GpuFacts] = []
        """The GPUs that rank 0 sees."""
        self._used: defaultdict[int, set[str]] = defaultdict(set)
        """The digits of the uuids of the GPUs that each rank has used, for the ranks that know them."""
        self._sampled: dict[int, SampledCode] = {}
        """The samples of the program's own code in the repeat that is recorded, by rank."""
        self.seconds: list[float] = []
        """The time of each repeat, with the start and the end of its processes."""
        self.writer = RunWriter(
            settings.results,
            settings.experiment,
            text,
            command=self.command,
            argv=argv,
            world_size=self.processes,
            git=self._git,
            settings=self._values,
            chosen=[key for key, origin in configuration.origins.items() if origin.startswith(FILLED_IN)],
            variant=identity.label_of(configuration),
            asked=identity.asked(configuration),
            name=configuration.labels.name,
            tags=configuration.labels.tags,
        )
        self._handler = RunLog(self.writer, logging.getLevelName(settings.logging.level))
        try:
            self.metrics = MetricLogger(self.writer, settings.logging, self._values, text)
        except GpubenchError as error:
            self.writer.finish(FAILED, error.record())
            raise
        self.listen_to_log(True)
        say_choices(configuration)
        say_idle(configuration)
        self.listen_to_log(False)

    @property
    def command(self) -> str:
        """The command that run.json names, which says what kind of run it is."""
        return self.settings.command

    def _code(self) -> dict[str, Any] | None:
        """The state of the code that is measured; None if it is in no repository."""
        return git.state(self.directory)

    @property
    def code(self) -> Mapping[str, Any] | None:
        """The state of the code that is measured, as run.json has it; None if it is in no repository."""
        return self._git

    @property
    def is_open(self) -> bool:
        """Whether the number of steps of a repeat is not set, and follows from the time that they take."""
        return False

    @property
    def scale(self) -> dict[str, Any]:
        """The settings that decide how much is computed at a time, by dot-key."""
        declared = fields(type(self.settings))
        return {key: self._values[key] for key, each in declared.items() if setting(each).role == "scale"}

    def listen_to_log(self, listening: bool) -> None:
        """Starts or stops writing the host's own log lines to this run's run.log."""
        root = logging.getLogger("gpubench")
        (root.addHandler if listening else root.removeHandler)(self._handler)

    @abstractmethod
    def at_start(self) -> Progress:
        """The progress of a repeat that begins."""

    def begin_repeat(self, number: int, repeats: int) -> None:
        """Begins repeat `number` of `repeats`, in a new process or in the current one."""
        then = self.progress
        begun = replace(self.at_start(), repeat=number, repeats=repeats, variant=self.variant)
        self.progress = replace(begun, round=self.round, ends=self.ends, telemetry=then.telemetry)

    def begin_recorded(self) -> None:
        """Begins the repeat that the profiler records, in a new process."""
        self.begin_repeat(self.progress.repeat, self.progress.repeats)
        self.progress.recorded = True

    def turn_to(self, repeat: int) -> None:
        """Makes `repeat` the current one.

        Under torchrun all repeats run in the same processes, and only the events show which repeat is running.
        """
        if repeat == self.profiled:
            if not self.progress.recorded:
                self.begin_recorded()
        elif repeat != self.progress.repeat:
            self.begin_repeat(repeat, self.progress.repeats)

    @staticmethod
    def content(rank: int, data: bytes | bytearray, type_: type[T]) -> T:
        """Decodes the JSON in an event of `rank`. Raises InvalidEvent if it is of another type."""
        try:
            return events.parse(data, type_)
        except msgspec.DecodeError as error:
            raise InvalidEvent.of(rank, error) from None

    def refuse_unknown(self, rank: int, repeat: int) -> None:
        """Raises InvalidEvent if the run has no such rank or repeat."""
        measurement = self.settings.measurement
        planned = measurement.max_repeats if measurement.target_precision else measurement.repeats
        if not 0 <= rank < self.processes:
            raise InvalidEvent.of(rank, f"the run has {units.counted(self.processes, 'rank')}")
        if repeat >= max(planned, self.progress.repeat + 1) and repeat != self.profiled:
            raise InvalidEvent.of(rank, f"it is of repeat {repeat + 1}, which the run does not have")

    @abstractmethod
    def keep(self, event: events.Message) -> bool:
        """Keeps an event of this command. Returns False if the command has no use for this kind of event."""

    @abstractmethod
    def completed(self) -> int: ...

    @abstractmethod
    def sum_up(self) -> Summary:
        """The summary of the repeats so far, without the warnings that need the run's environment."""

    @property
    def has_results(self) -> bool:
        """Whether anything was measured so far."""
        found = self.sum_up()
        return kind_of(self.command).is_measured(metrics=bool(found.metrics), steady=bool(found.steady))

    def summary(self) -> Summary:
        """The complete summary of the repeats so far."""
        found, wanted = self.sum_up(), self.settings.measurement
        throughput, known = found.get("throughput"), flatten(self.environment)
        beside = other_load(
            self.own_telemetry,
            [(window.start, window.end) for window in found.steady],
            known.get("cpu.logical_cores"),
            loaders=self.has_loaders,
            on_cpu=not self.on_gpu,
        )
        # That one repeat only was completed of several is said by the status of the run.
        lone = warnings.lone_repeat(1, warnings.more_repeats(self._values))
        own = [one for one in found.warnings if wanted.repeats == 1 or one != lone]
        noisy = warnings.on_noise(beside, throughput, found.steady, self._values)
        missed = warnings.imprecise(throughput, wanted.target_precision, self.completed(), wanted.max_repeats)
        return msgspec.structs.replace(
            found,
            warnings=[*own, *noisy, *warnings.collected(missed)],
            others=beside,
            environment=self._main_facts(known),
            sampling=sampling(self.telemetry),
        )

    def _main_facts(self, known: Mapping[str, Any]) -> Environment:
        """Takes the main facts of the environment from `known`, which maps dot-keys to values."""
        git = self._git or {}
        return Environment(
            host=known.get("host.name"),
            device=self.gpu_name or known.get("cpu.model"),
            torch=known.get("torch.version"),
            cuda=known.get("torch.cuda"),
            driver=known.get("driver.version"),
            python=known.get("python.version"),
            gpubench=known.get("packages.gpubench"),
            commit=git.get("commit"),
            dirty=git.get("dirty"),
        )

    def refutation(self, summary: Summary) -> GpubenchError | None:
        """An error if a run that completed has a wrong result, otherwise None."""
        return None

    def take(self, event: events.Message) -> None:
        if isinstance(event, events.RepeatDone | events.StageDone) and event.gpus is not None:
            self._used[event.rank].update(event.gpus)
        match event:
            case events.Log():
                self._take_log(event)
            case events.EnvironmentCaptured():
                self._take_environment(event)
            case events.Failed():
                self._take_failure(event)
            case events.TraceRecorded():
                self._take_trace(event)
            case events.CodeSampled():
                self._sampled[event.rank] = SampledCode(event.main, event.workers, event.calls)
            case _:
                if not self.keep(event):
                    log.log(NOTIMPORTANT, "rank %d: %s", event.rank, type(event).__name__)

    def sample(self, telemetry: TelemetrySample) -> None:
        self.progress.telemetry = telemetry
        self.telemetry.append(telemetry)
        self.writer.append(TELEMETRY, telemetry)

    def flush(self) -> None:
        """Writes buffered data, so that other programs can read it during the run."""
        self.writer.flush()
        self.metrics.flush()

    def end_repeat(self) -> None:
        """Updates run.json and the summary after a repeat."""
        self.writer.update(repeats=self.completed(), gpus=self._own_gpus)
        write_summary(self.summary(), self.writer)

    def throughputs(self) -> list[float]:
        """The throughput of each repeat so far, in samples per second; empty if the command has none."""
        metric: Metric | None = self.sum_up().get("throughput")
        return metric.repeats if metric else []

    @property
    def directory(self) -> Path:
        """The directory whose commit is recorded."""
        return Path()

    @property
    def processes(self) -> int:
        """The number of worker processes to start: one for each rank."""
        return self.settings.distributed.world_size

    @property
    def patience(self) -> float:
        """The shortest time without progress after which a rank counts as stalled, in seconds."""
        return float(self.settings.measurement.stall_timeout)

    @property
    def on_gpu(self) -> bool:
        return self.settings.device is Device.cuda

    @property
    def has_loaders(self) -> bool:
        """Whether the ranks have, or may have, processes that load data."""
        return bool(self._values.get("data.workers"))

    @property
    def gpu_name(self) -> str | None:
        """The name of the GPU, or None on a CPU."""
        return self.device.name if self.on_gpu and self.device else None

    @property
    def device(self) -> events.GpuFacts | None:
        """The first GPU that the ranks used, among those that rank 0 sees, or the first of these; None without one."""
        used = self.used_gpus or ()
        own = (gpu for gpu in self._listed if gpu.uuid and devices.digits(gpu.uuid) in used)
        return next(own, self._listed[0] if self._listed else None)

    @cached_property
    def watched_gpus(self) -> list[devices.Gpu]:
        """The GPUs of this machine that its ranks may use."""
        if not self.on_gpu:
            return []
        visible = devices.visible_gpus()
        if has_gpu_each(self.settings, visible):
            return devices.machine_gpus() or visible
        return visible[: local_ranks(self.settings)]

    @property
    def used_gpus(self) -> set[str] | None:
        """The digits of the uuids of the GPUs that the ranks used on all machines; None if they are not all known."""
        if len(self._used) == self.processes:
            return set().union(*self._used.values())
        only = self.on_gpu and self.processes == 1 == len(self.watched_gpus)
        return {self.watched_gpus[0].digits} if only else None

    def job(self, repeats: Sequence[int]) -> events.Job:
        """The job of a worker process, which calls `work` of its module `worker` with it.

        It is to measure `repeats`, and then the repeat that the profiler records, if there is one.
        """
        return events.Job(
            worker=kind_of(self.command).worker,
            lighter=self.lighter,
            settings=self.settings.model_dump(mode="json"),
            repeats=[*repeats, *([] if self.profiled is None else [self.profiled])],
            profiled=self.profiled,
            clock=self.clock,
            machine=machine(),
            silence=silence(self.patience),
            samples=self.samples,
            seconds=self.seconds_each,
            length=self.length,
        )

    def start(self, job: events.Job) -> Workers:
        return Workers(
            job,
            self.processes,
            worker_environment(self.settings),
            self.settings.measurement.stall_timeout,
            under_torchrun=launched_by_torchrun(),
        )

    @property
    def _own_gpus(self) -> list[int]:
        """The indices in the telemetry samples of the GPUs that the ranks used on this machine."""
        used = self.used_gpus or set()
        return sorted({gpu.index for gpu in self.watched_gpus if gpu.digits in used and gpu.index is not None})

    @property
    def own_telemetry(self) -> list[TelemetrySample]:
        """The samples with the GPUs that the ranks used."""
        return of_gpus(self.telemetry, self._own_gpus)

    @property
    def metered_gpus(self) -> list[int]:
        """The indices in the telemetry samples of all GPUs that the ranks used; empty if one of them is not sampled."""
        used, sampled = self.used_gpus, {gpu.digits for gpu in self.watched_gpus if gpu.index is not None}
        return self._own_gpus if used is not None and used <= sampled else []

    def close(self, status: str, summary: Summary, error: GpubenchError | None = None) -> None:
        """Ends the run with `status`, and always closes the log. Raises RunFailed if the status cannot be written."""
        try:
            self.listen_to_log(True)
            if took := summary.sampling:
                mean, largest = units.seconds(took.mean), units.seconds(took.largest)
                log.info("%d hardware samples took %s each, the longest %s", took.samples, mean, largest)
            for warning in summary.warnings:  # reports print them below the figures, which a failed run has not
                if error is not None:
                    log.warning("%s", warning)
                else:
                    self._handler.handle(logging.LogRecord(log.name, logging.WARNING, "", 0, warning, None, None))
            self.writer.update(gpus=self._own_gpus)
            write_summary(summary, self.writer)
            self.metrics.close(summary, succeeded=error is None)
        finally:
            self.listen_to_log(False)
            self.writer.finish(status, error.record() if error else None)

    @property
    def traces(self) -> list[Path]:
        """The paths of the profiler's traces, in order of time."""
        return sorted(self.writer.path.joinpath(TRACES).glob(TRACE_FILES), key=lambda path: path.name)

    def diagnose(self, *, failed: bool = False) -> None:
        """Reads the traces, if there are any, and keeps the profile and the findings.

        A run that `failed` before its recording was complete gets none, because its traces show the failure.
        """
        if self.diagnosis or not self.traces:
            return
        self.listen_to_log(True)
        try:
            summary = self.summary()
            found = of_run(
                self.traces,
                self.diagnosed_settings,
                {metric.name: metric for metric in summary.metrics},
                flatten(self.environment),
                self.unit_time(summary),
                summary.others.cores or 0.0 if summary.others and summary.others.busy else 0.0,
                self._sampled,
                self.ready_data,
                self.changed_level,
            )
            wanted = self._values.get("profiling.active") or 1
            if failed and any(len(rank.step_numbers) < wanted for rank in found.profile.ranks):
                log.warning("no diagnosis, because the run ended while it was recorded")
                return
            self.diagnosis = found
            self.writer.replace(PROFILE, found.profile)
            self.conclude(self.addressed(found.findings))
            self.metrics.scalars(self.progress.repeat, 0, time.time(), shares(found.profile))
        except (DataError, RunFailed) as error:
            log.warning("no diagnosis: %s", error)
        finally:
            self.listen_to_log(False)

    def addressed(self, findings: Findings) -> Findings:
        """The findings in the words of who has to act on them."""
        return findings

    @property
    def ready_data(self) -> ReadyData | None:
        """What an earlier run has measured of the same program with data that is always ready; None if none has."""
        return None

    @property
    def changed_level(self) -> ChangedLevel | None:
        """From which step on the measured steps take another time; None if they do not."""
        return None

    @property
    def source(self) -> Mapping[str, Any]:
        """The `places`, the `optimizers` and the `device_type` of a program of the user; {} if it is gpubench's own."""
        return {}

    def in_code(self, changes: Mapping[str, Any]) -> str:
        """The code of the program that does the same as some settings; "" if the program is gpubench's own."""
        return ""

    @property
    def diagnosed_settings(self) -> Mapping[str, Any] | None:
        """The settings of the recorded program by dot-key; None if they are not those of gpubench."""
        return self._values

    @property
    def findings(self) -> Findings | None:
        return self.diagnosis.findings if self.diagnosis else None

    def conclude(self, findings: Findings) -> None:
        """Keeps the findings, and replaces them once their fixes have been tried."""
        assert self.diagnosis
        self.diagnosis = replace(self.diagnosis, findings=findings)
        self.writer.replace(FINDINGS, findings)

    def unit_time(self, summary: Summary) -> float | None:
        """The time without profiler of one unit of the profiler's schedule, in seconds; None if unknown."""
        return None

    def _take_trace(self, event: events.TraceRecorded) -> None:
        # only the last part of a worker's path, so that it cannot lead outside the folder
        name = f"{TRACES}/{Path(event.name).name}"
        self.writer.append_piece(name, event.data, event.last)
        if not event.last:
            return
        size = (self.writer.path / name).stat().st_size
        log.info("rank %d recorded %s, %s", event.rank, name, units.size(size))
        if size > LARGE_TRACE * (1 if name.endswith(".gz") else COMPRESSION):
            log.warning("%s has %s: %s", name, units.size(size), SMALLER)

    def _take_environment(self, event: events.EnvironmentCaptured) -> None:
        self.environment = event.environment
        self.writer.replace(ENVIRONMENT, event.environment)
        self._listed = event.gpus
        if event.settings:
            self._values |= event.settings
            self.writer.update(observed=event.settings)

    def _take_log(self, event: events.Log) -> None:
        """Passes a worker's log record, with its rank and time, to the host's handlers for run.log and the console."""
        record = logging.LogRecord(event.logger, event.level, "", 0, event.message, None, None)
        record.created, record.rank, record.fields = event.time, event.rank, event.fields
        logging.getLogger(event.logger).handle(record)

    def _take_failure(self, event: events.Failed) -> None:
        """Writes a failure with its traceback to run.log at any log level.

        The console shows only the message, later.
        """
        text = event.traceback or event.message
        self.writer.append_text(
            LOG, render_logfmt(time.time(), logging.ERROR, event.rank, "gpubench.worker", text, {"doing": event.doing})
        )


def say_choices(configuration: Configuration[S]) -> None:
    """Logs every setting that gpubench chose for the user. config.yaml gives the reasons."""
    values = flatten(configuration.settings.model_dump(mode="json"))
    chosen = {key: values[key] for key, origin in configuration.origins.items() if origin.startswith(FILLED_IN)}
    text = ", ".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in chosen.items()
    )
    if chosen:
        line = "chosen for you: %s (change any with --KEY=VALUE)"
        logging.getLogger(CHOICES).log(MODIFIABLE, line, text, extra={"fields": chosen})


def say_idle(configuration: Configuration[S]) -> None:
    """Warns of each setting that the user has put into a file or a variable, and that has no effect in this run."""
    values = flatten(configuration.settings.model_dump(mode="json"))
    for key, reason in idle(configuration).items():
        origin, default = configuration.origins[key], fields(type(configuration.settings))[key].get_default()
        if values[key] != default and is_elsewhere(origin) and origin not in presets():
            log.warning("%s, from %s, has no effect: %s", key, origin, reason)
