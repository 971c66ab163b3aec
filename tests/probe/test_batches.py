"""Which batches of a program count as training, how many samples they have, and what is evaluation."""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from probing import Loop, Measured, batches, probed
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from gpubench.probe.batches import DrawnBatches, samples_of_next
from gpubench.probe.device import Mark
from gpubench.probe.hooks import DATA_WAIT, FORWARD
from gpubench.probe.timeline import EVALUATION, OTHER, LoopPart

EPOCH, EPOCHS = 4, 4
SLEEP = 0.004
EVALUATED = 5

Evaluate = Callable[[Loop], None]


def without_eval(loop: Loop) -> None:
    with torch.no_grad():
        for (batch,) in batches(EVALUATED, 6):
            loop.model(batch)
            time.sleep(SLEEP)


def gradients_off_inside(loop: Loop) -> None:
    for (batch,) in batches(EVALUATED, 6):
        with torch.no_grad():
            loop.model(batch)
        time.sleep(SLEEP)


def of_averaged_weights(loop: Loop) -> None:
    averaged = copy.deepcopy(loop.model)
    with torch.inference_mode():
        for (batch,) in batches(EVALUATED, 6):
            averaged(batch)
            time.sleep(SLEEP)


def cut_short(loop: Loop) -> None:
    for number, (batch,) in enumerate(batches(50, 6)):
        loop.model(batch).sum().item()
        time.sleep(SLEEP)
        if number == EVALUATED - 1:
            break


def under_attack(loop: Loop) -> None:
    loop.model.eval()
    for (batch,) in batches(EVALUATED, 6):
        loop.model(batch).sum().backward()
        time.sleep(SLEEP)
    loop.model.train()


WAYS: list[Evaluate] = [without_eval, of_averaged_weights, cut_short, under_attack]  # fmt: skip


def test_batches_that_are_kept_count_again_where_the_model_is_given_them(tmp_path: Path) -> None:
    def run(keep: Callable[[], list[Any]]) -> Callable[[], None]:
        def train() -> None:
            model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
            optimizer = torch.optim.SGD(model.parameters())
            kept = keep()
            for number in range(40):
                (batch,) = kept[number % len(kept)]
                model(batch).mean().backward()
                optimizer.step()

        return train

    def one_of_an_open_pass() -> list[Any]:
        passes.append(iter(batches(5)))
        return [next(passes[-1])]

    passes: list[Any] = []
    for number, keep in enumerate((lambda: [next(iter(batches(5)))], lambda: list(batches(5)), one_of_an_open_pass)):
        (folder := tmp_path / str(number)).mkdir()
        found = probed(folder, run(keep))
        assert {step["samples"] for step in found.steps[10:]} == {4}, keep
        assert found.events["repeatdone"]["samples_from"] == "entries of the first tensor that Sequential is given"


def test_several_updates_with_each_batch_count_it_once(tmp_path: Path) -> None:
    def run() -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters())
        for (batch,) in batches(10):
            for _ in range(5):
                model(batch).mean().backward()
                optimizer.step()

    found = probed(tmp_path, run)
    assert [step["samples"] for step in found.steps] == [4, 0, 0, 0, 0] * 10


def test_a_model_that_evaluates_between_new_loaders_of_the_same_data_evaluates(tmp_path: Path) -> None:
    def run() -> None:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters())
        data = TensorDataset(torch.randn(20, 3))
        for _ in range(3):
            for (batch,) in DataLoader(data, 4):
                model(batch).mean().backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                for _ in range(3):
                    model(torch.randn(2, 3))
                    time.sleep(SLEEP)
            model.train()

    steps = probed(tmp_path, run).steps
    assert len(steps) == 15
    assert [number for number, step in enumerate(steps) if step["phases"].get(EVALUATION, 0) >= 3 * SLEEP] == [5, 10]


