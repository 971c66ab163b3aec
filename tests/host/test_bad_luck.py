"""What a run leaves behind when something goes wrong in the middle of it."""

import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from running import HOST, SMALL, Finished, gpubench, started, wait_for_steps

from gpubench.runs.reader import Run

MODEL = """
import os, signal, sys, time
import torch
from torch import nn

def make():
    calls = 0
    def loss(module, batch):
        nonlocal calls
        calls += 1
        if calls == 15 and os.environ.get("RANK", "0") == os.environ.get("VICTIM", "0"):
            {accident}
        return module(batch).square().mean()
    return nn.Linear(8, 8), lambda n: torch.randn(n, 8), loss
"""


def accident(tmp_path: Path, code: str, *options: str, launcher: Sequence[str] = (sys.executable,)) -> Finished:
    """A run whose model does `code` in the forward pass of step 14."""
    (tmp_path / "unlucky.py").write_text(MODEL.format(accident=code))
    common = ("--model", "unlucky:make", "--performance.cpu_threads=1", "--steps", "40", "--repeats", "2", "-q")
    results = tmp_path / "results"
    return gpubench("train-bench", *common, *options, results=results, cwd=tmp_path, launcher=launcher)


def error_of(done: Finished) -> str:
    """The message, having checked that it is told once, with a hint, and recorded."""
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert any(line.startswith("hint: ") for line in done.stderr.splitlines())
    record = done.document("run.json")
    assert record["status"] == "failed"
    message = errors[0].removeprefix("error: ")
    assert record["error"]["message"] == message
    return message


def test_a_loss_that_is_not_finite_fails_the_run_and_names_the_step(tmp_path: Path) -> None:
    done = accident(tmp_path, "return module(batch).sum() * float('nan')")
    assert done.code == 1
    assert "loss became nan at step 14 (counting from 0) of repeat 1" in error_of(done)


def test_running_out_of_memory_names_the_phase_and_what_to_try(tmp_path: Path) -> None:
    done = accident(tmp_path, "torch.empty(1 << 50)")
    assert done.code == 1
    assert "out of memory in forward of step 14" in error_of(done)
    assert "--batch-size" in done.stderr


def test_a_model_that_raises_is_named_and_its_traceback_is_in_the_log(tmp_path: Path) -> None:
    done = accident(tmp_path, "raise KeyError('oops')")
    assert done.code == 1
    assert "KeyError in forward of step 14: 'oops'" in error_of(done)
    assert "unlucky.py" in (done.run / "run.log").read_text()
    assert len(done.lines("steps.jsonl")) >= 10


def test_a_killed_worker_is_reported_with_its_signal_and_the_rest_is_kept(tmp_path: Path) -> None:
    done = accident(tmp_path, "time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)")
    assert done.code == 1
    assert "killed by SIGKILL" in error_of(done)


