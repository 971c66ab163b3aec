"""How the model is fed: datasets of the user, shuffles, real DataLoader workers, and batches on the device."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import forked
import psutil
import pytest
import torch
from data_made import feed, opened, text_files, without_path
from running import PATIENCE

from gpubench.errors import DataError
from gpubench.settings.sections import DataSettings
from gpubench.worker.dataloader import POOL_BATCHES, to_device
from gpubench.zoo import Task


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _quick_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of a DataLoader need not import torch."""
    if forked.FOLDER in os.environ:
        forked.fork_spawned(monkeypatch.setattr)


@pytest.fixture
def text(tmp_path: Path) -> DataSettings:
    return text_files(tmp_path / "text")


# ---- a dataset of the user's own


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = f"own_{os.getpid()}"
    (tmp_path / f"{name}.py").write_text(
        textwrap.dedent("""
        import os
        from multiprocessing.util import Finalize
        import torch
        from torch.utils.data import Dataset, IterableDataset

        class Squares(Dataset):
            def __len__(self): return 10
            def __getitem__(self, i): return torch.tensor([i, i * i])

        class Endless(IterableDataset):
            def __iter__(self):
                while True: yield torch.ones(3)

        class Unmeasured(Dataset):
            def __getitem__(self, i): return i

        class Empty(Squares):
            def __len__(self): return 0

        class Ragged(Squares):
            def __getitem__(self, i): return torch.ones(i)

        class Aborting(Squares):
            def __getitem__(self, i):
                Finalize(None, os.abort, exitpriority=1)
                return super().__getitem__(i)

        class Together(Squares):
            def __getitems__(self, indices): return [torch.tensor([-i]) for i in indices]

        def local():
            class Local(Squares): pass
            return Local()

        def needs(argument): pass
        def wrong(): return [1, 2]
        constant = 3
        def fails(): raise ZeroDivisionError("mine")
        """)
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield name
    sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "has no attribute 'nothing'"),
        ("constant", "of type int, not a callable"),
        ("needs", "cannot be called without arguments"),
        ("wrong", r"returned builtins\.list"),
        ("Unmeasured", "without a length"),
    ],
)
def test_a_callable_that_gives_no_dataset_is_told(own: str, name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        opened(without_path(f"{own}:{name}"), None)


def test_a_module_that_is_not_there_is_told_and_so_are_the_users_own_errors(own: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No module named 'gone_away'"):
        opened(without_path("gone_away:make"), None)
    with pytest.raises(DataError, match="raised ZeroDivisionError: mine") as caught:
        opened(without_path(f"{own}:fails"), None)
    assert isinstance(caught.value.__cause__, ZeroDivisionError), "run.log tells where"
    (tmp_path / "importing.py").write_text("import gone_away\ndef make(): ...")
    with pytest.raises(DataError, match="cannot be imported: ModuleNotFoundError: No module named 'gone_away'"):
        opened(without_path("importing:make"), None)


@pytest.mark.parametrize("workers", [0, 1])
def test_items_of_the_users_dataset_are_collated_as_they_are(own: str, workers: int) -> None:
    data = DataSettings(source=f"{own}:Squares", workers=workers)
    with feed(data, opened(data, None), batch_size=5) as batches:
        assert batches.batches_per_epoch == 2
        rows = torch.cat(list(batches.epoch(0)))
    assert sorted(rows[:, 0].tolist()) == list(range(10))
    assert torch.equal(rows[:, 1], rows[:, 0] ** 2)


def test_a_dataset_that_reads_many_samples_at_once_is_asked_to(own: str) -> None:
    data = without_path(f"{own}:Together")
    batch = next(feed(data, opened(data, None)).epoch(0))
    assert batch.shape == (4, 1)


def test_a_stream_without_length_has_no_number_of_batches(own: str) -> None:
    data = without_path(f"{own}:Endless")
    batches = feed(data, opened(data, None))
    assert batches.batches_per_epoch is None
    assert next(batches.epoch(0)).shape == (4, 3)


def test_samples_that_do_not_fit_together_are_told(own: str) -> None:
    data = without_path(f"{own}:Ragged")
    with pytest.raises(DataError, match="cannot be made into a batch"):
        next(feed(data, opened(data, None)).epoch(0))


def test_a_dataset_that_workers_cannot_be_sent_is_told(own: str) -> None:
    data = DataSettings(source=f"{own}:local", workers=1)
    with feed(data, opened(data, None)) as batches, pytest.raises(DataError, match="cannot be sent") as caught:
        next(batches.epoch(0))
    assert "set data.workers to 0" in str(caught.value.hint)
    assert not multiprocessing.active_children()


# ---- the feed


@pytest.mark.parametrize("world_size", [1, 2])
def test_each_epoch_is_a_new_shuffle_that_the_ranks_share_out(text: DataSettings, world_size: int) -> None:
    dataset = opened(text, Task.causal_lm, sequence_length=3)  # 33 samples
    per_rank, batch_size = 33 // world_size, 5

    def starts(rank: int, epoch: int) -> list[int]:
        batches = feed(text, dataset, batch_size=batch_size, rank=rank, world_size=world_size)
        assert batches.batches_per_epoch == per_rank // batch_size
        return [int(row[0]) for batch in batches.epoch(epoch) for row in batch["input_ids"]]

    orders = []
    for epoch in (0, 1):
        ranks = [starts(rank, epoch) for rank in range(world_size)]
        assert all(len(seen) == per_rank // batch_size * batch_size for seen in ranks)
        together = [start for seen in ranks for start in seen]
        assert len(set(together)) == len(together)
        assert set(together) <= set(range(0, 99, 3))
        orders.append(together)
    assert orders[0] != orders[1]
    assert [start for rank in range(world_size) for start in starts(rank, 0)] == orders[0]


def test_too_large_a_batch_is_told_with_the_arithmetic(text: DataSettings) -> None:
    dataset = opened(text, Task.causal_lm)  # 12 samples
    message = r"a batch of 7 on each of 2 ranks takes 14 samples, and data\.source text holds 12, 6 for each"
    with pytest.raises(DataError, match=message) as caught:
        feed(text, dataset, batch_size=7, world_size=2)
    assert caught.value.hint == "set training.batch_size to 6 or less"
    with pytest.raises(DataError, match=r"takes 4 samples, and data\.source synthetic holds 3"):
        feed(DataSettings(samples=3))


def test_data_without_samples_is_told(own: str) -> None:
    data = without_path(f"{own}:Empty")
    with pytest.raises(DataError, match="holds no samples") as refusal:
        feed(data, opened(data, None))
    assert refusal.value.hint == "give one whose length is not 0"


def test_synthetic_batches_lie_ready_and_are_never_zeros() -> None:
    batches = feed(DataSettings(samples=41), channels_last=True)
    assert batches.on_device
    assert batches.batches_per_epoch == 10
    seen = list(batches.epoch(0))
    assert len(seen) == 10
    assert len({id(batch) for batch in seen}) == POOL_BATCHES
    for images, targets in seen:
        assert images.shape == (4, 3, 4, 4)
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert (images != 0).all()
        assert (targets["labels"] != 0).all()


def test_large_synthetic_batches_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(part.nbytes for part in (torch.empty(4, 3, 4, 4), torch.empty(4, dtype=torch.int64)))
    for room, count in ((1, 1), (2 * size, 2), (100 * size, POOL_BATCHES)):
        monkeypatch.setattr("gpubench.worker.dataloader.POOL_BYTES", room)
        assert len({id(batch) for batch in feed(DataSettings()).epoch(0)}) == count


def test_synthetic_data_differ_by_rank_and_leave_the_models_randomness_alone() -> None:
    for source in ("synthetic", "synthetic-host"):
        data = without_path(source)

        def first(rank: int, data: DataSettings = data) -> torch.Tensor:
            torch.manual_seed(0)
            before = torch.get_rng_state()
            images, _ = next(feed(data, rank=rank, world_size=2).epoch(0))
            assert torch.equal(torch.get_rng_state(), before)
            return torch.as_tensor(images)

        assert torch.equal(first(0), first(0))
        assert not torch.equal(first(0), first(1))


def test_host_samples_come_from_workers_that_end_with_the_feed() -> None:
    data = DataSettings(source="synthetic-host", samples=16, workers=2)
    with feed(data) as batches:
        assert not batches.on_device
        epochs = [[images for images, _ in batches.epoch(number)] for number in (0, 1)]
        workers = [process.pid for process in multiprocessing.active_children()]
        assert len(workers) == 2
        half_used = batches.epoch(2)
        next(half_used)
    assert not multiprocessing.active_children()
    assert not any(psutil.pid_exists(pid) for pid in workers if pid is not None)
    every = torch.cat([images for epoch in epochs for images in epoch])
    assert every.shape == (32, 3, 4, 4)
    assert len({float(image.sum()) for image in every}) == 32  # no sample is drawn twice


def test_a_worker_that_aborts_as_it_ends_fails_nothing(own: str) -> None:
    data = DataSettings(source=f"{own}:Aborting", workers=1)
    with feed(data, opened(data, None)) as batches:
        assert len(next(batches.epoch(0))) == 4
    for worker in multiprocessing.active_children():
        worker.join(PATIENCE)  # to write its memory to a core file takes an aborted one its time
    assert not multiprocessing.active_children()


def test_workers_die_when_their_rank_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        textwrap.dedent("""
        import time, torch
        from gpubench.worker.dataloader import Feed
        from gpubench.settings.sections import DataSettings

        def make_batch(batch_size):
            return torch.randn(batch_size, 2)

        if __name__ == "__main__":
            data = DataSettings(source="synthetic-host", workers=1)
            feed = Feed(data, None, make_batch, 2, 0, 1, 0, torch.device("cpu"))
            next(feed.epoch(0))
            print("ready", flush=True)
            time.sleep(60)
        """)
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
        children = psutil.Process(rank.pid).children(recursive=True)
        assert children
        os.kill(rank.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(children, timeout=20)  # DataLoader looks after its parent every 5 s
    assert not alive


# ---- batches


def test_moving_keeps_the_nesting_and_lays_out_images_only() -> None:
    batch = {
        "images": torch.rand(2, 3, 4, 5),
        "rest": [torch.zeros(2, 3, 4, 5, dtype=torch.int64), (torch.rand(2), "x")],
    }
    moved = to_device(batch, torch.device("meta"), non_blocking=True, channels_last=True)
    assert moved["images"].device.type == "meta"
    assert moved["images"].is_contiguous(memory_format=torch.channels_last)
    whole, (vector, name) = moved["rest"]
    assert whole.is_contiguous()
    assert whole.dtype == torch.int64
    assert vector.shape == (2,)
    assert isinstance(moved["rest"][1], tuple)
    assert name == "x"
