"""What is seen of a program's DataLoader when its batches are drawn alone."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from probing import Loop, Measured, probed
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gpubench.probe.alone import ELSEWHERE, NO_LOADER, LoaderProbe

STEPS = 6


class Numbers(Dataset[Any]):
    """Samples of three numbers. `make` is called for each of them."""

    def __init__(self, length: int = 64, make: Callable[[int], object] = lambda index: None) -> None:
        self.length = length
        self.make = make

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.make(index)
        return torch.full((3,), float(index))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(32, 3))


def train(loader: Any, updates: int = 12) -> Callable[[], None]:
    """Returns a program that trains on the batches of a DataLoader, which it makes where it draws from it."""

    def run() -> None:
        loop = Loop()
        left = updates
        while left:
            for batch in loader():
                loop.optimizer.zero_grad()
                loop.model(batch if isinstance(batch, torch.Tensor) else batch[0]).sum().backward()
                loop.optimizer.step()
                left -= 1
                if not left:
                    break

    return run


def drawn(folder: Path, loader: Any, steps: int = STEPS, recorded: bool = False) -> Measured:
    profiling = {"enabled": True} if recorded else None
    found = probed(folder, train(loader), steps, profiling=profiling, probe=LoaderProbe)
    assert found.code == 0, found.all[-1]
    return found


def record(found: Measured) -> dict[str, Any]:
    loader: dict[str, Any] = found.events["loaderdrawn"]["loader"]
    return loader


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_each_batch_is_a_step_and_all_samples_are_counted(tmp_path: Path, workers: int) -> None:
    found = drawn(tmp_path, lambda: DataLoader(Numbers(), batch_size=4, num_workers=workers))
    assert [step["samples"] for step in found.steps] == [4] * len(found.steps)
    assert len(found.steps) == STEPS + 3  # with the warm-up of the test's host
    loader = record(found)
    assert (loader["workers"], loader["batch_size"], loader["length"], loader["style"]) == (workers, 4, 64, "map")
    assert loader["samples"] == 4 * STEPS
    assert loader["times"]["number"] >= 4 * STEPS
    kinds = {stage["kind"] for stage in loader["stages"]}
    assert {"index", "dataset", "collate"} <= kinds
    assert ("transfer" in kinds) == bool(workers)
    assert len(loader["memory"]) == workers


def test_passes_begin_again_and_their_starts_are_told_apart(tmp_path: Path) -> None:
    found = drawn(tmp_path, lambda: DataLoader(Numbers(8), batch_size=4, num_workers=1))
    assert record(found)["passes"] > 2
    starts = [number for number, step in enumerate(found.steps) if "worker_start" in step["phases"]]
    assert starts == list(range(0, len(found.steps), 2))
    assert len(record(found)["restarts"]) == len(starts) - 1


def test_one_update_is_enough(tmp_path: Path) -> None:
    found = probed(tmp_path, train(lambda: DataLoader(Numbers(4), batch_size=4), 1), STEPS, probe=LoaderProbe)
    assert record(found)["samples"] == 4 * STEPS


def test_an_iterable_dataset_is_drawn_from(tmp_path: Path) -> None:
    loader = record(drawn(tmp_path, lambda: DataLoader(Stream(), batch_size=4)))
    assert (loader["style"], loader["length"]) == ("iterable", None)
    assert loader["times"]["number"] > 0


def test_the_loader_that_trains_is_drawn_from_and_not_that_of_an_evaluation(tmp_path: Path) -> None:
    def both() -> Iterator[Any]:
        next(iter(DataLoader(Numbers(16), batch_size=16)))  # as to look at a shape
        loop = Loop()
        with torch.no_grad():
            for batch in DataLoader(Numbers(24), batch_size=8):
                loop.model(batch)
        yield from DataLoader(Numbers(64), batch_size=4)

    assert record(drawn(tmp_path, both))["batch_size"] == 4


def refused(found: Measured) -> tuple[str, str]:
    event = found.events["loaderrefused"]
    return event["reason"], event["hint"]


def test_a_program_without_a_loader_is_refused(tmp_path: Path) -> None:
    def without() -> None:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(80):
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()

    assert refused(probed(tmp_path, without, STEPS, probe=LoaderProbe))[0] == NO_LOADER


def test_a_loader_that_another_thread_may_draw_from_is_not_said_to_be_missing(tmp_path: Path) -> None:
    found = probed(tmp_path, train(lambda: [torch.ones(4, 3)], 80), STEPS, probe=LoaderProbe)
    assert refused(found)[0] == ELSEWHERE  # the loop makes a loader


def broken(index: int) -> None:
    if index >= 20:
        raise OSError("cannot open photo.jpg")


def asserting(index: int) -> None:
    assert index < 20


def chained(index: int) -> None:
    try:
        broken(index)
    except OSError as error:
        raise ValueError(f"photo {index}: Error: none") from error


def killed(index: int) -> None:
    if index >= 20:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("make", "workers", "reason"),
    [
        (broken, 0, "the data raised OSError, making batch 6: cannot open photo.jpg"),
        (broken, 1, "the data raised OSError, making batch 6: cannot open photo.jpg"),
        (chained, 1, "the data raised ValueError, making batch 6: photo 20: Error: none"),
        (killed, 1, "a worker of the DataLoader was killed or crashed, making batch "),
    ],
    ids=["raises", "raises in a worker", "raises again in a worker", "worker killed"],
)
def test_data_that_fails_is_named_with_the_batch(
    tmp_path: Path, make: Callable[[int], None], workers: int, reason: str
) -> None:
    def loader() -> Any:
        return DataLoader(Numbers(64, make), batch_size=4, num_workers=workers)

    found = probed(tmp_path, train(loader), STEPS, probe=LoaderProbe)
    assert refused(found)[0].startswith(reason)
    assert len(found.steps) in (4, 5), "what was drawn until then is kept"


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_without_a_message_is_named_without_its_traceback(tmp_path: Path, workers: int) -> None:
    loader = lambda: DataLoader(Numbers(64, asserting), batch_size=4, num_workers=workers)  # noqa: E731
    found = probed(tmp_path, train(loader), STEPS, probe=LoaderProbe)
    assert refused(found)[0].startswith("the data raised AssertionError, making batch 6")
    assert "Traceback" not in refused(found)[0]


def test_a_sampler_that_gives_its_indices_once_is_drawn_from_until_its_end(tmp_path: Path) -> None:
    sampler = iter(range(32))
    found = drawn(tmp_path, lambda: DataLoader(Numbers(), batch_size=4, sampler=sampler))
    assert "only once" in found.events["log"]["message"]
    assert record(found)["samples"] == 4 * (len(found.steps) - 3)


@pytest.mark.parametrize(("longest", "batches"), [(60.0, 100), (0.0, STEPS + 3)])
def test_the_recorded_repeat_draws_more_samples_if_these_are_few_and_take_little_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, longest: float, batches: int
) -> None:
    monkeypatch.setattr("gpubench.probe.alone.LONGEST_RECORDING", longest)
    found = drawn(tmp_path, lambda: DataLoader(Numbers(), batch_size=4), recorded=True)
    assert len(found.steps) == batches
    assert record(found)["samples"] == 4 * (batches - 3)


def test_slow_samples_are_made_again_in_the_recorded_repeat(tmp_path: Path) -> None:
    def slow(index: int) -> None:
        if index == 7:
            torch.randn(300, 300) @ torch.randn(300, 300)

    found = drawn(tmp_path, lambda: DataLoader(Numbers(16, slow), batch_size=4), 12, recorded=True)
    times = record(found)["times"]
    assert all(len(one["again"]) == 2 for one in times["slowest"])
    assert len(times["typical_again"]) == len(times["slowest"])
    assert "codesampled" in found.events
