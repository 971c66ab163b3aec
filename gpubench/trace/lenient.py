"""What is nearly JSON: a profiler writes NaN, names that are not UTF-8, and halves of characters as they come."""

import json
import re
from decimal import Decimal
from typing import Any, TypeVar

import msgspec

from gpubench.trace.events import Args, ExactEvent

Kind = TypeVar("Kind")

_NOT_A_NUMBER = re.compile(rb"(?<=[:\[,\s])[+-]?(?:inf(?:inity)?|nan)(?=[\s,\]}])", re.IGNORECASE)
_ESCAPE = re.compile(rb"\\(?:u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|(?P<half>u[dD][89a-fA-F]\w\w)|.)", re.DOTALL)
"""Of a character beyond 16 bits the escape has two halves; one of them alone is no text."""
_json = json.JSONDecoder(strict=False)

SHORT = 10
"""Characters: a word or an escape that is cut off has fewer, as -Infinit."""


def text(found: bytes) -> str:
    """As JSON that can be decoded, if it can at all."""
    found = _NOT_A_NUMBER.sub(b"null", found)
    return _ESCAPE.sub(lambda match: rb"\ufffd" if match["half"] else match[0], found).decode(errors="replace")


def events(found: bytes) -> tuple[list[ExactEvent], int] | None:
    """Those of an array that make sense, and how many do not; None if it is no whole array."""
    try:
        every = json.loads(text(found), strict=False, parse_float=Decimal)
    except (ValueError, RecursionError):
        return None
    good = [event for one in every if (event := _event(one)) is not None]
    return good, len(every) - len(good)


class Broken(Exception):
    def __init__(self, why: str, *, early: bool = False) -> None:
        super().__init__(why)
        self.early = early
        """More text might have made it JSON."""


def value(found: str) -> tuple[Any, int]:
    """What the text begins with, and where that ends. Raises Broken."""
    try:
        return _json.raw_decode(found)
    except json.JSONDecodeError as error:
        if error.msg.startswith("Unterminated string") or len(found) - error.pos < SHORT:
            raise Broken("its JSON does not end", early=True) from None
        raise Broken("its JSON is broken") from None
    except RecursionError:
        raise Broken("its brackets are nested too deep") from None
    except ValueError:  # Python reads no integer of thousands of digits
        raise Broken("a number in it is too long") from None


def _event(found: Any) -> ExactEvent | None:
    """Without those of its arguments that make no sense; None where nothing is left to make sense of."""
    if not isinstance(found, dict):
        return None
    args, name = found.get("args"), found.get("name", "")
    known = {key: value for key, value in args.items() if _as(Args, {key: value})} if isinstance(args, dict) else {}
    return _as(ExactEvent, found) or _as(ExactEvent, found | {"args": known, "name": str(name)})


def _as(kind: type[Kind], found: dict[str, Any]) -> Kind | None:
    try:
        return msgspec.json.decode(msgspec.json.encode(found), type=kind, strict=False)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError):
        return None