@pytest.mark.parametrize("evaluate", WAYS, ids=lambda each: each.__name__)
def test_batches_that_no_update_follows_are_evaluation(tmp_path: Path, evaluate: Evaluate) -> None:
    def run() -> None:
        loop = Loop(EPOCH)
        for _ in range(EPOCHS):
            loop()
            evaluate(loop)

    steps = probed(tmp_path, run).steps
    assert [step["samples"] for step in steps] == [4] * EPOCH * EPOCHS
    evaluated = {number: step["phases"].get("evaluation", 0.0) for number, step in enumerate(steps)}
    after = range(EPOCH, len(steps), EPOCH)
    assert all(evaluated[number] > EVALUATED * SLEEP for number in after)
    assert not any(seconds for number, seconds in evaluated.items() if number not in after)


class _Pass:
    """A pass over a made DataLoader."""

    _dataset_kind = 0
    _auto_collation = True

    def __init__(self, sampler: "_Pass | None" = None) -> None:
        self._index_sampler = sampler
        self._dataset = sampler


EPOCH_OF_T = "t C B U " * 3 + "-t "
EVENTS = {
    "an evaluation before the next epoch": (EPOCH_OF_T * 2 + "v c v c -v " + EPOCH_OF_T, [1] * 9),
    "one that is cut short": (EPOCH_OF_T + "v c v c " + EPOCH_OF_T, [1] * 6),
    "one without gradients, whose calls are not seen": (EPOCH_OF_T + "!v !v !v -v " + EPOCH_OF_T, [1] * 6),
    "one whose calls are not seen": (EPOCH_OF_T + "v v v -v " + EPOCH_OF_T, [1] * 6),
    "one with gradients and without a backward pass": (EPOCH_OF_T + "v C v C v C -v " + EPOCH_OF_T, [1] * 6),
    "one with gradients that is cut short": (EPOCH_OF_T + "v C v C " + EPOCH_OF_T, [1] * 6),
    "one with the training data": (EPOCH_OF_T + "!t c !t c -t " + EPOCH_OF_T, [1] * 6),
    "one with backward passes": (EPOCH_OF_T + "!v c B !v c B -v " + EPOCH_OF_T, [1] * 6),
    "one before the first update": ("!v c !v c -v " + EPOCH_OF_T * 2, [1] * 6),
    "one while the next batch is there already": ("t t C B U t C B U -t !v c !v c -v C B U", [1, 1, 1]),
    "one cut short while the next batch is there already": ("t C B U t !v c !v c C B U t C B U", [1, 1, 1]),
    "batches for training drawn in evaluation mode": (EPOCH_OF_T + "v c v c -v !t !t C B C B U", [1, 1, 1, 2]),
    "a teacher": ("t c C B U " * 3, [1] * 3),
    "accumulated gradients": ("t C B t C B t C B U " * 2, [3] * 2),
    "losses that are added": ("t C t C t C B U " * 2, [3] * 2),
    "losses that are added, in a pass that ends": (("t C t C -t B U ") * 3, [2] * 3),
    "batches that are drawn in advance": ("t t t t C B C B C B C B U " * 2 + "t t -t C B C B U", [4, 4, 2]),
    "each drawn before the last one is used": (("t t C B U t C B U t C B U -t C B U " * 2), [1] * 8),
    "each drawn ahead, with accumulated gradients": (
        ("t t C B t C B U t C B t C B U t C B -t C B U " * 2),
        [2] * 6,
    ),
    "each drawn ahead, with collected micro-batches": ("t t t C B C B U t t C B C B U t -t C B C B U " * 2, [2] * 6),
    "each drawn ahead by two loaders": ("t t u u C B U t u C B U -t -u C B U " * 2, [2] * 6),
    "each drawn ahead, for two optimizers": ("t t C B U C B U t C B U C B U -t C B U C B U ", [1, 0] * 3),
    "each drawn ahead, with evaluations": ("t t C B U !v !v c !v c -v c t C B U -t C B U " * 2, [1] * 6),
    "two batches for each update": ("t t C B U " * 4 + "-t " + "t t C B U " * 2, [1, 3, 2, 2, 2, 2]),
    "two loaders": ("l u C B U " * 3 + "-l l u C B U", [2] * 4),
    "two loaders whose batches are used in turn": ("l C u C B U " * 3 + "-l l C u C B U -u l C u C B U", [2] * 5),
    "labels that are made first": ("u c t C B U " * 6, [1, 1, 2, 2, 2, 2]),
    "nested loaders": ("o t C B U t C B U -t " * 2, [2, 1, 2, 1]),
    "nested loaders, once that is known": ("o t C B U t C B U -t " * 4, [2, 1, 2, 1, 1, 1, 1, 1]),
    "activations that are collected first": ("!t c !t c !t c C B U " * 3 + "-t !t c !t c C B U", [3, 3, 3, 2]),
    "no module that is seen": ("t B U " * 2 + "!v !v -v t B U", [1, 1, 1]),
    "no backward pass that is seen": ("t C U " * 2 + "!v c -v t C U", [1, 1, 1]),
    "another loader, in a later phase": (EPOCH_OF_T + "!s c C B U " * 4, [1, 1, 1, 0, 0, 1, 1]),
    "evaluation mode that is never left": (EPOCH_OF_T + "!v c -v !t c B U !t c B U", [1] * 5),
}
"""Each with the samples of every update. A letter draws a batch of one sample from a loader of that name, or without
gradients after "!", and "-" before it ends the pass. "C" calls a module for training, "c" one without gradients. "B" is
a backward pass, and "U" an update."""


