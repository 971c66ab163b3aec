"""Parses YAML of plain values safely, whatever its source.

A few lines with aliases can stand for more values than fit in memory, and libyaml's composer recurses into nested
values until the stack overflows, which no handler catches. This module checks the events of the parser for both before
it builds any value.
"""

from collections.abc import Iterator
from typing import Any, Final

import yaml

MOST_VALUES = 20_000
"""The largest number of values, with those that aliases stand for. Settings have about a hundred."""
DEEPEST = 64
WHOLE: Final = 2**64
"""The limit of integers. No setting is as large, and Python does not print integers with thousands of digits."""

MERGE: Final = "tag:yaml.org,2002:merge"
"""The tag of <<, which adds the keys of other mappings."""

_SAFE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_SAFE):  # type: ignore[misc]  # which of the two is known when it runs
    pass


def _integer(loader: Any, node: Any) -> int:
    number: int = loader.construct_yaml_int(node)
    if abs(number) >= WHOLE:
        raise ValueError("a number in it is too long")
    return number


def _mapping(loader: Any, node: Any) -> Iterator[dict[Any, Any]]:
    """Builds a mapping as PyYAML does, but refuses a key that is given twice, of which PyYAML keeps the last value."""
    seen = set[str]()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != MERGE:
            if key.value in seen:
                raise ValueError(f"line {key.start_mark.line + 1} gives {key.value} a second time")
            seen.add(key.value)
    yield from loader.construct_yaml_map(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)
_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)


def parse(text: str | bytes) -> Any:
    """The value of the single document in `text`, None if there is none. Bytes must be UTF-8.

    Raises ValueError with a message of one line for text that is not YAML, has a type of another program, is nested
    deeper than DEEPEST, gives a key twice, contains itself, or stands for more than MOST_VALUES values.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode()
        _check(text)
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Besides its own errors, PyYAML raises those of a tag's constructor: !!bool x is a KeyError.
        raise ValueError(_reason(error)) from None


def _reason(error: Exception) -> str:
    """Says what is wrong with a text in one line, without what only a programmer of Python knows."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not text in UTF-8"
    if isinstance(error, yaml.reader.ReaderError):
        return "it is not text: it has control characters"
    if not isinstance(error, yaml.YAMLError | ValueError):
        return "a value does not fit its tag"
    return " ".join(str(error).replace('in "<unicode string>", ', "at ").split())


def _check(text: str) -> None:
    values, sizes = 0, dict[str, int]()
    nested: list[tuple[str | None, int]] = []  # anchor of each open collection, and the number of values before it
    for event in yaml.parse(text, Loader=_SAFE):
        if isinstance(event, yaml.AliasEvent):
            if any(event.anchor == anchor for anchor, _ in nested):
                raise ValueError("it contains itself")
            values += sizes.get(event.anchor or "", 0)
        elif isinstance(event, yaml.CollectionStartEvent):
            nested.append((event.anchor, values))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = nested.pop()
            sizes[anchor or ""] = values - before
        elif isinstance(event, yaml.ScalarEvent):
            sizes[event.anchor or ""] = 1
            values += 1
        if values > MOST_VALUES:
            raise ValueError(f"it expands to more than {MOST_VALUES:,} values")
        if len(nested) > DEEPEST:
            raise ValueError(f"it is nested deeper than {DEEPEST} levels")
