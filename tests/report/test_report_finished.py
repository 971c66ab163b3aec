"""A run with nothing left to make: `--resume --json` shows what the run itself showed."""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
from cli import complaint
from piped import Line
from profiles_made import findings, profile
from running import Finished

from gpubench import events
from gpubench.diagnosis.rules import Diagnosis
from gpubench.errors import RunFailed
from gpubench.host.schedule import Outcome
from gpubench.kinds.pipeline import defaults
from gpubench.kinds.pipeline.recorder import PipeRecorder
from gpubench.kinds.pipeline.settings import PipeSettings
from gpubench.report import run as report
from gpubench.runs.directory import FINDINGS, PROFILE, RUN, RUNNING, SUMMARY, sample_file
from gpubench.settings.loading import completed, load

CommandLine = Callable[..., Finished]
LINE = Line((2, 3), micro_batches=4)
LATENT = b"of a sample"


def made(results: Path) -> Outcome:
    """A profiled run of four samples."""
    given = {"results": str(results), "work.samples": 4, "distributed.world_size": 2, "device": "cpu", "verify": False}
    recorder = PipeRecorder(completed(load(PipeSettings, None, given), defaults.complete), ["gpubench"])
    recorder.begin_repeat(0, 1)
    repeat = LINE.repeat()
    environment = {"torch": {"version": "2.13.0"}, "packages": {"diffusers": "0.42.1"}}
    recorder.take(events.EnvironmentCaptured(rank=0, environment=environment))
    said: list[events.Message] = [*repeat.built.values(), *finished(repeat.samples.values()), *repeat.stages.values()]
    for event in said:
        recorder.take(event)
    for rank in range(2):
        recorder.take(events.SpansMeasured(rank=rank, spans=[span for span in repeat.spans if span.rank == rank]))
    recorder.diagnosis = Diagnosis(profile(), findings(), [])
    recorder.writer.replace(PROFILE, recorder.diagnosis.profile)
    recorder.writer.replace(FINDINGS, recorder.diagnosis.findings)
    recorder.end_repeat()
    summary = recorder.summary()
    assert summary.metrics
    recorder.close("completed", summary)
    return Outcome(recorder, "completed", summary, None)


def finished(samples: Iterable[events.Sample]) -> list[events.SampleFinished]:
    header = b"{}"
    latent = len(header).to_bytes(8, "little") + header + LATENT
    digest = hashlib.sha256(LATENT).hexdigest()
    return [
        events.SampleFinished(
            rank=1,
            sample=msgspec.structs.replace(sample, sha256=digest, latent=sample_file(sample.sample, "safetensors")),
            latent=latent,
            image=None,
        )
        for sample in samples
    ]


def test_it_is_the_document_that_the_run_printed(command_line: CommandLine, tmp_path: Path) -> None:
    outcome = made(tmp_path / "before")
    path = outcome.recorder.writer.path
    done = command_line("pipe-infer", "--resume", str(path), "--json")
    assert (done.code, done.stderr.splitlines()[-1]) == (0, f"nothing to do: all 4 samples of {path} are finished")
    assert done.stdout == report.to_json([path])
    assert not done.runs


def test_a_run_whose_samples_differ_from_the_reference_fails_again(command_line: CommandLine, tmp_path: Path) -> None:
    path = made(tmp_path / "before").recorder.writer.path
    record = json.loads((path / "run.json").read_text())
    error = RunFailed("1 of 4 samples differ from the reference", "summary.json says which").record()
    summary = json.loads((path / SUMMARY).read_text())
    summary["pipeline"]["verification"] = {"reference": "made", "samples": 4, "identical": 3, "divergence": None}
    (path / SUMMARY).write_text(json.dumps(summary))
    (path / "run.json").write_text(json.dumps(record | {"status": "failed", "error": error}))
    done = command_line("pipe-infer", "--resume", str(path), "--json")
    assert done.code == 1
    assert done.stderr.splitlines()[-2:] == [f"error: {error['message']}", f"hint: {error['hint']}"]
    assert json.loads(done.stdout)["runs"][0]["error"] == error
    shown = command_line("runs", "show", str(path)).stdout.splitlines()
    assert {f"error: {error['message']}", f"hint: {error['hint']}"} <= set(shown)


def test_of_a_run_that_was_killed_before_it_summed_up_it_says_that(command_line: CommandLine, tmp_path: Path) -> None:
    path = made(tmp_path / "before").recorder.writer.path
    for name in (SUMMARY, PROFILE, FINDINGS):
        (path / name).unlink()
    record = json.loads((path / RUN).read_text())
    (path / RUN).write_text(json.dumps(record | {"status": RUNNING, "pid": 2**22 + 1}))
    (told,) = json.loads(command_line("pipe-infer", "--resume", str(path), "--json").stdout)["runs"]
    assert (told["path"], told["status"], told["metrics"], "profile" in told) == (str(path), "interrupted", [], False)


def test_a_summary_that_does_not_read_is_refused(command_line: CommandLine, tmp_path: Path) -> None:
    path = made(tmp_path / "before").recorder.writer.path
    (path / SUMMARY).write_text("{")
    said, advised = complaint(command_line("pipe-infer", "--resume", str(path), "--json"))
    assert said.startswith(f"{path / SUMMARY} is damaged: ")
    assert advised == "restore it from a copy, or measure again"
