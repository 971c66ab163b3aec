"""YAML of plain values, whoever wrote it.

An alias stands for all that its anchor holds, so that a few lines can mean more values than there is memory for; and
libyaml's composer goes down into nested values until the stack overflows, which no handler catches. Both are looked for
in the events of the parser, which knows neither, before anything is made of them.
"""

from typing import Any, Final

import yaml

MOST_VALUES = 20_000
"""With those that aliases stand for; settings have about a hundred."""
DEEPEST = 64
WHOLE: Final = 2**64
"""Integers from here on are no setting, and Python refuses to print one of thousands of digits."""

_SAFE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_SAFE):  # type: ignore[misc]  # which of the two is known when it runs
    pass


def _integer(loader: Any, node: Any) -> int:
    number: int = loader.construct_yaml_int(node)
    if abs(number) >= WHOLE:
        raise ValueError("a number in it is too long")
    return number


_Loader.add_constructor("tag:yaml.org,2002:int", _integer)


def parse(text: str | bytes) -> Any:
    """What the one document in `text` says, None if there is none; bytes are UTF-8.

    Raises ValueError, in one line, for text that is not YAML, names a type of another program, is nested deeper than
    DEEPEST, holds itself, or stands for more than MOST_VALUES values.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode()
        _check(text)
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Beside its own errors PyYAML raises what a tag's constructor stumbles over: !!bool x is a KeyError.
        known = isinstance(error, yaml.YAMLError | ValueError)
        reason = " ".join(str(error).split()) if known else "a value does not fit its tag"
        raise ValueError(reason) from None


def _check(text: str) -> None:
    values, sizes = 0, dict[str, int]()
    nested: list[tuple[str | None, int]] = []  # of each open collection, its anchor, and the values before it
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
            raise ValueError(f"it stands for more than {MOST_VALUES:,} values")
        if len(nested) > DEEPEST:
            raise ValueError(f"it is nested deeper than {DEEPEST} levels")
