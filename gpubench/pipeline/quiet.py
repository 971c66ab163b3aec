"""Without the libraries' own progress bars and advice, which are meant for somebody who types at them."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any


@contextmanager
def quiet(*, transformers: bool = False) -> Iterator[None]:
    """Nothing but errors is heard from diffusers, its imports and deprecations included.

    With `transformers`, nor from that library: to import it for a scheduler alone takes half a second.
    """
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for library in ("diffusers", "transformers") if transformers else ("diffusers",):
            stack.enter_context(_errors_only(import_module(f"{library}.utils.logging")))
        yield


@contextmanager
def _errors_only(library: Any) -> Iterator[None]:
    before = library.get_verbosity()
    bars = library.is_progress_bar_enabled()
    library.set_verbosity_error()
    library.disable_progress_bar()
    try:
        yield
    finally:
        library.set_verbosity(before)
        if bars:
            library.enable_progress_bar()
