"""What a user's training loop has besides model and loss: clipping, its own batches, optimizer and schedule."""

import functools
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from places import SUPPORT
from running import gpubench
from torch import nn
from torch.nn import functional
from worked import as_in_a_fresh_process, working

from gpubench import events
from gpubench.errors import UsageError
from gpubench.settings.schema import Precision
from gpubench.worker.precision import arithmetic

CPU = torch.device("cpu")
SGD = {"optimizer": "sgd", "learning_rate": 0.125, "momentum": 0.0}


@pytest.fixture(autouse=True)
def _fresh_process() -> Iterator[None]:
    with as_in_a_fresh_process():
        yield


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current directory, whose module `own` is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("own", None)
    yield tmp_path
    sys.modules.pop("own", None)


def losses(**sections: Any) -> list[float | None]:
    """The loss of each step of one repeat."""
    messages = working(repeats=1, **sections)
    measured = [message.steps for message in messages if isinstance(message, events.StepsMeasured)]
    return [step.loss for steps in measured for step in steps]


# Clipping


def test_gradients_are_clipped_before_the_update(here: Path) -> None:
    (here / "own.py").write_text(
        "import torch\n"
        "def batch(n): return torch.ones(n, 4)\n"
        "def loss(module, batch): return module(batch).square().mean()\n"
        "def build(): return torch.nn.Linear(4, 1), batch, loss\n"
    )
    torch.manual_seed(0)
    module, expected = nn.Linear(4, 1), []
    for _ in range(6):
        loss = module(torch.ones(4, 4)).square().mean()
        expected.append(loss.item())
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        with torch.no_grad():
            for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                parameter.sub_(0.125 * gradient * min(1.0, 0.25 / norm.item()))
    found = losses(model={"name": "own:build"}, training=SGD | {"clip_grad_norm": 0.25})
    assert found == pytest.approx(expected, rel=1e-4)
    assert losses(model={"name": "own:build"}, training=SGD) != pytest.approx(expected, rel=1e-4)


def test_a_norm_below_the_largest_changes_nothing() -> None:
    assert losses(training={"clip_grad_norm": 1e9}) == losses()


def test_amp_clips_the_gradients_and_not_their_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.amp, "GradScaler", functools.partial(torch.amp.GradScaler, init_scale=2.0**10))
    rules, module = arithmetic(Precision.amp, CPU), nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    with rules.forward():
        loss = functional.mse_loss(module(torch.ones(1, 2)), torch.full((1, 1), 4.0))
    rules.backward(loss)
    rules.unscale(optimizer)
    before = module.weight.detach().clone()
    norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
    assert norm < 100
    rules.step(optimizer)
    assert (module.weight - before).norm().item() == pytest.approx(0.25, rel=1e-3)


def test_two_ranks_clip_by_the_norm_of_the_whole_gradient_sharded_or_not(tmp_path: Path) -> None:
    clip = "--training.clip_grad_norm=0.05"
    found = []
    for number, more in enumerate([(), (clip,), (clip, "--distributed.strategy=fsdp2")]):
        options = ("--steps=4", "--training.warmup_steps=1", "--repeats=1", "--precision=fp32", "--world-size=2")
        sgd = ("--training.optimizer=sgd", "--training.learning_rate=1", "--device=cpu")
        run = ("train-bench", "--model=small_model:build", *sgd, *options, *more)
        done = gpubench(*run, results=tmp_path / str(number), cwd=SUPPORT)
        assert done.code == 0, done.stderr
        found.append([step["loss"] for step in done.lines("steps.jsonl") if step["rank"] == 0])
    free, clipped, sharded = found
    assert clipped != pytest.approx(free, rel=1e-4)
    assert sharded == pytest.approx(clipped, rel=1e-5)


# Data

DATA = """
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler
seen = []
def loss(module, batch): return module(batch["x"]).square().mean()
def net(): return torch.nn.Linear(4, 1), lambda n: {"x": torch.rand(n, 4)}, loss
class Rows(Dataset):
    def __len__(self): return 10
    def __getitem__(self, index): return torch.full((4,), float(index))
def gathered(samples):
    seen.append([int(sample[0]) for sample in samples])
    return {"x": torch.stack(samples)}
def loader(): return DataLoader(Rows(), batch_size=5, collate_fn=gathered)
def ragged(): return DataLoader(Rows(), batch_size=4, collate_fn=gathered)
def empty(): return DataLoader(Rows(), batch_size=16, drop_last=True)
def shared():
    return DataLoader(Rows(), batch_size=2, collate_fn=gathered, sampler=DistributedSampler(Rows(), 1, 0, seed=3))
def pair(): return Rows(), gathered
def broken(): return Rows(), torch.mm
def triple(): return Rows(), gathered, 3
"""


@pytest.fixture
def own(here: Path) -> Path:
    (here / "own.py").write_text(DATA)
    return here


