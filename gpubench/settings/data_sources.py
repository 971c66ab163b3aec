"""Checks data sources, and computes how many batches and steps they give, without torch.

The command line calls these checks before it starts workers, and the workers call them again.
"""

import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from gpubench.errors import DataError, SettingsError, UsageError, did_you_mean
from gpubench.settings.callables import refuse_missing
from gpubench.settings.schema import TrainSettings
from gpubench.settings.sections import DataSettings, TrainingSettings
from gpubench.zoo import Task

SYNTHETIC = ("synthetic", "synthetic-host")
FROM_PATH = ("image-folder", "text")
CHOICES = "synthetic, synthetic-host, image-folder, text or module:callable"
IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff"})


def check_source(data: DataSettings) -> None:
    """Raises DataError if `data.source` is unknown, or if the data that it reads is not given, missing or empty.

    It stops at the first usable file, so it is fast on any amount of data.
    """
    unread = [name for name in ("path", "tokenizer") if getattr(data, name) is not None]
    if unread and data.source not in FROM_PATH:
        raise DataError(
            f"data.{unread[0]} is given, but data.source {data.source} does not read it",
            f"set --data {' or '.join(FROM_PATH)}",
            keys=[f"data.{unread[0]}", "data.source"],
        )
    if data.source in FROM_PATH:
        _check_path(data)
        if data.tokenizer is not None and not (data.tokenizer / "tokenizer.json").is_file():
            raise DataError(
                f"no tokenizer.json in data.tokenizer {data.tokenizer}",
                "give the folder that save_pretrained() wrote, or leave data.tokenizer out for one token per byte",
                keys=["data.tokenizer"],
            )
    elif ":" in data.source:
        if not names_callable(data.source):
            message = f"data.source {data.source!r} is not module:callable"
            raise DataError(message, "for example mypackage.data:train", keys=["data.source"])
        refuse_missing("data.source", data.source, DataError, ["data.source"])
    elif data.source not in SYNTHETIC:
        near = did_you_mean(data.source, SYNTHETIC + FROM_PATH)
        hint = f"{near} give {CHOICES}".lstrip()
        raise DataError(f"unknown data.source {data.source!r}", hint, keys=["data.source"])


SUITED: dict[str, tuple[Task | None, ...]] = {
    "image-folder": (Task.image_classification, Task.image_denoising, None),
    "text": (Task.causal_lm, Task.masked_lm),
}
"""The tasks that each source with files is for; None is a callable of the user."""


def check_task(source: str, task: Task | None) -> None:
    if source not in SUITED or task in SUITED[source]:
        return
    sources = ", ".join([*SYNTHETIC, *(name for name, tasks in SUITED.items() if task in tasks)])
    model = "a model of your own" if task is None else f"a model for {task}"
    message = f"data.source {source} does not suit {model}"
    raise DataError(message, f"use {sources} or module:callable", keys=["data.source"])


def names_callable(text: str) -> bool:
    """Whether `text` has the form of module:callable."""
    return all(part.isidentifier() for part in re.split(r"[.:]", text)) and text.count(":") == 1


