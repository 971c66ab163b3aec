"""A dataset of the user's own, named as module:callable."""

import importlib
import inspect
import os
import sys
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from gpubench.errors import DataError, did_you_mean


def load(source: str) -> Dataset[Any]:
    """What the callable in `source` returns; the module may lie in the current directory.

    Raises DataError if it cannot be found, called without arguments, or returns no usable Dataset. An exception of the
    user's own code passes through with its traceback.
    """
    module_name, _, name = source.partition(":")
    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and one that it imports is not
        hint = f"run from the folder that holds it (now {here}), or install it"
        raise DataError(f"data.source {source!r}: there is no module {error.name!r}", hint) from None
    for part in name.split("."):
        if not hasattr(found, part):
            hint = did_you_mean(part, dir(found)) or "name a class or function of it"
            raise DataError(f"data.source {source!r}: module {module_name!r} has no {name!r}", hint)
        found = getattr(found, part)
    _check_callable(source, found)
    return _checked(source, found())


def _check_callable(source: str, found: Any) -> None:
    if not callable(found):
        kind = type(found).__name__
        raise DataError(f"data.source {source!r} is not callable but of type {kind}", "name a function or class")
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        hint = "name a callable that takes none and returns a torch.utils.data.Dataset"
        raise DataError(f"data.source {source!r} cannot be called without arguments: {error}", hint) from None


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