@pytest.mark.parametrize(("words", "samples"), EVENTS.values(), ids=EVENTS)
def test_what_follows_a_batch_decides_whether_it_trains(words: str, samples: list[int]) -> None:
    found, part, seen = [], LoopPart([(OTHER, Mark(0))]), DrawnBatches()
    loaders: dict[str, _Pass] = {}
    passes: dict[str, _Pass] = {}
    for word in words.split():
        marks, name = len(part.marks), word[-1]
        if word == "U":
            seen.update(part)
            found.append(part.drawn)
            part = LoopPart([(OTHER, Mark(0))])
        elif word == "B":
            seen.settle(part)
        elif word in ("C", "c"):
            seen.called(marks, trains=word == "C")
            part.marks += [(FORWARD, Mark(0)), (OTHER, Mark(0))] if word == "C" else []
        else:
            one = passes.setdefault(name, _Pass(loaders.setdefault(name, _Pass())))
            if seen.begin(seen.pass_of(one), marks, evaluates=word[0] == "!"):
                part.marks += [(DATA_WAIT, Mark(0)), (OTHER, Mark(0))]
            if word[0] == "-":
                seen.end_pass()
                del passes[name]
            else:
                seen.take(seen.pass_of(one), 1, counts=True)
            assert len(part.marks) < 40
    assert found == samples


@pytest.mark.parametrize(
    ("words", "phases"),
    [
        ("t C B", [OTHER, DATA_WAIT, OTHER, FORWARD, OTHER]),
        ("v c v c -v t C B", [OTHER, EVALUATION, EVALUATION, DATA_WAIT, OTHER, FORWARD, OTHER]),
        ("t v c -v C B", [OTHER, DATA_WAIT, OTHER, EVALUATION, EVALUATION, FORWARD, OTHER]),
        ("-t c c t C B", [OTHER, DATA_WAIT, EVALUATION, DATA_WAIT, OTHER, FORWARD, OTHER]),
        ("-t c c v C B", [OTHER, DATA_WAIT, OTHER, DATA_WAIT, OTHER, FORWARD, OTHER]),
        ("!v c !v c S -v t C B", [OTHER, EVALUATION, EVALUATION, OTHER, DATA_WAIT, OTHER, FORWARD, OTHER]),
    ],
)
def test_evaluation_lasts_from_its_first_batch_to_what_is_none(words: str, phases: list[str]) -> None:
    seen, t, v = DrawnBatches(), _Pass(_Pass()), _Pass(_Pass())
    first = LoopPart([(OTHER, Mark(0))])
    seen.begin(seen.pass_of(t), 1, evaluates=False)
    seen.take(seen.pass_of(t), 1, counts=True)
    seen.settle(first)
    part = LoopPart([(OTHER, Mark(0))])
    for word in words.split():
        one = t if word[-1] == "t" else v
        if word == "B":
            seen.settle(part)
        elif word == "S":
            seen.leave(len(part.marks))
            part.marks.append((OTHER, Mark(0)))
        elif word in ("C", "c"):
            seen.called(len(part.marks), trains=word == "C")
            part.marks += [(FORWARD, Mark(0)), (OTHER, Mark(0))] if word == "C" else []
        elif word == "-v":
            seen.end_pass()
        elif word == "-t":
            seen.begin(seen.pass_of(one), len(part.marks), evaluates=False)
            part.marks += [(DATA_WAIT, Mark(0)), (OTHER, Mark(0))]
            seen.end_pass()
        else:
            if seen.begin(seen.pass_of(one), len(part.marks), evaluates=word[0] == "!"):
                part.marks += [(DATA_WAIT, Mark(0)), (OTHER, Mark(0))]
            seen.take(seen.pass_of(one), 1, counts=True)
    assert [phase for phase, _ in part.marks] == phases


