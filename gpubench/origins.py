"""What a refusal says of where the settings in question were given: a variable, a file, an option that changes them."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from gpubench.errors import UsageError

COMMAND_LINE = "command line"
FILLED_IN = "default: "
"""Begins the origin of what nobody gave; the reason follows."""

THE_RUN, FIX, TRIAL = "the run", "the fix of a finding", "a trial"
"""Origins in a run that tries a fix: of what is as it was, of the fix, and of what every such run changes."""


def source(origin: str | None) -> str:
    """As "(from mine.yaml)" behind a space; nothing for the command line, what nobody gave, what a trial changes."""
    return f" (from {origin})" if _elsewhere(origin) else ""


def told(message: str, origins: Mapping[str, str]) -> str:
    """The message, and behind it where the settings that it names are from, if not from the command line."""
    named = {key: origin for key, origin in origins.items() if _names(message, key)}
    found = {key: origin for key, origin in named.items() if _elsewhere(origin) and source(origin) not in message}
    if not found:
        return message
    if len(set(named.values())) == 1:
        return message + source(next(iter(found.values())))
    return f"{message} ({', '.join(f'{key} from {origin}' for key, origin in found.items())})"


@contextmanager
def telling(origins: Mapping[str, str]) -> Iterator[None]:
    """Refusals inside say where the settings that they name are from."""
    try:
        yield
    except UsageError as error:
        raise type(error)(told(error.message, origins), error.hint) from None


@contextmanager
def about(key: str) -> Iterator[None]:
    """Refusals inside, of what does not know for which setting it works, begin with the setting."""
    try:
        yield
    except UsageError as error:
        raise type(error)(f"{key}: {error.message}", error.hint) from None


def _elsewhere(origin: str | None) -> bool:
    nowhere = (None, COMMAND_LINE, THE_RUN, FIX, TRIAL)
    return origin not in nowhere and not str(origin).startswith(FILLED_IN)


def _names(message: str, key: str) -> bool:
    """A key of one word has to look like a setting: with its value, or with a colon."""
    behind = r"(?![\w.]*\w)" if "." in key else r"(?= ?=|:)"
    return re.search(rf"(?<![\w.]){re.escape(key)}{behind}", message) is not None
