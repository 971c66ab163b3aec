"""Loads batches for one rank, collates them and copies them to the device."""

import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import cycle, islice
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from gpubench.errors import DataError, GpubenchError
from gpubench.settings.data_sources import batches_each
from gpubench.settings.sections import DataSettings


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """Applies `function` to every tensor in `batch`. Other leaves are unchanged; mappings become dicts."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(function, value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple takes its fields as separate arguments
        return type(batch)(*(map_tensors(function, value) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(map_tensors(function, value) for value in batch)
    return batch


def tensors(batch: Any) -> Iterator[torch.Tensor]:
    """Yields every tensor in `batch`, depth first."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors(value)
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from tensors(value)


def to_device(batch: Any, device: torch.device, *, non_blocking: bool = False, channels_last: bool = False) -> Any:
    """Copies every tensor in `batch` to `device`.

    `channels_last` converts 4-D floating-point tensors (images) to the NHWC layout. `non_blocking` has an effect only
    for tensors in page-locked memory.
    """

    def move(tensor: torch.Tensor) -> torch.Tensor:
        images = channels_last and tensor.ndim == 4 and tensor.is_floating_point()
        layout = torch.channels_last if images else torch.preserve_format
        return tensor.to(device, non_blocking=non_blocking, memory_format=layout)

    return map_tensors(move, batch)


class RandomSamples(Dataset[Any]):
    """A dataset of `length` random samples, which are drawn anew at each access.

    A sample is `make_batch(1)` without its batch dimension.
    """

    def __init__(self, make_batch: Callable[[int], Any], length: int) -> None:
        self.make_batch = make_batch
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return map_tensors(lambda tensor: tensor[0], self.make_batch(1))


POOL_BATCHES = 4  # number of synthetic batches on the device
POOL_BYTES = 256 << 20  # their largest total size, so that they leave memory to the model

# DataLoader workers are spawned. A fork of a process with threads and a CUDA context can deadlock, and keeps the
# process's sockets and device memory alive after the process is killed. Children of a fork server watch the server
# instead of the rank, so they survive a rank that is killed. A spawned worker imports torch again, which takes seconds,
# but before the first step.
START_METHOD = "spawn"


Data = Dataset[Any] | tuple[Dataset[Any], Callable[[list[Any]], Any]] | DataLoader[Any]
"""A dataset, one with the function that makes samples into a batch, or the user's own DataLoader."""


