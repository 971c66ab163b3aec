import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpubench.events import Step
from gpubench.host.loggers import MetricLogger, TensorBoard
from gpubench.metrics import DEFINITIONS
from gpubench.runs.directory import RunWriter
from gpubench.runs.steps import Repeat
from gpubench.runs.summary import summarise
from gpubench.settings.sections import LoggingSettings


def step(number: int, epoch: int, repeat: int = 0) -> Step:
    return Step(repeat, 0, epoch, number, 0.0, 0.5, {"forward": 0.5}, 0.5, samples=4, loss=float(number))


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RunWriter]:
    writer = RunWriter(tmp_path, "trial", "seed: 0\n", command="train-bench", argv=[], world_size=1, git=None)
    yield writer
    writer.finish("completed")


def test_an_epoch_ends_where_the_next_begins_or_the_run_does(writer: RunWriter) -> None:
    logger = MetricLogger(writer, LoggingSettings(), {}, "")
    logger.steps([step(0, 0), step(1, 0), step(2, 1)])
    logger.steps([step(0, 0, repeat=1)])
    logger.close(summarise([Repeat(0)], None, "fp32"))
    writer.flush()
    lines = [json.loads(line) for line in (writer.path / "epochs.jsonl").read_text().splitlines()]
    assert [(line["repeat"], line["epoch"], line["steps"]) for line in lines] == [(0, 0, 2), (0, 1, 1), (1, 0, 1)]
    assert lines[0] == {
        "repeat": 0,
        "epoch": 0,
        "steps": 2,
        "samples": 8,
        "seconds": 1.0,
        "samples_per_second": 8.0,
        "loss": 0.5,
    }


def test_samples_that_are_unknown_give_no_throughput(writer: RunWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Mapping[str, float]] = []
    monkeypatch.setattr(TensorBoard, "scalars", lambda self, repeat, step, when, values: sent.append(values))
    logger = MetricLogger(writer, LoggingSettings(), {}, "")
    logger.steps([msgspec.structs.replace(step(0, 0), samples=0), step(0, 0, repeat=1)])
    logger.close(summarise([Repeat(0)], None, "fp32"))
    writer.flush()
    lines = [json.loads(line) for line in (writer.path / "epochs.jsonl").read_text().splitlines()]
    assert [line["samples_per_second"] for line in lines] == [None, 8.0]
    assert ["rank0/throughput" in values for values in sent] == [False, True]


def test_a_tracker_that_fails_is_dropped_and_the_rest_goes_on(
    writer: RunWriter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = 0

    def fail(self: TensorBoard, repeat: int, step: int, when: float, values: Mapping[str, float]) -> None:
        nonlocal calls
        calls += 1
        raise OSError("disk full")

    monkeypatch.setattr(TensorBoard, "scalars", fail)
    logging.getLogger("gpubench").propagate = True
    logger = MetricLogger(writer, LoggingSettings(), {}, "")
    (board,) = logger._trackers
    logger.steps([step(0, 0), step(1, 0)])
    logger.close(summarise([Repeat(0)], None, "fp32"))
    board.close({}, {}, True)
    assert calls == 1
    assert "TensorBoard failed and gets no more data: disk full" in caplog.text
    writer.flush()
    assert json.loads((writer.path / "epochs.jsonl").read_text())["steps"] == 2


def test_curves_go_by_the_metrics_names_and_are_in_their_units(writer: RunWriter) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = MetricLogger(writer, LoggingSettings(), {}, "")
    logger.steps([step(0, 0)])
    logger.close(summarise([Repeat(0)], None, "fp32"))
    curves = EventAccumulator(str(writer.path / "tensorboard" / "repeat-0"))
    curves.Reload()
    found = {tag: curves.Scalars(tag)[0].value for tag in curves.Tags()["scalars"]}
    assert found == {"rank0/step_time": 0.5, "rank0/throughput": 8.0, "rank0/phase_forward": 0.5, "rank0/loss": 0.0}
    assert {"step_time", "throughput", "phase_forward"} <= DEFINITIONS.keys()


def test_hyperparameters_of_any_type_are_written(writer: RunWriter) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    config: dict[str, Any] = {"training.steps": 5, "precision": "bf16", "data.path": None, "model.compile": True}
    board = TensorBoard(writer.path / "tensorboard", "seed: 0\n")
    board.close(config, {"throughput": 3.0}, True)
    found = EventAccumulator(str(writer.path / "tensorboard"))
    found.Reload()
    content = found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    values = HParamsPluginData.FromString(content).session_start_info.hparams
    assert values["training.steps"].number_value == 5
    assert values["precision"].string_value == "bf16"
    assert values["data.path"].string_value == "None"
    assert values["model.compile"].bool_value is True
