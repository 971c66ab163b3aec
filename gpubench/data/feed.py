"""The batches of one rank."""

import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import cycle, islice
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info
from torch.utils.data.distributed import DistributedSampler

from gpubench.data.batches import tensors, to_device
from gpubench.data.synthetic import RandomSamples
from gpubench.errors import DataError, GpubenchError
from gpubench.settings import DataSettings
from gpubench.sources import batches_each

POOL_BATCHES = 4  # synthetic batches kept on the device ...
POOL_BYTES = 256 << 20  # ... as far as they fit in here: they must not crowd out what is being measured

# How DataLoader workers start. A forked copy of a process with threads and a CUDA context can deadlock, and keeps that
# one's sockets and device memory alive when it is killed. Children of a fork server watch the server and not the rank,
# so they outlive a rank that is killed, for ever. Spawned ones import torch anew: seconds, but before the first step.
START_METHOD = "spawn"


class Feed:
    """Batches for one rank; a context manager that shuts its DataLoader workers down.

    `batch_size` is per rank. Every rank gets the same number of batches: what does not fill one is dropped. All ranks
    shuffle by `seed`; random samples and augmentation draw from `seed` + `rank`.

    on_device: the batches lie on `device` already, so that waiting for data and copying take no time by construction.
    batches_per_epoch: per rank; None for an IterableDataset without length, which must split itself among ranks.

    Raises DataError if there is nothing to make batches of, or less than one batch for each rank.
    """

    def __init__(
        self,
        data: DataSettings,
        dataset: Dataset[Any] | None,
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
        self.batches_per_epoch: int | None
        if dataset is None and make_batch is None:
            hint = "set data.source to module:callable, which returns a dataset whose batches the model accepts"
            raise DataError(f"data.source {data.source} needs a model with known inputs", hint)
        if self.on_device and make_batch is not None:
            self.batches_per_epoch = batches_each(data.source, data.samples, batch_size, world_size)
            self._pool = _pool(make_batch, batch_size, seed + rank, device, channels_last)
            return
        if dataset is None:
            assert make_batch is not None
            dataset = RandomSamples(make_batch, data.samples)
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
            collate_fn=_collate,
            pin_memory=bool(data.pin_memory),
            drop_last=True,
            multiprocessing_context=START_METHOD if workers else None,
            generator=torch.Generator().manual_seed(seed + rank),
            prefetch_factor=data.prefetch if workers else None,
            persistent_workers=workers > 0,
        )

    def epoch(self, number: int) -> Iterator[Any]:
        """The batches of one pass over the data, in an order that `number` and the seed decide.

        The first one starts the workers. Raises DataError if a sample cannot be read or batched.
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
                warnings.filterwarnings("ignore", "Got pickle error")  # it advises to fork; the error says enough
                return iter(loader)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            hint = "define its classes and functions at the top of a module, or set data.workers to 0"
            raise DataError(
                f"data.source {self._source} cannot be sent to DataLoader workers: {error}", hint
            ) from error

    def close(self) -> None:
        """Ends the workers and waits for them."""
        # The loader keeps the iterator that owns persistent workers, and so may a half-used epoch(): without this
        # private call they would end when the last of these is collected.
        iterator = None if self._loader is None else self._loader._iterator
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            with suppress(RuntimeError):  # a worker that aborts as it ends: torch then ends the others as well
                iterator._shutdown_workers()
        self._pool.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Reader(Dataset[Any]):
    """Reads the samples of a batch.

    An expected error takes the place of the samples: raised in a worker, DataLoader would rebuild it from the text of
    its traceback, without message and hint. Where there are no workers, `seed` starts a random sequence of the data's
    own: drawing from the model's would change its dropout, and give every rank with the same model seed the same data.
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
        at_once = getattr(self.dataset, "__getitems__", None)
        return at_once(indices) if at_once else [self.dataset[index] for index in indices]


def _collate(samples: list[Any] | GpubenchError) -> Any:
    if isinstance(samples, GpubenchError):
        return samples
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError) as error:
        hint = "every sample must hold tensors or numbers, of the same shapes"
        return DataError(f"the samples cannot be made into a batch: {error}", hint)


def _length(dataset: Any) -> int:
    return len(dataset)


def _pool(
    make_batch: Callable[[int], Any], batch_size: int, seed: int, device: torch.device, channels_last: bool
) -> list[Any]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the GPUs as well
        first = make_batch(batch_size)
        size = sum(tensor.nbytes for tensor in tensors(first))
        count = min(POOL_BATCHES, max(1, POOL_BYTES // max(size, 1)))
        batches = [first, *(make_batch(batch_size) for _ in range(count - 1))]
    return [to_device(batch, device, channels_last=channels_last) for batch in batches]