class Detection(Dataset[Any]):
    """Pictures with some boxes each."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return torch.randn(3), torch.zeros(index % 3 + 2, 4)

    @staticmethod
    def collate(found: list[Any]) -> dict[str, Tensor]:
        numbers = [torch.full((len(boxes),), number) for number, (_, boxes) in enumerate(found)]
        return {"batch_idx": torch.cat(numbers), "img": torch.stack([picture for picture, _ in found])}


class Stream(IterableDataset[Any]):
    """Samples whose first tensor is a scalar, so that a batch of them begins with a vector."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(10):
            yield {"boxes": torch.zeros(5, 4), "img": torch.randn(3)}

    @staticmethod
    def collate(found: list[Any]) -> dict[str, Tensor]:
        return {key: (torch.cat if key == "boxes" else torch.stack)([one[key] for one in found]) for key in found[0]}


class Listed(Detection):
    """A dataset that takes a list of indices."""

    def __getitem__(self, index: Any) -> Any:
        return {"scale": torch.ones(()), "img": torch.randn(len(index), 3)}


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "indices": lambda: DataLoader(Detection(), 4, collate_fn=Detection.collate),
    "workers": lambda: DataLoader(
        Detection(), 4, collate_fn=Detection.collate, num_workers=2, persistent_workers=True
    ),
    "sampler of batches": lambda: DataLoader(
        Listed(), batch_size=None, sampler=BatchSampler(SequentialSampler(range(10)), 4, drop_last=False)
    ),
    "stream": lambda: DataLoader(Stream(), 4, collate_fn=Stream.collate),
}  # fmt: skip


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS)
def test_samples_are_what_the_sampler_drew(tmp_path: Path, loader: Callable[[], "DataLoader[Any]"]) -> None:
    def run() -> None:
        loop, data = Loop(), loader()
        for _ in range(3):
            for batch in data:
                loop.step(batch["img"])

    assert [step["samples"] for step in probed(tmp_path, run).steps] == [4, 4, 2] * 3


def epochs(loop: Loop, body: Callable[[Tensor], object], number: int = 3) -> None:
    for _ in range(number):
        for (batch,) in loop.data:
            body(batch)


def with_a_frozen_mode(loop: Loop) -> None:
    epochs(loop, loop.step, 1)
    loop.model.eval()
    epochs(loop, loop.step, 2)


def pseudo_labelled(loop: Loop) -> None:
    unlabelled = iter(batches(20, 3))
    for (batch,) in batches(12, 1):
        (other,) = next(unlabelled)
        with torch.no_grad():
            loop.model(other)
        loop.step(torch.cat([batch, other]))


def in_turn(loop: Loop) -> None:
    one, other = batches(5, 1), batches(7, 3)
    drawn = [iter(one), iter(other)]
    for _ in range(12):
        losses = []
        for number, data in enumerate((one, other)):
            try:
                (batch,) = next(drawn[number])
            except StopIteration:
                drawn[number] = iter(data)
                (batch,) = next(drawn[number])
            losses.append(loop.model(batch).sum())
        torch.stack(losses).sum().backward()
        loop.optimizer.step()


def collected_first(loop: Loop) -> None:
    drawn = iter(batches(24, 2))
    for _ in range(12):
        with torch.no_grad():
            pair = [loop.model[0](next(drawn)[0]) for _ in range(2)]  # type: ignore[index]
        loop.model[2](torch.cat(pair)).sum().backward()  # type: ignore[index]
        loop.optimizer.step()