class Feed:
    """The batches of one rank: a context manager that shuts down its DataLoader workers on exit.

    `batch_size` is per rank. Every rank gets the same number of batches; samples that do not fill a batch are dropped.
    All ranks shuffle with `seed`; random samples and augmentation use `seed` + `rank`.

    on_device: whether the batches are already on `device`, so that loading and copying take no time.
    batches_per_epoch: the number of batches per rank; None for an IterableDataset without a length, which must split
        its samples among the ranks itself.

    own_loader: whether the batches are those of the user's DataLoader, which is used as it is: with its own batch size,
        workers and sampler. If the sampler is a DistributedSampler, each epoch has another order.

    Raises DataError if there is less than one batch of data for each rank, or if a DataLoader of the user ends with a
    smaller batch.
    """

    def __init__(
        self,
        data: DataSettings,
        dataset: Data | None,
        make_batch: Callable[[int], Any] | None,
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        device: torch.device,
        channels_last: bool = False,
    ) -> None:
        self._source = data.source
        self._loader: DataLoader[Any] | None = None
        self._sampler: DistributedSampler[Any] | None = None
        self._pool: list[Any] = []
        self.on_device = data.source == "synthetic"
        self.own_loader = isinstance(dataset, DataLoader)
        self.batches_per_epoch: int | None
        if self.on_device and make_batch is not None:
            self.batches_per_epoch = batches_each(data.source, data.samples, batch_size, world_size)
            self._pool = _pool(make_batch, batch_size, seed + rank, device, channels_last)
            return
        if dataset is None:
            assert make_batch is not None  # models.build refuses a model that has none
            dataset = RandomSamples(make_batch, data.samples)
        if isinstance(dataset, DataLoader):
            self._adopt(dataset, batch_size)
            return
        dataset, collate = dataset if isinstance(dataset, tuple) else (dataset, default_collate)
        if not isinstance(dataset, IterableDataset):
            self.batches_per_epoch = batches_each(data.source, _length(dataset), batch_size, world_size)
            self._sampler = DistributedSampler(dataset, world_size, rank, shuffle=True, seed=seed, drop_last=True)
            dataset = _Reader(dataset, seed + rank)
        elif hasattr(dataset, "__len__"):
            self.batches_per_epoch = batches_each(data.source, _length(dataset), batch_size, 1)
        else:
            self.batches_per_epoch = None
        workers = data.workers or 0
        self._loader = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=self._sampler,
            num_workers=workers,
            collate_fn=partial(_collate, collate),
            pin_memory=bool(data.pin_memory),
            drop_last=True,
            multiprocessing_context=START_METHOD if workers else None,
            generator=torch.Generator().manual_seed(seed + rank),
            prefetch_factor=data.prefetch if workers else None,
            persistent_workers=workers > 0,
        )

    def _adopt(self, loader: DataLoader[Any], batch_size: int) -> None:
        self._loader = loader
        self._sampler = loader.sampler if isinstance(loader.sampler, DistributedSampler) else None
        streams = isinstance(loader.dataset, IterableDataset)
        if loader.batch_size and not loader.drop_last and (streams or len(loader.sampler) % loader.batch_size):  # type: ignore[arg-type]
            message = f"the last batch of the DataLoader from data.source {self._source} may be smaller than the others"
            raise DataError(message, "create it with drop_last=True, because every step needs as many samples")
        try:
            batches = len(loader)
        except TypeError:  # of an IterableDataset without a length
            self.batches_per_epoch = None
            return
        self.batches_per_epoch = batches * (loader.batch_size or batch_size) // batch_size
        if not batches:
            raise DataError(f"the DataLoader from data.source {self._source} has no batches", "give it more data")

    def epoch(self, number: int) -> Iterator[Any]:
        """Yields the batches of one pass over the data, in an order that depends on `number` and the seed.

        The first call starts the workers. Raises DataError if a sample cannot be read or batched.
        """
        if self._loader is None:
            yield from islice(cycle(self._pool), self.batches_per_epoch)
            return
        if self._sampler is not None:
            self._sampler.set_epoch(number)
        for batch in self._start(self._loader):
            if isinstance(batch, GpubenchError):
                raise batch
            yield batch

    def _start(self, loader: DataLoader[Any]) -> Iterator[Any]:
        if loader.num_workers == 0:
            return iter(loader)
        try:
            with warnings.catch_warnings():
                # The error below replaces this warning, which advises to fork.
                warnings.filterwarnings("ignore", "Got pickle error")
                return iter(loader)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            fewer = "create it with num_workers=0" if self.own_loader else "set data.workers to 0"
            hint = f"define its classes and functions at the top of a module, or {fewer}"
            raise DataError(
                f"data.source {self._source} cannot be sent to DataLoader workers: {error}", hint
            ) from error

    def close(self) -> None:
        """Ends the workers and waits for them."""
        # The iterator that owns persistent workers is held by the loader, and by an unfinished epoch(). Without this
        # private call, the workers would end only when both are garbage-collected.
        iterator = None if self._loader is None else self._loader._iterator
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            with suppress(RuntimeError):  # if a worker aborts on exit, torch ends the others too
                iterator._shutdown_workers()
        self._pool.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Reader(Dataset[Any]):
    """Wraps a dataset so that it returns expected errors, and has a random state of its own.

    An expected error is returned instead of the samples, because DataLoader would rebuild an error that is raised from
    the text of its traceback, without message and hint. Without DataLoader workers, the data draws from a random state
    that begins with `seed`. If it drew from the model's, it would change the dropout, and ranks with the same model
    seed would get the same data.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset = dataset
        self.random_state = torch.Generator().manual_seed(seed).get_state()

    def __len__(self) -> int:
        return _length(self.dataset)

    def __getitems__(self, indices: list[int]) -> list[Any] | GpubenchError:
        try:
            if get_worker_info() is not None:
                return self._read(indices)
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self.random_state)
                samples = self._read(indices)
                self.random_state = torch.get_rng_state()
                return samples
        except GpubenchError as error:
            return error

    def _read(self, indices: list[int]) -> list[Any]:
        read_all = getattr(self.dataset, "__getitems__", None)
        return read_all(indices) if read_all else [self.dataset[index] for index in indices]


def _collate(collate: Callable[[list[Any]], Any], samples: list[Any] | GpubenchError) -> Any:
    if isinstance(samples, GpubenchError):
        return samples
    try:
        return collate(samples)
    except (RuntimeError, TypeError) as error:
        hint = "every sample must consist of tensors or numbers, with the same shapes in all samples"
        if collate is not default_collate:
            hint = "fix the collate_fn that data.source returns"
        return DataError(f"the samples cannot be made into a batch: {error}", hint)


def _length(dataset: Any) -> int:
    return len(dataset)


def _pool(
    make_batch: Callable[[int], Any], batch_size: int, seed: int, device: torch.device, channels_last: bool
) -> list[Any]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also reseed the GPUs
        first = make_batch(batch_size)
        size = sum(tensor.nbytes for tensor in tensors(first))
        count = min(POOL_BATCHES, max(1, POOL_BYTES // max(size, 1)))
        batches = [first, *(make_batch(batch_size) for _ in range(count - 1))]
    return [to_device(batch, device, channels_last=channels_last) for batch in batches]