def trained(source: str, batch_size: int = 5, **data: Any) -> list[list[int]]:
    """The rows of each batch of one repeat on `own:net`, after those of the first."""
    losses(
        model={"name": "own:net"},
        data={"source": f"own:{source}"} | data,
        training={"batch_size": batch_size},
        measurement={"count_flops": False},
    )
    seen: list[list[int]] = sys.modules["own"].seen
    return seen


@pytest.mark.usefixtures("own")
def test_a_dataloader_is_used_as_it_is() -> None:
    assert trained("loader")[:4] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]] * 2


@pytest.mark.usefixtures("own")
def test_the_distributed_sampler_of_a_dataloader_gets_the_number_of_the_epoch() -> None:
    seen = trained("shared", batch_size=2)
    order = [torch.randperm(10, generator=torch.Generator().manual_seed(3 + epoch)).tolist() for epoch in (0, 1)]
    assert list(chain(*seen[:5])) == order[0]
    assert seen[5] == order[1][:2]
    assert order[0][:2] != order[1][:2]


@pytest.mark.usefixtures("own")
def test_a_dataset_may_come_with_its_collate_fn() -> None:
    seen = trained("pair", batch_size=2)
    assert all(len(batch) == 2 for batch in seen)
    assert sorted(chain(*seen[:5])) == list(range(10))


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("source", "more", "message", "hint"),
    [
        ("loader", {"prefetch": 3}, "data.prefetch = 3: data.source own:loader returns a DataLoader", "leave data.pre"),
        (
            "loader",
            {"workers": 2},
            "data.workers = 2: data.source own:loader returns a DataLoader",
            "leave data.workers",
        ),
        ("loader", {"pin_memory": True}, "data.pin_memory = True", "leave data.pin_memory"),
        ("loader", {"batch_size": 4}, "a batch of 4 samples was requested, but .* has 5", "training.batch_size"),
        ("ragged", {"batch_size": 4}, "the last batch of the DataLoader .* may be smaller", "drop_last=True"),
        ("empty", {"batch_size": 16}, "has no batches", "more data"),
        ("broken", {}, "cannot be made into a batch", "collate_fn"),
        ("triple", {}, r"returned \(Rows, function, int\)", "collate_fn"),
    ],
)
def test_data_that_cannot_be_used_as_it_is_is_refused(
    source: str, more: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        trained(source, **more)
    assert hint in (caught.value.hint or "")


# Optimizer

OPTIMIZER = """
import torch
def batch(n): return torch.ones(n, 4)
def loss(module, batch): return module(batch).square().mean()
def plain(parameters): return torch.optim.SGD(parameters, lr=0.125)
def scheduled(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.125)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
def plateau(parameters):
    optimizer = plain(parameters)
    return optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
def build(which="plain"):
    known = {"none": lambda parameters: None, "raising": lambda parameters: 1 / 0}
    return torch.nn.Linear(4, 1), batch, loss, known.get(which) or globals()[which]
def usual(): return build()[:3]
"""


def with_own(which: str = "plain", **training: Any) -> list[float | None]:
    return losses(model={"name": "own:build", "arguments": {"which": which}}, training=training)


def test_a_model_may_come_with_its_own_optimizer(here: Path) -> None:
    (here / "own.py").write_text(OPTIMIZER)
    assert with_own() == losses(model={"name": "own:usual"}, training=SGD)
    assert with_own() != losses(model={"name": "own:usual"})


def test_its_scheduler_steps_after_every_update(here: Path) -> None:
    (here / "own.py").write_text(OPTIMIZER)
    torch.manual_seed(0)
    module, expected = nn.Linear(4, 1), []
    for step in range(6):
        loss = module(torch.ones(4, 4)).square().mean()
        expected.append(loss.item())
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                parameter.sub_(0.125 * 0.5 ** (step // 2) * gradient)
    assert with_own("scheduled") == pytest.approx(expected, rel=1e-4)
    assert with_own("plain") != pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("which", "training", "message"),
    [
        ("plain", {"learning_rate": 0.5}, "training.learning_rate = 0.5: the model comes with its own optimizer"),
        ("plain", {"optimizer": "sgd"}, "training.optimizer = sgd: the model comes"),
        ("plain", {"optimizer_impl": "foreach"}, "training.optimizer_impl = foreach: the model comes"),
        ("none", {}, "returned NoneType"),
        ("raising", {}, "raised ZeroDivisionError"),
        ("plateau", {}, r"returned \(SGD, ReduceLROnPlateau\)"),
    ],
)
def test_an_optimizer_that_cannot_be_used_is_refused(
    which: str, training: dict[str, Any], message: str, here: Path
) -> None:
    (here / "own.py").write_text(OPTIMIZER)
    with pytest.raises(UsageError, match=message) as caught:
        with_own(which, **training)
    assert caught.value.hint
