"""Takes in what the workers of one run say, and keeps it: in the run directory at once, in memory for the end."""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from gpubench import cautions, events, units
from gpubench.configuration import Configuration
from gpubench.diagnosis.traces import Diagnosis, of_run
from gpubench.dotkeys import flatten
from gpubench.errors import DataError, GpubenchError, RunFailed
from gpubench.findings import Findings
from gpubench.host.tracking import MetricLogger
from gpubench.logs import MODIFIABLE, NOTIMPORTANT, LogfmtFormatter, render_logfmt
from gpubench.metrics import Metric
from gpubench.origins import FILLED_IN
from gpubench.provenance import git_state
from gpubench.runs import ENVIRONMENT, FAILED, FINDINGS, LOG, PROFILE, TELEMETRY, TRACE_FILES, TRACES, RunWriter
from gpubench.settings import Device, RunSettings
from gpubench.summary import Environment, Summary
from gpubench.telemetry import TelemetrySample, others
from gpubench.trace.shares import shares

LARGE_TRACE = 100 * 2**20  # bytes, compressed
COMPRESSION = 10  # at the least: a viewer has that much more to show, and gives up
SMALLER = "lower profiling.active, or turn off profiling.with_stack, profiling.record_shapes or profiling.modules"

log = logging.getLogger("gpubench.run")

S = TypeVar("S", bound=RunSettings)


@dataclass
class Progress:
    """Where a run stands, for whoever draws it."""

    repeat: int = 0
    repeats: int = 1
    ranks: int = 1
    doing: str = "starting"
    telemetry: TelemetrySample | None = None
    recorded: bool = False
    """By the profiler: a repeat that is not measured."""

    @property
    def place(self) -> str:
        """Which repeat this is."""
        return "profiling" if self.recorded else f"repeat {self.repeat + 1}/{self.repeats}"


