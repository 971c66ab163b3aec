"""What is kept of a run from what its workers say, and what the run says of itself in every place."""

import csv
import errno
import io
import json
import os
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cases_made import case, cpu
from piped import Line, finished
from rich.console import Console

from gpubench import events, units
from gpubench.diagnosis.rules import Diagnosis
from gpubench.errors import RunFailed
from gpubench.findings import Findings
from gpubench.host import live, schedule
from gpubench.host import recorder as recorders
from gpubench.host.schedule import Outcome
from gpubench.host.supervision import LONGEST_SILENCE, SHORTEST_SILENCE
from gpubench.kinds.pipeline import defaults, progress
from gpubench.kinds.pipeline.recorder import PipeRecorder
from gpubench.kinds.pipeline.settings import PipeSettings
from gpubench.kinds.training.recorder import TrainRecorder
from gpubench.report import after_run, terminal
from gpubench.report import run as report
from gpubench.runs import directory
from gpubench.runs.directory import LOG, REPORT, RUN, SUMMARY, SUMMARY_TABLE, TRACE, TRACES
from gpubench.settings.defaults import complete
from gpubench.settings.loading import completed, load
from gpubench.settings.schema import TrainSettings
from gpubench.telemetry import CpuSample, TelemetrySample

LINE = Line((2, 3), micro_batches=4)
ON_CPU = {"device": "cpu", "measurement.repeats": 2}


def built(repeat: int) -> events.ModelBuilt:
    return events.ModelBuilt(
        rank=0,
        repeat=repeat,
        parameters=1,
        trainable_parameters=1,
        sample_shape="8",
        tokens_per_sample=None,
        seconds=0.5,
    )


def stepped(repeat: int, number: int) -> events.StepsMeasured:
    return events.StepsMeasured(
        rank=0, steps=[events.Step(repeat, 0, 0, number, 0.0, 0.1, {"forward": 0.1}, 0.1, samples=8)]
    )


@pytest.mark.parametrize(("steps", "is_diagnosed"), [(1, False), (3, True)])
def test_a_recording_that_a_failure_has_cut_short_is_not_diagnosed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int, is_diagnosed: bool
) -> None:
    given = {"model": "gpt2-tiny", "results": str(tmp_path), "profiling.enabled": True, "profiling.active": 3} | ON_CPU
    recorder = TrainRecorder(completed(load(TrainSettings, None, given), complete), ["gpubench"])
    trace = recorder.writer.path / TRACES / "rank0.1.pt.trace.json"
    trace.parent.mkdir()
    trace.write_text("{}")
    found = Diagnosis(case(cpu(step_numbers=list(range(steps)))).profile, Findings("", [], []), [trace])
    monkeypatch.setattr("gpubench.host.recorder.of_run", lambda *_: found)
    recorder.diagnose(failed=True)
    assert (recorder.diagnosis is not None) == is_diagnosed
    recorder.diagnose()
    assert recorder.diagnosis is not None
    recorder.close("failed", recorder.summary())


def test_training_that_is_recorded_behind_its_repeats_is_said_to_be(tmp_path: Path) -> None:
    given = {"model": "gpt2-tiny", "results": str(tmp_path)} | ON_CPU
    recorder = TrainRecorder(completed(load(TrainSettings, None, given), complete), ["gpubench"])
    recorder.profiled = 2
    recorder.begin_repeat(0, 2)
    places = []
    for repeat in range(3):
        if repeat != recorder.profiled:
            recorder.take(built(repeat))
        recorder.take(events.Planned(rank=1, repeat=repeat, steps=7))
        recorder.take(events.Planned(rank=0, repeat=repeat, steps=7 + repeat))
        for number in range(2):
            recorder.take(stepped(repeat, number))
        places.append(live.describe(recorder.progress).partition("  loss")[0].partition("  80")[0])
    assert places == ["repeat 1 of 2  step 2/7", "repeat 2 of 2  step 2/8", "profiling  step 2/9"]
    assert len(recorder.progress.steps) == 2, "of the repeat in hand alone"
    recorder.close("completed", recorder.summary())
    steps = [json.loads(line) for line in (recorder.writer.path / "steps.jsonl").read_text().splitlines()]
    assert [step["repeat"] for step in steps] == [0, 0, 1, 1]


