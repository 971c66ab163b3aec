"""Without the libraries' own progress bars and advice, which are meant for somebody who types at them."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing but errors is heard from diffusers and transformers, their imports and deprecations included."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for library in (diffusers_logging, transformers_logging):
            stack.enter_context(_errors_only(library))
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
