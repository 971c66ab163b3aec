"""The datasets that a model is trained on: image folders, text files and datasets of the user.

Their samples can be collated into the batches that `gpubench.worker.tasks` describes for each task.
"""

import logging
import math
import os
import tempfile
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gpubench.errors import DataError
from gpubench.settings.data_sources import (
    SUITED,
    SYNTHETIC,
    check_source,
    check_task,
    image_files,
    sequences,
    text_files,
)
from gpubench.settings.sections import DataSettings
from gpubench.worker.callables import find_callable
from gpubench.worker.dataloader import Data
from gpubench.worker.tasks import MASKED_FRACTION, alpha_bar
from gpubench.zoo import Task

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def load(source: str) -> Data:
    """Calls the callable named `source`, which returns a dataset, (dataset, collate_fn) or a DataLoader.

    Raises DataError if it cannot be called or returns something else.
    """
    returned = find_callable("data.source", source, DataError)()
    match returned:
        case DataLoader():
            return returned
        case (Dataset() as dataset, collate) if callable(collate):
            return _checked(source, dataset), collate
    return _checked(source, returned)


def _checked(source: str, dataset: Any) -> Dataset[Any]:
    if not isinstance(dataset, Dataset):
        kind = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
        if isinstance(dataset, tuple):
            kind = f"({', '.join(type(part).__name__ for part in dataset)})"
        hint = "return a Dataset, IterableDataset or DataLoader of torch.utils.data, or (dataset, collate_fn)"
        raise DataError(f"data.source {source!r} returned {kind}", hint)
    if not isinstance(dataset, IterableDataset) and not hasattr(dataset, "__len__"):
        hint = "define __len__, or derive from IterableDataset"
        raise DataError(f"data.source {source!r} returned a dataset without a length", hint)
    return dataset


MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)  # mean of ImageNet's pixels per channel, in 0..1
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)

ALPHA_BAR = alpha_bar()

AREA = (0.08, 1.0)  # area of the crop, as a share of the image
RATIO = (3 / 4, 4 / 3)  # width / height of the crop


class LabelledImages(Dataset[tuple[torch.Tensor, int]]):
    """Samples (image float32 [3, size, size], label): every image file below `folder`.

    The label is the index of the file's own folder in `classes`, the sorted folders that contain images. Each access
    draws a new random crop and flip from torch's generator. Raises DataError with the name of a file that cannot be
    decoded.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.size = size
        self.files = list(image_files(folder))
        parents = [name.rpartition(os.sep)[0] for name in self.files]
        self.classes = sorted(set(parents))
        index = {name: label for label, name in enumerate(self.classes)}
        self.labels = [index[parent] for parent in parents]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return random_view(self.files[index], self.size).sub_(MEAN).div_(STD), self.labels[index]


class NoisyImages(Dataset[dict[str, torch.Tensor]]):
    """Samples of image denoising: {"clean", "noise": [3, size, size], "timesteps": int64 [], "alpha_bar": []}.

    All but `timesteps` are float32. `clean` is in -1..1; `alpha_bar` is its share of the noisy image's variance at the
    timestep, as in `tasks.alpha_bar`. Files, crops and errors are those of LabelledImages.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.size = size
        self.files = list(image_files(folder))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        clean = random_view(self.files[index], self.size).mul_(2).sub_(1)
        timestep = torch.randint(len(ALPHA_BAR), ())
        noise = torch.randn_like(clean)
        return {"clean": clean, "noise": noise, "timesteps": timestep, "alpha_bar": ALPHA_BAR[timestep]}


def random_view(name: str, size: int) -> torch.Tensor:
    """A random crop of the image file `name`, flipped with probability 1/2: float32 [3, size, size] in 0..1."""
    image = random_resized_crop(decode(name), size)
    if torch.rand(()) < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div_(255)


def decode(name: str) -> Image.Image:
    """Reads the image in the file `name` as RGB. Raises DataError with the name if it cannot be decoded."""
    try:
        with Image.open(name) as image:
            return image.convert("RGB")
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error, ...
        raise DataError(
            f"image {name} cannot be read: {error}", "replace the file, or remove it from the folder"
        ) from error


def random_resized_crop(image: Image.Image, size: int) -> Image.Image:
    """Resizes a random part of `image` to size x size pixels with bilinear filtering.

    Area and shape are drawn as in Szegedy et al. 2015 (arXiv:1409.4842), section 6, and torchvision's
    RandomResizedCrop: ten attempts, then the largest centred crop of an allowed shape.
    """
    left, top, width, height = _random_box(image.width, image.height)
    # The image is cropped first, because the filter of resize(box=...) reads pixels outside the box.
    part = image.crop((left, top, left + width, top + height))
    return part.resize((size, size), Image.Resampling.BILINEAR)


