"""Finds a callable of the user by its name, `module:callable`, and calls it."""

import importlib
import inspect
import operator
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from gpubench.errors import GpubenchError, ModelError, did_you_mean
from gpubench.settings.callables import check_arguments, how_to_write

USER_ERRORS = (Exception, SystemExit)
"""The exceptions that code of the user may raise."""


def find_callable(
    setting: str, name: str, refused: type[GpubenchError], arguments: Mapping[str, Any] | None = None
) -> Callable[[], Any]:
    """Makes a function that calls the callable with the name `name`, the value of `setting`, with `arguments`.

    Its module may be in the current directory. Raises `refused` if it cannot be imported, or not be called with these
    arguments. The returned function also raises `refused` if the user's code raises an exception; that exception is the
    cause, so that run.log has the traceback.
    """
    found, arguments = _imported(setting, name, refused), arguments or {}
    try:
        signature = inspect.signature(found)
        if refused is ModelError:
            check_arguments(name, signature, arguments)
        signature.bind(**arguments)
    except ValueError:  # some builtins have no signature
        pass
    except TypeError as error:
        raise refused(f"{setting} {name!r} cannot be called without arguments: {error}", "give them defaults") from None

    def call() -> Any:
        try:
            return found(**arguments)
        except USER_ERRORS as error:
            if isinstance(error, MemoryError | torch.OutOfMemoryError):
                raise  # the caller adds the hint on memory
            message = f"{setting} {name!r} raised {type(error).__name__}: {error}"
            raise refused(message, "fix the error in that code; run.log has the traceback") from error

    return call


def _imported(setting: str, name: str, refused: type[GpubenchError]) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    if (here := os.getcwd()) not in sys.path:  # noqa: PTH109
        sys.path.insert(0, here)
    try:
        imported = importlib.import_module(module)
    except USER_ERRORS as error:
        raise refused(
            f"{setting} {name!r} cannot be imported: {type(error).__name__}: {error}",
            how_to_write(),
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
    return cast("Callable[..., Any]", found)
