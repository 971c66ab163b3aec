"""The probe in a process: when it ends a program, forks, other profilers, and that it changes no program.

Each loop runs with the probe in a fork of this process (`probing.py`). One test runs a real program.
"""

import base64
import json
import multiprocessing
import os
import socket
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from probing import RECORDED, WARMUP, Loop, batches, probed, run_probed
from running import gpubench
from torch import nn

from gpubench.probe import hooks, timeline
from gpubench.probe.hooks import Probe


def test_a_program_is_ended_after_the_steps_that_are_wanted(tmp_path: Path) -> None:
    loop = Loop(100)
    marks = tmp_path / "marks"

    def run() -> None:
        try:
            loop()
        except Exception:  # a program's own handler for errors does not keep it going
            marks.write_text("caught")
        finally:
            marks.write_text(marks.read_text() + "cleaned up" if marks.exists() else "cleaned up")

    found = probed(tmp_path, run, steps=5)
    assert found.code == 0
    assert len(found.steps) == WARMUP + 5
    assert found.names[-1] == "done"
    assert marks.read_text() == "cleaned up"


def test_no_more_steps_are_sent_than_wanted_although_turns_are_known_only_after_more(tmp_path: Path) -> None:
    def run() -> None:
        loop = Loop(100)
        other = torch.optim.SGD(nn.Linear(3, 1).parameters())
        for (batch,) in loop.data:
            loop.step(batch)
            other.step()

    found = probed(tmp_path, run, steps=1)
    assert found.code == 0
    assert len(found.steps) == WARMUP + 1 < timeline.LONGEST_PERIOD
    assert sum(step["total"] for step in found.steps) == pytest.approx(found.events["repeatdone"]["wall"])


@pytest.mark.parametrize("follow", [None, 10**9])
def test_a_program_ends_when_its_host_is_gone(tmp_path: Path, follow: int | None) -> None:
    data = batches(20)

    def run() -> None:
        loop = Loop()
        ends = time.monotonic() + 60
        while time.monotonic() < ends:
            loop.data = data
            loop()

    assert probed(tmp_path, run, follow=follow, leaves=True).code == 1


