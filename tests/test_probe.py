"""The probe: what it sees of training loops of all kinds, and that it changes none of them.

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
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from probing import RECORDED, WARMUP, Loop, batches, probed, run_probed
from running import gpubench
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from gpubench.probe import hooks, observed, timeline
from gpubench.probe.hooks import Probe
from gpubench.probe.timeline import Timeline, period


def test_the_steps_of_a_plain_loop_with_their_phases_and_losses(tmp_path: Path) -> None:
    alone = Loop()
    alone()
    found = probed(tmp_path, Loop())
    assert found.code == 0
    assert found.names[:2] == ["hello", "environmentcaptured"]
    assert found.names[-2:] == ["repeatdone", "done"]
    assert [step["step"] for step in found.steps] == list(range(12))
    assert [step["loss"] for step in found.steps] == alone.losses  # to the bit: the probe changes nothing
    assert found.phases() == {"data_wait", "forward", "backward", "optimizer", "other"}
    assert {step["samples"] for step in found.steps} == {4}
    assert found.events["modelbuilt"]["parameters"] == 26
    assert found.events["modelbuilt"]["sample_shape"] == "3"
    for step in found.steps:
        assert sum(step["phases"].values()) == pytest.approx(step["total"])
    assert sum(step["total"] for step in found.steps) == pytest.approx(found.events["repeatdone"]["wall"])


@pytest.mark.parametrize("kept", [False, True])
def test_the_start_of_workers_is_a_phase_of_each_epoch_that_has_one(tmp_path: Path, kept: bool) -> None:
    def run() -> None:
        loop = Loop()
        loop.data = DataLoader(loop.data.dataset, batch_size=12, num_workers=1, persistent_workers=kept)
        for _ in range(2):
            loop()

    found = probed(tmp_path, run)
    assert found.code == 0
    starts = [step["step"] for step in found.steps if "worker_start" in step["phases"]]
    assert starts == ([0] if kept else [0, 4])
    assert all("data_wait" in step["phases"] for step in found.steps[1:4])


def test_a_batch_with_which_several_optimizers_update_in_turns_counts_once(tmp_path: Path) -> None:
    def run() -> None:
        critic, actor = nn.Bilinear(3, 3, 1), nn.Linear(3, 3)
        of_critic, of_actor = (torch.optim.SGD(one.parameters()) for one in (critic, actor))
        for number in range(40):
            batch = torch.randn(8, 3)
            critic(batch, torch.randn(8, 3)).sum().backward()
            of_critic.step()
            if number % 2:
                critic(batch, actor(batch)).sum().backward()
                of_actor.step()

    found = probed(tmp_path, run)
    assert {step["samples"] for step in found.steps[2:]} == {16}


def test_a_batch_that_every_step_is_given_again_counts_in_each(tmp_path: Path) -> None:
    def run() -> None:
        loop, batch = Loop(), torch.randn(8, 3)
        for _ in range(12):
            loop.step(batch)

    assert {step["samples"] for step in probed(tmp_path, run).steps[2:]} == {8}


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


def test_accumulated_passes_are_one_step_and_their_losses_are_added(tmp_path: Path) -> None:
    def run() -> None:
        loop = Loop()
        for number, (batch,) in enumerate(loop.data):
            (loop.model(batch).mean() * 0 + number).backward()
            if number % 3 == 2:
                loop.optimizer.step()

    found = probed(tmp_path, run)
    assert [step["loss"] for step in found.steps] == [3.0, 12.0, 21.0, 30.0]
    assert {step["samples"] for step in found.steps} == {12}


def test_backward_passes_and_what_optimizers_update_are_counted(tmp_path: Path) -> None:
    def run() -> None:
        model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 1, bias=False))
        optimizer = torch.optim.SGD(model.parameters())
        for number, (batch,) in enumerate(batches(12)):
            model[0].requires_grad_(number < 11)  # so that only the last update leaves it out
            for half in batch.chunk(2):
                model(half).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    found = probed(tmp_path, run, steps=9)
    assert found.events["repeatdone"]["work"] == {"backward_passes": 24, "updated_first": 16, "updated_least": 4}


def test_optimizers_that_take_turns_make_one_step(tmp_path: Path) -> None:
    def run() -> None:
        first, second = nn.Linear(3, 3), nn.Linear(3, 1)
        one, other = torch.optim.SGD(first.parameters()), torch.optim.SGD(second.parameters())
        for (batch,) in batches(30):
            for optimizer in (one, one, other):
                second(first(batch)).mean().backward()
                optimizer.step()

    found = probed(tmp_path, run)
    assert len(found.steps) == 30
    assert {step["samples"] for step in found.steps} == {4}
    assert found.events["repeatdone"]["work"] == {"backward_passes": 90, "updated_first": 16, "updated_least": 16}


@pytest.mark.parametrize(
    ("order", "length"), [("", 1), ("aaaa", 1), ("abab", 2), ("aaabaaab", 4), ("abcabcab", 3), ("abba", 1), ("aab", 1)]
)
def test_the_period_of_a_sequence(order: str, length: int) -> None:
    assert period(map(ord, order)) == length


def test_evaluation_is_a_phase_of_its_own(tmp_path: Path) -> None:
    def run() -> None:
        loop = Loop()
        for number, (batch,) in enumerate(loop.data):
            loop.step(batch)
            if number == 6:
                loop.model.eval()
                with torch.no_grad():
                    for (other,) in batches(5):
                        loop.model(other)
                        time.sleep(0.01)
                loop.model.train()

    steps = probed(tmp_path, run).steps
    assert [number for number, step in enumerate(steps) if "evaluation" in step["phases"]] == [7]
    assert steps[7]["phases"]["evaluation"] > 0.04
    assert {step["samples"] for step in steps} == {4}


@pytest.mark.parametrize("stepped", [2, 3], ids=["while modules are looked for", "later"])
def test_batches_drawn_before_the_evaluation_mode_is_left_are_for_training(tmp_path: Path, stepped: int) -> None:
    def run() -> None:
        loop = Loop()
        drawn = iter(loop.data)
        for number in range(6):
            pair = [next(drawn)[0], next(drawn)[0]]
            time.sleep(0.01)
            loop.model.train()
            for batch in pair:
                loop.model(batch).square().mean().backward()
            loop.optimizer.step()
            if number >= stepped - 1:
                loop.model.eval()
                for (other,) in batches(5):
                    loop.model(other)

    steps = probed(tmp_path, run).steps
    assert [step["samples"] for step in steps] == [8] * 6
    assert all("data_wait" in step["phases"] for step in steps)
    assert all(step["phases"]["other"] > 0.01 for step in steps)  # what follows the draw is no evaluation either


def test_an_evaluation_with_the_training_data_is_no_training(tmp_path: Path) -> None:
    def run() -> None:
        loop = Loop(6)
        for _ in range(2):
            loop()
            loop.model.eval()
            for (batch,) in loop.data:
                loop.model(batch)
                time.sleep(0.01)
            loop.model.train()

    steps = probed(tmp_path, run).steps
    assert [step["samples"] for step in steps] == [4] * 12
    assert steps[6]["phases"]["evaluation"] > 0.06


def test_a_wrapped_model_is_evaluated_without_its_wrapper(tmp_path: Path) -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, batch: Tensor) -> Tensor:
            found: Tensor = self.module(batch)
            return found

    def run() -> None:
        loop = Loop(4)
        model = loop.model
        loop.model = Wrapper(Wrapper(model))
        for _ in range(3):
            loop()
            model.eval()
            for (batch,) in batches(5):
                model(batch)
            model.train()

    steps = probed(tmp_path, run).steps
    assert [step["samples"] for step in steps] == [4] * 12
    assert [number for number, step in enumerate(steps) if "evaluation" in step["phases"]] == [4, 8]


def test_skipped_updates_end_a_step_and_losses_are_unscaled(tmp_path: Path) -> None:
    def run() -> None:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
        for number, (batch,) in enumerate(batches()):
            scaler.scale(model(batch).mean() * 0 + (torch.inf if number in (2, 5) else number)).backward()
            model.weight.grad = torch.full_like(model.weight, torch.inf if number in (2, 5) else 1.0)
            scaler.step(optimizer)
            scaler.update()

    steps = probed(tmp_path, run).steps
    assert [number for number, step in enumerate(steps) if step["skipped"]] == [2, 5]
    assert [step["loss"] for step in steps] == [0, 1, None, 3, 4, None, 6, 7, 8, 9, 10, 11]


def test_modules_that_get_the_same_samples_count_them_once(tmp_path: Path) -> None:
    def run() -> None:
        actor, critic = nn.Linear(3, 2), nn.Linear(3, 1)
        optimizer = torch.optim.SGD([*actor.parameters(), *critic.parameters()])
        for _ in range(8):
            for batch in torch.randn(2, 4, 3):
                (actor(batch).mean() + critic(batch).mean()).backward()
            optimizer.step()

    steps = probed(tmp_path, run).steps
    assert [step["samples"] for step in steps[1:]] == [8] * 7  # in the first step the modules are not known yet


def test_a_closure_counts_as_forward_and_backward(tmp_path: Path) -> None:
    def run() -> None:
        loop = Loop()
        loop.optimizer = torch.optim.LBFGS(loop.model.parameters(), max_iter=2)
        for (batch,) in loop.data:

            def closure(batch: Tensor = batch) -> Tensor:
                loss: Tensor = loop.model(batch).square().mean()
                loss.backward()
                return loss

            loop.optimizer.step(closure)

    found = probed(tmp_path, run)
    assert len(found.steps) == 12
    assert found.phases() == {"data_wait", "forward", "backward", "optimizer", "other"}


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


def test_the_steps_in_which_code_is_compiled_are_told(tmp_path: Path) -> None:
    def run() -> None:
        loop = Loop()
        evaluated = torch.compile(lambda batch: batch.square().sum(), backend="eager")
        for number, (batch,) in enumerate(loop.data):
            if number in (5, 8, 9):
                evaluated(batch)
            if number == 8:
                evaluated(batch.double())
            loop.step(batch)

    assert probed(tmp_path, run).events["graphscompiled"]["steps"] == [5, 8]


def test_a_recorded_repeat_sends_the_trace_of_its_steps_and_ends(tmp_path: Path) -> None:
    found = probed(tmp_path, Loop(100), profiling=RECORDED.model_dump())
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


def test_what_comes_long_before_the_first_update_is_set_up(tmp_path: Path) -> None:
    def run() -> None:
        for _ in batches(3000):
            pass
        Loop()()

    found = probed(tmp_path, run)
    assert found.steps[0]["samples"] < 4 * timeline.LONGEST_PERIOD * 200
    assert len(found.steps) == 12


def test_a_program_without_a_host_runs_on(tmp_path: Path) -> None:
    loop = Loop()
    child = os.fork()
    if not child:
        os._exit(run_probed(str(tmp_path / "nobody"), loop) or len(loop.losses) != 12)
    assert os.waitpid(child, 0)[1] == 0


def test_a_batch_of_a_class_of_the_program_does_no_harm(tmp_path: Path) -> None:
    class Table:
        values = 7

        def __init__(self, rows: Tensor) -> None:
            self.rows = rows

    def run() -> None:
        loop = Loop()
        data = TensorDataset(torch.randn(48, 3))
        for table in DataLoader(data, 4, collate_fn=lambda rows: Table(torch.stack([row for (row,) in rows]))):
            loop.step(table.rows)

    steps = probed(tmp_path, run).steps
    assert [step["samples"] for step in steps[2:]] == [4] * 10  # of the module's input


def test_backward_takes_an_iterator(tmp_path: Path) -> None:
    def run() -> None:
        loop = Loop()
        for (batch,) in loop.data:
            losses: Any = (loop.model(batch).mean() * 0 + part for part in (1, 2))
            torch.autograd.backward(losses)
            assert all(parameter.grad is not None for parameter in loop.model.parameters())
            loop.optimizer.step()

    found = probed(tmp_path, run)
    assert (found.code, {step["loss"] for step in found.steps}) == (0, {3.0})


def test_a_recomputed_forward_pass_is_backward_and_has_no_samples(tmp_path: Path) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.Linear(3, 3), nn.Linear(3, 1)

        def forward(self, batch: Tensor) -> Any:
            return self.last(checkpoint(self.inner, batch, use_reentrant=False))

    def run() -> None:
        loop = Loop()
        loop.model = Checkpointed()
        loop.optimizer = torch.optim.SGD(loop.model.parameters())
        for _ in range(12):
            loop.step(torch.randn(4, 3))

    assert [step["samples"] for step in probed(tmp_path, run).steps[2:]] == [4] * 10


def test_a_second_training_in_the_same_process(tmp_path: Path) -> None:
    first, second = Loop(12), Loop(8)

    def run() -> None:
        first()
        first.model.eval()
        second()

    steps = probed(tmp_path, run).steps
    assert len(steps) == 20
    assert {step["samples"] for step in steps[14:]} == {4}
    assert all("evaluation" not in step["phases"] and "forward" in step["phases"] for step in steps[14:])


def test_an_update_that_raises_leaves_no_phase_open(tmp_path: Path) -> None:
    loop = Loop()
    loop.optimizer = torch.optim.SGD(loop.model.parameters())

    def fails() -> float:
        raise ArithmeticError

    def run() -> None:
        for number, (batch,) in enumerate(loop.data):
            loop.step(batch)
            if number == 5:
                with suppress(ArithmeticError):
                    loop.optimizer.step(fails)
            time.sleep(0.002)

    for step in probed(tmp_path, run).steps[7:]:
        assert step["phases"]["other"] > 0.002


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
        for _ in range(200):
            nn.Linear(3, 1)(torch.randn(4, 3)).mean().backward()
            kept.append(len(probe._timeline.part.marks) + len(probe._timeline.part.losses))
        assert max(kept) < 128

    assert probed(tmp_path, run).code == 0


def test_a_compiled_update_is_not_measured_and_works(tmp_path: Path) -> None:
    loop = Loop()

    def run() -> None:
        warnings.simplefilter("ignore")  # of the compiler's own
        update = torch.compile(loop.optimizer.step, backend="eager")
        for (batch,) in loop.data:
            loop.model(batch).mean().backward()
            update()

    found = probed(tmp_path, run)
    assert (found.code, found.names) == (0, [])


class Device:
    """Stands in for torch.cuda, on whose timeline an event comes later than on the host's."""

    now = 0.0

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = -1.0

        def record(self) -> None:
            Device.now += 0.25
            self.at = Device.now

        def query(self) -> bool:
            return self.at <= Device.now - 2

        def elapsed_time(self, end: "Device.Event") -> float:
            return 1e3 * (end.at - self.at)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", Device.Event)
    monkeypatch.setattr(Device, "now", 0.0)


def test_phases_nest_on_the_timeline_of_the_device(device: None) -> None:
    made = Timeline()
    for number in range(timeline.CERTAIN):
        with made.phase("optimizer"), made.phase("forward"):
            pass
        assert not list(made.steps()), number
        made.end_part(1)
    Device.now += 10
    steps = list(made.steps())
    assert len(steps) == timeline.CERTAIN
    assert made.measure(steps[0])[0] == {"other": 0.5, "optimizer": 0.5, "forward": 0.25}


@pytest.mark.parametrize(("devices", "found"), [(["cuda"], None), (["cuda", "cpu"], "auto")])
def test_no_implementation_of_an_optimizer_is_known_where_it_cannot_be_fused(
    monkeypatch: pytest.MonkeyPatch, devices: list[str], found: str | None
) -> None:
    monkeypatch.setattr(torch.utils._foreach_utils, "_get_fused_kernels_supported_devices", lambda: devices)
    model = nn.Linear(3, 1)
    assert (
        observed.of_process([model], torch.optim.Adam(model.parameters()), None).get("training.optimizer_impl") == found
    )


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
