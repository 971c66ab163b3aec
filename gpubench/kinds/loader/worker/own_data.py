"""Stands in for a training program where only a dataset is given: makes a DataLoader of it, and has it drawn from.

Run with the probe in it as `python -m gpubench.kinds.loader.worker.own_data MODULE:CALLABLE BATCH_SIZE`.
"""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from gpubench.errors import DataError, GpubenchError
from gpubench.worker.callables import find_callable

PROBE = "_gpubench_probe.alone"
WITHOUT_SIZE = "leave out --batch-size"
WANTED = "return a Dataset, an IterableDataset, a DataLoader or (dataset, collate_fn) of torch.utils.data, or batches"


class GeneratedBatches(IterableDataset[Any]):
    """The batches that a generator of the user makes without a DataLoader."""

    def __init__(self, source: str, first: Iterable[Any]) -> None:
        self._source = source
        self._first: Iterable[Any] | None = first

    def __iter__(self) -> Iterator[Any]:
        """Each pass calls the user's callable again, because a generator works only once."""
        first, self._first = self._first, None
        return iter(find_callable("--data", self._source, DataError)() if first is None else first)


def loader_of(source: str, returned: Any, batch_size: int | None) -> DataLoader[Any]:
    """Returns the DataLoader of what a callable has returned. Raises DataError for anything else."""
    size = batch_size or 32
    match returned:
        case DataLoader():
            if batch_size is not None:
                raise DataError(f"--data {source} returns a DataLoader, which has its own batch size", WITHOUT_SIZE)
            return returned
        case (Dataset() as dataset, collate) if callable(collate):
            return _made(source, dataset, size, collate_fn=collate)
        case Dataset():
            return _made(source, returned, size)
        case list() | tuple() if batch_size is not None:  # of samples
            return DataLoader(returned, batch_size=size, shuffle=True)  # type: ignore[arg-type]
        case str() | bytes() | dict():
            pass
        case Iterable():
            if batch_size is not None:
                raise DataError(f"--data {source} returns batches, which have their own size", WITHOUT_SIZE)
            return DataLoader(GeneratedBatches(source, returned), batch_size=None)
    kind = type(returned)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    raise DataError(f"--data {source} returned {'None' if returned is None else name}", WANTED)


def _made(source: str, dataset: Dataset[Any], size: int, **more: Any) -> DataLoader[Any]:
    try:
        return DataLoader(dataset, batch_size=size, shuffle=not isinstance(dataset, IterableDataset), **more)
    except (TypeError, ValueError) as error:  # it is shuffled by its length
        if not hasattr(dataset, "__len__"):
            hint = "give it one, or make it an IterableDataset"
            raise DataError(f"the dataset of --data {source} has no __len__", hint) from None
        if not len(dataset):
            raise DataError(f"the dataset of --data {source} is empty", "let it have one sample at least") from None
        raise DataError(f"the dataset of --data {source} cannot be drawn from: {error}", WANTED) from None


def main() -> None:
    source, size = sys.argv[1:3]
    probe = sys.modules[PROBE].installed
    probe.join()
    try:
        returned = find_callable("--data", source, DataError)()
        loader = loader_of(source, returned, int(size) if size != "-" else None)
    except GpubenchError as error:
        probe.refuse(error.message, error.hint or "")
    probe.draw(loader, "")


if __name__ == "__main__":
    main()