def by_lbfgs(loop: Loop) -> None:
    loop.optimizer = torch.optim.LBFGS(loop.model.parameters(), max_iter=4)
    data = torch.randn(4, 3)
    for _ in range(12):

        def closure() -> Tensor:
            loop.optimizer.zero_grad()
            loss: Tensor = loop.model(data).square().mean()
            loss.backward()
            return loss

        loop.optimizer.step(closure)


def by_lbfgs_over_all_batches(loop: Loop) -> None:
    loop.optimizer = torch.optim.LBFGS(loop.model.parameters(), max_iter=4)
    data = batches(2, 2)
    for _ in range(12):

        def closure() -> Tensor:
            loop.optimizer.zero_grad()
            losses = [loop.model(batch).square().mean() for (batch,) in data]
            for loss in losses:
                loss.backward()
            return torch.stack(losses).detach().sum()

        loop.optimizer.step(closure)


def by_rollouts(loop: Loop) -> None:
    for _ in range(3):
        for _ in range(8):
            with torch.no_grad():
                loop.model(torch.randn(1, 3))
        for batch in torch.randn(EPOCH, 4, 3):
            loop.step(batch)


def one_state_at_a_time(loop: Loop) -> None:
    for _ in range(12):
        loop.optimizer.zero_grad()
        torch.stack([loop.model(torch.randn(3)) for _ in range(4)]).mean().backward()
        loop.optimizer.step()


class Field(nn.Linear):
    """The right side of a differential equation, which is called with the time first."""

    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(y) * t


