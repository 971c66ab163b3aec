"""What users name as module:callable, of a model or of data: found, and called without arguments."""

import importlib
import inspect
import operator
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from gpubench.errors import GpubenchError, did_you_mean

USERS = (Exception, SystemExit)
"""What importing and calling somebody else's code may raise."""


def find(setting: str, name: str, refused: type[GpubenchError]) -> Callable[[], Any]:
    """The callable that `setting` names; the module may lie in the current directory.

    Raises `refused` for one that cannot be imported or called without arguments, and so does what is returned where
    the user's code raises: in its words, and with the exception as the cause, so that run.log has its traceback.
    """
    module, _, attribute = name.partition(":")
    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109
        sys.path.insert(0, here)
    try:
        imported = importlib.import_module(module)
    except USERS as error:
        raise refused(
            f"{setting} {name!r} cannot be imported: {type(error).__name__}: {error}",
            f"write package.module:callable, without .py; the current directory, {here}, is searched first",
        ) from error
    try:
        found = operator.attrgetter(attribute)(imported)
    except AttributeError as error:
        hint = did_you_mean(error.name or "", dir(error.obj)) or "name a class or function of it"
        raise refused(f"{setting} {name!r}: {error}", hint) from None
    if not callable(found):
        raise refused(
            f"{setting} {name!r} is of type {type(found).__name__}, not a callable", "name a function or a class"
        )
    try:
        inspect.signature(found).bind()
    except ValueError:  # of some builtins nobody knows
        pass
    except TypeError as error:
        raise refused(f"{setting} {name!r} cannot be called without arguments: {error}", "give them defaults") from None

    def made() -> Any:
        try:
            return found()
        except USERS as error:
            if isinstance(error, MemoryError | torch.OutOfMemoryError):
                raise  # to whoever knows what takes less
            said = f"{setting} {name!r} raised {type(error).__name__}: {error}"
            raise refused(said, "mend it there; run.log has the traceback") from error

    return made
