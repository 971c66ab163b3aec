"""Gives the first batches of training again and again, so that data is always ready: the treatment data.cached.

Only DataLoaders that train are concerned, from the batch on that follows the first updates, and evaluation loads its
data as always. A pass has as many batches as it would have. What the program does to a batch must not reach the next
one that is the same: containers are new each time, and tensors are copied if the program changes them in place.
"""

from __future__ import annotations

import copy
from time import monotonic
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple
from weakref import WeakKeyDictionary, ref

import torch
from torch.utils.data import dataloader

from .attributes import attributes, set_attribute
from .batches import DrawnBatches

MOST_BATCHES = 8
MOST_BYTES = 512 * 2**20
MOST_SECONDS = 2.0
"""The batches that are kept of a DataLoader, their largest size together, and the time to make them after which no more
are kept. One is kept in any case."""


class KeptBatch:
    """A batch that is given again."""

    def __init__(self, batch: Any, samples: Optional[int]) -> None:
        self.samples = samples
        """The number of indices that were drawn for it; None if that is unknown."""
        self._given = batch
        self._tensors = tensors_in(batch)
        self._original = [each.detach().clone() for each in self._tensors]
        self._versions = [each._version for each in self._tensors]
        self._changes = False
        self.size = sum(each.numel() * each.element_size() for each in self._original)

    def give(self) -> Any:
        """Returns the batch as it was."""
        if not self._changes:
            self._changes = any(each._version != was for each, was in zip(self._tensors, self._versions))
        if not self._changes:
            return rebuilt(self._given, {})
        copies = {
            id(was): each.clone().pin_memory() if was.is_pinned() else each.clone()
            for was, each in zip(self._tensors, self._original)
        }
        return rebuilt(self._given, copies)


class CachedBatches:
    """The batches that are kept of the DataLoaders of training, by the identities of their samplers."""

    def __init__(self) -> None:
        self._kept: Dict[int, List[KeptBatch]] = {}
        self._full: Dict[int, bool] = {}
        self._samplers: Dict[int, Callable[[], Any]] = {}
        """Return the samplers that have these identities; None if one has gone."""
        self._seconds = 0.0
        """The time in which batches were made."""
        self._given: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        """The number of batches that each pass has given."""

    def next(self, iterator: Any, draw: Callable[[], Any], drawn: DrawnBatches) -> Tuple[Any, Optional[KeptBatch]]:
        """Returns the next batch of a pass, and what was kept of it if it is one that was given before.

        `draw` makes the next one, and `drawn` knows which DataLoaders train. Raises StopIteration at the end of a pass.
        """
        sampler = self._identity(iterator._index_sampler)
        given = self._given.get(iterator, 0)
        if not self._full.get(sampler):
            began = monotonic()
            batch = draw()
            self._seconds += monotonic() - began
            self._given[iterator] = given + 1
            if drawn.is_known_to_train(iterator):
                self._keep(sampler, iterator, KeptBatch(batch, drawn.expected(iterator)))
            return batch, None
        if (length := _length(iterator)) is not None and given >= length:
            raise StopIteration
        kept = self._kept[sampler]
        found = kept[given % len(kept)]
        self._given[iterator] = iterator._num_yielded = given + 1
        drawn.expect(iterator, found.samples)
        return found.give(), found

    def begin_pass(self, iterator: Any) -> None:
        """Notes that an iterator begins another pass."""
        self._given.pop(iterator, None)

    def ready(self, loader: Any) -> Any:
        """Returns an iterator of a DataLoader whose batches are kept, without starting workers; None for others."""
        if not self._full.get(self._identity(loader._index_sampler)):
            return None
        iterator: Any = object.__new__(dataloader._SingleProcessDataLoaderIter)
        dataloader._BaseDataLoaderIter.__init__(iterator, loader)
        return iterator

    def _identity(self, sampler: Any) -> int:
        """Returns the identity of a sampler, after forgetting what was kept of one that has gone and had the same."""
        identity = id(sampler)
        known = self._samplers.get(identity)
        if known is None or known() is not sampler:
            self._kept.pop(identity, None)
            self._full.pop(identity, None)
            try:
                self._samplers[identity] = ref(sampler)
            except TypeError:  # of a class of C, which then has to stay
                self._samplers[identity] = lambda: sampler
        return identity

    def _keep(self, sampler: int, iterator: Any, batch: KeptBatch) -> None:
        kept = self._kept.setdefault(sampler, [])
        kept.append(batch)
        size = sum(each.size for each in kept)
        length = _length(iterator)
        most = MOST_BATCHES if length is None else max(1, min(MOST_BATCHES, length))
        enough = len(kept) >= most or size + kept[-1].size > MOST_BYTES or self._seconds > MOST_SECONDS
        self._full[sampler] = enough

    @property
    def is_ready(self) -> bool:
        """Whether batches are given again, of each DataLoader that trains."""
        return bool(self._full) and all(self._full.values())


def _length(iterator: Any) -> Optional[int]:
    """Returns the number of batches in a pass; None if it is unknown."""
    try:
        if iterator._dataset_kind == dataloader._DatasetKind.Iterable:
            return None if iterator._IterableDataset_len_called is None else int(iterator._IterableDataset_len_called)
        return len(iterator._index_sampler)
    except Exception:  # a sampler without a length
        return None


def tensors_in(batch: Any) -> List[torch.Tensor]:
    """Returns the tensors in a batch, in lists, tuples, mappings and objects with attributes."""
    found: List[torch.Tensor] = []
    _collect(batch, found, set())
    return found


def _collect(batch: Any, found: List[torch.Tensor], seen: set[int]) -> None:
    if id(batch) in seen:
        return
    seen.add(id(batch))
    if isinstance(batch, torch.Tensor):
        found.append(batch)
    elif isinstance(batch, Mapping):
        for each in batch.values():
            _collect(each, found, seen)
    elif isinstance(batch, (list, tuple)):
        for each in batch:
            _collect(each, found, seen)
    elif not isinstance(batch, (type, torch.nn.Module)):
        for each in attributes(batch).values():
            _collect(each, found, seen)


def rebuilt(batch: Any, copies: Mapping[int, torch.Tensor]) -> Any:
    """Returns a batch with new containers, and with the tensors in `copies` by the identity of those in their place."""
    if isinstance(batch, torch.Tensor):
        return copies.get(id(batch), batch)
    kind = type(batch)
    if kind in (list, tuple):
        return kind(rebuilt(each, copies) for each in batch)
    if kind is dict:
        return {key: rebuilt(each, copies) for key, each in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return kind(*(rebuilt(each, copies) for each in batch))
    if isinstance(batch, (str, bytes, int, float, type(None))):
        return batch
    made = copy.copy(batch)
    if isinstance(made, dict) or (isinstance(made, Mapping) and hasattr(made, "__setitem__")):
        for key, each in list(made.items()):
            made[key] = rebuilt(each, copies)
    for name, each in attributes(made).items():
        set_attribute(made, name, rebuilt(each, copies))
    return made
