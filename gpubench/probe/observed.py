"""Finds out about the program: its batches, how it runs by the dot-keys of the treatments, and where."""

from __future__ import annotations

import linecache
import os
import re
import site
import sys
import sysconfig
from itertools import islice
from types import FrameType
from typing import Any, Mapping

import torch
from torch.nn.modules.conv import _ConvNd
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset, dataloader

from .modules import named_modules, parameters_of
from .treatments import KERNELS, is_compiled, steps_by_itself

AUTOCAST = {torch.float16: "amp", torch.bfloat16: "bf16"}
"""The values of `precision` by the type of autocast."""


def of_loader(iterator: Any) -> dict[str, Any]:
    """Returns how the DataLoader of an iterator runs, by dot-key; {} for one whose samples depend on its workers."""
    if isinstance(iterator._dataset, IterableDataset):
        return {}
    found = {"data.workers": iterator._num_workers, "data.pin_memory": bool(iterator._pin_memory)}
    if isinstance(iterator, dataloader._MultiProcessingDataLoaderIter):
        found["data.prefetch"] = iterator._prefetch_factor
        found["data.persistent_workers"] = bool(getattr(iterator, "_persistent_workers", False))
    return found


def of_process(roots: list[torch.nn.Module], optimizer: Any, autocast: torch.dtype | None) -> dict[str, Any]:
    """Returns how this process runs the outermost modules and an optimizer, by dot-key, without what is unknown.

    `autocast` is the type in which autocast computes the calls of modules; None without autocast.
    """
    found: dict[str, Any] = {
        "performance.compile": any(map(is_compiled, roots)),
        "performance.cpu_threads": torch.get_num_threads(),
        "performance.cudnn_benchmark": bool(torch.backends.cudnn.benchmark),
    }
    if precision := _matmul_precision():
        found["performance.matmul_precision"] = precision
    if not found["performance.compile"]:  # otherwise the mode is not known
        found["performance.compile_mode"] = "default"
    if kernels := _kernels():
        found["performance.sdpa"] = kernels
    if torch.cuda.is_initialized():
        names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        options = "".join(os.environ.get(name, "") for name in names)
        found["performance.expandable_segments"] = "expandable_segments:True" in options.replace(" ", "")
    parameters = [each for root in roots for each in parameters_of(root)]
    if any(type(each).__name__ == "DTensor" for each in parameters):
        found["distributed.strategy"] = "fsdp2"
    else:
        found.update(_of_modules(roots, parameters, autocast))
    defaults = getattr(optimizer, "defaults", {})
    # A class of the program's own may keep the arguments of the class that it is made after, without their effect.
    own = type(optimizer).__module__.startswith("torch.optim") and {"fused", "foreach"} <= defaults.keys()
    if own and _can_fuse(parameters):
        loop = "loop" if defaults["foreach"] is False else "auto"
        found["training.optimizer_impl"] = "fused" if defaults["fused"] else "foreach" if defaults["foreach"] else loop
    return found


def of_optimizers(made: Mapping[Any, str | None]) -> dict[str, list[str]]:
    """Returns the lines that make the optimizers which can be fused, by the name of the class.

    `made` has the line of each optimizer; None if it is unknown.
    """
    found: dict[str, list[str]] = {}
    for optimizer, place in made.items():
        cls = type(optimizer)
        if {"fused", "foreach"} <= getattr(optimizer, "defaults", {}).keys() and not steps_by_itself(cls):
            of_torch = cls.__module__.startswith("torch.optim")
            lines = found.setdefault(f"torch.optim.{cls.__name__}" if of_torch else cls.__qualname__, [])
            lines += [place] if place and place not in lines else []
    return found


