"""The probe: what it sees of training loops of all kinds.

Each loop runs with the probe in a fork of this process (`probing.py`).
"""

import math
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from probing import RECORDED, Loop, batches, probed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from gpubench.probe import hooks, observed, rhythm, timeline
from gpubench.probe.hooks import AFTER_EACH, LONG_SECONDS, Probe
from gpubench.probe.host import FLUSH_SECONDS
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


class Own(nn.Linear):
    """A module whose class gives the methods of nn.Module results of its own, as some implementations of MAML do."""

    def parameters(self, recurse: bool = True) -> Any:
        return nn.ParameterList([self.weight, self.bias])

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no such thing here")

    modules = children = named_children = named_parameters = buffers = named_buffers = named_modules


@pytest.mark.parametrize("treatments", [{}, {"precision": "bf16", "performance.channels_last": True}], ids=["", "vs"])
@pytest.mark.parametrize(
    "how", [{}, {"profiling": RECORDED.model_dump()}, {"follow": 3}], ids=["timed", "recorded", "followed"]
)
def test_what_a_class_makes_of_the_methods_of_modules_is_not_used(
    tmp_path: Path, how: dict[str, Any], treatments: dict[str, Any]
) -> None:
    losses: list[float] = []

    def run() -> None:
        model = Own(3, 2)
        optimizer = torch.optim.SGD([model.weight, model.bias], lr=0.1)
        for (batch,) in DataLoader(TensorDataset(torch.randn(48, 3)), batch_size=4):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

    found = probed(tmp_path, run, treatments=treatments, **how)
    assert found.code == 0
    assert found.events["modelbuilt"]["parameters"] == 8
    assert {step["samples"] for step in found.steps} <= {4}


def test_long_steps_are_measured_as_they_end(tmp_path: Path) -> None:
    """Those since the last flush all at once would make one step in some dozens seem slow."""
    at_once = tmp_path / "at_once"

    class Counting(Probe):
        def _measure_steps(self, most: int | None = None, *, ended: bool = False) -> None:
            before = self._sent
            super()._measure_steps(most, ended=ended)
            with at_once.open("a") as file:
                print(self._sent - before, file=file)

    def loop() -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(100):
            optimizer.zero_grad()
            model(torch.randn(2, 4)).mean().backward()
            optimizer.step()
            time.sleep(2 * LONG_SECONDS + 2 * FLUSH_SECONDS / 100)

    assert len(probed(tmp_path, loop, probe=Counting).steps) == 100
    counts = [int(line) for line in at_once.read_text().split()]
    assert sum(counts) == 100
    assert max(counts) <= AFTER_EACH


def test_a_loss_that_has_diverged_beyond_32_bits_ends_no_run(tmp_path: Path) -> None:
    def run() -> None:
        weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        optimizer = torch.optim.SGD([weight], lr=0.0)
        for size in (1.0, 1e38, 1e80, 1e300, 1e308, 1.0):
            (weight * size).backward()
            optimizer.step()
            optimizer.zero_grad()

    found = probed(tmp_path, run)
    assert found.code == 0
    assert [step["loss"] for step in found.steps] == [1.0, 1e38, None, None, None, 1.0]
    assert [step["not_finite"] for step in found.steps] == [False, False, True, True, True, False]