def test_a_killed_rank_ends_the_run_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VICTIM", "1")
    began = time.monotonic()
    done = accident(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", "--world-size", "2")
    assert done.code == 1
    assert "rank 1 (pid" in error_of(done)
    assert time.monotonic() - began < 60  # not the five minutes after which a collective gives up


def test_a_rank_that_hangs_is_named_and_its_stack_is_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VICTIM", "1")
    done = accident(
        tmp_path, "time.sleep(1000)", "--world-size", "2", "--measurement.stall_timeout=9", "--logging.level=CRITICAL"
    )
    assert done.code == 1
    assert "made no progress" in error_of(done)
    assert "unlucky.py" in (done.run / "run.log").read_text()  # the stack of the one that sleeps, at any level


def test_a_stopped_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VICTIM", "1")
    code = "os.kill(os.getpid(), signal.SIGSTOP)"
    done = accident(tmp_path, code, "--world-size", "2", "--measurement.stall_timeout=9")
    assert done.code == 1
    assert error_of(done).startswith("rank 1 (pid")
    assert "has been silent" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_a_batch_systems_sigterm_keep_the_repeat_in_hand(tmp_path: Path, number: int) -> None:
    options = ("--steps", "100000", "--repeats", "2", "--experiment", "long")
    with started("train-bench", *SMALL, *options, results=tmp_path) as going:
        run = wait_for_steps(tmp_path, 50)
        going.process.send_signal(number)
        going.process.send_signal(number)  # impatience changes nothing
        done = going.finish(30)
    assert done.code == 130, done.stderr
    assert "error: interrupted" in done.stderr
    assert json.loads((run / "run.json").read_text())["status"] == "interrupted"
    summary = json.loads((run / "summary.json").read_text())
    found = {metric["name"]: metric["estimate"] for metric in summary["metrics"]}
    assert found.get("throughput", 0) > 0, (summary, done.stdout, done.stderr)
    assert "samples/s" in done.stdout


def test_a_killed_host_leaves_a_directory_that_reads_and_no_workers(tmp_path: Path) -> None:
    options = ("--steps", "100000", "--world-size", "2", "--experiment", "long")
    with started("train-bench", *SMALL, *options, results=tmp_path) as going:
        path = wait_for_steps(tmp_path, 50)
        family = going.workers
        assert len(family) >= 2
        going.process.kill()
    _, alive = psutil.wait_procs(family, timeout=15)
    assert not alive
    run = Run.open(path)
    assert run.record.status == "running"
    assert run.status == "interrupted"
    steps = list(run.lines("steps.jsonl", dict))
    assert len(steps) >= 50
    assert len(run.problems) <= 1  # the line it was writing


def test_the_host_ends_a_worker_that_will_not_leave(tmp_path: Path) -> None:
    done = accident(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN); raise ValueError('no')")
    assert done.code == 1
    assert "ValueError" in error_of(done)
    assert not [one for one in psutil.process_iter(["cwd"]) if one.info["cwd"] == str(tmp_path)]


def test_under_torchrun_the_failing_rank_is_heard_before_all_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VICTIM", "1")
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = accident(tmp_path, "raise KeyError('oops')", launcher=launcher)
    assert "rank 1: KeyError in forward of step 14: 'oops'" in done.stderr
    assert done.document("run.json")["status"] == "failed"


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path: Path) -> None:
    options = ("--steps", "300", "--repeats", "1", "-vv")
    gone = ("bash", "-c", f'exec {" ".join(HOST)} "$@" 2> >(:)', "bash")
    done = gpubench("train-bench", *SMALL, *options, results=tmp_path, launcher=gone)
    assert (done.code, Run.open(done.run).status) == (0, "completed")


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("return None", "the loss must be a scalar tensor with a gradient, but is a NoneType"),
        ("return module(batch)", "the loss must be a scalar tensor with a gradient, but is a tensor of shape (8, 8)"),
        ("return module(batch).mean().detach()", "but is a scalar that depends on no tensor with a gradient"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_is_named(tmp_path: Path, code: str, complaint: str) -> None:
    done = accident(tmp_path, code)
    assert done.code == 2
    assert complaint in error_of(done)


def test_a_batch_of_the_wrong_size_is_refused_because_every_rate_would_be_wrong(tmp_path: Path) -> None:
    (tmp_path / "greedy.py").write_text(
        "import torch\n"
        "def make():\n"
        "    return torch.nn.Linear(8, 8), lambda n: torch.randn(n + 3, 8), lambda m, b: m(b).mean()\n"
    )
    done = gpubench("train-bench", "--model", "greedy:make", "-q", results=tmp_path / "results", cwd=tmp_path)
    assert done.code == 2
    assert error_of(done) == "a batch of 8 samples was requested, but its first tensor has 11"


def test_a_stream_that_is_exactly_used_up_is_a_whole_run_and_one_that_is_too_short_is_named(tmp_path: Path) -> None:
    (tmp_path / "stream.py").write_text(
        "import torch\n"
        "from torch.utils.data import IterableDataset\n"
        "class Once(IterableDataset):\n"
        "    def __init__(self): self.left = iter(range(160))\n"
        "    def __iter__(self): return ((torch.randn(4), torch.randn(2)) for _ in self.left)\n"
        "def model(): return torch.nn.Linear(4, 2)\n"
    )
    common = ("train-bench", "--model", "stream:model", "--data", "stream:Once", "--repeats", "1", "-q")
    exact = gpubench(*common, "--steps", "10", results=tmp_path / "exact", cwd=tmp_path)
    assert exact.code == 0, exact.stderr
    short = gpubench(*common, "--steps", "11", results=tmp_path / "short", cwd=tmp_path)
    assert short.code == 2
    assert error_of(short) == "the data ended, and cannot be read a second time"
