"""benchmarks/gpu_suite.py without a GPU: its jobs with tiny models on the CPU, and what it makes of how they end."""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import PATIENCE, environment

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
COMMANDS = {"train-bench", "pipe-infer", "profile", "memory", "compare"}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_the_jobs_cover_all_five_commands_and_come_after_what_they_need(load: Callable[[str], Any]) -> None:
    jobs = load("gpu_jobs").JOBS
    names = [job.name for job in jobs]
    assert len(set(names)) == len(names)
    named = {part for job in jobs for part in job.arguments}
    assert COMMANDS - named == {"memory"}  # which memory_check.py calls, twice
    assert "benchmarks/memory_check.py" in named
    for number, job in enumerate(jobs):
        assert set(job.after) <= set(names[:number]), job.name


def test_a_dry_run_measures_two_runs_and_judges_them(tmp_path: Path) -> None:
    only = ("--only", "pipe-sd15-fp16", "--only", "compare-ranks", "--only", "compare-memory-format")
    command = [
        sys.executable,
        str(BENCHMARKS / "gpu_suite.py"),
        "--dry-run",
        "--budget",
        "3000",
        "--output",
        str(tmp_path),
        *only,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment())
    found = {job["name"]: job for job in json.loads((tmp_path / "summary.json").read_text())["jobs"]}
    assert [job["status"] for job in found.values()] == ["skipped", "completed", "completed", "completed"], done.stdout
    assert found["compare-memory-format"]["note"] == "resnet50-nchw and resnet50-channels-last left no run"
    for name in ("pipe-sd15-fp16-1", "pipe-sd15-fp16-2"):
        (run,) = found[name]["runs"]
        assert run["metrics"]["verified_samples"]["estimate"] == 1
    assert "throughput" in found["compare-ranks"]["printed"]
    assert "| compare-ranks " in done.stdout


def test_an_undecided_bar_is_no_failure_and_a_missed_one_is(load: Callable[[str], Any]) -> None:
    ended, status_of = load("processes").Ended, load("gpu_results").status_of
    job = load("gpu_jobs.job").Job("a", (), "", 1.0)
    assert [status_of(ended(code, "", ""), job) for code in (0, 1, 2, 3, 4, None)] == [
        *("completed", "failed", "failed", "failed", "completed", "stopped")
    ]
    dry = load("gpu_suite").dried(job)
    assert status_of(ended(3, "", ""), dry) == "completed"
    assert status_of(ended(1, "", ""), dry) == "failed"


def test_the_list_names_every_job_and_runs_none(load: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert load("gpu_suite").main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert all(f"| {job.name} " in printed for job in load("gpu_jobs").JOBS)
