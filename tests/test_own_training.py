"""What a training loop of one's own has besides model and loss: clipping, its own batches, optimizer and schedule."""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from running import gpubench
from torch import nn
from torch.nn import functional
from worked import as_in_a_fresh_process, working

from gpubench import events
from gpubench.settings.schema import Precision
from gpubench.worker.precision import arithmetic

CPU = torch.device("cpu")
TESTS = Path(__file__).parent
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
                parameter -= 0.125 * gradient * min(1.0, 0.25 / norm.item())
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
        done = gpubench(*run, results=tmp_path / str(number), cwd=TESTS)
        assert done.code == 0, done.stderr
        found.append([step["loss"] for step in done.lines("steps.jsonl") if step["rank"] == 0])
    free, clipped, sharded = found
    assert clipped != pytest.approx(free, rel=1e-4)
    assert sharded == pytest.approx(clipped, rel=1e-5)