def test_a_program_whose_host_was_killed_before_its_first_step_ends_there(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as host:
        host.bind(str(tmp_path / "host"))
    if not (child := os.fork()):
        os._exit(run_probed(str(tmp_path / "host"), Loop()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_a_program_that_closes_all_files_runs_on(tmp_path: Path) -> None:
    loop = Loop()

    def run() -> None:
        loop()
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        loop()

    found = probed(tmp_path, run)
    assert found.code == 0
    assert "done" not in found.names


def test_the_workers_of_a_loader_and_a_process_without_updates_are_no_ranks(tmp_path: Path) -> None:
    loop = Loop()
    loop.data = batches(workers=1)
    assert len(probed(tmp_path, loop).steps) == 12
    (tmp_path / "host").unlink()
    assert probed(tmp_path, lambda: [nn.Linear(3, 1)(batch) for (batch,) in batches()]).names == []


def test_a_model_can_be_copied_saved_and_compiled_as_without_the_probe(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"

    def run() -> None:
        loop = Loop()
        loop()
        torch.save(loop.model, path)
        assert not loop.model._forward_pre_hooks
        assert not loop.model._forward_hooks
        assert "probe" not in repr(nn.Module.__call__)

    assert probed(tmp_path, run).code == 0
    assert b"probe" not in path.read_bytes()
    assert isinstance(torch.load(path, weights_only=False), nn.Sequential)


@pytest.mark.parametrize("stacks", [False, True], ids=["", "with stacks"])
def test_a_recorded_repeat_sends_the_trace_of_its_steps_and_ends(tmp_path: Path, stacks: bool) -> None:
    found = probed(tmp_path, Loop(100), profiling=RECORDED.model_dump() | {"with_stack": stacks})
    assert found.code == 0
    assert len(found.steps) == timeline.CERTAIN + RECORDED.units
    pieces = [event for event in found.all if event["event"] == "tracerecorded"]
    assert [piece["last"] for piece in pieces] == [True]
    trace = json.loads(base64.b64decode(pieces[0]["data"]))
    names = [event["name"] for event in trace["traceEvents"]]
    assert len([name for name in names if name.startswith("ProfilerStep#")]) == RECORDED.active
    assert names.count("module: 1.0 (ReLU)") == RECORDED.active


def test_a_program_with_a_profiler_of_its_own_is_not_recorded_and_says_so(tmp_path: Path) -> None:
    def run() -> None:
        with torch.profiler.profile():
            Loop(100)()

    found = probed(tmp_path, run, profiling=RECORDED.model_dump())
    assert found.code == 0
    assert "cannot be recorded" in found.events["log"]["message"]
    assert "tracerecorded" not in found.names
    (tmp_path / "host").unlink()
    assert "slows it down" in probed(tmp_path, run, steps=8).events["log"]["message"]


def test_a_program_without_a_host_runs_on(tmp_path: Path) -> None:
    loop = Loop()
    child = os.fork()
    if not child:
        os._exit(run_probed(str(tmp_path / "nobody"), loop) or len(loop.losses) != 12)
    assert os.waitpid(child, 0)[1] == 0


def test_a_fork_that_trains_is_a_rank_although_its_parent_has_imported_torch(tmp_path: Path) -> None:
    def run() -> None:
        assert next(iter(batches())) is not None
        child = multiprocessing.get_context("fork").Process(target=Loop(12))
        child.start()
        child.join()
        assert child.exitcode == 0

    found = probed(tmp_path, run)
    assert len(found.steps) == 12
    assert found.names[-1] == "done"


def test_a_process_that_never_updates_does_not_collect_marks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hooks, "LONGEST_SETUP", 64)
    kept: list[int] = []

    def run() -> None:
        probe = Probe(str(tmp_path / "host"), {})
        probe.install()
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # without one, backward passes are steps
        for _ in range(200):
            nn.Linear(3, 1)(torch.randn(4, 3)).mean().backward()
            kept.append(len(probe._timeline.part.marks) + len(probe._timeline.part.losses))
        assert max(kept) < 128
        del optimizer

    assert probed(tmp_path, run).code == 0


def test_a_compiled_update_is_not_measured_and_works(tmp_path: Path) -> None:
    def run() -> None:
        loop = Loop()
        warnings.simplefilter("ignore")  # of the compiler's own
        update = torch.compile(loop.optimizer.step, backend="eager")
        for (batch,) in loop.data:
            loop.model(batch).mean().backward()
            update()

    found = probed(tmp_path, run)
    assert (found.code, found.names) == (0, [])


def test_a_real_program_prints_the_same_losses_with_the_probe(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import importlib.util\n"
        "assert importlib.util.find_spec('torch')\n"  # as transformers does before it imports torch
        "import sitecustomize, torch\n"
        "assert sitecustomize.OWN\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Linear(3, 1)\n"
        "optimizer = torch.optim.Adam(model.parameters())\n"
        "for _ in range(30):\n"
        "    loss = model(torch.randn(4, 3)).square().mean()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    print(repr(loss.item()))\n"
        "import sys\n"
        "print([entry for entry in sys.path if 'probe' in entry])\n"
    )
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("OWN = True\n")
    command = f"PYTHONPATH=$PYTHONPATH:{own} {sys.executable} {script}"
    options = ("--repeats", "1", "--steps", "all")
    run = gpubench("train-bench", *options, "--", "sh", "-c", command, results=tmp_path)
    assert run.code == 0
    *losses, path = (run.run / "output.log").read_text().splitlines()
    assert path == "[]"
    assert [step["loss"] for step in run.lines("steps.jsonl")] == [float(loss) for loss in losses]