def _of_modules(
    roots: list[torch.nn.Module], parameters: list[torch.nn.Parameter], autocast: torch.dtype | None
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for root in roots:
        if isinstance(root, DistributedDataParallel):
            found["distributed.strategy"] = "ddp"
            found["distributed.bucket_mb"] = root.bucket_bytes_cap / 2**20
            found["distributed.gradient_as_bucket_view"] = bool(root.gradient_as_bucket_view)
    if autocast in AUTOCAST:
        found["precision"] = AUTOCAST[autocast]
    elif parameters and {each.dtype for each in parameters} == {torch.float32}:
        by_backend = getattr(torch.backends.cuda.matmul, "fp32_precision", None)  # what the program has set instead
        fast = parameters[0].is_cuda and (_matmul_precision() or by_backend) not in ("highest", "ieee", "none", None)
        found["precision"] = "tf32" if fast else "fp32"
    weights = [each.weight for root in roots for _, each in named_modules(root) if isinstance(each, _ConvNd)]
    if images := [weight for weight in weights if type(weight) is torch.nn.Parameter and weight.dim() == 4]:
        found["performance.channels_last"] = any(
            each.is_contiguous(memory_format=torch.channels_last) and not each.is_contiguous() for each in images
        )
    return found


def _matmul_precision() -> str | None:
    """Returns the precision of products in fp32; None if the program has set that of single backends instead."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # PyTorch refuses to say it for all of them
        return None


def _can_fuse(parameters: list[torch.nn.Parameter]) -> bool:
    """Tells whether this PyTorch can fuse the update of these parameters: on a CPU it can from 2.4 on."""
    if any(each.device.type != "cpu" for each in parameters):
        return True
    try:
        from torch.utils._foreach_utils import _get_fused_kernels_supported_devices
    except ImportError:
        return True
    return "cpu" in _get_fused_kernels_supported_devices()


def _kernels() -> str | None:
    """Returns the value of performance.sdpa that allows the same kernels as the program does; None if none does."""
    allowed = {
        value for value, name in KERNELS.items() if getattr(torch.backends.cuda, f"{name}_sdp_enabled", lambda: False)()
    }
    if {"flash", "efficient"} <= allowed:
        return "fused"
    if len(allowed) > 1:
        return None
    return next(iter(allowed), "math")


def autocast_of(tensor: torch.Tensor) -> torch.dtype | None:
    """Returns the type in which autocast computes on the device of the tensor now; None without autocast."""
    device = tensor.device.type
    if device not in ("cpu", "cuda"):
        return None
    try:
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    except (AttributeError, TypeError):  # PyTorch before 2.4
        if device == "cpu":
            return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
        return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None


_PACKAGES = frozenset({"site-packages", "dist-packages"})
"""The folders of installed packages, also those of a virtual environment in the program's directory."""


_UNNAMED = frozenset({"torch", __name__.partition(".")[0]})
"""The packages that are not named as who made a call: every call passes through PyTorch and this probe."""


MOST_PLACES = 1024
"""The largest number of places that are remembered."""
MOST_MODELS = 16
"""The largest number of places that fixes belong in."""
CALLED = re.compile(r"(?:self\.)?[^\W\d]\w*(?=\s*\()")


class SourcePlaces:
    """Finds the line of the program's own source that leads to a call."""

    def __init__(self) -> None:
        try:
            self._directory = os.getcwd()
        except OSError:  # it has been removed
            self._directory = os.sep
        folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
        folders += [*getattr(site, "getsitepackages", list)(), site.getusersitepackages()]
        folders += [os.path.dirname(torch.__file__), os.path.dirname(os.path.abspath(__file__))]
        self._libraries = tuple({os.path.join(os.path.abspath(each), "") for each in folders if each})
        self._own: dict[str, bool] = {}
        """Whether files are the program's own, by their names in code objects."""
        self.remembered: dict[int, str] = {}
        """The places of calls by what was made there; see `remember`."""
        self._made_of: dict[int, str] = {}
        """Those of the program's own calls by what it was made of."""

    def remember(self, made: int, of: int) -> None:
        """Keeps the line that is being run as the place where the object with the identity `made` was made.

        A package that makes another one of the same thing, such as a DataLoader of a dataset with the identity `of`,
        has what it is made with from the one that the program has made.
        """
        if place := self.here():
            if len(self.remembered) >= MOST_PLACES:
                self.remembered.clear()
            if " (by " in place:
                place = self._made_of.get(of, place)
            elif len(self._made_of) < MOST_PLACES:
                self._made_of[of] = place
            self.remembered[made] = place

    def here(self) -> str | None:
        """Returns the innermost line of the program that is being run, as "train.py:31"; None without one.

        If it called another package, which made the call, that package is named: "train.py:31 (by transformers)".
        """
        frame: FrameType | None = sys._getframe(1)
        package = ""
        while frame:
            name = frame.f_code.co_filename
            if not name.startswith("<"):
                path = self.absolute(name)
                if self.is_own(name):
                    return f"{self.shown(path)}:{frame.f_lineno}" + (f" (by {package})" if package else "")
                module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
                if _PACKAGES.intersection(path.split(os.sep)) and module not in _UNNAMED:
                    package = module
            frame = frame.f_back
        return None

    def model(self, found: dict[str, str]) -> None:
        """Notes the line that calls an outermost module: as "model" the first one, and each as "model NAME".

        NAME is what the module is called there, and a number where that is not a name or is unknown.
        """
        if (place := self.here()) is None:
            return
        found.setdefault("model", place)
        key = f"model {self._called() or len(found)}"
        if found.get(key, place) != place or len(found) >= MOST_MODELS:
            key = f"model {min(len(found), MOST_MODELS)}"
        found.setdefault(key, place)

    def _called(self) -> str:
        """Returns what the innermost line of the program calls, if it is a name or an attribute of `self`.

        The variables of a frame are not looked at: that would keep them as long as the frame.
        """
        frame: FrameType | None = sys._getframe(2)
        while frame and not self.is_own(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None or not hasattr(frame.f_code, "co_positions"):  # Python before 3.11
            return ""
        line, _, column, _ = next(islice(frame.f_code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
        if line is None or column is None:
            return ""
        text = (
            linecache.getline(self.absolute(frame.f_code.co_filename), line).encode()[column:].decode(errors="replace")
        )
        named = CALLED.match(text)
        return named[0] if named else ""

    def is_own(self, name: str) -> bool:
        """Tells whether a file of source, by its name in a code object, is the program's own."""
        known = self._own.get(name)
        if known is None:
            path = self.absolute(name)
            known = not (
                name.startswith("<") or path.startswith(self._libraries) or _PACKAGES.intersection(path.split(os.sep))
            )
            if len(self._own) < MOST_PLACES:
                self._own[name] = known
        return known

    def absolute(self, name: str) -> str:
        """Returns the path of a file of source by its name in a code object."""
        return os.path.join(self._directory, name)

    def shown(self, path: str) -> str:
        """Returns the path relative to the directory that the program was started in, if it is in there."""
        main = getattr(sys.modules.get("__main__"), "__file__", None)
        for folder in (self._directory, os.path.dirname(os.path.abspath(main)) if main else None):
            if folder and path.startswith(os.path.join(folder, "")):
                return os.path.relpath(path, folder)
        return path


def first_tensor(batch: Any, depth: int = 3) -> torch.Tensor | None:
    """Returns the first tensor with a dimension in nested sequences and mappings, or None."""
    if isinstance(batch, torch.Tensor):
        return batch if batch.dim() else None
    if not depth:
        return None
    if not isinstance(batch, (tuple, list)):
        values = getattr(batch, "values", None)
        batch = tuple(values()) if callable(values) else ()
    for part in batch:
        if (found := first_tensor(part, depth - 1)) is not None:
            return found
    return None


def device_of(result: Any) -> torch.device | None:
    """Returns the device of the first tensor in a result; None without one."""
    try:
        tensor = first_tensor(result)
    except Exception:  # the result is of the program's own class
        return None
    return None if tensor is None else tensor.device


def is_vector(tensor: torch.Tensor | None) -> bool:
    """Tells whether a tensor is a vector of real numbers. One of whole numbers is a batch of indices."""
    return tensor is not None and tensor.dim() == 1 and tensor.is_floating_point()


def samples_in(batch: Any) -> tuple[int, str]:
    """Returns the number of samples in a batch, the first dimension of its first tensor, and the shape of a sample.

    Returns 0 and "" without such a tensor.
    """
    try:
        tensor = first_tensor(batch)
        if tensor is None or not tensor.dim():
            return 0, ""
        return int(tensor.size(0)), " x ".join(map(str, tensor.shape[1:]))
    except Exception:  # the batch is the program's own class, or a tensor without a shape, as a nested one
        return 0, ""
