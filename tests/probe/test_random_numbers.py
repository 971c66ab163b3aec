"""Generators of random numbers that are in the same state in several workers, and those that only seem to be."""

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset

from gpubench.probe import random_numbers
from gpubench.probe.random_numbers import RandomStates, same_numbers


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_numbers, "MOST_TWISTS", 50)


SHARED = np.random.default_rng(0)
Found = list[tuple[str, str, int]]


class Holding(Dataset[float]):
    """Draws from what it holds."""

    def __init__(self, generator: Any, draw: Callable[[Any], Any], reseed: Callable[[Any, int], Any] | None = None):
        self.generator, self._draw, self._reseed = generator, draw, reseed

    def __getitem__(self, index: int) -> float:
        if self._reseed:
            self._reseed(self.generator, index)
        return float(self._draw(self.generator))


class Slotted(Dataset[float]):
    __slots__ = ("rng",)

    def __init__(self) -> None:
        self.rng = random.Random(0)

    def __getitem__(self, index: int) -> float:
        return self.rng.random()


class Drawing(Dataset[float]):
    """Draws without holding anything."""

    def __init__(self, draw: Callable[[int], Any]) -> None:
        self.draw = draw

    def __getitem__(self, index: int) -> float:
        return float(self.draw(index))


class OfModule(Dataset[float]):
    def __getitem__(self, index: int) -> float:
        return float(SHARED.random())


