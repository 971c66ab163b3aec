"""Takes in what the workers of one run say, and keeps it: in the run directory at once, in memory for the end."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpubench import events
from gpubench.configuration import Configuration
from gpubench.defaults import FILLED_IN
from gpubench.dotkeys import flatten
from gpubench.errors import GpubenchError
from gpubench.logs import MODIFIABLE, NOTIMPORTANT, LogfmtFormatter, render_logfmt
from gpubench.metrics import Metric
from gpubench.provenance import git_state
from gpubench.runs import ENVIRONMENT, FAILED, LOG, STEPS, TELEMETRY, RunWriter
from gpubench.settings import Device, TrainSettings
from gpubench.steady import Repeat
from gpubench.summary import Summary, summarise
from gpubench.telemetry import TelemetrySample
from gpubench.tracking import MetricLogger

log = logging.getLogger("gpubench.run")


@dataclass
class Progress:
    """Where a run stands, for whoever draws it."""

    repeat: int = 0
    repeats: int = 1
    ranks: int = 1
    planned: int = 0
    step: events.Step | None = None
    """Rank 0's latest."""
    doing: str = "starting"
    telemetry: TelemetrySample | None = None
    steps: list[events.Step] = field(default_factory=list)
    """Rank 0's, of the repeat in hand."""


class Recorder:
    """One run: its directory, its metrics, and what is known of it so far."""

    def __init__(self, configuration: Configuration[TrainSettings], command: str, argv: Sequence[str]) -> None:
        """Creates the run directory of a complete configuration.

        Raises RunDirectoryError where that fails, and UsageError where a tracker cannot start.
        """
        settings, text = configuration.settings, configuration.to_yaml()
        self.settings = settings
        self.progress = Progress(repeats=settings.measurement.repeats)
        self.device_name: str | None = None
        self._repeats: dict[int, Repeat] = {}
        self._flops: events.FlopsCounted | None = None
        self._peak: events.PeakMeasured | None = None
        self._telemetry: list[TelemetrySample] = []
        self.writer = RunWriter(
            settings.results,
            settings.experiment,
            text,
            command=command,
            argv=argv,
            world_size=settings.distributed.world_size,
            git=git_state(Path()),
        )
        self._handler = _RunLog(self.writer, logging.getLevelName(settings.logging.level))
        try:
            self._metrics = MetricLogger(self.writer, settings.logging, flatten(settings.model_dump(mode="json")), text)
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

    def begin_repeat(self, number: int, repeats: int) -> None:
        ranks = self.settings.distributed.world_size
        self.progress = Progress(number, repeats, ranks, telemetry=self.progress.telemetry)
        self._repeats.setdefault(number, Repeat(number))

    def take(self, event: events.Message) -> None:
        """Keeps what one event says."""
        match event:
            case events.StepsMeasured():
                self._take_steps(event)
            case events.Heartbeat(rank=0):
                self.progress.doing = event.doing
            case events.Log():
                self._take_log(event)
            case events.ModelBuilt(rank=0):
                self._start_repeat(event)
            case events.Planned(rank=0):
                self.progress.planned = event.steps
            case events.RepeatDone():
                self._repeats[event.repeat].done[event.rank] = event
            case events.YardstickRead(rank=0):
                self._repeats[event.repeat].yardstick = event.seconds
            case events.Failed():
                self._take_failure(event)
            case _:
                self._take_finding(event)

    def _take_finding(self, event: events.Message) -> None:
        """What is said once a run."""
        match event:
            case events.EnvironmentCaptured():
                self._take_environment(event.environment)
            case events.FlopsCounted():
                self._flops = event
            case events.PeakMeasured():
                self._peak = event
            case events.GraphTraced():
                self._metrics.graph(event.graph)
            case _:
                log.log(NOTIMPORTANT, "rank %d: %s", event.rank, type(event).__name__)

    def sample(self, telemetry: TelemetrySample) -> None:
        self.progress.telemetry = telemetry
        self._telemetry.append(telemetry)
        self.writer.append(TELEMETRY, telemetry)

    def flush(self) -> None:
        """Lets everything so far be seen by others."""
        self.writer.flush()
        self._metrics.flush()

    def end_repeat(self) -> None:
        """Updates run.json and the summary with what is complete."""
        self.writer.update(repeats=sum(bool(repeat.done) for repeat in self._repeats.values()))
        self._metrics.summary(self.summary())

    def throughputs(self) -> list[float]:
        """One per repeat so far."""
        metric: Metric | None = self.summary().get("throughput")
        return metric.repeats if metric else []

    def summary(self) -> Summary:
        assert self.settings.precision
        on_gpu = self.settings.device is Device.cuda
        return summarise(
            [repeat for _, repeat in sorted(self._repeats.items())],
            self.settings.training.warmup_steps,
            self.device_name if on_gpu else None,
            self.settings.precision,
            self._flops,
            self._peak,
            self._telemetry,
            sorted({gpu.index for sample in self._telemetry for gpu in sample.gpus}),
        )

    def close(self, status: str, summary: Summary, error: GpubenchError | None = None) -> None:
        """Ends the run as `status`. Raises RunFailed if that cannot be written; the log is let go of in any case."""
        try:
            self.listen_to_log(True)
            for warning in summary.warnings:
                log.warning("%s", warning)
            self._metrics.close(summary, succeeded=error is None)
        finally:
            self.listen_to_log(False)
            self.writer.finish(status, error.record() if error else None)

    def _start_repeat(self, built: events.ModelBuilt) -> None:
        """Under torchrun repeats follow one another in one process; the events say which is in hand."""
        if built.repeat != self.progress.repeat:
            self.begin_repeat(built.repeat, self.progress.repeats)
        self._repeats[built.repeat].built = built
        self.writer.update(
            workload={
                "parameters": built.parameters,
                "trainable_parameters": built.trainable_parameters,
                "sample_shape": built.sample_shape,
                "tokens_per_sample": built.tokens_per_sample,
            }
        )

    def _take_steps(self, event: events.StepsMeasured) -> None:
        for step in event.steps:
            self._repeats[step.repeat].steps.setdefault(step.rank, []).append(step)
            self.writer.append(STEPS, step)
        if event.rank == 0 and event.steps:
            self.progress.step = event.steps[-1]
            self.progress.steps += event.steps
            self._metrics.steps(event.steps)

    def _take_environment(self, environment: dict[str, Any]) -> None:
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


def say_choices(configuration: Configuration[TrainSettings]) -> None:
    """Names every setting that was filled in for the user; config.yaml has the reasons."""
    values = flatten(configuration.settings.model_dump(mode="json"))
    chosen = {key: values[key] for key, origin in configuration.origins.items() if origin.startswith(FILLED_IN)}
    text = ", ".join(f"{key}={value}" for key, value in chosen.items())
    if chosen:
        log.log(MODIFIABLE, "%s (chosen for you; change any with --KEY=VALUE)", text, extra={"fields": chosen})
