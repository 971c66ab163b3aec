"""The memory of programs as the probe follows it: loops of known sizes, each in a fork with the probe in it."""

import base64
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from probing import probed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from gpubench.diagnosis.rules import advise
from gpubench.memory.allocation_log import AllocationLog, DeviceLog, classify
from gpubench.memory.analysis import footprint
from gpubench.memory.footprint import Amounts, Footprint
from gpubench.probe import following

WIDTH, BATCH, CLASSES = 64, 32, 10
WEIGHTS = 4 * (WIDTH * WIDTH + WIDTH + WIDTH * CLASSES + CLASSES)
TENSORS = 4  # parameters of the model
COUNTER = 4  # bytes that Adam needs to count the steps of a parameter


def followed(
    folder: Path,
    loop: Callable[[], object],
    steps: int = 5,
    *,
    code: int = 0,
    treatments: dict[str, Any] | None = None,
    missed: Sequence[str] = (),
) -> AllocationLog:
    """Returns the history of a loop, which ends with `code`, and in which the treatments `missed` change nothing."""
    run = probed(folder, loop, follow=steps, treatments=treatments)
    assert run.code == code
    assert [*run.missed] == [*missed]
    parts = [base64.b64decode(event["data"]) for event in run.all if event["event"] == "memoryrecorded"]
    found = msgspec.json.decode(b"".join(parts), type=DeviceLog)
    assert (found.device, found.name, found.rank) == (-1, "cpu", 0)
    assert "stepsmeasured" not in run.names
    classify(found.history)
    return found.history


def table(history: AllocationLog) -> Footprint:
    return footprint(history, source="measured", device="cpu", capacity=None)


def ends(found: Footprint, phase: str, stage: str = "steady") -> Amounts:
    """Returns what is held at the end of a phase, by category."""
    (one,) = [each for each in found.phases if (each.stage, each.phase) == (stage, phase)]
    return one.end


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))


def train(
    loss_of: Callable[[nn.Module, Tensor], Tensor], steps: int = 9, after: Callable[[nn.Module], object] = id
) -> None:
    """Trains a model, and calls `after` with it after each update."""
    own = model()
    adam = torch.optim.Adam(own.parameters())
    for _ in range(steps):
        loss = loss_of(own, torch.randn(BATCH, WIDTH))
        loss.backward()
        adam.step()
        adam.zero_grad()
        after(own)


def test_the_parameters_of_a_teacher_are_parameters(tmp_path: Path) -> None:
    def loop() -> None:
        teacher = model().eval()

        def loss_of(own: nn.Module, batch: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = teacher(batch)
            return nn.functional.mse_loss(own(batch), wanted)

        train(loss_of)

    end = ends(table(followed(tmp_path, loop)), "optimizer")
    assert end["parameters"] == 2 * WEIGHTS
    assert not end.get("unknown")


def test_every_category_has_the_bytes_that_the_shapes_say(tmp_path: Path) -> None:
    dataset = TensorDataset(torch.randn(10 * BATCH, WIDTH), torch.randint(CLASSES, (10 * BATCH,)))

    def loop() -> None:
        own = model()
        adam = torch.optim.Adam(own.parameters())
        for inputs, targets in DataLoader(dataset, batch_size=BATCH):
            loss = nn.functional.cross_entropy(own(inputs), targets)
            loss.backward()
            adam.step()
            adam.zero_grad()

    history = followed(tmp_path, loop)
    found = table(history)
    state = 2 * WEIGHTS + TENSORS * COUNTER
    assert found.peak.phase == "optimizer"
    assert ends(found, "forward")["parameters"] == WEIGHTS
    assert ends(found, "forward")["optimizer_state"] == state
    assert "gradients" not in ends(found, "forward")
    hidden, logits = 4 * BATCH * WIDTH, 4 * BATCH * CLASSES
    assert ends(found, "forward")["activations"] == pytest.approx(hidden, abs=16)  # the result of the ReLU
    assert ends(found, "forward")["temporaries"] == logits  # which the softmax replaces
    assert ends(found, "loss")["activations"] == pytest.approx(hidden + logits, abs=16)
    assert ends(found, "backward")["gradients"] == WEIGHTS
    assert "gradients" not in ends(found, "zero_grad")
    batch, drawn_from = BATCH * (4 * WIDTH + 8), 10 * BATCH * (4 * WIDTH + 8)
    assert ends(found, "forward")["inputs"] == pytest.approx(batch + drawn_from, abs=16)
    assert {mark.step for mark in history.marks} == {None, 0, 1, 2, 3, 4}
    assert {one.module for one in history.allocations if one.category == "gradients"} == {"0", "2"}
    assert all("test_following.py" in one.where for one in history.allocations if one.category == "parameters")
    assert found.kept == [0, 0]


def test_treatments_change_the_memory_that_is_recorded(tmp_path: Path) -> None:
    values = {"precision": "bf16", "performance.sdpa": "math"}
    loop = partial(train, lambda own, batch: own(batch).sum())
    plain = followed(tmp_path, loop)
    (tmp_path / "host").unlink()
    changed = followed(tmp_path, loop, treatments=values, missed=["performance.sdpa"])
    before, after = ({one.size for one in each.allocations if "relu" in one.operator} for each in (plain, changed))
    assert before == {2 * size for size in after} != set()


def test_shared_parameters_count_once_and_frozen_ones_have_no_gradients(tmp_path: Path) -> None:
    def loop() -> None:
        square = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)]
        tied = nn.Sequential(*square, nn.Linear(WIDTH, 1))
        tied[1].weight = tied[0].weight
        tied[2].requires_grad_(requires_grad=False)
        sgd = torch.optim.SGD([one for one in tied.parameters() if one.requires_grad], lr=0.1)
        for _ in range(9):
            tied(torch.randn(BATCH, WIDTH)).sum().backward()
            sgd.step()

    found = table(followed(tmp_path, loop))
    assert ends(found, "optimizer")["parameters"] == 4 * (WIDTH * WIDTH + WIDTH + 1)
    assert ends(found, "optimizer")["gradients"] == 4 * WIDTH * WIDTH
    assert "optimizer_state" not in ends(found, "optimizer")


