"""The JSON of a trace, a piece at a time, so that a file of any size needs little more memory than what is kept of it.

A piece ends between two events. Where that is need not be parsed for: a prefix of the events that decodes is whole.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import msgspec
import psutil

from gpubench.errors import DataError
from gpubench.trace.events import Args, Event, ExactEvent

PIECE = 8 * 2**20
MOST_PENDING = 512 * 2**20  # a single event of this size is none
SPARE_MEMORY = 256 * 2**20  # what must be left to the rest of the machine
EXACT_BELOW = 2.0**43  # microseconds: up to here the nearest double still tells the nanosecond

_GZIP, _PICKLE, _ZIP = b"\x1f\x8b", b"\x80", b"PK"
_TO_SPACE = bytes(range(32)).ljust(32)
_PLAIN = bytes.maketrans(_TO_SPACE, b" " * 32)  # control characters are white space, or inside a name not valid JSON
_BEGIN = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}\s*,\s*\{")
_NOT_A_NUMBER = re.compile(rb"(?<=[:\[,\s])[+-]?(?:inf(?:inity)?|nan)(?=[\s,\]}])", re.IGNORECASE)
_LONG_FRACTION = re.compile(rb'"ts"\s*:\s*"?\d{13,}\.')
NEAR_THE_END = 256 * 1024
MOST_TRIES = 8

Kind = TypeVar("Kind")

_ts = attrgetter("ts")
_fast = msgspec.json.Decoder(list[Event], strict=False)
_exact = msgspec.json.Decoder(list[ExactEvent], strict=False)

HOW = "record one with torch.profiler and export_chrome_trace, or gpubench profile"


class TraceDocument:
    """One trace file. `batches` goes through its events; `metadata` and `dropped` are complete after that."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        """What stands beside the events."""
        self.dropped = 0
        """Events that are none: no object, or times that are no numbers."""

    def batches(self) -> Iterator[list[Event]]:
        """The events in the order of the file. Raises DataError for a file that is no trace, or not whole."""
        with self._reading(), self._open() as file:
            rest = self._head(file)
            while piece := self._piece(file):
                events, rest = self._whole(rest + piece)
                yield events
            yield self._tail(rest)

    def _piece(self, file: IO[bytes]) -> bytes:
        if psutil.virtual_memory().available < SPARE_MEMORY:
            raise self._too_large()
        return file.read(PIECE).translate(_PLAIN)

    def _open(self) -> IO[bytes]:
        with self.path.open("rb") as file:
            magic = file.read(2)
        if not magic:
            raise DataError(f"{self.path} is empty", HOW)
        if magic.startswith(_PICKLE) or magic == _ZIP:
            raise DataError(f"{self.path} is a pickle, not a trace", "a memory snapshot: gpubench memory --snapshot")
        return cast("IO[bytes]", gzip.open(self.path) if magic == _GZIP else self.path.open("rb"))

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, zlib.error) as error:
            raise DataError(f"{self.path} is cut short or damaged: {error}", "copy it again") from None
        except MemoryError:
            raise self._too_large() from None
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror or error}", HOW) from None

    def _head(self, file: IO[bytes]) -> bytes:
        """Goes to the first event; what is read of the events so far."""
        text = self._piece(file).removeprefix(b"\xef\xbb\xbf").lstrip()
        if text.startswith(b"["):
            return text[1:]
        while not (match := _BEGIN.search(text)):
            piece = self._piece(file)
            if not text.startswith(b"{") or not piece or len(text) > MOST_PENDING:
                raise DataError(f"{self.path} is not a trace: no traceEvents in it", HOW)
            text += piece
        self._keep(_lenient(text[: match.start()].rstrip().removesuffix(b",")) + "}")
        return text[match.end() :]

    def _whole(self, text: bytes) -> tuple[list[Event], bytes]:
        """The events that are whole, and the rest of the text, in which the next one begins."""
        if len(text) > MOST_PENDING:
            raise self._damaged()
        borders = _last_borders(text)
        for decode in (self._decode, self._decode_leniently):
            for border in borders:
                if (events := decode(text[: border.start() + 1])) is not None:
                    return events, text[border.end() - 1 :]
        return [], text

    def _tail(self, rest: bytes) -> list[Event]:
        """The last events, and what stands behind them."""
        text = _lenient(b"[" + rest)
        try:
            _, end = json.JSONDecoder(strict=False).raw_decode(text)
        except (ValueError, RecursionError):
            raise self._damaged() from None
        if behind := text[end:].strip().lstrip(", "):
            self._keep("{" + behind)
        inside = text[1 : end - 1].encode()
        events = self._decode(inside)
        if events is None and (events := self._decode_leniently(inside)) is None:
            raise self._damaged()
        return events

    def _keep(self, text: str) -> None:
        try:
            found = json.loads(text, strict=False)
        except (ValueError, RecursionError):
            raise self._damaged() from None
        self.metadata |= found if isinstance(found, dict) else {}

    def _decode(self, text: bytes) -> list[Event] | None:
        """The events of a piece; None if it is not whole, or not as it should be."""
        text = b"[" + text + b"]"
        try:
            events = _fast.decode(text)
            if any(map(EXACT_BELOW.__le__, map(_ts, events))) and _LONG_FRACTION.search(text):
                return self._finite(_exact.decode(text))
            return events
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    def _decode_leniently(self, text: bytes) -> list[Event] | None:
        """Past what is not JSON (NaN, bytes that are not UTF-8) and events that make no sense."""
        try:
            found = json.loads(_lenient(b"[" + text + b"]"), strict=False, parse_float=Decimal)
        except (ValueError, RecursionError):
            return None
        events = [event for one in found if (event := _event(one)) is not None]
        self.dropped += len(found) - len(events)
        return self._finite(events)

    def _finite(self, events: list[ExactEvent]) -> list[Event]:
        """Decimals that are no numbers cannot be compared."""
        finite = [event for event in events if event.ts.is_finite() and event.dur.is_finite()]
        self.dropped += len(events) - len(finite)
        return cast("list[Event]", finite)

    def _too_large(self) -> DataError:
        return DataError(f"{self.path} does not fit in memory", "record fewer steps, or no stacks and memory")

    def _damaged(self) -> DataError:
        return DataError(f"{self.path} is cut short or damaged: its JSON does not end", "copy it again, or record anew")


def _last_borders(text: bytes) -> list[re.Match[bytes]]:
    """What looks like the border of two events, the last first."""
    return list(_BETWEEN.finditer(text, max(0, len(text) - NEAR_THE_END)))[: -MOST_TRIES - 1 : -1]


def _lenient(text: bytes) -> str:
    return _NOT_A_NUMBER.sub(b"null", text).decode(errors="replace")


def _event(found: Any) -> ExactEvent | None:
    """Without those of its arguments that make no sense; None where nothing is left to make sense of."""
    if not isinstance(found, dict):
        return None
    args = found.get("args")
    known = {key: value for key, value in args.items() if _as(Args, {key: value})} if isinstance(args, dict) else {}
    return _as(ExactEvent, found) or _as(ExactEvent, found | {"args": known})


def _as(kind: type[Kind], found: dict[str, Any]) -> Kind | None:
    try:
        return msgspec.json.decode(msgspec.json.encode(found), type=kind, strict=False)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError):
        return None
