"""From an array of events in JSON to events of a kind; each reader of traces looks at other parts of them."""

import re
from operator import attrgetter
from typing import Protocol, TypeVar, cast

import msgspec

from gpubench.trace import lenient
from gpubench.trace.events import Event, ExactEvent

EXACT_BELOW = 2.0**43  # microseconds: up to here the nearest double still tells the nanosecond
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

E = TypeVar("E")

_LONG_FRACTION = re.compile(rb'"ts"\s*:\s*"?\d{13,}\.')
_ts = attrgetter("ts")
_fast = msgspec.json.Decoder(list[Event], strict=False)
_exact = msgspec.json.Decoder(list[ExactEvent], strict=False)


class Decoder(Protocol[E]):
    """Both take a whole array, and give its events with how many it left out; None where they cannot."""

    def strictly(self, text: bytes) -> tuple[list[E], int] | None:
        """Of what is JSON, as it should be."""

    def leniently(self, text: bytes) -> tuple[list[E], int] | None:
        """Past what is not JSON (NaN, bytes that are not UTF-8) and events that make no sense."""


class Work:
    """What was done, and when: all but the arguments that nobody asks for."""

    def strictly(self, text: bytes) -> tuple[list[Event], int] | None:
        try:
            events = _fast.decode(text)
            if any(map(EXACT_BELOW.__le__, map(_ts, events))) and _LONG_FRACTION.search(text):
                return _finite(_exact.decode(text))
            return events, 0
        except UNREADABLE:
            return None

    def leniently(self, text: bytes) -> tuple[list[Event], int] | None:
        if (found := lenient.events(text)) is None:
            return None
        events, dropped = found
        finite, more = _finite(events)
        return finite, dropped + more


def _finite(events: list[ExactEvent]) -> tuple[list[Event], int]:
    """Decimals that are no numbers cannot be compared."""
    finite = [event for event in events if event.ts.is_finite() and event.dur.is_finite()]
    return cast("list[Event]", finite), len(events) - len(finite)
