"""Runs on disks, streams, terminals and clocks that do not behave."""

import json
import os
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from places import SUPPORT
from running import HOST, PATIENCE, SMALL, disk, environment, gpubench

from gpubench.compare.evidence import open_run
from gpubench.runs.directory import STEPS
from gpubench.runs.reader import Run

SHORT = ("train-bench", *SMALL, "--steps", "20", "--repeats", "1")


def shell(line: str, results: Path, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[bytes]":
    """`line` in a shell, with the command in place of RUN."""
    command = shlex.join([*HOST, "-m", "gpubench", *arguments, "--results", str(results)])
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line.replace("RUN", command)],
        env=environment() | variables,
        capture_output=True,
        timeout=PATIENCE,
    )


def only_run(results: Path) -> Run:
    (path,) = results.glob("*/*")
    return Run.open(path)


def test_a_disk_that_fills_up_ends_the_run_which_says_so_and_keeps_what_was_measured(tmp_path: Path) -> None:
    with disk(tmp_path, "1m") as results:
        done = gpubench("train-bench", *SMALL, "--steps", "100000", "-q", results=results)
        assert done.code == 1
        errors = [line.removeprefix("error: ") for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, done.stderr
        assert errors[0].startswith(f"cannot write {done.run}/")
        assert "No space left on device" in errors[0]
        record = done.document("run.json")
        assert (record["status"], record["error"]["message"]) == ("failed", errors[0])
        run = open_run(done.run)
        assert run.metrics["throughput"].estimate > 0
        steps = list(Run.open(done.run).lines(STEPS, dict))
        assert [step["step"] for step in steps] == list(range(len(steps)))
        assert len(steps) > 1000


def test_a_disk_that_may_only_be_read_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with disk(tmp_path, "1m") as results:
        subprocess.run(["mount", "-o", "remount,ro", str(results)], check=True)
        done = gpubench(*SHORT, results=results / "mine")
    assert done.code == 2
    assert "Read-only file system" in done.stderr
    assert "hint: choose another --results" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_stdout_that_takes_nothing_costs_the_report_and_not_the_run(tmp_path: Path) -> None:
    done = shell("RUN > /dev/full", tmp_path, *SHORT, "-q")
    assert done.returncode == 1
    assert b"error: cannot write to stdout: No space left on device" in done.stderr
    assert b"Traceback" not in done.stderr
    assert only_run(tmp_path).status == "completed"


def test_a_reader_that_takes_one_line_of_the_report_is_no_error(tmp_path: Path) -> None:
    done = shell("RUN | head -1", tmp_path, *SHORT, "-q", TERM="dumb")
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    assert only_run(tmp_path).status == "completed"


def test_an_odd_path_no_home_no_stdin_and_forty_columns(tmp_path: Path) -> None:
    results = tmp_path / "größer als\n[bold]3 'GiB'"
    done = shell("exec env -u HOME -u USER -u LOGNAME RUN <&-", results, *SHORT, COLUMNS="40", TERM="dumb")
    said = done.stdout.decode()
    assert done.returncode == 0, done.stderr
    path = only_run(results).path
    ends = [f"completed: {path}", f"page: {path / 'report.html'}"]
    assert said.splitlines()[-2:] == [end.replace("\n", "\\n") for end in ends]
    assert "…" not in said
    assert "\x1b" not in said
    assert (path / "report.html").exists()


def test_a_clock_that_is_set_back_changes_no_time_that_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "results"
    monkeypatch.setenv("PYTHONPATH", f"{SUPPORT / 'clock_set_back'}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("RESULTS_WITH_STEPS", str(results))
    options = ("--steps", "500", "--repeats", "2", "--measurement.telemetry_interval=0.1")
    done = gpubench("train-bench", *SMALL, *options, results=results, launcher=HOST)
    assert done.code == 0, done.stderr
    record = done.document("run.json")
    assert record["ended"] < record["started"]  # what the clock said
    times = [sample["time"] for sample in done.lines("telemetry.jsonl")]
    assert all(0 < later - earlier < 600 for earlier, later in pairwise(times))
    steps = done.lines("steps.jsonl")
    assert all(step["total"] > 0 for step in steps)
    assert all(0 < later["time"] - earlier["time"] < 600 for earlier, later in pairwise(steps))
    windows = json.loads((done.run / "summary.json").read_text())["steady"]
    assert len(windows) == 2
    for window in windows:
        assert any(window["start"] - 60 < time < window["end"] + 60 for time in times)
    assert not [line for line in done.stderr.splitlines() if "Traceback" in line]
