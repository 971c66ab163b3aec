"""What the model is fed: `open_dataset` finds the samples, `Feed` makes batches of them for one rank.

The samples collate into the batches that `gpubench.models` describes for each task.
"""

from typing import Any

from torch.utils.data import Dataset

from gpubench.data import custom
from gpubench.data.batches import tensors, to_device
from gpubench.data.feed import Feed
from gpubench.data.images import LabelledImages, NoisyImages
from gpubench.data.text import BYTES, CausalWindows, MaskedWindows, load_tokenizer, read_bytes, tokenize, vocabulary_of
from gpubench.errors import DataError
from gpubench.settings import DataSettings
from gpubench.sources import SUITED, SYNTHETIC, check_source, check_task, sequences
from gpubench.zoo import Task

__all__ = ["Feed", "open_dataset", "tensors", "to_device"]


def open_dataset(
    data: DataSettings,
    task: Task | None,
    image_size: int | None,
    sequence_length: int | None,
    vocab_size: int | None,
    classes: int | None,
) -> Dataset[Any] | None:
    """The samples that `data` names, in the form that `task` trains on; None for the synthetic sources.

    `image_size` is in pixels, `sequence_length` in tokens; `vocab_size` and `classes` are the model's, and unchecked
    where they are None. `task` is None for a model of the user's own, which image-folder feeds (image, label).

    Raises DataError if the data is not there, does not suit the task, or holds less or more than the model can take.
    """
    check_source(data)
    if data.source in SYNTHETIC:
        return None
    if data.source not in SUITED:
        return custom.load(data.source)
    check_task(data.source, task)
    if data.source == "text":
        return _open_text(data, task, sequence_length, vocab_size)
    return _open_images(data, task, image_size, classes)


def _open_images(data: DataSettings, task: Task | None, size: int | None, classes: int | None) -> Dataset[Any]:
    assert data.path is not None
    if size is None:
        raise DataError("the model does not say how large its images are", "set data.image_size")
    if task is Task.image_denoising:
        return NoisyImages(data.path, size)
    dataset = LabelledImages(data.path, size)
    if classes is not None and (found := len(dataset.classes)) > classes:
        hint = "leave folders out, or use a model with more classes"
        raise DataError(f"{data.path} holds images in {found} folders, and the model tells {classes} classes", hint)
    return dataset


def _open_text(data: DataSettings, task: Task | None, length: int | None, vocab_size: int | None) -> Dataset[Any]:
    assert data.path is not None
    if length is None:
        raise DataError("the model does not say how long its sequences are", "set data.sequence_length")
    tokenizer = None if data.tokenizer is None else load_tokenizer(data.tokenizer)
    vocabulary = BYTES if tokenizer is None else vocabulary_of(tokenizer)
    mask_token = vocabulary.mask_token if task is Task.masked_lm else 0
    if mask_token is None:
        hint = "use one that was made for masked language models"
        raise DataError(f"data.tokenizer {data.tokenizer} has no token [MASK] or <mask>", hint)
    needed = max(vocabulary.size, mask_token + 1)
    if vocab_size is not None and needed > vocab_size:
        source = "text with one token per byte" if tokenizer is None else f"data.tokenizer {data.tokenizer}"
        hint = "use a model with a larger vocabulary, or a tokenizer that fits this one"
        raise DataError(f"{source} needs a vocabulary of {needed}, and the model's is {vocab_size}", hint)
    tokens = read_bytes(data.path) if tokenizer is None else tokenize(data.path, tokenizer)
    sequences(data.path, len(tokens), length)
    if task is Task.causal_lm:
        return CausalWindows(tokens, length)
    return MaskedWindows(tokens, length, vocabulary.size, mask_token)
