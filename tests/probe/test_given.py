"""What the samples of a program without a DataLoader are, and what is said where they are uncertain."""

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from probing import Measured, probed
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, l1_loss, mse_loss
from torch.utils.data import DataLoader, IterableDataset

from gpubench.probe import hooks
from gpubench.probe.batches import size_of

STEPS = 12
Train = Callable[[], None]


class Recurrent(nn.Module):
    """A model whose input has the steps of the sequences first."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.out = nn.Linear(8, 1)

    def forward(self, batch: Tensor) -> Tensor:
        states = self.layer(batch)[0]
        return self.out(states[:, -1] if self.layer.batch_first else states[-1])  # type: ignore[no-any-return]


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 8)

    def forward(self, batch: Tensor) -> Tensor:
        state = torch.zeros(batch.shape[1], 8)
        for step in batch:
            state = self.cell(step, state)
        return state.mean(dim=1)


class ByHand(nn.Module):
    """A model without a layer that shows which dimension counts samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Linear(4, 8)

    def forward(self, batch: Tensor) -> Tensor:
        return self.weights(batch).mean(dim=(0, 2))  # type: ignore[no-any-return]


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(3, 4)

    def forward(self, pictures: list[Tensor], targets: list[dict[str, Tensor]]) -> Tensor:
        found = [self.out(each.mean(dim=(1, 2))) for each in pictures]
        return torch.stack([l1_loss(one, other["box"]) for one, other in zip(found, targets, strict=True)]).sum()


class OfPacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 8)

    def forward(self, batch: nn.utils.rnn.PackedSequence) -> Tensor:
        return self.layer(batch)[1][0]  # type: ignore[no-any-return]


def times(model: nn.Module, loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def of_sequences(model: nn.Module, samples: int = 8) -> Train:
    return lambda: times(model, lambda: mse_loss(model(torch.randn(12, 8, 4)).flatten(), torch.randn(samples)))


def of_transformer() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16)
    times(model, lambda: model(torch.randn(12, 8, 8)).square().mean())


def of_packed() -> None:
    model = OfPacked()
    lengths = [9, 7, 3]
    times(model, lambda: model(nn.utils.rnn.pack_sequence([torch.randn(one, 4) for one in lengths])).mean())


def of_pictures() -> None:
    model = Detector()
    targets = [{"box": torch.rand(4)} for _ in range(5)]
    times(model, lambda: model([torch.rand(3, 8, 8) for _ in range(5)], targets))


def of_inner_loops() -> None:
    """Model-agnostic meta-learning: four tasks of two samples to adapt with, twice, and six more."""
    model = nn.Linear(1, 1)

    def loss() -> Tensor:
        losses = []
        for _ in range(4):
            support, query = torch.rand(2, 1), torch.rand(6, 1)
            weights: dict[str, Tensor] = dict(model.named_parameters())
            for _ in range(2):
                adapted = torch.func.functional_call(model, weights, (support,)).square().mean()
                gradients = torch.autograd.grad(adapted, list(weights.values()), create_graph=True)
                weights = {name: one - 0.1 * g for (name, one), g in zip(weights.items(), gradients, strict=True)}
            losses.append(torch.func.functional_call(model, weights, (query,)).square().mean())
        return torch.stack(losses).sum()

    times(model, loss)


def of_copies() -> None:
    """First-order meta-learning: a copy of the model is trained in each iteration."""
    model = nn.Sequential(nn.Linear(3, 1))
    outer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        inner = copy.deepcopy(model)
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        for _ in range(3):
            inner(torch.randn(8, 3)).square().mean().backward()
            optimizer.step()
        for one, other in zip(model.parameters(), inner.parameters(), strict=True):
            one.grad = one.detach() - other.detach()
        outer.step()


