"""Data sources in files that tests make, and the feeds that read them."""

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from gpubench.settings.sections import DataSettings
from gpubench.worker.dataloader import Feed
from gpubench.worker.datasets import open_dataset
from gpubench.zoo import Task

CPU = torch.device("cpu")


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


def text_files(folder: Path) -> DataSettings:
    """Two files with the bytes 0 to 99, so that every token tells where it stands."""
    (folder / "b").mkdir(parents=True)
    (folder / "a.txt").write_bytes(bytes(range(43)))
    (folder / "b" / "c.txt").write_bytes(bytes(range(43, 100)))
    (folder / "empty.txt").touch()
    return DataSettings(source="text", path=folder)


def without_path(source: str) -> DataSettings:
    return DataSettings(source=source)