class Recorder(ABC, Generic[S]):
    """One run of any command: its directory, its metrics, and what is known of it so far."""

    command: ClassVar[str]
    worker: ClassVar[str]
    """The module whose `work` does what the command is about, in a process with torch."""
    lighter: ClassVar[str]
    """What takes less memory, where there is not enough."""
    progress: Progress
    samples: list[int] | None = None
    """What is still to be made, of a command that makes samples one by one; None for all."""
    profiled: int | None = None
    """The repeat that torch.profiler records: none of the measured ones."""
    diagnosis: Diagnosis | None = None
    """What its traces showed."""

    def __init__(self, configuration: Configuration[S], argv: Sequence[str]) -> None:
        """Creates the run directory of a complete configuration.

        Raises RunDirectoryError where that fails, and UsageError where a tracker cannot start.
        """
        settings, text = configuration.settings, configuration.to_yaml()
        self.settings = settings
        self.origins = configuration.origins
        self._values = flatten(settings.model_dump(mode="json"))
        self._git = git_state(Path())
        self.clock = (time.time(), time.monotonic())  # for all repeats, wherever the host's clock is set in between
        self.environment: dict[str, Any] = {}
        self.device_name: str | None = None
        self.telemetry: list[TelemetrySample] = []
        self.writer = RunWriter(
            settings.results,
            settings.experiment,
            text,
            command=self.command,
            argv=argv,
            world_size=settings.distributed.world_size,
            git=self._git,
        )
        self._handler = _RunLog(self.writer, logging.getLevelName(settings.logging.level))
        try:
            self.metrics = MetricLogger(self.writer, settings.logging, self._values, text)
        except GpubenchError as error:
            self.writer.finish(FAILED, error.record())
            raise
        self.listen_to_log(True)
        say_choices(configuration)
        self.listen_to_log(False)

    def listen_to_log(self, listening: bool) -> None:
        """Whether the host's own log lines belong to this run now."""
        root = logging.getLogger("gpubench")
        (root.addHandler if listening else root.removeHandler)(self._handler)

    @abstractmethod
    def at_start(self) -> Progress:
        """Where any repeat stands as it begins."""

    def begin_repeat(self, number: int, repeats: int) -> None:
        """Repeat `number` of `repeats` begins, in a fresh process or in the one at hand."""
        then = self.progress
        self.progress = replace(self.at_start(), repeat=number, repeats=repeats, telemetry=then.telemetry)

    def begin_recorded(self) -> None:
        """The repeat begins that the profiler records, in a process of its own."""
        self.begin_repeat(self.progress.repeat, self.progress.repeats)
        self.progress.recorded = True

    def turn_to(self, repeat: int) -> None:
        """Under torchrun repeats follow one another in one process; the events say which is in hand."""
        if repeat == self.profiled:
            if not self.progress.recorded:
                self.begin_recorded()
        elif repeat != self.progress.repeat:
            self.begin_repeat(repeat, self.progress.repeats)

    @abstractmethod
    def keep(self, event: events.Message) -> bool:
        """Keeps what an event of this command's own says; False for one that is none."""

    @abstractmethod
    def completed(self) -> int:
        """How many repeats are complete."""

    @abstractmethod
    def sum_up(self) -> Summary:
        """What the repeats so far tell, whatever was asked of them."""

    def summary(self) -> Summary:
        """What can be said so far."""
        found, wanted = self.sum_up(), self.settings.measurement
        throughput, known = found.get("throughput"), flatten(self.environment)
        beside = others(
            self.telemetry,
            [(window.start, window.end) for window in found.steady],
            known.get("cpu.logical_cores"),
            loaders=bool(self._values.get("data.workers")),
            on_cpu=self.settings.device is Device.cpu,
        )
        said = cautions.noise(beside, throughput)
        if throughput and wanted.target_precision is not None and self.completed() >= wanted.max_repeats:
            said += filter(None, [cautions.imprecise(throughput.reach, wanted.target_precision)])
        return msgspec.structs.replace(
            found, warnings=found.warnings + said, others=beside, environment=self._main_facts(known)
        )

    def _main_facts(self, known: Mapping[str, Any]) -> Environment:
        """`known` is the environment by dot-key."""
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
        """What a run that came to its end has shown to be wrong all the same."""
        return None

    def take(self, event: events.Message) -> None:
        """Keeps what one event says."""
        match event:
            case events.Log():
                self._take_log(event)
            case events.EnvironmentCaptured():
                self._take_environment(event.environment)
            case events.Failed():
                self._take_failure(event)
            case events.TraceRecorded():
                self._take_trace(event)
            case _:
                if not self.keep(event):
                    log.log(NOTIMPORTANT, "rank %d: %s", event.rank, type(event).__name__)

    def sample(self, telemetry: TelemetrySample) -> None:
        self.progress.telemetry = telemetry
        self.telemetry.append(telemetry)
        self.writer.append(TELEMETRY, telemetry)

    def flush(self) -> None:
        """Lets everything so far be seen by others."""
        self.writer.flush()
        self.metrics.flush()

    def end_repeat(self) -> None:
        """Updates run.json and the summary with what is complete."""
        self.writer.update(repeats=self.completed())
        self.metrics.summary(self.summary())

    def throughputs(self) -> list[float]:
        """One per repeat so far."""
        metric: Metric | None = self.sum_up().get("throughput")
        return metric.repeats if metric else []

    def documents(self) -> dict[str, Any]:
        """What a run's JSON shows beside its summary."""
        found = self.diagnosis
        return {"profile": found.profile, "findings": found.findings} if found else {}

    @property
    def processes(self) -> int:
        """Workers to start: one for each rank."""
        return self.settings.distributed.world_size

    @property
    def patience(self) -> float:
        """The shortest time, in seconds, for which a rank may make no progress before it is named."""
        return float(self.settings.measurement.stall_timeout)

    @property
    def gpu_name(self) -> str | None:
        """None on a CPU."""
        return self.device_name if self.settings.device is Device.cuda else None

    @property
    def gpus(self) -> list[int]:
        """The indices that telemetry knows the run's GPUs by."""
        return sorted({gpu.index for sample in self.telemetry for gpu in sample.gpus})

    def close(self, status: str, summary: Summary, error: GpubenchError | None = None) -> None:
        """Ends the run as `status`. Raises RunFailed if that cannot be written; the log is let go of in any case."""
        try:
            self.listen_to_log(True)
            shown = cautions.noise(summary.others, summary.get("throughput"))  # in every report, beside the figures
            for warning in summary.warnings:
                if warning not in shown:
                    log.warning("%s", warning)
                elif self._handler.level <= logging.WARNING:
                    self._handler.handle(logging.LogRecord(log.name, logging.WARNING, "", 0, warning, None, None))
            self.metrics.close(summary, succeeded=error is None)
        finally:
            self.listen_to_log(False)
            self.writer.finish(status, error.record() if error else None)

    @property
    def traces(self) -> list[Path]:
        """The profiler's files, in order of time."""
        return sorted(self.writer.path.joinpath(TRACES).glob(TRACE_FILES), key=lambda path: path.name)

    def diagnose(self) -> None:
        """Reads the traces, if there are any, and keeps what they show."""
        if self.diagnosis or not self.traces:
            return
        self.listen_to_log(True)
        try:
            summary = self.summary()
            self.diagnosis = found = of_run(
                self.traces,
                self._values,
                {metric.name: metric for metric in summary.metrics},
                flatten(self.environment),
                self.unit_time(summary),
            )
            self.writer.replace(PROFILE, found.profile)
            self.conclude(found.findings)
            self.metrics.scalars(self.progress.repeat, 0, time.time(), shares(found.profile))
        except (DataError, RunFailed) as error:
            log.warning("no diagnosis: %s", error)
        finally:
            self.listen_to_log(False)

    @property
    def findings(self) -> Findings | None:
        return self.diagnosis.findings if self.diagnosis else None

    def conclude(self, findings: Findings) -> None:
        """Keeps what was found, and in time what became of it."""
        assert self.diagnosis
        self.diagnosis = replace(self.diagnosis, findings=findings)
        self.writer.replace(FINDINGS, findings)

    def unit_time(self, summary: Summary) -> float | None:
        """Seconds that one of the units takes unrecorded that the profiler's schedule counts."""
        return None

    def _take_trace(self, event: events.TraceRecorded) -> None:
        name = f"{TRACES}/{Path(event.name).name}"  # whatever a worker says, it is a file in there
        self.writer.append_piece(name, event.data, event.last)
        if not event.last:
            return
        size = (self.writer.path / name).stat().st_size
        log.info("rank %d recorded %s, %s", event.rank, name, units.size(size))
        if size > LARGE_TRACE * (1 if name.endswith(".gz") else COMPRESSION):
            log.warning("%s has %s: %s", name, units.size(size), SMALLER)

    def _take_environment(self, environment: dict[str, Any]) -> None:
        self.environment = environment
        self.writer.replace(ENVIRONMENT, environment)
        gpus = environment.get("gpus") or []
        self.device_name = gpus[0].get("name") if gpus else None

    def _take_log(self, event: events.Log) -> None:
        """Hands a worker's record to the host's handlers, run.log and console, with its rank and its time."""
        record = logging.LogRecord(event.logger, event.level, "", 0, event.message, None, None)
        record.created, record.rank, record.fields = event.time, event.rank, event.fields
        logging.getLogger(event.logger).handle(record)

    def _take_failure(self, event: events.Failed) -> None:
        """Straight to run.log, whatever its level: the console shows the message alone, and later."""
        text = event.traceback or event.message
        self.writer.append_text(
            LOG, render_logfmt(time.time(), logging.ERROR, event.rank, "gpubench.worker", text, {"doing": event.doing})
        )


class _RunLog(logging.Handler):
    """The host's own lines in run.log."""

    def __init__(self, writer: RunWriter, level: int) -> None:
        super().__init__(level)
        self.setFormatter(LogfmtFormatter())
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        self._writer.append_text(LOG, self.format(record))


def say_choices(configuration: Configuration[S]) -> None:
    """Names every setting that was filled in for the user; config.yaml has the reasons."""
    values = flatten(configuration.settings.model_dump(mode="json"))
    chosen = {key: values[key] for key, origin in configuration.origins.items() if origin.startswith(FILLED_IN)}
    text = ", ".join(f"{key}={value}" for key, value in chosen.items())
    if chosen:
        log.log(MODIFIABLE, "%s (chosen for you; change any with --KEY=VALUE)", text, extra={"fields": chosen})