def of_attacks() -> None:
    model = nn.Linear(3, 1)

    def loss() -> Tensor:
        batch, change = torch.randn(8, 3), torch.zeros(8, 3)
        for _ in range(3):
            change.requires_grad_()
            (gradient,) = torch.autograd.grad(model(batch + change).mean(), change)
            change = change.detach() + gradient.sign()
        return model(batch + change.detach()).square().mean()  # type: ignore[no-any-return]

    times(model, loss)


def of_actions() -> None:
    """A network that chooses an action with gradients on before each update."""
    model = nn.Linear(4, 2)

    def loss() -> Tensor:
        model(torch.randn(1, 4)).argmax()
        return mse_loss(model(torch.randn(8, 4))[:, 0], torch.randn(8))

    times(model, loss)


def of_critic() -> None:
    """A generator whose critic updates twice, with samples of the data and with what the generator has made."""
    generator, critic = nn.Linear(2, 3), nn.Linear(3, 1)
    of_generator, of_critic = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (generator, critic))
    for _ in range(STEPS):
        for _ in range(2):
            with torch.no_grad():
                made = generator(torch.randn(8, 2))
            (critic(made) - critic(torch.randn(8, 3))).mean().backward()
            of_critic.step()
        critic(generator(torch.randn(8, 2))).mean().backward()
        of_generator.step()


def of_sharpness() -> None:
    """Each batch is computed with two sets of parameters."""
    model = nn.Linear(3, 1)

    def loss() -> Tensor:
        batch = torch.randn(8, 3)
        model(batch).square().mean().backward()
        with torch.no_grad():
            for each in model.parameters():
                each.add_(0.01)
        return model(batch).square().mean()  # type: ignore[no-any-return]

    times(model, loss)


def of_accumulated_batch() -> None:
    """The same batch stands for four batches, as in a benchmark."""
    model, batch = nn.Linear(3, 1), torch.randn(8, 3)

    def loss() -> Tensor:
        for _ in range(3):
            model(batch).square().mean().backward()
        return model(batch).square().mean()  # type: ignore[no-any-return]

    times(model, loss)


def of_long_episodes() -> None:
    """An update follows more calls than are kept."""
    model = nn.Linear(3, 1)
    times(model, lambda: torch.stack([model(torch.randn(1, 3)) for _ in range(1100)]).sum())


def of_rays(points: int = 12, mask: int = 8) -> None:
    """A field of points on rays, whose chunks are given one after the other."""
    model = nn.Linear(3, 4)

    def loss() -> Tensor:
        found = torch.cat([model(chunk) for chunk in torch.randn(8 * points, 3).split(64)])
        return mse_loss(found.view(8, points, 4).mean(dim=1)[:mask], torch.randn(mask, 4))

    times(model, loss)


def of_graphs() -> None:
    """Graphs of some nodes each, all of whose nodes are one batch."""
    model, step = nn.Linear(3, 4), 0

    def loss() -> Tensor:
        nonlocal step
        step += 1
        sizes = [2 + (step + each) % 3 for each in range(5)]
        means = [part.mean(dim=0) for part in model(torch.randn(sum(sizes) + step % 2, 3))[: sum(sizes)].split(sizes)]
        return mse_loss(torch.stack(means), torch.randn(5, 4))

    times(model, loss)


KNOWN: dict[str, tuple[Train, int]] = {
    "sequences for an LSTM": (of_sequences(Recurrent(nn.LSTM(4, 8))), 8),
    "sequences for an LSTM with batches first": (of_sequences(Recurrent(nn.LSTM(4, 8, batch_first=True)), 12), 12),
    "sequences for cells": (of_sequences(Cells()), 8),
    "sequences whose loss shows their number": (of_sequences(ByHand()), 8),
    "sequences for a transformer": (of_transformer, 8),
    "packed sequences": (of_packed, 3),
    "lists of pictures": (of_pictures, 5),
    "inner loops": (of_inner_loops, 32),
    "inner loops with copies": (of_copies, 24),
    "attacks": (of_attacks, 8),
    "choices of actions": (of_actions, 8),
    "a critic": (of_critic, 16),
    "two passes with other parameters": (of_sharpness, 8),
    "one batch for several": (of_accumulated_batch, 32),
    "long episodes": (of_long_episodes, 1100),
    "points on rays": (of_rays, 8),
    "nodes of graphs": (of_graphs, 5),
}