def batches_each(source: str, samples: int, batch_size: int, world_size: int) -> int:
    """The batches of each rank in one pass over `samples` samples. Raises DataError if there is none."""
    if samples == 0:
        message = f"data.source {source} holds no samples"
        raise DataError(message, "give one whose length is not 0", keys=["data.source"])
    if (per_rank := samples // world_size) < batch_size:
        ranks = f" on each of {world_size} ranks" if world_size > 1 else ""
        share = f", {per_rank} for each" if world_size > 1 else ""
        hint = f"set training.batch_size to {per_rank} or less" if per_rank else "use fewer ranks or more data"
        raise DataError(
            f"a batch of {batch_size}{ranks} takes {batch_size * world_size} samples, "
            f"and data.source {source} holds {samples}{share}",
            f"{hint}, or raise data.samples" if source in SYNTHETIC else hint,
            keys=["data.source"],
        )
    return per_rank // batch_size


def plan(training: TrainingSettings, batches_per_epoch: int | None) -> int | None:
    """The steps in a repeat, warm-up included; None if their number follows from the time that they take."""
    if training.seconds is not None or training.is_open:
        return None
    if training.epochs is None:
        assert training.steps
        return training.warmup + training.steps
    if batches_per_epoch is None:
        message = "training.epochs needs data with a length"
        raise DataError(message, "set training.steps instead", keys=["training.epochs"])
    steps = training.epochs * batches_per_epoch // training.grad_accumulation
    if steps <= training.warmup:
        raise UsageError(
            f"{training.epochs} epochs x {batches_per_epoch} batches / {training.grad_accumulation} accumulated = "
            f"{steps} steps, and training.warmup_steps={training.warmup} leaves none to measure",
            "lower training.warmup_steps or raise training.epochs",
            keys=["training.warmup_steps"],
        )
    return steps


def refuse_short(settings: TrainSettings, batches_per_epoch: int | None) -> None:
    """Raises UsageError if the data gives too few steps for the warm-up or the profiler's schedule."""
    profiling, steps = settings.profiling, plan(settings.training, batches_per_epoch)
    if not profiling.enabled or steps is None:
        return
    source = f"{batches_per_epoch} batches in an epoch"
    if short := profiling.shortfall(steps // steps_in_unit(settings, batches_per_epoch), source):
        hint = "raise training.epochs, or lower profiling.wait or profiling.repeat"
        raise SettingsError(short, hint, keys=profiling.SCHEDULE)


def steps_in_unit(settings: TrainSettings, batches_per_epoch: int | None) -> int:
    """The steps in one unit of the profiler's schedule. Raises SettingsError for an epoch without a length."""
    if settings.profiling.unit == "step":
        return 1
    if batches_per_epoch is None:
        message = "profiling.unit=epoch needs data with a length"
        raise SettingsError(message, "use --profiling.unit=step", keys=["profiling.unit"])
    return max(1, batches_per_epoch // settings.training.grad_accumulation)


def samples_in(data: DataSettings, length: int | None, enough: int) -> int | None:
    """The number of samples in `data`; None if there are at least `enough`, or if it is unknown.

    `length` is that of a sequence in tokens; None if unknown. Raises DataError for less than one sequence.
    """
    found = None
    if data.source in SYNTHETIC:
        found = data.samples
    elif data.path is not None and data.source == "image-folder":
        found = sum(1 for _ in islice(image_files(data.path), enough))
    elif data.path is not None and data.source == "text" and length and data.tokenizer is None:  # one token a byte
        found = sequences(data.path, sum(os.path.getsize(name) for name in text_files(data.path)), length)  # noqa: PTH202
    return None if found is None or found >= enough else found


def sequences(path: Path, tokens: int, length: int) -> int:
    """The number of whole sequences of `length` in `tokens` tokens. Raises DataError if there is none."""
    if tokens < length:
        hint = "set data.sequence_length to less, or give more text"
        raise DataError(f"{path} holds {tokens} tokens, less than one sequence of {length}", hint)
    return tokens // length


def _check_path(data: DataSettings) -> None:
    wanted = "a folder of images" if data.source == "image-folder" else "a text file or a folder of them"
    path, hint, keys = data.path, f"set data.path to {wanted}", ["data.path"]
    if path is None:
        message = f"data.source {data.source} reads data.path, and none is given"
        raise DataError(message, hint, keys=["data.source", *keys])
    if not os.path.exists(path):  # noqa: PTH110 - Path's own raises for a name too long or a folder out of bounds
        raise DataError(f"data.path {path} does not exist", hint, keys=keys)
    if data.source == "image-folder":
        if not path.is_dir():
            raise DataError(f"data.path {path} is not a folder", hint, keys=keys)
        if next(image_files(path), None) is None:
            suffixes = " ".join(sorted(suffix[1:] for suffix in IMAGE_SUFFIXES))
            raise DataError(f"data.path {path} holds no images", f"images end in one of: {suffixes}", keys=keys)
    elif next(text_files(path), None) is None:
        raise DataError(f"data.path {path} holds no text", f"{hint} that is not empty", keys=keys)


def image_files(folder: Path) -> Iterator[str]:
    """Yields the paths of the image files below `folder`, by suffix, in the order of their names."""
    return (name for name in _files(folder) if os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES)  # noqa: PTH122


def text_files(path: Path) -> Iterator[str]:
    """Yields `path` itself, or the non-empty regular files below it in the order of their names."""
    names = [str(path)] if path.is_file() else _files(path)
    return (name for name in names if os.path.isfile(name) and os.path.getsize(name) > 0)  # noqa: PTH113, PTH202


def _files(folder: Path) -> Iterator[str]:
    # Strings and not Paths, because there can be millions. Links are followed, because class folders often are links.
    for parent, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (os.path.join(parent, name) for name in sorted(names) if not name.startswith("."))  # noqa: PTH118
