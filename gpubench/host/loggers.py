"""Writes metrics to epochs.jsonl, TensorBoard and Weights & Biases, and the host's own lines to run.log.

Metrics are written only by `MetricLogger`, which runs in the host, so that no tracker slows down a step.
"""

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from gpubench import foreign_files
from gpubench.errors import UsageError
from gpubench.events import Step
from gpubench.logs import PROGRAM_OUTPUT, WORKER_OUTPUT, LogfmtFormatter
from gpubench.runs.directory import EPOCHS, LOG, TENSORBOARD, RunWriter
from gpubench.runs.summary import Summary
from gpubench.settings.sections import LoggingSettings
from gpubench.surrogates import without_surrogates

if TYPE_CHECKING:
    from tensorboard.summary.writer.record_writer import RecordWriter

log = logging.getLogger("gpubench.host.loggers")


class RunLog(logging.Handler):
    """The log handler that writes the host's own lines to run.log, which it creates.

    What workers print is written at any level, because hints about failures name it. A program's output has a file of
    its own.
    """

    def __init__(self, writer: RunWriter, level: int) -> None:
        super().__init__()
        self.setFormatter(LogfmtFormatter())
        self._level = level
        self._writer = writer
        writer.append_bytes(LOG, b"")

    def filter(self, record: logging.LogRecord) -> bool:
        return record.name != PROGRAM_OUTPUT and (record.levelno >= self._level or record.name == WORKER_OUTPUT)

    def emit(self, record: logging.LogRecord) -> None:
        self._writer.append_text(LOG, self.format(record))


class Epoch(msgspec.Struct, frozen=True):
    """One line of epochs.jsonl: the totals of rank 0 over one pass through the data, including the warm-up."""

    repeat: int
    epoch: int
    steps: int
    samples: int
    seconds: float
    samples_per_second: float | None
    """None if the samples are unknown, as those of some programs are."""
    loss: float | None


class ExperimentTracker(Protocol):
    """A program that stores scalars and shows them as curves."""

    def flush(self) -> None: ...

    def scalars(self, repeat: int, step: int, when: float, values: Mapping[str, float]) -> None:
        """Adds values at the time `when`, in seconds since the epoch."""

    def graph(self, definition: bytes) -> None:
        """Adds the model as a serialised TensorBoard GraphDef."""

    def close(self, hyperparameters: Mapping[str, Any], results: Mapping[str, float], succeeded: bool) -> None:
        """Adds the settings and the metrics of the run, and ends the tracker."""