def test_a_program_that_calls_no_module_has_a_forward_pass_too(tmp_path: Path) -> None:
    def loop() -> None:
        weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
        sgd = torch.optim.SGD([weight], lr=0.1)
        for (batch,) in DataLoader(TensorDataset(torch.randn(9 * BATCH, WIDTH)), batch_size=BATCH):
            sgd.zero_grad()
            (batch @ weight).relu().sum().backward()
            sgd.step()

    found = table(followed(tmp_path, loop))
    phases = {one.phase for one in found.phases if one.stage == "steady"}
    assert phases == {"data", "zero_grad", "forward", "backward", "optimizer"}
    assert ends(found, "forward")["activations"] == pytest.approx(4 * BATCH * WIDTH, abs=16)


def test_optimizers_that_take_turns_make_one_step(tmp_path: Path) -> None:
    def loop() -> None:
        maker, judge = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 1)
        of_maker, of_judge = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (maker, judge))
        for _ in range(9):
            made = maker(torch.randn(BATCH, 3))
            judge(made.detach()).mean().backward()
            of_judge.step()
            judge(made).mean().backward()
            of_maker.step()

    history = followed(tmp_path, loop, 3)
    assert max(mark.step or 0 for mark in history.marks) == 2
    modules = {one.module for one in history.allocations if one.category == "parameters"}
    assert len(modules) == 2


def keep_outputs(own: nn.Module, batch: Tensor, kept: Any) -> Tensor:
    found: Tensor = own(batch)
    kept.append(found)
    return found.sum()


def test_what_every_step_keeps_is_found_with_its_line(tmp_path: Path) -> None:
    kept: list[Tensor] = []
    found = table(followed(tmp_path, lambda: train(lambda own, batch: keep_outputs(own, batch, kept))))
    assert found.kept == [4 * BATCH * CLASSES] * 2
    (growth,) = [one for one in advise(found, None).findings if one.id == "growth"]
    assert any("test_following.py" in line for line in growth.evidence)


def test_what_is_kept_for_one_step_more_is_no_growth(tmp_path: Path) -> None:
    last: deque[Tensor] = deque(maxlen=2)
    found = table(followed(tmp_path, lambda: train(lambda own, batch: keep_outputs(own, batch, last))))
    assert found.kept == [0, 0]


def test_a_program_that_ends_early_says_how_far_it_got(tmp_path: Path) -> None:
    history = followed(tmp_path, lambda: train(lambda own, batch: own(batch).sum(), steps=2))
    assert history.notes == [
        "the program ended after 2 of 5 optimizer steps",
        "no evaluation was seen in the 2 recorded optimizer steps, so that its memory is unknown",
    ]


@pytest.mark.parametrize("gradients", [True, False])
def test_an_evaluation_is_a_phase_of_its_own(tmp_path: Path, gradients: bool) -> None:
    updates = itertools.count(1)

    def evaluate(model: nn.Module) -> None:
        if next(updates) % 3:
            return
        model.eval()
        with torch.set_grad_enabled(gradients):
            for (batch,) in DataLoader(TensorDataset(torch.randn(100 * BATCH, WIDTH)), 50 * BATCH):
                model(batch).sum().item()
        model.train()

    history = followed(tmp_path, lambda: train(lambda own, batch: own(batch).sum(), after=evaluate))
    assert not any("no evaluation" in note for note in history.notes)
    found = table(history)
    assert found.peak.phase == "evaluation"
    assert {one.phase for one in found.phases} >= {"forward", "backward", "optimizer", "evaluation"}


def test_a_program_that_fails_before_its_first_update_shows_what_it_held(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(own: nn.Module, batch: Tensor) -> Tensor:
        found = own(batch)
        raise MemoryError(found.shape)

    found = table(followed(tmp_path, lambda: train(fail), code=1))
    assert "MemoryError" in capfd.readouterr().err
    assert found.peak.amounts["parameters"] == WEIGHTS
    assert found.peak.phase in ("forward", "loss")


def test_a_program_computes_the_same_while_it_is_followed(tmp_path: Path) -> None:
    def losses(file: Path) -> list[float]:
        torch.manual_seed(0)
        found: list[float] = []

        def loss(own: nn.Module, batch: Tensor) -> Tensor:
            loss: Tensor = checkpoint(own, batch, use_reentrant=False).square().mean()
            found.append(loss.item())
            file.write_text(repr(found))
            return loss

        train(loss, steps=4)
        return found

    file = tmp_path / "losses"
    followed(tmp_path, lambda: losses(file))
    assert losses(tmp_path / "own") == pytest.approx(eval(file.read_text()), rel=1e-6)


def test_a_pytorch_that_shows_no_end_of_a_storage_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    before = nn.Module.__call__
    monkeypatch.setattr(following, "keeps_storages", lambda: False)
    with pytest.raises(SystemExit, match=r"needs PyTorch 2\.2"):
        following.Following({}).install()
    assert nn.Module.__call__ is before
