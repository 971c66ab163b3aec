"""Changes how the program runs, without an edit: what the settings of `ProgramSettings` set.

Most changes must be made before the program makes its loaders and optimizers, so that they are installed with the
probe. A treatment has priority over what the program asks for.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable

import torch
from torch.utils.data import DataLoader, IterableDataset, dataloader

OPTIMIZERS = {
    "fused": {"fused": True, "foreach": None},
    "foreach": {"fused": None, "foreach": True},
    "loop": {"fused": None, "foreach": False},
}
"""The arguments of an optimizer for each value of training.optimizer_impl."""


def install(treatments: dict[str, Any]) -> None:
    """Installs the treatments, which are values by dot-key."""
    workers = treatments.get("data.workers")
    if any(key.startswith("data.") for key in treatments):
        prefetch = treatments.get("data.prefetch")
        _change(DataLoader, lambda given: _loader(given, workers, treatments.get("data.pin_memory"), prefetch))
    if implementation := treatments.get("training.optimizer_impl"):
        for cls in vars(torch.optim).values():
            if inspect.isclass(cls) and {"fused", "foreach"} <= set(inspect.signature(cls).parameters):
                _change(cls, lambda given: given.update(OPTIMIZERS[implementation]))
    if threads := treatments.get("performance.cpu_threads"):
        torch.set_num_threads(threads)
        torch.set_num_threads = _ignore
    if precision := treatments.get("performance.matmul_precision"):
        torch.set_float32_matmul_precision(precision)
        torch.set_float32_matmul_precision = _ignore
    apply_again(treatments)


def _ignore(*_: Any, **__: Any) -> None:
    """Stands in for what the program must not change."""


def apply_again(treatments: dict[str, Any]) -> None:
    """Applies again what the program may have changed since."""
    if (benchmark := treatments.get("performance.cudnn_benchmark")) is not None:
        torch.backends.cudnn.benchmark = benchmark


def compile_modules(treatments: dict[str, Any], roots: list[torch.nn.Module]) -> None:
    """Compiles the outermost modules, unless they are compiled already."""
    if treatments.get("performance.compile"):
        for root in roots:
            if not is_compiled(root):
                root.compile()


def is_compiled(module: torch.nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Returns the model inside of DistributedDataParallel, torch.compile and the like, or the module itself."""
    wrapped = getattr(module, "module", None) or getattr(module, "_orig_mod", None)
    return unwrapped(wrapped) if isinstance(wrapped, torch.nn.Module) else module


def of_loader(iterator: Any) -> dict[str, Any]:
    """Returns how the DataLoader of an iterator runs, by dot-key; {} for one whose samples depend on its workers."""
    if isinstance(iterator._dataset, IterableDataset):
        return {}
    found = {"data.workers": iterator._num_workers, "data.pin_memory": bool(iterator._pin_memory)}
    if isinstance(iterator, dataloader._MultiProcessingDataLoaderIter):
        found["data.prefetch"] = iterator._prefetch_factor
    return found


def of_process(roots: list[torch.nn.Module], optimizer: Any) -> dict[str, Any]:
    """Returns how this process runs the outermost modules and an optimizer, by dot-key, without what is unknown."""
    found: dict[str, Any] = {
        "performance.compile": any(map(is_compiled, roots)),
        "performance.cpu_threads": torch.get_num_threads(),
        "performance.matmul_precision": torch.get_float32_matmul_precision(),
        "performance.cudnn_benchmark": bool(torch.backends.cudnn.benchmark),
    }
    defaults = getattr(optimizer, "defaults", {})
    if {"fused", "foreach"} <= defaults.keys():
        loop = "loop" if defaults["foreach"] is False else "auto"
        found["training.optimizer_impl"] = "fused" if defaults["fused"] else "foreach" if defaults["foreach"] else loop
    return found


def _loader(given: dict[str, Any], workers: int | None, pin_memory: bool | None, prefetch: int | None) -> None:
    """Changes the arguments of a DataLoader. The samples of an IterableDataset depend on its workers."""
    if isinstance(given["dataset"], IterableDataset):
        return
    if workers is not None:
        given["num_workers"] = workers
        if not workers:
            given.update(prefetch_factor=None, persistent_workers=False, timeout=0, multiprocessing_context=None)
    if pin_memory is not None:
        given["pin_memory"] = pin_memory
    if prefetch is not None and given.get("num_workers"):
        given["prefetch_factor"] = prefetch


def _change(cls: type, change: Callable[[dict[str, Any]], object]) -> None:
    """Makes `change` change the arguments with which objects of `cls` are made."""
    original: Callable[..., None] = cls.__init__  # type: ignore[misc]
    signature = inspect.signature(original)

    @functools.wraps(original)
    def changed(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        own = given.pop("self")
        given.update(given.pop("kwargs", {}))
        change(given)
        original(own, **given)

    cls.__init__ = changed  # type: ignore[misc]
