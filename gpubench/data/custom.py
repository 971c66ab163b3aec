"""A dataset of the user's own, named as module:callable."""

from typing import Any

from torch.utils.data import Dataset, IterableDataset

from gpubench import callables
from gpubench.errors import DataError


def load(source: str) -> Dataset[Any]:
    """What the callable in `source` returns. Raises DataError where there is none, and as `callables.find` says."""
    return _checked(source, callables.find("data.source", source, DataError)())


def _checked(source: str, dataset: Any) -> Dataset[Any]:
    if not isinstance(dataset, Dataset):
        kind = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
        raise DataError(
            f"data.source {source!r} returned {kind}", "return a torch.utils.data.Dataset or IterableDataset"
        )
    if not isinstance(dataset, IterableDataset) and not hasattr(dataset, "__len__"):
        hint = "define __len__, or derive from IterableDataset"
        raise DataError(f"data.source {source!r} returned a dataset without a length", hint)
    return dataset
