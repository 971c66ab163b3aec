"""Starts the probe in a Python process, when the process imports torch.

Python imports the first `sitecustomize` of its path at start-up, and the folder of this one is at the front of
PYTHONPATH. It stays there for the processes that this one starts, but leaves `sys.path` at once, so that the program
finds its own modules, among them the `sitecustomize` that it would have imported without the probe.
"""

from __future__ import annotations

import _socket
import importlib.util
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))
PACKAGE = "_gpubench_probe"
ADDRESS_VARIABLE = "_GPUBENCH_PROBE"
PROBES = {"_GPUBENCH_INFERENCE": "calls", "_GPUBENCH_LOADER": "alone"}
"""The modules that measure something else than training, by the environment variables that are set for it."""
NO_SIGNAL = getattr(_socket, "MSG_NOSIGNAL", 0)
"""The host may stop to listen at any time, and the program may have set SIGPIPE to its default, which ends it."""


class _WaitForTorch(MetaPathFinder):
    """Finds the module torch where Python would, and installs the probe once the module has been executed.

    It stays until then, because a program may look for torch without an import, or before it can be found.
    """

    _looking = False

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch" or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_install(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _tell("torch")
                _load(next((name for key, name in PROBES.items() if key in os.environ), "steady")).install(os.environ)

        spec.loader.exec_module = execute_and_install  # type: ignore[method-assign]
        return spec


def _tell(what: str) -> None:
    """Tells the host how far this process has got. `_socket` takes a tenth of the time to import of `socket`."""
    try:
        connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
        connection.connect(os.environ[ADDRESS_VARIABLE])
        told = b'{"event":"seen","rank":-1,"pid":%d,"what":"%s"}\n' % (os.getpid(), what.encode())
        connection.sendall(told, NO_SIGNAL)
        connection.close()
    except OSError:  # the host has all its ranks, or is gone
        pass


def _load(name: str) -> Any:
    """Imports a module of the probe under the private name of its package."""
    if PACKAGE not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            PACKAGE, os.path.join(FOLDER, "__init__.py"), submodule_search_locations=[FOLDER]
        )
        assert spec
        assert spec.loader
        package = sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
    return importlib.import_module(f"{PACKAGE}.{name}")


def _run_own() -> None:
    """Runs the `sitecustomize` that this one hides, if there is one."""
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec and spec.loader:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module  # the import statement returns what it finds here in the end
        spec.loader.exec_module(module)


sys.path[:] = [entry for entry in sys.path if not entry or os.path.abspath(entry) != FOLDER]
if ADDRESS_VARIABLE in os.environ:
    _tell("python")
    sys.meta_path.insert(0, _WaitForTorch())
_run_own()
