"""Random samples that still take the road of real ones: drawn one by one, collated, and copied to the device."""

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset

from gpubench.data.batches import map_tensors


class RandomSamples(Dataset[Any]):
    """`length` samples, each a `make_batch(1)` without its batch dimension; a new draw at every visit."""

    def __init__(self, make_batch: Callable[[int], Any], length: int) -> None:
        self.make_batch = make_batch
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return map_tensors(lambda tensor: tensor[0], self.make_batch(1))