def said(found: Measured) -> str:
    return " ".join(event["message"] for event in found.all if event["event"] == "log")


@pytest.mark.parametrize(("train", "samples"), KNOWN.values(), ids=KNOWN)
def test_samples_are_those_that_the_program_shows(tmp_path: Path, train: Train, samples: int) -> None:
    torch.manual_seed(0)
    steps = probed(tmp_path, train).steps
    assert len(steps) == STEPS
    assert {step["samples"] for step in steps[3:]} == {samples}


def of_two_views() -> None:
    model = nn.Linear(3, 4)
    times(model, lambda: cosine_similarity(model(torch.randn(8, 3)), model(torch.randn(8, 3))).mean())


class Sentences(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(STEPS):
            yield torch.rand(9, 8, 4), torch.rand(7, 8)


def of_made_batches() -> None:
    model = nn.Linear(4, 1)
    loader = iter(DataLoader(Sentences(), batch_size=None))
    times(model, lambda: model(next(loader)[0]).mean())


@pytest.mark.parametrize(
    ("train", "reason"),
    [
        (lambda: of_rays(7, 5), "Linear is given 56 entries, but its loss has 5"),
        (of_rays, ""),
        (of_two_views, "Linear is given several batches before a backward pass"),
        (of_made_batches, "the tensors in a batch all have another first dimension"),
        (of_critic, "several optimizers update in a step"),
        (lambda: of_sequences(Recurrent(nn.LSTM(4, 8)))(), ""),
        (of_attacks, ""),
    ],
)
def test_an_uncertain_number_of_samples_is_said_with_what_to_do(tmp_path: Path, train: Train, reason: str) -> None:
    message = said(probed(tmp_path, train))
    assert reason in message
    assert ("--samples-per-step" in message) is bool(reason)


class OfNested(nn.Module):
    """A model that is given tensors without a shape, whose layer is given them too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(4, 1, batch_first=True)

    def forward(self, batch: Tensor) -> Tensor:
        with suppress(Exception):
            self.layer(batch, batch, batch)
        whole = batch.to_padded_tensor(0.0)
        return self.layer(whole, whole, whole)[0].mean()  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore")
def test_tensors_without_a_shape_do_no_harm(tmp_path: Path) -> None:
    model = OfNested()
    found = probed(tmp_path, lambda: times(model, lambda: model(torch.nested.nested_tensor([torch.rand(3, 4)] * 2))))
    assert (found.code, len(found.steps)) == (0, STEPS)


def test_evaluation_by_its_mode_alone_is_said_where_it_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "MUCH_EVALUATION", 0.0)
    model = nn.Linear(3, 1)

    def loss() -> Tensor:
        model.eval()
        with torch.no_grad():
            batch = torch.cat([torch.randn(2, 3) + model(torch.randn(2, 3)) for _ in range(100)])
        model.train()
        return model(batch).square().mean()  # type: ignore[no-any-return]

    found = probed(tmp_path, lambda: times(model, loss))
    assert "in evaluation mode" in said(found)
    assert {step["samples"] for step in found.steps[3:]} == {200}


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        ({"of_box": torch.zeros(9), "picture": torch.zeros(4, 3), "label": torch.zeros(4)}, 4),
        ((["a", "b", "c"], torch.zeros(7, 2), torch.zeros(3)), 3),
        ((torch.zeros(5, 2), torch.zeros(3)), 5),
        ("no tensor", 0),
    ],
)
def test_most_parts_of_a_batch_have_as_many_entries_as_it_has_samples(batch: object, samples: int) -> None:
    assert size_of(batch) == samples
