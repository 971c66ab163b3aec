"""What the model is fed: real files on disk, real DataLoader workers."""

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from running import PATIENCE
from torch.utils.data import Dataset

from gpubench.errors import DataError
from gpubench.settings.data_sources import check_source
from gpubench.settings.sections import DataSettings
from gpubench.worker.dataloader import POOL_BATCHES, Feed, to_device
from gpubench.worker.datasets import (
    ALPHA_BAR,
    CausalWindows,
    MaskedWindows,
    TokenFiles,
    open_dataset,
    random_resized_crop,
)
from gpubench.zoo import Task

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _quick_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of a DataLoader need not import torch."""
    if forked.FOLDER in os.environ:
        forked.fork_spawned(monkeypatch.setattr)


def random_pair(batch_size: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return torch.randn(batch_size, 3, 4, 4), {"labels": torch.randint(1, 10, (batch_size,))}


def feed(data: DataSettings, dataset: Dataset[Any] | None = None, **changes: Any) -> Feed:
    given: dict[str, Any] = {
        "make_batch": random_pair,
        "batch_size": 4,
        "rank": 0,
        "world_size": 1,
        "seed": 7,
        "device": CPU,
    }
    return Feed(data, dataset, **given | changes)


def opened(data: DataSettings, task: Task | None, **changes: Any) -> Any:
    sizes: dict[str, Any] = {"image_size": 16, "sequence_length": 8, "vocab_size": None, "classes": None}
    return open_dataset(data, task, **sizes | changes)


@pytest.fixture
def images(tmp_path: Path) -> DataSettings:
    """Twelve images in the folders cat (red) and dog (blue), of several kinds and modes."""
    folder = tmp_path / "images"
    kinds = [("jpg", "RGB"), ("png", "RGBA"), ("PNG", "L"), ("bmp", "RGB"), ("gif", "P"), ("tif", "RGB")]
    for name, colour in (("cat", "red"), ("dog", "blue")):
        (folder / name).mkdir(parents=True)
        for number, (suffix, mode) in enumerate(kinds):
            picture = Image.new("RGB", (40 + number, 30), colour).convert(mode)
            picture.save(folder / name / f"{number}.{suffix}")
    (folder / "readme.txt").write_text("not an image")
    return DataSettings(source="image-folder", path=folder)


@pytest.fixture
def text(tmp_path: Path) -> DataSettings:
    """Two files with the bytes 0 to 99, so that every token tells where it stands."""
    folder = tmp_path / "text"
    (folder / "b").mkdir(parents=True)
    (folder / "a.txt").write_bytes(bytes(range(43)))
    (folder / "b" / "c.txt").write_bytes(bytes(range(43, 100)))
    (folder / "empty.txt").touch()
    return DataSettings(source="text", path=folder)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tokenizer of whole words: one is 0, two 1, three 2, [MASK] 3, anything else 4."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"one": 0, "two": 1, "three": 2, "[MASK]": 3, "[UNK]": 4}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return folder


def without_path(source: str) -> DataSettings:
    return DataSettings(source=source)


# ---- sources


@pytest.mark.parametrize(
    ("source", "message", "hint"),
    [
        ("txt", "unknown data.source 'txt'", "did you mean 'text'"),
        ("imagefolder", "unknown data.source 'imagefolder'", "did you mean 'image-folder'"),
        ("nonsense!", "unknown data.source", "module:callable"),
        (":call", "is not module:callable", "mypackage.data:train"),
        ("image-folder", "none is given", "folder of images"),
        ("text", "none is given", "text file"),
    ],
)
def test_a_source_that_cannot_be_is_told_with_the_next_move(source: str, message: str, hint: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        check_source(without_path(source))
    assert hint in str(caught.value.hint)


def test_a_path_that_is_missing_or_holds_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "note.txt").write_text("no picture")
    (tmp_path / "nothing.txt").touch()
    for source, name, message in [
        ("image-folder", "gone", "gone does not exist"),
        ("text", "gone", "gone does not exist"),
        ("image-folder", "empty", "empty holds no images"),
        ("image-folder", "note.txt", "note.txt is not a folder"),
        ("text", "empty", "empty holds no text"),
        ("text", "nothing.txt", "nothing.txt holds no text"),
    ]:
        with pytest.raises(DataError, match=message):
            check_source(DataSettings(source=source, path=tmp_path / name))


def test_a_folder_without_tokenizer_is_named(text: DataSettings, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no tokenizer\.json in .*text"):
        check_source(text.model_copy(update={"tokenizer": text.path}))


def test_checking_a_source_does_not_load_torch() -> None:
    code = "import sys, gpubench.settings.data_sources; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_synthetic_sources_have_no_dataset() -> None:
    assert opened(without_path("synthetic"), Task.causal_lm) is None
    assert opened(without_path("synthetic-host"), None) is None


@pytest.mark.parametrize(
    ("source", "task", "suited"),
    [
        ("image-folder", Task.causal_lm, "text"),
        ("image-folder", Task.latent_denoising, "synthetic-host or module:callable"),
        ("text", Task.image_classification, "image-folder"),
        ("text", None, "image-folder"),
    ],
)
def test_a_source_that_does_not_suit_the_task_names_those_that_do(
    source: str, task: Task | None, suited: str, images: DataSettings, text: DataSettings
) -> None:
    data = images if source == "image-folder" else text
    with pytest.raises(DataError, match="does not suit") as caught:
        opened(data, task)
    assert suited in str(caught.value.hint)


# ---- images


def test_images_come_normalised_with_the_label_of_their_folder(images: DataSettings) -> None:
    dataset = opened(images, Task.image_classification)
    assert len(dataset) == 12
    for index in range(12):
        image, label = dataset[index]
        assert image.shape == (3, 16, 16)
        assert image.dtype == torch.float32
        assert label == index // 6
    red, _ = dataset[0]  # 3.jpg is pure red up to its compression
    expected = torch.tensor([(1 - 0.485) / 0.229, -0.456 / 0.224, -0.406 / 0.225])
    torch.testing.assert_close(red.mean((1, 2)), expected, atol=0.05, rtol=0)


def test_crops_and_flips_differ_between_visits_and_repeat_with_the_seed(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (50, 60, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    dataset = opened(DataSettings(source="image-folder", path=tmp_path), None)
    torch.manual_seed(1)
    first, second = dataset[0][0], dataset[0][0]
    torch.manual_seed(1)
    assert torch.equal(dataset[0][0], first)
    assert not torch.equal(first, second)


def test_crops_keep_to_the_area_and_shape_of_the_recipe() -> None:
    # A picture whose pixels are their own coordinates, so that a crop's extent can be read off its corners.
    y, x = np.mgrid[0:200, 0:200].astype(np.uint8)
    picture = Image.fromarray(np.stack([x, y, x], axis=2))
    torch.manual_seed(0)
    areas = []
    for _ in range(200):
        crop = np.asarray(random_resized_crop(picture, 100)).astype(float)
        width, height = np.ptp(crop[..., 0]) + 1, np.ptp(crop[..., 1]) + 1
        assert 0.7 < width / height < 1.43  # 3/4 to 4/3, and a pixel of rounding
        areas.append(width * height / 200**2)
    assert min(areas) > 0.07
    assert min(areas) < 0.2
    assert max(areas) > 0.8


def test_a_picture_too_slim_for_any_crop_is_cut_in_the_middle() -> None:
    strip = Image.new("RGB", (300, 1), "white")
    strip.putpixel((149, 0), (0, 0, 0))
    assert np.asarray(random_resized_crop(strip, 8)).max() == 0


def test_noisy_images_hold_what_denoising_trains_on(images: DataSettings) -> None:
    torch.manual_seed(0)
    with feed(images, opened(images, Task.image_denoising)) as batches:
        batch = next(batches.epoch(0))
    assert {name: (tuple(value.shape), value.dtype) for name, value in batch.items()} == {
        "clean": ((4, 3, 16, 16), torch.float32),
        "noise": ((4, 3, 16, 16), torch.float32),
        "timesteps": ((4,), torch.int64),
        "alpha_bar": ((4,), torch.float32),
    }
    assert batch["clean"].min() == -1
    assert batch["clean"].max() == 1
    assert torch.equal(batch["alpha_bar"], ALPHA_BAR[batch["timesteps"]])
    assert batch["noise"].std() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_corrupt_image_is_named_with_message_and_hint_intact(images: DataSettings, workers: int) -> None:
    assert images.path is not None
    broken = images.path / "cat" / "0.jpg"
    broken.write_bytes(broken.read_bytes()[:100])
    data = images.model_copy(update={"workers": workers})
    with feed(data, opened(data, Task.image_classification)) as batches, pytest.raises(DataError) as caught:
        list(batches.epoch(0))
    assert caught.value.message.startswith(f"image {broken} cannot be read: ")
    assert "\n" not in caught.value.message
    assert caught.value.hint == "replace the file, or remove it from the folder"


def test_more_folders_than_classes_and_a_missing_size_are_told(images: DataSettings) -> None:
    assert opened(images, Task.image_classification, classes=2)
    with pytest.raises(DataError, match="2 folders, but the model has 1 classes"):
        opened(images, Task.image_classification, classes=1)
    with pytest.raises(DataError, match="the size of the model's images is unknown"):
        opened(images, None, image_size=None)


# ---- text


def test_windows_follow_each_other_across_files(text: DataSettings) -> None:
    dataset = opened(text, Task.causal_lm)
    assert len(dataset) == 12  # 100 bytes in windows of 8
    windows = [dataset[index]["input_ids"] for index in range(12)]
    assert torch.equal(torch.cat(windows), torch.arange(96))
    assert windows[0].dtype == torch.int64


def test_a_window_can_span_more_than_two_files(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"{number}.txt").write_bytes(bytes([2 * number, 2 * number + 1]))
    dataset = opened(DataSettings(source="text", path=tmp_path), Task.causal_lm, sequence_length=7)
    assert dataset[0]["input_ids"].tolist() == list(range(7))


def test_a_large_file_is_mapped_and_not_read(tmp_path: Path) -> None:
    file = tmp_path / "large.txt"
    content = np.random.default_rng(0).integers(0, 256, 8 << 20, np.uint8)
    content.tofile(file)
    tracemalloc.start()
    dataset = opened(DataSettings(source="text", path=file), Task.causal_lm, sequence_length=1024)
    assert len(dataset) == 8192
    for index in (0, 5000, 8191):
        expected = content[index * 1024 : (index + 1) * 1024].astype(np.int64)
        assert np.array_equal(dataset[index]["input_ids"].numpy(), expected)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_tokenizer_is_applied_once_to_a_file_that_goes_away(
    text: DataSettings, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    words = tmp_path / "words.txt"
    words.write_text("one two three two\nsomething " * 10)
    data = DataSettings(source="text", path=words, tokenizer=tokenizer)
    dataset = opened(data, Task.causal_lm, sequence_length=5, vocab_size=5)
    assert len(dataset) == 10
    assert dataset[9]["input_ids"].tolist() == [0, 1, 2, 1, 4]
    (written,) = temporary.iterdir()
    assert written.stat().st_size == 50 * 2  # uint16
    assert written.stat().st_mode & 0o077 == 0
    del dataset
    assert not list(temporary.iterdir())


def test_text_that_is_not_utf8_is_named_and_leaves_nothing_behind(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    file = tmp_path / "latin.txt"
    file.write_bytes("één".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.txt is not UTF-8"):
        opened(DataSettings(source="text", path=file, tokenizer=tokenizer), Task.causal_lm)
    assert not list(temporary.iterdir())


def test_a_broken_tokenizer_is_named(text: DataSettings, tokenizer: Path) -> None:
    (tokenizer / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"data\.tokenizer .* cannot be read"):
        opened(text.model_copy(update={"tokenizer": tokenizer}), Task.causal_lm)


def test_text_shorter_than_a_sequence_is_told(text: DataSettings) -> None:
    with pytest.raises(DataError, match="holds 100 tokens, less than one sequence of 101"):
        opened(text, Task.causal_lm, sequence_length=101)


def test_a_vocabulary_larger_than_the_models_is_told(text: DataSettings, tokenizer: Path) -> None:
    assert opened(text, Task.causal_lm, vocab_size=256)
    assert opened(text, Task.masked_lm, vocab_size=257)
    with pytest.raises(DataError, match="vocabulary of 256 tokens, but the model has 255"):
        opened(text, Task.causal_lm, vocab_size=255)
    with pytest.raises(DataError, match="vocabulary of 257 tokens, but the model has 256"):
        opened(text, Task.masked_lm, vocab_size=256)
    with pytest.raises(DataError, match="vocabulary of 5 tokens, but the model has 4"):
        opened(text.model_copy(update={"tokenizer": tokenizer}), Task.causal_lm, vocab_size=4)


def test_masking_hides_15_percent_and_labels_only_those(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    np.arange(4000, dtype=np.uint16).tofile(file)
    tokens = TokenFiles([str(file)], np.uint16)
    torch.manual_seed(0)
    sample = MaskedWindows(tokens, 4000, vocabulary_size=4000, mask_token=5000)[0]
    original = CausalWindows(tokens, 4000)[0]["input_ids"]
    hidden = sample["labels"] != -100
    assert hidden.sum() == 600
    assert torch.equal(sample["labels"][hidden], original[hidden])
    assert torch.equal(sample["input_ids"][~hidden], original[~hidden])
    masked = sample["input_ids"][hidden] == 5000
    kept = sample["input_ids"][hidden] == original[hidden]
    assert masked.float().mean() == pytest.approx(0.8, abs=0.05)
    assert kept.float().mean() == pytest.approx(0.1, abs=0.05)


def test_the_shortest_masked_sequence_still_has_a_label(text: DataSettings) -> None:
    sample = opened(text, Task.masked_lm, sequence_length=1)[0]
    assert sample["labels"].tolist() == [0]


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
    (tmp_path / "importing.py").write_text("import gone_away")
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


def test_the_noise_schedule_runs_from_clean_to_noise() -> None:
    assert math.isclose(float(ALPHA_BAR[0]), 1 - 1e-4, rel_tol=1e-5)
    assert float(ALPHA_BAR[-1]) < 1e-4
    assert (ALPHA_BAR.diff() < 0).all()
