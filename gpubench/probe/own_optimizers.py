"""Finds optimizers whose classes do not derive from those of torch.optim, such as those of fastai."""

from __future__ import annotations

import gc
from typing import Iterator

import torch

METHODS = ("step", "zero_grad")
"""What an optimizer has, unlike a schedule of learning rates."""
_NONE = (torch.optim.Optimizer, torch.nn.Module)
"""The classes of what is measured otherwise, or is a model."""


def own_optimizers() -> set[type]:
    """Returns the classes outside of PyTorch that define the `step` of an optimizer which the program has made.

    It goes through all classes and objects of this process, and is meant for programs without an optimizer of
    torch.optim.
    """
    found = {
        each
        for each in _classes()
        if "step" in vars(each)
        and all(callable(getattr(each, name, None)) for name in METHODS)
        and not issubclass(each, _NONE)
        and each.__module__.partition(".")[0] != "torch"
    }
    made = {type(each) for each in gc.get_objects()} if found else set()
    return {base for cls in made for base in cls.__mro__ if base in found}


def _classes() -> Iterator[type]:
    seen: set[type] = set()
    waiting: list[type] = [object]
    while waiting:
        each: type
        for each in type.__subclasses__(waiting.pop()):
            if each not in seen:
                seen.add(each)
                waiting.append(each)
                yield each
