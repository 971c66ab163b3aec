"""What the model is fed: the sources of data, and images and text in real files."""

import math
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from data_made import feed, opened, text_files, without_path
from PIL import Image

from gpubench.errors import DataError
from gpubench.settings.data_sources import check_source
from gpubench.settings.sections import DataSettings
from gpubench.worker.datasets import (
    ALPHA_BAR,
    CausalWindows,
    MaskedWindows,
    TokenFiles,
    random_resized_crop,
)
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
    return text_files(tmp_path / "text")


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


def test_the_noise_schedule_runs_from_clean_to_noise() -> None:
    assert math.isclose(float(ALPHA_BAR[0]), 1 - 1e-4, rel_tol=1e-5)
    assert float(ALPHA_BAR[-1]) < 1e-4
    assert (ALPHA_BAR.diff() < 0).all()
