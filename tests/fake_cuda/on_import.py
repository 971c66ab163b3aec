"""Adds the arithmetic of the fake CUDA to torch as soon as a process has imported it, unless FAKECUDA_ARITHMETIC=0.

`build.py` copies this file into the environment's site-packages, beside a .pth file that imports it in every process.
Where LD_LIBRARY_PATH does not name the folder of the fake libraries, nothing happens.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from pathlib import Path
from types import ModuleType


def _library() -> Path | None:
    folders = map(Path, filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":")))
    return next((path for folder in folders if (path := folder / "fake_cuda_arithmetic.so").exists()), None)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the ordinary finders find torch, and adds to what executes it."""

    def find_spec(
        self, name: str, path: object, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name)
        if spec and spec.loader:
            execute = spec.loader.exec_module

            def and_install(module: ModuleType) -> None:
                sys.meta_path.remove(self)  # only now: a program may ask for the specification and import torch later
                execute(module)
                import ctypes

                ctypes.CDLL(str(_library()), mode=ctypes.RTLD_GLOBAL).fc_install()

            spec.loader.exec_module = and_install  # type: ignore[method-assign]
        return spec


if os.environ.get("FAKECUDA_ARITHMETIC") != "0" and _library():
    sys.meta_path.insert(0, _Finder())