def test_a_pipeline_that_is_recorded_behind_its_repeats_is_said_to_be(tmp_path: Path) -> None:
    given = {"results": str(tmp_path), "work.samples": 4, "distributed.world_size": 2} | ON_CPU
    recorder = PipeRecorder(completed(load(PipeSettings, None, given), defaults.complete), ["gpubench"])
    recorder.profiled = 2
    recorder.begin_repeat(0, 2)
    places = []
    for number in range(3):
        repeat = LINE.repeat(number)
        for one in repeat.built.values():
            recorder.take(one)
        if number == 1:  # of the repeat before, from another rank's connection
            recorder.progress.take(done(0, 0))
        if number != recorder.profiled:
            for rank in range(2):
                spans = [span for span in repeat.spans if span.rank == rank]
                recorder.take(events.SpansMeasured(rank=rank, spans=spans))
            for sample in range(3):
                recorder.take(done(sample, number))
        recorder.take(events.Heartbeat(rank=0, doing="waiting for all ranks", step=None))
        places.append(progress.describe(recorder.progress).partition("  rank 0")[0])
    assert places == ["repeat 1 of 2  samples 3/4", "repeat 2 of 2  samples 3/4", "profiling  waiting for all ranks"]
    recorder.end_repeat()
    assert (recorder.writer.path / TRACE).is_file(), "of the repeats that were measured"
    recorder.close("completed", recorder.summary())


def done(sample: int, repeat: int) -> events.SampleFinished:
    return events.SampleFinished(rank=1, sample=finished(sample, 0.0, 1.0, repeat), latent=None, image=None)


def test_both_ends_of_a_link_between_machines_give_up_after_the_deadline_of_a_pipeline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[events.Job] = []

    def workers(job: events.Job, *_: object, **__: object) -> None:
        jobs.append(job)
        raise RunFailed("far enough")

    monkeypatch.setattr(recorders, "Workers", workers)
    for deadline in (8.0, 1.0, 60.0):
        given = {"results": str(tmp_path), "pipeline.deadline": deadline} | ON_CPU
        recorder = PipeRecorder(completed(load(PipeSettings, None, given), defaults.complete), ["gpubench"])
        with pytest.raises(RunFailed, match="far enough"):
            schedule.measure(recorder, [0], None, lambda recorder: None)
        recorder.close("failed", recorder.summary())
    assert [job.silence for job in jobs] == [8.0, SHORTEST_SILENCE, LONGEST_SILENCE], (
        "no less than a busy machine may take"
    )


def test_a_disk_without_room_for_the_samples_that_are_taken_over_leaves_no_run_that_seems_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = directory.write_document

    def full(path: Path, document: object) -> None:
        if path.suffix == ".safetensors":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, document)

    monkeypatch.setattr(directory, "write_document", full)
    taken_over = SimpleNamespace(
        path=tmp_path,
        damaged=[],
        samples={0: finished(0, 0.0, 1.0)},
        files=lambda number: {"samples/00000.safetensors": b"latent"},
        missing=lambda samples: list(range(1, samples)),
    )
    given = {"results": str(tmp_path)} | ON_CPU
    with pytest.raises(RunFailed, match="No space left on device"):
        PipeRecorder(completed(load(PipeSettings, None, given), defaults.complete), [], cast("Any", taken_over))
    (record,) = tmp_path.glob("*/*/run.json")
    assert json.loads(record.read_text())["status"] == "failed"


BUSY = CpuSample(load=1.0, worker_cpu=0.5, steal=0.0, processes={"cc1plus": 1.4, "sh": 0.1})
ENVIRONMENT = {
    "host": {"name": "here"},
    "cpu": {"model": "EPYC", "logical_cores": 2},
    "torch": {"version": "2.13.0", "cuda": "13.0"},
    "driver": {"version": "580.1"},
    "python": {"version": "3.11.7"},
    "gpus": [],
    "packages": {"gpubench": "0.1.0"},
}


