"""Tells how a DataLoader runs, and what its dataset and its batches consist of."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any, Dict, Optional

import torch
from torch.utils.data import IterableDataset

from .cached import tensors_in
from .device import visible_gpus

DECODERS = ("PIL", "cv2", "torchvision", "turbojpeg", "simplejpeg", "imageio", "skimage")
"""Packages that decode pictures."""
FEWEST_VALUES = 16
"""The different values that tell a picture from a constant."""


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


def objects_of(dataset: Any) -> int:
    """Returns the largest number of entries of a list or mapping of Python objects that a dataset holds."""
    most, level = 0, [dataset]
    for _ in range(3):
        held = [each for one in level for each in getattr(one, "__dict__", {}).values()]
        most = max([most, *(len(each) for each in held if isinstance(each, (list, dict, set, tuple)))])
        level = [each for each in held if isinstance(each, torch.utils.data.Dataset)]
    return most


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
