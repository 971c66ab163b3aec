"""Hides the warnings of gpubench's own calls from a program, without changing which warnings it prints itself.

Python prints most warnings once in each place and keeps a registry of them. `warnings.catch_warnings` makes all of
these registries invalid, so that the program would print its own warnings again.
"""

from __future__ import annotations

import re
import warnings
from contextlib import contextmanager, suppress
from typing import Any, Iterator


@contextmanager
def ignored_warnings(message: str | None = None) -> Iterator[None]:
    """Ignores the warnings whose text begins with the regular expression `message`; None for all.

    A warning that a filter ignores enters no registry. The filter is put into the list itself, as the functions of
    `warnings` would mark the registries as invalid.
    """
    pattern = re.compile(message, re.IGNORECASE) if message else None
    ignoring: Any = ("ignore", pattern, Warning, None, 0)
    filters: Any = getattr(warnings, "_get_filters", lambda: warnings.filters)()
    filters.insert(0, ignoring)
    try:
        yield
    finally:
        with suppress(ValueError):  # another thread has replaced them
            filters.remove(ignoring)
