"""Tells how a DataLoader runs, and what its dataset and its batches consist of."""

from __future__ import annotations

import os
import sys
from collections import deque
from importlib.util import find_spec
from itertools import islice
from typing import Any, Dict, List, Optional

import torch
from torch.utils.data import Dataset, IterableDataset

from .attributes import attributes
from .cached import tensors_in
from .device import visible_gpus

DECODERS = ("PIL", "cv2", "torchvision", "turbojpeg", "simplejpeg", "imageio", "skimage")
"""Packages that decode pictures."""
FEWEST_VALUES = 16
"""The different values that tell a picture from a constant."""
COLLECTIONS = (list, tuple, set, frozenset, dict, deque)
MOST_NESTED = 3
"""The datasets within each other, and the collections within a collection, that are looked at."""
OBJECTS_LOOKED_AT = 1000
PAGE = 4096
"""The bytes of a page of memory, which is what a process copies when it counts a reference."""


def loader_facts(loader: Any) -> Dict[str, Any]:
    """Returns how a DataLoader runs."""
    dataset = loader.dataset
    return {
        "dataset": type(dataset).__name__[:200],
        "style": "iterable" if isinstance(dataset, IterableDataset) else "map",
        "length": length_of(dataset),
        "batch_size": loader.batch_size or getattr(loader.batch_sampler, "batch_size", None),
        "workers": loader.num_workers,
        "start_method": start_method_of(loader),
        "prefetch": loader.prefetch_factor if loader.num_workers else None,
        "persistent": bool(loader.persistent_workers),
        "pin_memory": bool(loader.pin_memory),
        "threads": 1 if loader.num_workers else torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": visible_gpus(),
        "decoders": [name for name in DECODERS if find_spec(name)],
    }


def batch_facts(batch: Any) -> Optional[Dict[str, Any]]:
    """Returns the fields of `gpubench.loader_record.BatchFacts`."""
    try:
        tensors = tensors_in(batch)
        sizes = [each.numel() * each.element_size() for each in tensors]
        return {
            "size": sum(sizes),
            "wide": sum(size for each, size in zip(tensors, sizes) if each.dtype is torch.float64),
            "from_bytes": sum(size for each, size in zip(tensors, sizes) if _is_of_bytes(each)),
            "pinned": any(each.is_pinned() for each in tensors if torch.cuda.is_available()),
        }
    except Exception:  # tensors of the program's own class
        return None


def _is_of_bytes(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor of pictures has the values of bytes, as they are or divided by 255."""
    if not tensor.is_floating_point() or tensor.dim() < 3 or tensor.numel() < 256:
        return False
    part = tensor.reshape(-1)[:4096].double()
    if part.min() < 0 or part.max() > 255:
        return False
    if len(part.unique()) < FEWEST_VALUES:
        return False
    scaled = part if part.max() > 1 else part * 255
    return bool((scaled - scaled.round()).abs().max() < 1e-3)


def objects_of(dataset: Any) -> Dict[str, int]:
    """Returns how many Python objects the largest collection that a dataset holds has: "objects".

    "object_bytes" is about what a forked process copies that reads all of them, by some of them.
    """
    try:
        largest = _largest_collection(dataset)
        entries = largest.items() if isinstance(largest, dict) else largest
        looked_at = list(islice(entries, 0, None, 1 + len(largest) // OBJECTS_LOOKED_AT))
        seen: set[int] = set()
        copied = sum(_copied(each, seen) for each in looked_at)
        return {"objects": len(largest), "object_bytes": copied * len(largest) // max(1, len(looked_at))}
    except Exception:  # of a collection of the program's own class
        return {"objects": 0}


def _largest_collection(dataset: Any) -> Any:
    largest: Any = ()
    level = [dataset]
    for _ in range(MOST_NESTED):
        held = [each for one in level for each in attributes(one).values()]
        largest = max([largest, *(each for one in held for each in _collections(one))], key=len)
        level = [each for each in held if isinstance(each, Dataset)]
    return largest


def _collections(found: Any) -> List[Any]:
    """Returns the collections of Python objects that an attribute consists of, such as each column of a table."""
    if isinstance(found, COLLECTIONS):
        return [found]
    columns = [found]
    if type(found).__name__ == "DataFrame" and hasattr(found, "to_numpy"):  # of pandas
        columns = [column for _, column in found.items()]
    return [column.__array__().ravel() for column in columns if _is_of_objects(getattr(column, "dtype", None))]


def _is_of_objects(dtype: Any) -> bool:
    """Tells whether an array holds Python objects, as one of strings of pandas also does without Arrow."""
    return str(dtype) == "object" or getattr(dtype, "storage", None) == "python"


def _copied(entry: Any, seen: set[int], depth: int = 0) -> int:
    """Returns the bytes that a process copies which reads an object: all of it, or one page of a large one.

    `seen` has the identities of objects that need no second copy.
    """
    if id(entry) in seen:
        return 0
    seen.add(id(entry))
    size = min(sys.getsizeof(entry, 0), PAGE)
    if depth == MOST_NESTED:
        return size
    if isinstance(entry, dict):
        inside = [*entry.keys(), *entry.values()]
    else:
        inside = list(entry if isinstance(entry, COLLECTIONS) else attributes(entry).values())
    return size + sum(_copied(each, seen, depth + 1) for each in inside[:OBJECTS_LOOKED_AT])


def length_of(dataset: Any) -> Optional[int]:
    try:
        return len(dataset)
    except Exception:  # it has none
        return None


def start_method_of(loader: Any) -> str:
    if not loader.num_workers:
        return ""
    context = loader.multiprocessing_context or torch.multiprocessing
    try:
        return str(context.get_start_method())
    except Exception:  # a context of the program's own
        return ""