def measured(results: Path, *totals: float, sample: CpuSample = BUSY) -> Outcome:
    """A run of repeats whose steps took so long, beside whatever `sample` shows."""
    given = {"model": "gpt2-tiny", "results": str(results), "training.warmup_steps": 0, "device": "cpu"}
    recorder = TrainRecorder(completed(load(TrainSettings, None, given), complete), ["gpubench"])
    recorder.take(events.EnvironmentCaptured(rank=0, environment=ENVIRONMENT))
    for repeat, total in enumerate(totals):
        recorder.begin_repeat(repeat, len(totals))
        recorder.take(built(repeat))
        began = 1e9 + 100 * repeat
        steps = [
            events.Step(repeat, 0, 0, n, began + n * total, total, {"forward": total}, total, samples=8)
            for n in range(4)
        ]
        recorder.take(events.StepsMeasured(rank=0, steps=steps))
        recorder.sample(TelemetrySample(time=began + total, cost=0.0, cpu=sample))
    summary = recorder.summary()
    recorder.close("completed", summary)
    return Outcome(recorder, "completed", summary, None)


def shown(outcome: Outcome) -> str:
    text = io.StringIO()
    terminal.show(report.document([outcome.recorder.writer.path]), Console(file=text, width=120))
    return text.getvalue()


def test_a_run_says_everywhere_the_same_of_how_far_its_figures_can_be_relied_on(tmp_path: Path) -> None:
    outcome = measured(tmp_path, 0.1, 0.3, 0.9)
    path = outcome.recorder.writer.path
    low, high = outcome.summary["throughput"].interval or (0.0, 0.0)
    middle = units.rate(median(outcome.summary["throughput"].repeats), "samples/s")
    lies = f"median {middle} ({units.span(low, high, 'samples/s')}, too noisy to quote)"
    noisy = "throughput varies too much over 3 repeats to quote it: the shortest one measured 400 ms; raise --steps"
    busy = (
        "other processes kept 1.5 cores busy while it ran (cc1plus, sh): "
        "its steps may have taken up to 4 times as long as on an idle machine"
    )
    document = json.loads((path / SUMMARY).read_text())
    assert document["warnings"][-2:] == [noisy, busy]
    assert document["others"]["processes"] == {"cc1plus": 1.4, "sh": 0.1}
    assert json.loads(report.to_json([path]))["runs"][0]["warnings"] == document["warnings"]
    text = shown(outcome)
    assert f"on cpu: {lies}, on a busy machine\n" in text
    assert f"\nwarning: {noisy}\nwarning: {busy}\n" in text
    assert text.index("step time") < text.index("warning: ")
    after_run.write_up(path)
    page = (path / REPORT).read_text()
    assert busy[1:] in page
    assert "too noisy to quote" in page
    assert sum(busy in line for line in (path / LOG).read_text().splitlines()) == 1
    (row,) = [
        row for row in csv.DictReader((path / SUMMARY_TABLE).read_text().splitlines()) if row["name"] == "throughput"
    ]
    assert (float(row["low"]), float(row["high"])) == (low, high) == tuple(document["metrics"][0]["interval"])


def test_a_precise_run_on_a_quiet_machine_has_nothing_to_say_of_noise(tmp_path: Path) -> None:
    outcome = measured(tmp_path, 0.1, 0.101, 0.102, sample=CpuSample(load=0.5, worker_cpu=1.0, steal=0.0))
    assert outcome.summary.warnings == []
    assert "+- 2.5 %" in shown(outcome)


def test_the_first_line_says_that_a_single_repeat_is_one_and_that_the_machine_was_busy(tmp_path: Path) -> None:
    text = shown(measured(tmp_path, 0.1))
    assert "on cpu: 80 samples/s, from one repeat on a busy machine\n" in text
    assert "a single repeat has no interval" in text


def test_the_main_facts_of_the_environment_stand_beside_the_metrics(tmp_path: Path) -> None:
    outcome = measured(tmp_path, 0.1)
    path = outcome.recorder.writer.path
    facts = json.loads((path / SUMMARY).read_text())["environment"]
    git = json.loads((path / RUN).read_text())["git"] or {}
    assert facts == {
        "host": "here",
        "device": "EPYC",
        "torch": "2.13.0",
        "cuda": "13.0",
        "driver": "580.1",
        "python": "3.11.7",
        "gpubench": "0.1.0",
        "commit": git.get("commit"),
        "dirty": git.get("dirty"),
    }