def test_the_loss_of_an_update_without_a_backward_pass_is_unknown(tmp_path: Path) -> None:
    def run() -> None:
        weight = nn.Parameter(torch.ones(()))
        optimizer = torch.optim.SGD([weight], lr=0.0)
        for added in (0.0, math.nan, 0.0, 0.0):
            (weight + added).backward()
            optimizer.step()
            optimizer.step()

    found = probed(tmp_path, run)
    assert found.code == 0
    assert [step["loss"] for step in found.steps] == [1.0, None, None, None, 1.0, None, 1.0, None]
    assert [step["not_finite"] for step in found.steps] == [False, False, True, *[False] * 5]


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
    work = found.events["repeatdone"]["work"]
    assert 44 <= work["forwarded"] <= 48  # the first call is the one in which the model is recognised
    counted = {"backward_passes": 24, "updated_first": 16, "updated_least": 4, "updated_bytes": 16}
    counted |= {"updated_parameters": 1, "unused_passes": 0, "batches": 12, "calls": work["forwarded"] // 2}
    assert {name: work[name] for name in counted} == counted
    assert work["elements"] == 3 * work["forwarded"]
    assert work["shapes"] == ["2x3 float32"]
    assert work["reached"] == work["looked_at"] > 0
    assert work["changed_parameters"] == work["looked_at_parameters"] > 0
    assert work["repeated_contents"] == 0 < work["contents"]


@pytest.mark.parametrize("checks", [0, 5])
def test_a_program_that_updates_its_parameters_itself_has_a_step_for_each_backward_pass(
    tmp_path: Path, checks: int
) -> None:
    """A few backward passes before an optimizer is made, such as checks of the model, are no steps."""

    def run() -> None:
        model = nn.Linear(3, 1)
        optimizer = None
        for number, (batch,) in enumerate(batches(30)):
            model(batch).mean().backward()
            if checks and number >= checks:
                optimizer = optimizer or torch.optim.SGD(model.parameters())
                optimizer.step()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.data.add_(parameter.grad, alpha=-0.1)
                parameter.grad = None

    found = probed(tmp_path, run)
    assert len(found.steps) == 30 - checks
    assert {step["samples"] for step in found.steps[min(checks, 1) :]} == {4}
    assert all(step["loss"] is not None for step in found.steps)
    assert ("log" in found.events) == (not checks)


class OwnOptimizer:
    """An optimizer of no class of torch.optim, as those of fastai."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        self.parameters = list(parameters)

    @torch.no_grad()
    def step(self) -> None:
        for each in self.parameters:
            assert each.grad is not None
            each.sub_(each.grad, alpha=0.01)

    def zero_grad(self) -> None:
        for each in self.parameters:
            each.grad = None


def test_the_updates_of_an_optimizer_of_an_own_class_are_steps_with_a_phase(tmp_path: Path) -> None:
    def run() -> None:
        model = nn.Linear(3, 1)
        optimizer = OwnOptimizer(model.parameters())
        for (batch,) in batches(20):
            for _ in range(2):
                model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    found = probed(tmp_path, run)
    assert len(found.steps) == 20
    assert {step["samples"] for step in found.steps} == {4}
    # The first eight backward passes show that there is none of torch.optim.
    assert all({"backward", "optimizer", "forward"} <= set(step["phases"]) for step in found.steps[7:])
    assert all(step["loss"] is not None for step in found.steps)
    assert "log" not in found.events


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
    work = found.events["repeatdone"]["work"]
    assert 356 <= work["forwarded"] <= 360
    counted = {"backward_passes": 90, "updated_first": 16, "updated_least": 16, "unused_passes": 0}
    assert {name: work[name] for name in counted} == counted
    assert 29 <= work["counted_steps"] <= 30  # a step has three updates


def test_each_model_has_its_name_where_the_program_calls_it(tmp_path: Path) -> None:
    def run() -> None:
        body, heads = nn.Linear(3, 3), [nn.Linear(3, 3)]

        class Trainer:
            def __init__(self) -> None:
                self.tail = nn.Linear(3, 1)

            def loss(self, batch: Tensor) -> Tensor:
                return self.tail(heads[0](body(batch))).mean()  # type: ignore[no-any-return]

        trainer = Trainer()
        optimizer = torch.optim.SGD([*body.parameters(), *heads[0].parameters(), *trainer.tail.parameters()])
        for (batch,) in batches(6):
            trainer.loss(batch).backward()
            optimizer.step()

    places = probed(tmp_path, run).events["modelbuilt"]["places"]
    assert len({places[each] for each in ("model", "model body", "model self.tail")}) == 1
    others = places.keys() - {"loader", "model", "model body", "model self.tail"}
    assert len(others) == 1
    assert others.pop().removeprefix("model ").isdigit()


def test_each_loader_that_trains_has_the_line_that_makes_it(tmp_path: Path) -> None:
    def run() -> None:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters())
        first = DataLoader(TensorDataset(torch.randn(24, 3)), batch_size=2)
        other = DataLoader(TensorDataset(torch.randn(24, 3)), batch_size=2)
        for (one,), (two,) in zip(first, other, strict=True):
            (model(one).mean() - model(two).mean()).backward()
            optimizer.step()

    places = probed(tmp_path, run).events["modelbuilt"]["places"]
    file, _, line = places["loader"].rpartition(":")
    assert places["loader 2"] == f"{file}:{int(line) + 1}"


def test_a_loader_that_does_not_train_is_not_that_of_the_program(tmp_path: Path) -> None:
    """Such as one that computes the mean of the data before the training."""

    def run() -> None:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters())
        data = TensorDataset(torch.randn(24, 3))
        sum(batch.mean() for (batch,) in DataLoader(data))
        for (batch,) in (trains := DataLoader(data, batch_size=2)):
            model(batch).mean().backward()
            optimizer.step()
            assert trains

    file, _, line = probed(tmp_path, run).events["modelbuilt"]["places"]["loader"].rpartition(":")
    assert "trains := DataLoader(" in Path(file).read_text().splitlines()[int(line) - 1]


def test_a_turn_that_the_end_of_the_program_cuts_short_is_in_neither_the_steps_nor_the_wall_time(
    tmp_path: Path,
) -> None:
    def run() -> None:
        critic, generator = nn.Linear(3, 3), nn.Linear(3, 1)
        one, other = torch.optim.SGD(critic.parameters()), torch.optim.SGD(generator.parameters())
        for number in range(20):
            for optimizer in (one, one, other) if number < 19 else (one,):
                generator(critic(torch.randn(4, 3))).mean().backward()
                optimizer.step()
        time.sleep(0.05)
        generator(critic(torch.randn(4, 3))).mean().backward()
        one.step()

    found = probed(tmp_path, run)
    assert len(found.steps) == 19
    assert sum(step["total"] for step in found.steps) == pytest.approx(found.events["repeatdone"]["wall"])


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


@pytest.mark.parametrize("same_class", [True, False])
def test_a_teacher_is_part_of_the_forward_pass_and_of_no_evaluation(tmp_path: Path, same_class: bool) -> None:
    class Slow(torch.nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            time.sleep(0.01)
            return given

    class Teacher(torch.nn.Sequential):
        pass

    def run() -> None:
        loop = Loop()
        teacher = (torch.nn.Sequential if same_class else Teacher)(Slow(), torch.nn.Linear(3, 1)).eval()
        for number, (batch,) in enumerate(loop.data):
            with torch.no_grad():
                teacher(batch)
            loop.step(batch)
            if number == 6:
                loop.model.eval()
                teacher(batch)
                loop.model.train()

    steps = probed(tmp_path, run).steps
    assert all(step["phases"]["forward"] >= 0.01 for step in steps[3:])
    assert [number for number, step in enumerate(steps) if "evaluation" in step["phases"]] == [7]
    assert {step["samples"] for step in steps} == {4}


@pytest.mark.parametrize("drawn", [True, False], ids=["from a DataLoader", "made by the program"])
@pytest.mark.parametrize(
    ("trained", "begun", "left"),
    [
        pytest.param(True, {8, 14}, True, id="mode set and left each time"),
        pytest.param(True, {8, 14}, False, id="mode never left"),
        pytest.param(True, {8}, True, id="one evaluation"),
        pytest.param(True, {8}, False, id="one evaluation whose mode is never left"),
        pytest.param(False, set[int](), False, id="trained in evaluation mode from the start"),
    ],
)
def test_training_in_evaluation_mode_is_no_evaluation(
    tmp_path: Path, drawn: bool, trained: bool, begun: set[int], left: bool
) -> None:
    """`begun` has the steps after which the program sets the mode, and evaluates."""

    def run() -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters())
        model.train(trained)
        for number, (batch,) in enumerate(batches(20) if drawn else [(torch.randn(4, 3),)] * 20):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number in begun:
                model.eval()
                with torch.no_grad():
                    model(torch.randn(1, 3))
                    time.sleep(0.01)
                model.train(left)

    steps = probed(tmp_path, run).steps[2:]  # the modules are looked for in step 1
    evaluated = {step["step"]: step["phases"]["evaluation"] for step in steps if "evaluation" in step["phases"]}
    assert set(evaluated) == {number + 1 for number in begun}
    assert all(seconds > 0.01 for seconds in evaluated.values())
    first = set() if left else {number + 1 for number in sorted(begun)[:1]}
    assert {step["step"] for step in steps if step["phases"].keys().isdisjoint({"forward"})} <= first
    assert {step["samples"] for step in steps if drawn or step["step"] not in first} == {4}


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


def test_modules_that_take_turns_are_all_found(tmp_path: Path) -> None:
    def run() -> None:
        modules = [nn.Linear(3, 2) for _ in range(3)]
        optimizer = torch.optim.SGD([each for module in modules for each in module.parameters()])
        for number in range(18):
            modules[number % 3](torch.randn(4, 3)).mean().backward()
            optimizer.step()

    found = probed(tmp_path, run)
    assert [step["samples"] for step in found.steps[6:]] == [4] * 12
    assert found.events["modelbuilt"]["parameters"] == 24


@pytest.mark.parametrize("follow", [None, 3])
def test_a_program_without_modules_is_searched_for_a_while(tmp_path: Path, follow: int | None) -> None:
    def run() -> None:
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight])
        for _ in range(timeline.LONGEST_PERIOD + 4):
            (weight * torch.randn(3)).sum().backward()
            optimizer.step()
        assert follow or "probe" not in repr(nn.Module.__call__)

    found = probed(tmp_path, run, follow=follow)
    assert found.code == 0
    assert follow or len(found.steps) == timeline.LONGEST_PERIOD + 4
    assert found.events["modelbuilt"]["device"] == "cpu", "that of what the optimizer updates"


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


def test_what_comes_long_before_the_first_update_is_set_up(tmp_path: Path) -> None:
    def run() -> None:
        for _ in batches(3000):
            pass
        Loop()()

    found = probed(tmp_path, run)
    assert found.steps[0]["samples"] < 4 * timeline.LONGEST_PERIOD * 200
    assert len(found.steps) == 12


@pytest.mark.parametrize("first", ["draw", "zero_grad", "forward"])
def test_a_first_step_whose_beginning_is_not_seen_is_told(tmp_path: Path, first: str) -> None:
    """Modules are known only from the first backward pass on, so that a forward pass before it is not seen."""

    def run() -> None:
        loop = Loop()
        for (batch,) in loop.data if first == "draw" else [(torch.randn(4, 3),)] * 12:
            if first == "zero_grad":
                loop.optimizer.zero_grad()
            for _ in range(2):
                loop.model(batch).square().mean().backward()
            loop.optimizer.step()
            if first != "zero_grad":
                loop.optimizer.zero_grad()

    assert probed(tmp_path, run).events["repeatdone"]["partial_first"] is (first == "forward")


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


@pytest.mark.parametrize("seconds", [None, 600.0], ids=["all", "chosen"])
def test_updates_of_a_critic_belong_to_the_step_of_the_generator(tmp_path: Path, seconds: float | None) -> None:
    def run() -> None:
        critic, generator = nn.Linear(3, 3), nn.Linear(3, 3)
        updates = [(each, torch.optim.SGD(each.parameters())) for each in (critic, generator)]
        for number in range(120):
            for model, optimizer in [updates[0]] * (20 if number < 3 else 5) + [updates[1]]:
                optimizer.zero_grad()
                model(torch.randn(4, 3)).square().mean().backward()
                optimizer.step()

    found = probed(tmp_path, run, seconds=seconds)
    assert len(found.steps) == 120  # a plan for so long a time has more, however slow the machine is
    assert [step["samples"] for step in found.steps[2:4]] == [80, 20]  # what the optimizer with the most is given
    assert "heartbeat" in found.names


def test_what_is_held_back_is_told_as_the_steps_that_it_would_make(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "HELD_SECONDS", -1.0)

    def run() -> None:
        one, _other = (torch.optim.SGD([nn.Parameter(torch.ones(()))]) for _ in range(2))
        for _ in range(6):
            one.step()

    found = probed(tmp_path, run)
    assert found.code == 0
    held = [event["steps"] for event in found.all if event["event"] == "stepsheld"]
    assert [len(steps) for steps in held] == [1, 2, 3, 4, 5, 6]
    assert held[-1] == found.steps


def test_updates_in_no_rhythm_are_a_step_each_and_are_warned_of(tmp_path: Path) -> None:
    def run() -> None:
        models = [nn.Linear(3, 3) for _ in range(3)]
        optimizers = [torch.optim.SGD(each.parameters()) for each in models]
        for number in random.Random(0).choices(range(3), k=200):
            models[number](torch.randn(4, 3)).square().mean().backward()
            optimizers[number].step()

    found = probed(tmp_path, run)
    assert len(found.steps) == 200
    assert "the 3 optimizers of the program update in no rhythm" in found.events["log"]["message"]


def test_an_optimizer_that_is_made_anew_in_each_iteration_takes_its_turn(tmp_path: Path) -> None:
    def run() -> None:
        loop = Loop()
        inner = nn.Linear(3, 3)
        for _ in range(30):
            again = torch.optim.SGD(inner.parameters())
            for _ in range(3):
                inner(torch.randn(4, 3)).square().mean().backward()
                again.step()
            loop.step(torch.randn(4, 3))

    assert len(probed(tmp_path, run).steps) == 30


def test_a_recording_ends_after_all_its_steps_though_several_were_decided_at_once(tmp_path: Path) -> None:
    def run() -> None:
        models = [nn.Linear(3, 3) for _ in range(2)]
        optimizers = [torch.optim.SGD(each.parameters()) for each in models]
        for number in [0, 1] * 7 + [0] * 160:  # the first rhythm ends while the steps are recorded
            models[number](torch.randn(4, 3)).square().mean().backward()
            optimizers[number].step()

    found = probed(tmp_path, run, profiling=RECORDED.model_dump() | {"active": 4})
    assert found.code == 0
    assert "tracerecorded" in found.names


def test_the_gradients_of_a_function_of_torch_are_a_backward_pass(tmp_path: Path) -> None:
    def run() -> None:
        loop = Loop()
        parameters = list(loop.model.parameters())
        for (batch,) in loop.data:
            loss = loop.model(batch).square().mean()
            (slope,) = torch.autograd.grad(loss, parameters[0], create_graph=True)
            total = loss * 0 + 3 + slope.sum() * 0
            for parameter, gradient in zip(parameters, torch.autograd.grad(total, tuple(parameters)), strict=True):
                parameter.grad = gradient
            loop.optimizer.step()

    found = probed(tmp_path, run)
    assert (found.code, [step["loss"] for step in found.steps]) == (0, [3.0] * 12)
    assert "backward" in found.phases()
    assert found.events["repeatdone"]["work"]["backward_passes"] == 12


def test_the_loss_may_be_a_tensor_of_a_class_of_the_program(tmp_path: Path) -> None:
    class Named(Tensor):
        pass

    def run() -> None:
        loop = Loop()
        for number, (batch,) in enumerate(loop.data):
            (loop.model(batch).mean() * 0 + number).as_subclass(Named).backward()
            loop.optimizer.step()

    assert [step["loss"] for step in probed(tmp_path, run).steps] == list(range(12))


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


class Device:
    """Stands in for torch.cuda, on whose timeline an event comes later than on the host's."""

    now = 0.0

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = -1.0

        def record(self, stream: object) -> None:
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
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.delattr(torch._C, "_cuda_getCurrentStream", raising=False)  # a shorter way to it, of builds for CUDA
    monkeypatch.setattr(torch.cuda, "Event", Device.Event)
    monkeypatch.setattr(Device, "now", 0.0)


def test_phases_nest_on_the_timeline_of_the_device(device: None) -> None:
    made = Timeline()
    for number in range(rhythm.CERTAIN):
        with made.phase("optimizer"), made.phase("forward"):
            pass
        assert not list(made.steps()), number
        made.end_part(1)
    Device.now += 10
    steps = list(made.steps())
    assert len(steps) == rhythm.CERTAIN
    assert made.measure(steps[0])[0] == {"other": 25 * 10**7, "optimizer": 5 * 10**8, "forward": 25 * 10**7}


@pytest.mark.parametrize(("devices", "found"), [(["cuda"], None), (["cuda", "cpu"], "auto")])
def test_no_implementation_of_an_optimizer_is_known_where_it_cannot_be_fused(
    monkeypatch: pytest.MonkeyPatch, devices: list[str], found: str | None
) -> None:
    monkeypatch.setattr(torch.utils._foreach_utils, "_get_fused_kernels_supported_devices", lambda: devices)
    model = nn.Linear(3, 1)
    assert (
        observed.of_process([model], torch.optim.Adam(model.parameters()), None).get("training.optimizer_impl") == found
    )
