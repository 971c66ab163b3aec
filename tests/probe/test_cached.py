"""Batches of training that are kept and given again, so that data is always ready."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from probing import Loop, Measured, probed
from torch.utils.data import DataLoader, TensorDataset

from gpubench.probe.cached import MOST_BATCHES, KeptBatch, rebuilt, tensors_in

CACHED = {"data.cached": True}
SIZE = 4


class Seen:
    """Trains for some passes, and writes what its batches were."""

    def __init__(self, file: Path, batches: int = 12, passes: int = 4, workers: int = 0) -> None:
        self.file = file
        self.passes = passes
        data = TensorDataset(torch.arange(batches * SIZE * 3, dtype=torch.float32).view(-1, 3))
        self.loader = DataLoader(data, batch_size=SIZE, num_workers=workers)
        self.change: Callable[[torch.Tensor], object] = lambda batch: None
        self.evaluate = False

    def __call__(self) -> None:
        loop, seen, evaluated = Loop(), [], []
        for _ in range(self.passes):
            numbers = []
            for (batch,) in self.loader:
                numbers.append(int(batch[0, 0]) // (3 * SIZE))
                loop.optimizer.zero_grad()
                loop.model(batch).sum().backward()
                loop.optimizer.step()
                self.change(batch)
            seen.append(numbers)
            if self.evaluate:
                loop.model.eval()
                with torch.no_grad():
                    for (batch,) in DataLoader(self.loader.dataset, batch_size=2 * SIZE):
                        loop.model(batch)
                        evaluated.append(int(batch[0, 0]))
                loop.model.train()
        self.file.write_text(repr((seen, evaluated)))

    def read(self) -> tuple[list[list[int]], list[int]]:
        found: tuple[list[list[int]], list[int]] = eval(self.file.read_text())
        return found


def run(folder: Path, program: Seen) -> Measured:
    found = probed(folder, program, treatments=CACHED)
    assert found.code == 0
    assert found.missed == {}
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_the_first_batches_come_again_and_passes_keep_their_length(tmp_path: Path, workers: int) -> None:
    program = Seen(tmp_path / "seen", workers=workers)
    found = run(tmp_path, program)
    seen, _ = program.read()
    assert [len(numbers) for numbers in seen] == [12] * 4
    kept = seen[1][:MOST_BATCHES]
    assert len(set(kept)) == MOST_BATCHES
    assert all(set(numbers) == set(kept) for numbers in seen[1:])
    assert {step["samples"] for step in found.steps} == {SIZE}


def test_a_batch_that_the_program_changes_is_as_it_was(tmp_path: Path) -> None:
    program = Seen(tmp_path / "seen")
    program.change = lambda batch: batch.mul_(100)
    run(tmp_path, program)
    seen, _ = program.read()
    assert max(number for numbers in seen for number in numbers) < 12


def test_an_evaluation_gets_its_own_data(tmp_path: Path) -> None:
    program = Seen(tmp_path / "seen")
    program.evaluate = True
    run(tmp_path, program)
    _, evaluated = program.read()
    assert evaluated == [24 * number for number in range(6)] * 4


def test_each_of_successive_loaders_gives_its_own_batches(tmp_path: Path) -> None:
    """Their samplers may have the same place in memory, one after the other."""
    file = tmp_path / "seen"

    def stages() -> None:
        loop, seen = Loop(), []
        for stage in range(6):
            data = TensorDataset(torch.full((12 * SIZE, 3), float(stage)))
            for _ in range(2):
                for (batch,) in DataLoader(data, batch_size=SIZE):
                    loop.step(batch)
                    seen.append(int(batch[0, 0]) == stage)
        file.write_text(repr(seen))

    assert probed(tmp_path, stages, treatments=CACHED).code == 0
    assert eval(file.read_text()) == [True] * 144


def test_a_program_without_a_loader_says_why_nothing_was_kept(tmp_path: Path) -> None:
    def without() -> None:
        loop = Loop()
        for _ in range(12):
            loop.model(torch.ones(4, 3)).sum().backward()
            loop.optimizer.step()

    assert "no DataLoader of the program trains" in probed(tmp_path, without, treatments=CACHED).missed["data.cached"]


class Pair(NamedTuple):
    image: torch.Tensor
    label: int


class Graph:
    """A batch of a class of the program's own."""

    def __init__(self) -> None:
        self.nodes = torch.ones(2, 3)
        self.names = ["a"]


class Slotted:
    __slots__ = ("__mask", "nodes", "unset")

    def __init__(self) -> None:
        self.nodes = torch.ones(2, 3)
        self.__mask = torch.ones(2)


@dataclass(frozen=True)
class Frozen:
    nodes: torch.Tensor = field(default_factory=lambda: torch.ones(2, 3))


@pytest.mark.parametrize(
    "batch",
    [
        torch.ones(2),
        [torch.ones(2), {"x": torch.ones(3), "names": ["a", "b"]}],
        (Pair(torch.ones(2), 1), None, "text"),
        Graph(),
        Slotted(),
        Frozen(),
    ],
    ids=["tensor", "nested", "named tuple", "own class", "slots", "frozen"],
)
def test_batches_of_any_form_are_given_again(batch: Any) -> None:
    kept = KeptBatch(batch, 2)
    again = kept.give()
    assert tensors_in(again)
    assert type(again) is type(batch)
    assert [each.tolist() for each in tensors_in(again)] == [each.tolist() for each in tensors_in(batch)]
    for tensor in tensors_in(again):
        tensor.add_(1)
    assert all(float(each.min()) == 1 for each in tensors_in(kept.give()))


def test_containers_are_new_each_time() -> None:
    batch = {"labels": torch.ones(1), "rest": [1]}
    kept = KeptBatch(batch, 1)
    kept.give().pop("labels")
    assert set(kept.give()) == {"labels", "rest"}
    assert rebuilt("text", {}) == "text"