class Renewed(Dataset[float]):
    """Makes its generator anew for each sample."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index: int) -> float:
        self.rng = np.random.default_rng(index)
        return float(self.rng.random())


class Told(Holding):
    def set_epoch(self, epoch: int) -> None:
        self.generator.seed(epoch)


class Lines(IterableDataset[float]):
    """Orders its files alike in all workers; with `noisy`, adds noise of the same generator to each line."""

    def __init__(self, *, noisy: bool) -> None:
        self.rng, self.noisy = random.Random(0), noisy

    def __iter__(self) -> Iterator[float]:
        files = list(range(100))
        self.rng.shuffle(files)
        for each in files:
            yield each + self.rng.random() if self.noisy else each


class Jitter:
    def __init__(self) -> None:
        self.rng = np.random.RandomState(0)

    def __call__(self, index: int) -> float:
        return float(self.rng.rand())


def seeded(worker: int) -> None:
    """Seeds as PyTorch does in each worker."""
    random.seed(1000 + worker)
    torch.manual_seed(1000 + worker)
    np.random.seed(1000 + worker)


def found(dataset: Any, *, workers: int = 2, passes: int = 1, init: Callable[[int], Any] | None = None) -> Found:
    """What is found when workers, which each have a copy of the dataset as at its beginning, make three batches."""
    global SHARED
    records: list[dict[str, Any]] = []
    shared = copy.deepcopy(SHARED.bit_generator.state)
    kept = random.getstate(), torch.get_rng_state(), np.random.get_state()
    for number in range(passes):
        for worker in range(workers):
            SHARED.bit_generator.state = shared
            copied = copy.deepcopy(dataset)
            seeded(100 * number + worker)
            if init:
                init(worker)
            states = RandomStates(copied)
            stream = iter(copied) if isinstance(copied, IterableDataset) else None
            for batch in range(3):
                for index in (1 + 10 * worker + 2 * batch, 2 + 10 * worker + 2 * batch):
                    next(stream) if stream else copied[index]
                records.append({"worker": worker, **states.after_batch()})
    random.setstate(kept[0])
    torch.set_rng_state(kept[1])
    np.random.set_state(kept[2])
    return [(each["generator"], each["where"], each["number"]) for each in same_numbers(records)]


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        (Holding(np.random.default_rng(0), lambda rng: rng.random()), "Holding.generator"),
        (Holding(np.random.RandomState(0), lambda rng: rng.rand()), "Holding.generator"),
        (Holding(random.Random(0), lambda rng: rng.random()), "Holding.generator"),
        (Holding(torch.Generator(), lambda rng: torch.rand((), generator=rng)), "Holding.generator"),
        (Holding(random.Random(0), lambda rng: sum(rng.random() for _ in range(5000))), "Holding.generator"),
        (Subset(Holding(random.Random(0), lambda rng: rng.random()), range(100)), "Subset.dataset.generator"),
        (Slotted(), "Slotted.rng"),
        (Holding([[[[Drawing(Jitter())]]]], lambda held: held[0][0][0][0].draw(0)), "Holding.generator.draw.rng"),
        (Drawing(Jitter()), "Drawing.draw.rng"),
        (OfModule(), "SHARED"),
        (Lines(noisy=True), "Lines.rng"),
    ],
)
def test_a_generator_that_workers_have_copies_of_is_found(dataset: Any, name: str) -> None:
    assert found(dataset) == [(name, "workers", 2)]
    assert (name, "passes", 2) in found(dataset, workers=1, passes=2)


@pytest.mark.parametrize(
    ("init", "draw", "name"),
    [
        (lambda worker: np.random.seed(0), lambda index: np.random.rand(), "numpy.random"),
        (lambda worker: random.seed(0), lambda index: random.random(), "random"),
        (lambda worker: torch.manual_seed(0), lambda index: torch.rand(()), "torch"),
    ],
)
def test_workers_that_seed_alike_are_found(init: Callable[[int], Any], draw: Callable[[int], Any], name: str) -> None:
    assert found(Drawing(draw), init=init) == [(name, "workers", 2)]


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda index: (np.random.seed(0), np.random.rand())[1], "numpy.random"),
        (lambda index: (random.seed(7), random.random())[1], "random"),
        (lambda index: (torch.manual_seed(0), torch.rand(()))[1], "torch"),
        (lambda index: (random.seed(7), torch.manual_seed(0), random.random())[2], "random"),  # and not torch
    ],
)
def test_a_constant_seed_for_each_sample_is_found(draw: Callable[[int], Any], name: str) -> None:
    assert found(Drawing(draw), workers=1) == [(name, "batches", 1)]
    assert found(Drawing(draw)) == [(name, "batches", 2)]


def test_a_constant_seed_of_a_generator_that_the_dataset_holds_is_found() -> None:
    dataset = Holding(random.Random(0), lambda rng: rng.random(), lambda rng, index: rng.seed(0))
    assert ("Holding.generator", "batches", 1) in found(dataset, workers=1)


class SeedsOnce(Dataset[float]):
    """Draws an order with its first sample, from a seed that all workers have to agree on, and nothing after that."""

    def __init__(self) -> None:
        self.order: Any = None

    def __getitem__(self, index: int) -> float:
        if self.order is None:
            np.random.seed(0)
            self.order = np.random.permutation(100)
        return float(self.order[index % 100])


def test_a_seed_of_the_first_sample_is_no_seed_of_each_one() -> None:
    assert found(SeedsOnce()) == []


def own(worker: int) -> None:
    np.random.seed(worker)


@pytest.mark.parametrize(
    ("dataset", "init"),
    [
        (Drawing(lambda index: index), None),
        (Drawing(lambda index: random.random()), None),
        (Drawing(lambda index: np.random.rand()), None),
        (Drawing(lambda index: np.random.randn(300, 300).sum()), None),
        (Drawing(lambda index: torch.rand(())), None),
        (Drawing(lambda index: np.random.rand()), own),
        (Drawing(lambda index: torch.rand(())), lambda worker: np.random.seed(0)),  # seeds what is not drawn from
        (Drawing(lambda index: np.random.default_rng(index).random()), None),
        (Drawing(lambda index: random.Random(index).random()), None),
        (Drawing(lambda index: torch.rand((), generator=torch.Generator().manual_seed(index))), None),
        (Holding(random.Random(0), lambda rng: 0.0), None),
        (Holding(np.random.default_rng(0), lambda rng: 0.0), None),
        (Holding(random.Random(0), lambda rng: rng.random(), lambda rng, index: rng.seed(index)), None),
        (Holding(np.random.RandomState(0), lambda rng: rng.rand(), lambda rng, index: rng.seed(index)), None),
        (
            Holding(
                torch.Generator(),
                lambda rng: torch.rand((), generator=rng),
                lambda rng, index: rng.manual_seed(index),
            ),
            None,
        ),
        (Drawing(lambda index: (np.random.seed(index), np.random.rand())[1]), lambda worker: np.random.seed(0)),
        (Drawing(lambda index: (random.seed(index), random.random())[1]), lambda worker: random.seed(0)),
        (Renewed(), None),
        (Lines(noisy=False), None),
        (Subset(Drawing(lambda index: random.random()), range(100)), None),
    ],
)
def test_programs_whose_workers_draw_different_numbers_are_not_accused(dataset: Any, init: Any) -> None:
    assert found(dataset, init=init) == []
    assert found(dataset, workers=1) == []


def test_one_process_goes_on_with_its_generator_in_the_next_pass() -> None:
    dataset = Holding(random.Random(0), lambda rng: rng.random())
    records = []
    for _ in range(3):
        states = RandomStates(dataset)
        for index in range(2):
            dataset[index]
            records.append({"worker": 0, **states.after_batch()})
    assert same_numbers(records) == []


def test_a_dataset_that_is_told_which_pass_begins_may_repeat_what_it_was_told() -> None:
    dataset = Told(random.Random(0), lambda rng: rng.random())
    assert found(dataset, workers=1, passes=2) == []


def test_worker_seeds_that_repeat_in_each_pass_are_found() -> None:
    dataset = Drawing(lambda index: np.random.rand())
    assert found(dataset, passes=2, init=own) == [("numpy.random", "passes", 2)]
