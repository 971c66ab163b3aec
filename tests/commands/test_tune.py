"""`gpubench tune`: whole searches with real runs, what they print and leave, and how they go on."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import forked
import pytest
from places import SUPPORT
from running import PATIENCE, environment, gpubench, started

PROGRAM = str(SUPPORT / "training_program.py")
TINY = ("--config", "tiny", "--device", "cpu", "--performance.cpu_threads=1", "--logging.graph=false")
QUICK = (*TINY, "--steps", "10", "--training.warmup_steps=2")
ONE = ("--only", "training.read_loss", "--try", "training.read_loss=true")


def folder_of(results: Path) -> Path:
    (found,) = results.glob("tune-*")
    return found


def state(results: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder_of(results) / "tune.json").read_text())
    return found


def test_a_search_leaves_all_its_runs_and_a_page(tmp_path: Path) -> None:
    done = gpubench("tune", *QUICK, *ONE, "--runs", "6", "--memory", "64GiB", "--json", results=tmp_path)
    assert done.code == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["status"], found["most_peak"]) == ("completed", 64 * 2**30)
    assert found["subject"].startswith("resnet") or "tiny" in found["subject"]
    runs = [run for block in found["blocks"] for run in block["runs"]]
    assert all(run["throughput"] > 0 and run["peak"] > 0 for run in runs)
    assert {run["path"] for run in runs} <= {path.name for path in folder_of(tmp_path).iterdir()}
    assert (folder_of(tmp_path) / found["look"] / "findings.json").is_file()
    assert found["treatments"] == [
        {"name": "training.read_loss", "levels": [{"training.read_loss": True}], "numbers": "same"}
    ]
    assert {loss["outcome"] for loss in found["losses"].values()} == {"unharmed"}
    assert (folder_of(tmp_path) / "report.html").is_file()
    assert (folder_of(tmp_path) / "best.yaml").is_file() == bool(found["keep"])


def test_a_program_is_tuned_without_an_edit(tmp_path: Path) -> None:
    only = ("--only", "performance.cpu_threads", "--try", "performance.cpu_threads=1", "--steps", "20", "--runs", "7")
    done = gpubench("tune", *only, "-q", "--", sys.executable, PROGRAM, "500", "0", results=tmp_path)
    assert done.code == 0, done.stderr
    found = state(tmp_path)
    assert found["command"] == "program"
    assert found["codes"] == {"performance.cpu_threads 1": "torch.set_num_threads(1)"}
    assert PROGRAM in done.stdout.splitlines()[0]


def test_ctrl_c_keeps_the_results_and_resume_continues(tmp_path: Path) -> None:
    with started("tune", *QUICK, *ONE, "--runs", "6", results=tmp_path) as run:
        run.wait_for("tune-*/tune.json")
        run.process.send_signal(signal.SIGINT)
        ended = run.finish(60)
    assert ended.code == 130
    assert f"--resume {folder_of(tmp_path)}" in ended.stdout
    before = state(tmp_path)
    assert before["status"] == "interrupted"
    command = [sys.executable, "-m", "gpubench", "tune", "--resume", str(folder_of(tmp_path)), "--runs", "5", "-q"]
    done = forked.run(command, PATIENCE, env=environment())
    assert done.returncode == 0, done.stderr
    after = state(tmp_path)
    assert after["status"] == "completed"
    assert sum(len(block["runs"]) for block in after["blocks"]) <= 5
    assert after["blocks"][: len(before["blocks"])] == before["blocks"]


@pytest.mark.parametrize("point", ["next", "plan", "conclude"])
def test_a_signal_between_two_runs_loses_no_result(tmp_path: Path, point: str) -> None:
    """The signal of a batch system arrives where no run is measured."""
    program = f"""
import os, signal, sys
import forked
forked.fork_workers()
from gpubench.commands import main
from gpubench.tuner import Tuner

of_tuner = Tuner.{point}

def interrupted(tuner, *others):
    os.kill(os.getpid(), signal.SIGTERM)
    return of_tuner(tuner, *others)

Tuner.{point} = interrupted
main()
"""
    command = ("tune", "--results", str(tmp_path), *QUICK, *ONE, "--runs", "3", "-q")
    done = forked.run([sys.executable, "-c", program, *command], PATIENCE, env=environment())
    found = state(tmp_path)
    if point == "conclude":  # the signal is too late to end anything
        assert (done.returncode, found["status"]) == (0, "completed"), done.stderr
    else:
        assert (done.returncode, found["status"]) == (130, "interrupted"), done.stderr
        assert done.stderr.splitlines()[-2:] == [
            "error: interrupted",
            f"hint: gpubench tune --resume {folder_of(tmp_path)} continues the search",
        ]
    assert done.stdout.startswith("gpt2-tiny, fp32, batch 8 on cpu: ")
    assert (folder_of(tmp_path) / "report.html").is_file()


def test_a_program_that_does_not_run_is_one_error(tmp_path: Path) -> None:
    done = gpubench("tune", "-q", "--", sys.executable, "-c", "raise SystemExit(3)", results=tmp_path)
    assert done.code == 1
    assert done.stderr.count("error:") == 1
    assert not done.stdout
