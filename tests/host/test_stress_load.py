"""More ranks than cores, many samples, and runs beside one another."""

import json
from pathlib import Path

import pytest
from running import PATIENCE, SMALL, decided, gpubench, started

from gpubench.compare.evidence import open_run
from gpubench.runs.reader import Run

pytestmark = pytest.mark.stress

DUMMY = ("pipe-infer", "--unet", "dummy", "--device", "cpu", "--performance.cpu_threads=1", "--repeats", "1", "-q")


def test_eight_ranks_train_on_two_cores(tmp_path: Path) -> None:
    done = gpubench("train-bench", *SMALL, "--world-size", "8", "--steps", "20", "--repeats", "1", results=tmp_path)
    assert done.code == 0, done.stderr
    steps = done.lines("steps.jsonl")
    assert {(step["rank"], step["step"]) for step in steps} == {
        (rank, step) for rank in range(8) for step in range(len(steps) // 8)
    }
    assert len(open_run(done.run).summary.ranks) == 8


def test_eight_ranks_pass_samples_on_that_are_right_to_the_bit(tmp_path: Path) -> None:
    options = ("--step-ms", "2", "--steps", "16", "--samples", "10", "--world-size", "8", "--verify")
    done = gpubench(*DUMMY, *options, "--baseline", "off", results=tmp_path)
    assert done.code == 0, done.stderr
    pipeline = done.document("summary.json")["pipeline"]
    assert pipeline["verification"]["identical"] == 10
    assert [stage["rank"] for stage in pipeline["stages"]] == list(range(8))


def test_two_hundred_samples_go_through_and_none_is_lost(tmp_path: Path) -> None:
    options = ("--step-ms", "0.1", "--steps", "4", "--samples", "200", "--world-size", "2", "--no-verify")
    done = gpubench(*DUMMY, *options, "--baseline", "off", results=tmp_path)
    assert done.code == 0, done.stderr
    assert [line["sample"] for line in done.lines("samples.jsonl")] == list(range(200))
    assert len(list(done.run.glob("samples/*.safetensors"))) == 200


def test_two_runs_that_begin_together_have_a_directory_each_and_both_are_whole(tmp_path: Path) -> None:
    short = ("train-bench", *SMALL, "--steps", "20", "--repeats", "1", "--experiment", "same", "-q")
    with started(*short, results=tmp_path) as one, started(*short, results=tmp_path) as other:
        ended = [run.finish(PATIENCE) for run in (one, other)]
    assert [run.code for run in ended] == [0, 0], ended
    runs = sorted((tmp_path / "same").iterdir())
    assert len(runs) == 2
    for path in runs:
        run = Run.open(path)
        assert run.status == "completed"
        assert len(list(run.lines("steps.jsonl", dict))) == 30
        assert not run.problems
        assert (path / "report.html").exists()


def test_gradients_that_are_reduced_too_often_are_found_and_the_fix_is_confirmed(tmp_path: Path) -> None:
    program = ("--model", "slow_training:model", "--data.source=slow_training:photos", "--data.workers=1")
    slow = ("--batch-size", "2", "--training.grad_accumulation=8", "--distributed.sync_gradients=each")
    few = ("--steps", "10", "--training.warmup_steps=2", "--performance.cpu_threads=1", "--repeats", "1")
    done = gpubench("profile", *program, *slow, *few, "--world-size", "2", "--verify", "-q", results=tmp_path)
    assert done.code == 0, done.stderr
    (run,) = (path for path in done.runs if path.parent.name == "profile")
    found = json.loads((run / "findings.json").read_text())["findings"]
    trouble = next(one for one in found if one["id"] == "repeated-reduction")
    assert trouble["fix"] == {"distributed.sync_gradients": "last"}
    decided(trouble["measured"]["outcome"], trouble["measured"]["reason"], trouble["measured"])
    assert trouble["measured"]["outcome"] == "confirmed"