class Critic(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 1)

    def forward(self, states: Tensor, actions: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(torch.cat([states, actions], 1))


def by_an_actor_and_its_critic(loop: Loop) -> None:
    actor, critic = nn.Linear(3, 2), Critic()
    optimizers = [torch.optim.Adam(each.parameters()) for each in (critic, actor)]
    for _ in range(12):
        for _ in range(2):
            actor(torch.randn(1, 3)).detach()
            states, actions = torch.randn(2, 3), torch.randn(2, 2)
            critic(states, actions).mean().backward()
            optimizers[0].step()
        critic(states, actor(states)).mean().backward()
        optimizers[1].step()


def by_a_solver(loop: Loop) -> None:
    field = Field()
    optimizer = torch.optim.Adam(field.parameters())
    for _ in range(12):
        y = torch.randn(4, 3)
        for t in torch.linspace(0, 1, 5):
            y = y + 0.2 * field(t, y)
        optimizer.zero_grad()
        y.square().mean().backward()
        optimizer.step()


def checked_by_a_loader(loop: Loop) -> None:
    for number in range(12):
        loop.step(torch.randn(4, 3))
        if number % 4 == 3:
            gradients_off_inside(loop)


def attacked_in_evaluation_mode(loop: Loop) -> None:
    for (batch,) in batches(12):
        loop.model.eval()
        change = torch.zeros_like(batch, requires_grad=True)
        (gradient,) = torch.autograd.grad(loop.model(batch + change).mean(), change)
        loop.model.train()
        loop.step(batch + gradient.sign())


def with_batches_that_fail(loop: Loop) -> None:
    for number, (batch,) in enumerate(batches(18)):
        with suppress(RuntimeError):
            loop.step(batch if number % 3 else batch[:, :2])


def with_calls_that_fail(loop: Loop) -> None:
    for number in range(18):
        with suppress(RuntimeError):
            loop.step(torch.randn(4, 3 if number % 3 else 2))


def with_calls_that_are_made_again(loop: Loop) -> None:
    for (batch,) in batches(12):
        with suppress(RuntimeError):
            loop.model(batch[:, :2])
        loop.step(batch)


TRAINING: list[Callable[[Loop], None]] = [
    with_a_frozen_mode, pseudo_labelled, in_turn, collected_first, by_lbfgs, by_lbfgs_over_all_batches,
    one_state_at_a_time, by_an_actor_and_its_critic, by_a_solver, checked_by_a_loader, attacked_in_evaluation_mode,
    with_batches_that_fail, with_calls_that_fail, with_calls_that_are_made_again,
]  # fmt: skip


@pytest.mark.parametrize("train", TRAINING, ids=lambda each: each.__name__)
def test_batches_that_an_update_follows_are_training(tmp_path: Path, train: Callable[[Loop], None]) -> None:
    steps = probed(tmp_path, lambda: train(Loop(EPOCH))).steps
    assert len(steps) == 12
    assert [step["samples"] for step in steps[4:]] == [4] * 8
    if train is not checked_by_a_loader:
        assert not any("evaluation" in step["phases"] for step in steps[5:])


def said(found: Measured) -> str:
    return str(found.events["repeatdone"]["samples_from"])


def test_what_samples_are_is_told(tmp_path: Path) -> None:
    by_model = said(probed(tmp_path, lambda: by_rollouts(Loop())))
    assert by_model == "entries of the first tensor that Sequential is given"
    (tmp_path / "two").mkdir()
    assert said(probed(tmp_path / "two", lambda: epochs(Loop(), Loop().step))).startswith("indices drawn by")


def test_a_checkpoint_is_no_part_of_the_evaluation_before_it(tmp_path: Path) -> None:
    def run() -> None:
        loop = Loop(EPOCH)
        for _ in range(EPOCHS):
            loop.model.train()
            loop()
            loop.model.eval()
            without_eval(loop)
            torch.save(loop.model.state_dict(), tmp_path / "saved")
            time.sleep(0.05)

    steps = probed(tmp_path, run).steps
    after = [steps[number] for number in range(EPOCH, len(steps), EPOCH)]
    assert all(step["phases"]["other"] > 0.05 for step in after)
    assert all(step["phases"]["evaluation"] > EVALUATED * SLEEP for step in after)


class Chunks(Detection):
    """A dataset whose items are whole batches, of a table, a list of tensors and a target."""

    def __getitem__(self, index: int) -> Any:
        rows = 16 if index < 9 else 7
        return torch.randn(rows, 3), torch.zeros(2, rows), [torch.zeros(40 + index), torch.zeros(50)], torch.ones(rows)


class Clouds(Detection):
    def __getitem__(self, index: int) -> Any:
        return torch.randn(20 + index * 7 % 10, 3), torch.zeros(20 + index * 7 % 10)


class Boxes(Detection):
    def __getitem__(self, index: int) -> Any:
        return torch.randn(3, 8, 8), {"boxes": torch.zeros(3, 4), "labels": torch.zeros(3)}


class Chunk(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for index in range(10):
            yield Chunks()[index]


def first(found: list[Any]) -> Any:
    return found[0]


def listed(found: list[Any]) -> Any:
    return [[each] for each in found[0]]


ROWS: dict[str, tuple[Callable[[], DataLoader[Any]], list[int]]] = {
    "batches of the dataset": (lambda: DataLoader(Chunks(), 1, collate_fn=first), [16] * 9 + [7]),
    "of a stream": (lambda: DataLoader(Chunk(), 1, collate_fn=first), [16] * 9 + [7]),
    "without a batch size": (lambda: DataLoader(Chunks(), batch_size=None), [16] * 9 + [7]),
    "pictures one by one": (lambda: DataLoader(Boxes(), 1), [1] * 10),
    "lists of a picture": (lambda: DataLoader(Boxes(), 1, collate_fn=listed), [1] * 10),
    "clouds of points": (lambda: DataLoader(Clouds(), 1, collate_fn=first), [20, 27, 1, 1, 1, 1, 1, 1, 1, 1]),
}  # fmt: skip


@pytest.mark.parametrize(("loader", "samples"), ROWS.values(), ids=ROWS)
def test_an_index_may_stand_for_a_batch(loader: Callable[[], "DataLoader[Any]"], samples: list[int]) -> None:
    seen, drawn, found = DrawnBatches(), iter(loader()), []
    for _ in range(10):
        part = LoopPart([(OTHER, Mark(0))])
        seen.begin(seen.pass_of(drawn), 1, evaluates=False)
        if isinstance(drawn, _SingleProcessDataLoaderIter):
            index = drawn._next_index()
            seen.index(drawn, index)
            batch, data_pass = drawn._dataset_fetcher.fetch(index), seen.pass_of(drawn)
            seen.take(data_pass, samples_of_next(data_pass, drawn, batch), counts=True)
        seen.update(part)
        found.append(part.drawn)
    assert found == samples