def _random_box(width: int, height: int) -> tuple[int, int, int, int]:
    for _ in range(10):
        area = width * height * _uniform(*AREA)
        ratio = math.exp(_uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left = int(torch.randint(width - w + 1, ()))
            top = int(torch.randint(height - h + 1, ()))
            return left, top, w, h
    w, h = min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))
    return (width - w) // 2, (height - h) // 2, w, h


def _uniform(low: float, high: float) -> float:
    return low + (high - low) * float(torch.rand(()))


BLOCK = 1 << 16  # characters tokenised at once; a word that is cut at a block's end adds one or two tokens to 16,000
BLOCKS = 16  # number of blocks tokenised in parallel

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Vocabulary:
    """The tokens 0 to `size` - 1, and the mask token, which is None if the tokenizer has none."""

    size: int
    mask_token: int | None


BYTES = Vocabulary(256, mask_token=256)  # one token per byte, and a mask token that no text contains


class TokenFiles:
    """A sequence of tokens that is stored in `files`, one after the other, as numbers of type `dtype`."""

    def __init__(self, files: Sequence[str], dtype: npt.DTypeLike) -> None:
        self.files = files
        self.dtype = np.dtype(dtype)
        self.ends = list(accumulate(Path(name).stat().st_size // self.dtype.itemsize for name in files))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """The tokens in [start, stop) as int64, across file borders."""
        tokens = np.empty(stop - start, np.int64)
        position = start
        for file in range(bisect_right(self.ends, start), len(self.files)):
            if position == stop:
                break
            first = self.ends[file - 1] if file else 0
            end = min(stop, self.ends[file])
            mapped = _map(self.files[file], self.dtype, self.ends[file] - first)
            tokens[position - start : end - start] = mapped[position - first : end - first]
            position = end
        return tokens


@lru_cache(maxsize=64)  # each mapping holds a file descriptor, and a process may open only so many
def _map(name: str, dtype: np.dtype[Any], length: int) -> npt.NDArray[Any]:
    return np.memmap(name, dtype, mode="r", shape=(length,)).view(np.ndarray)


def read_bytes(path: Path) -> TokenFiles:
    """The text of the file or folder `path` with one token per byte."""
    return TokenFiles(list(text_files(path)), np.uint8)


def load_tokenizer(folder: Path) -> "Tokenizer":
    """Reads `folder`/tokenizer.json. Raises DataError if it cannot be read."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises bare Exception
        hint = "give the folder that save_pretrained() wrote"
        raise DataError(f"data.tokenizer {folder} cannot be read: {error}", hint) from error


def vocabulary_of(tokenizer: "Tokenizer") -> Vocabulary:
    known = (tokenizer.token_to_id(name) for name in ("[MASK]", "<mask>"))
    mask_token = next((token for token in known if token is not None), None)
    return Vocabulary(max(tokenizer.get_vocab().values(), default=-1) + 1, mask_token)


def tokenize(path: Path, tokenizer: "Tokenizer") -> TokenFiles:
    """Tokenises the text of the file or folder `path`, without special tokens.

    The tokens are written to a temporary file, which is deleted with the result or at the end of the process. Raises
    DataError if the text is not UTF-8.
    """
    dtype = np.uint16 if vocabulary_of(tokenizer).size <= 1 << 16 else np.uint32
    handle, name = tempfile.mkstemp(prefix="gpubench-tokens-")
    log.info("tokenising %s into %s", path, name)
    try:
        with os.fdopen(handle, "wb") as out:
            for blocks in _blocks(path):
                for encoding in tokenizer.encode_batch(blocks, add_special_tokens=False):
                    np.asarray(encoding.ids, dtype).tofile(out)
        tokens = TokenFiles([name], dtype)
    except BaseException:
        Path(name).unlink()
        raise
    weakref.finalize(tokens, Path(name).unlink, missing_ok=True)
    return tokens


def _blocks(path: Path) -> Iterator[list[str]]:
    for name in text_files(path):
        try:
            with open(name, encoding="utf-8") as file:  # noqa: PTH123
                while text := file.read(BLOCK * BLOCKS):
                    yield [text[start : start + BLOCK] for start in range(0, len(text), BLOCK)]
        except UnicodeDecodeError as error:
            hint = "leave out data.tokenizer to use one token per byte"
            raise DataError(f"{name} is not UTF-8 text: {error}", hint) from error


class CausalWindows(Dataset[dict[str, torch.Tensor]]):
    """Samples {"input_ids": int64 [length]}: consecutive windows of `length` tokens; a shorter last one is dropped."""

    def __init__(self, tokens: TokenFiles, length: int) -> None:
        self.tokens = tokens
        self.length = length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.length
        return {"input_ids": torch.from_numpy(self.tokens.read(start, start + self.length))}


class MaskedWindows(Dataset[dict[str, torch.Tensor]]):
    """The windows of CausalWindows with masked tokens: {"input_ids": int64 [length], "labels": int64 [length]}.

    15 % of the tokens are to be predicted. Of these, 80 % become the mask token, 10 % a random token, and 10 % stay
    (Devlin et al. 2018, arXiv:1810.04805, section 3.1). The labels of all other tokens are -100. The number of
    predicted tokens is the same in every sample, so that every step does the same work. Each access draws new
    positions from torch's generator.
    """

    def __init__(self, tokens: TokenFiles, length: int, vocabulary_size: int, mask_token: int) -> None:
        self.windows = CausalWindows(tokens, length)
        self.vocabulary_size = vocabulary_size
        self.mask_token = mask_token

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.windows[index]["input_ids"]
        hidden = torch.randperm(len(tokens))[: max(1, round(MASKED_FRACTION * len(tokens)))]
        labels = torch.full_like(tokens, -100)
        labels[hidden] = tokens[hidden]
        how = torch.rand(len(hidden))
        tokens[hidden[how < 0.8]] = self.mask_token
        random = hidden[how >= 0.9]
        tokens[random] = torch.randint(self.vocabulary_size, (len(random),))
        return {"input_ids": tokens, "labels": labels}


def open_dataset(
    data: DataSettings,
    task: Task | None,
    image_size: int | None,
    sequence_length: int | None,
    vocab_size: int | None,
    classes: int | None,
) -> Data | None:
    """Opens the dataset that `data` names, with samples for `task`. Returns None for the synthetic sources.

    `image_size` is in pixels, `sequence_length` in tokens. `vocab_size` and `classes` are those of the model; with None
    they are not checked. `task` is None for a model of the user; an image folder then gives (image, label).

    Raises DataError if the data does not exist, does not suit the task, or does not fit the model.
    """
    check_source(data)
    if data.source in SYNTHETIC:
        return None
    if data.source not in SUITED:
        return load(data.source)
    check_task(data.source, task)
    if data.source == "text":
        return _open_text(data, task, sequence_length, vocab_size)
    return _open_images(data, task, image_size, classes)


def _open_images(data: DataSettings, task: Task | None, size: int | None, classes: int | None) -> Dataset[Any]:
    assert data.path is not None
    if size is None:
        raise DataError("the size of the model's images is unknown", "set data.image_size")
    if task is Task.image_denoising:
        return NoisyImages(data.path, size)
    dataset = LabelledImages(data.path, size)
    if classes is not None and (found := len(dataset.classes)) > classes:
        hint = "remove folders, or use a model with more classes"
        raise DataError(f"{data.path} has images in {found} folders, but the model has {classes} classes", hint)
    return dataset


def _open_text(data: DataSettings, task: Task | None, length: int | None, vocab_size: int | None) -> Dataset[Any]:
    assert data.path is not None
    if length is None:
        raise DataError("the length of the model's sequences is unknown", "set data.sequence_length")
    tokenizer = None if data.tokenizer is None else load_tokenizer(data.tokenizer)
    vocabulary = BYTES if tokenizer is None else vocabulary_of(tokenizer)
    mask_token = vocabulary.mask_token if task is Task.masked_lm else 0
    if mask_token is None:
        hint = "use a tokenizer for masked language models"
        raise DataError(f"data.tokenizer {data.tokenizer} has no token [MASK] or <mask>", hint)
    needed = max(vocabulary.size, mask_token + 1)
    if vocab_size is not None and needed > vocab_size:
        source = "text with one token per byte" if tokenizer is None else f"data.tokenizer {data.tokenizer}"
        hint = "use a model with a larger vocabulary, or a tokenizer that fits this one"
        raise DataError(f"{source} needs a vocabulary of {needed} tokens, but the model has {vocab_size}", hint)
    tokens = read_bytes(data.path) if tokenizer is None else tokenize(data.path, tokenizer)
    sequences(data.path, len(tokens), length)
    if task is Task.causal_lm:
        return CausalWindows(tokens, length)
    return MaskedWindows(tokens, length, vocabulary.size, mask_token)
