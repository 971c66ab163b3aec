"""Batches as trees: tensors in any nesting of tuples, lists and mappings, as `default_collate` builds them."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """`batch` with `function` applied to every tensor; other leaves stay as they are, mappings become dicts."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(function, value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple takes its fields one by one
        return type(batch)(*(map_tensors(function, value) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map_tensors(function, value) for value in batch)
    return batch


def tensors(batch: Any) -> Iterator[torch.Tensor]:
    """Every tensor in `batch`, depth first."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors(value)
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from tensors(value)


def to_device(batch: Any, device: torch.device, *, non_blocking: bool = False, channels_last: bool = False) -> Any:
    """`batch` with every tensor on `device`; `channels_last` lays out 4-D floating tensors (images) as NHWC.

    `non_blocking` overlaps the copy with the host only for tensors in page-locked memory.
    """

    def move(tensor: torch.Tensor) -> torch.Tensor:
        images = channels_last and tensor.ndim == 4 and tensor.is_floating_point()
        layout = torch.channels_last if images else torch.preserve_format
        return tensor.to(device, non_blocking=non_blocking, memory_format=layout)

    return map_tensors(move, batch)