class MetricLogger:
    """Writes the steps of rank 0 as epochs and scalars."""

    def __init__(self, writer: RunWriter, settings: LoggingSettings, config: Mapping[str, Any], text: str) -> None:
        """`config` maps dot-keys to values, and `text` is the same configuration as YAML.

        Raises UsageError if a tracker cannot be started.
        """
        self._writer = writer
        self._config = config
        self._epoch: _OpenEpoch | None = None
        self._trackers: list[ExperimentTracker] = [TensorBoard(writer.path / TENSORBOARD, text)]
        if settings.wandb:
            self._trackers.append(WeightsAndBiases(writer.path, settings, config))

    def steps(self, steps: Sequence[Step]) -> None:
        """Adds the next steps of rank 0."""
        for step in steps:
            if self._epoch and (step.epoch, step.repeat) != (self._epoch.epoch, self._epoch.repeat):
                self._end_epoch()
            self._epoch = self._epoch or _OpenEpoch(step.repeat, step.epoch)
            self._epoch.take(step)
            values = {
                "rank0/step_time": step.total,
                **({"rank0/throughput": step.samples / step.total} if self._epoch.samples else {}),
                **{f"rank0/phase_{name}": seconds for name, seconds in step.phases.items()},
            }
            if step.loss is not None:
                values["rank0/loss"] = step.loss
            self.scalars(step.repeat, step.step, step.time, values)

    def scalars(self, repeat: int, step: int, when: float, values: Mapping[str, float]) -> None:
        """Sends values to every tracker; `when` is in seconds since the epoch.

        The value of a metric has the name and unit of the metric. Names of values of one rank begin with "rank<r>/".
        """
        self._send(lambda tracker: tracker.scalars(repeat, step, when, values))

    def graph(self, definition: bytes) -> None:
        """Sends the model as a serialised TensorBoard GraphDef to every tracker."""
        self._send(lambda tracker: tracker.graph(definition))

    def flush(self) -> None:
        """Flushes every tracker, so that curves are visible during the run."""
        self._send(lambda tracker: tracker.flush())

    def close(self, summary: Summary, succeeded: bool = True) -> None:
        """Ends the epoch, and closes every tracker with the metrics of the summary."""
        self._end_epoch()
        results = {metric.name: metric.estimate for metric in summary.metrics}
        self._send(lambda tracker: tracker.close(self._config, results, succeeded))

    def _send(self, message: Callable[[ExperimentTracker], None]) -> None:
        """Calls `message` with every tracker. A tracker that fails gets no more data, and the run continues."""
        for tracker in list(self._trackers):
            try:
                message(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                log.warning("%s failed and gets no more data: %s", type(tracker).__name__, error)

    def _end_epoch(self) -> None:
        if self._epoch:
            self._writer.append(EPOCHS, self._epoch.ended())
        self._epoch = None


@dataclass
class _OpenEpoch:
    """The totals of an epoch that has not ended yet."""

    repeat: int
    epoch: int
    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    losses: int = 0
    loss: float = 0.0
    """The sum of the losses of the `losses` steps that have one."""

    def take(self, step: Step) -> None:
        self.steps += 1
        self.samples += step.samples
        self.seconds += step.total
        if step.loss is not None:
            self.losses += 1
            self.loss += step.loss

    def ended(self) -> Epoch:
        return Epoch(
            repeat=self.repeat,
            epoch=self.epoch,
            steps=self.steps,
            samples=self.samples,
            seconds=self.seconds,
            samples_per_second=self.samples / self.seconds if self.samples else None,
            loss=self.loss / self.losses if self.losses else None,
        )


class TensorBoard:
    """Writes TensorBoard event files, without torch.utils.tensorboard, which would load torch into the host.

    The curves of each repeat are in a folder of their own. The configuration, the graph and the hyperparameters are in
    that of the run.
    """

    def __init__(self, folder: Path, config: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary as SummaryProto
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.plugins.text.metadata import create_summary_metadata

        self._folder = folder
        self._writers: dict[str, RecordWriter] = {}
        text = SummaryProto.Value(
            tag="config",
            metadata=create_summary_metadata(display_name="config", description=""),
            tensor=TensorProto(dtype="DT_STRING", string_val=[f"```yaml\n{config}```".encode()]),
        )
        self._add("", 0, time.time(), SummaryProto(value=[text]))

    def scalars(self, repeat: int, step: int, when: float, values: Mapping[str, float]) -> None:
        self._add(f"repeat-{repeat}", step, when, _scalars(values))

    def graph(self, definition: bytes) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._write("", Event(wall_time=time.time(), graph_def=definition))

    def close(self, hyperparameters: Mapping[str, Any], results: Mapping[str, float], succeeded: bool) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary as SummaryProto
        from tensorboard.plugins.hparams import api_pb2
        from tensorboard.plugins.hparams.metadata import SESSION_END_INFO_TAG, create_summary_metadata
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        now = time.time()
        status = api_pb2.STATUS_SUCCESS if succeeded else api_pb2.STATUS_FAILURE
        values = {key: _plain(value) for key, value in hyperparameters.items()}
        self._add("", 0, now, hparams_pb(values, trial_id=self._folder.parent.name))
        end = HParamsPluginData(session_end_info=SessionEndInfo(status=status, end_time_secs=now))
        metadata = create_summary_metadata(end)
        self._add("", 0, now, SummaryProto(value=[SummaryProto.Value(tag=SESSION_END_INFO_TAG, metadata=metadata)]))
        self._add("", 0, now, _scalars({f"summary/{name}": value for name, value in results.items()}))
        for writer in self._writers.values():
            writer.close()

    def flush(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    def _add(self, name: str, step: int, when: float, summary: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._write(name, Event(wall_time=when, step=step, summary=summary))

    def _write(self, name: str, event: Any) -> None:
        """Adds an event to the file in the folder `name`. Raises OSError if it cannot be written.

        TensorBoard's EventFileWriter is not used, because it reopens the file for each record, in a thread in which
        errors are lost.
        """
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        if name not in self._writers:
            folder = self._folder / name
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
            self._writers[name] = RecordWriter(foreign_files.appended(path))
            self._writers[name].write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
        self._writers[name].write(event.SerializeToString())


def _scalars(values: Mapping[str, float]) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary as SummaryProto

    return SummaryProto(value=[SummaryProto.Value(tag=tag, simple_value=value) for tag, value in values.items()])


def _plain(value: Any) -> bool | float | str:
    return value if isinstance(value, bool | int | float) else str(without_surrogates(str(value)))


class WeightsAndBiases:
    """Sends the values to Weights & Biases, which is optional. It keeps its files in the run directory."""

    def __init__(self, folder: Path, settings: LoggingSettings, config: Mapping[str, Any]) -> None:
        import wandb

        try:
            self._run = wandb.init(
                project=settings.wandb_project,
                name=folder.name,
                dir=str(folder),
                mode=settings.wandb_mode,
                config={key: _plain(value) for key, value in config.items()},
                reinit="create_new",  # interleaved runs are open at the same time
                settings=wandb.Settings(silent=True, console="off", save_code=False, disable_git=True),
            )
        except wandb.Error as error:
            raise UsageError(
                f"logging.wandb: {error}", "log in with wandb, or use logging.wandb_mode=offline"
            ) from None

    def scalars(self, repeat: int, step: int, when: float, values: Mapping[str, float]) -> None:
        self._run.log({**{f"repeat-{repeat}/{name}": value for name, value in values.items()}, "step": step})

    def flush(self) -> None:
        """Does nothing, because wandb sends its data by itself."""

    def graph(self, definition: bytes) -> None:
        """Does nothing, because wandb cannot show a TensorBoard graph."""

    def close(self, hyperparameters: Mapping[str, Any], results: Mapping[str, float], succeeded: bool) -> None:
        self._run.summary.update(dict(results))
        self._run.finish(exit_code=0 if succeeded else 1)
