"""The JSON of a trace, a piece at a time, so that a file of any size needs little more memory than what is kept of it.

A piece ends between two events. Where that is need not be parsed for: a prefix of the events that decodes is whole.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

import psutil

from gpubench.errors import DataError
from gpubench.trace import lenient
from gpubench.trace.decoding import Decoder
from gpubench.trace.opening import HOW, opened

PIECE = 8 * 2**20
MOST_PENDING = 64 * 2**20  # a single event of this size is none, and so much before the first event neither
SPARE_MEMORY = 256 * 2**20  # what must be left to the rest of the machine

_TO_SPACE = bytes(range(32)).ljust(32)
_PLAIN = bytes.maketrans(_TO_SPACE, b" " * 32)  # control characters are white space, or inside a name not valid JSON
_BEGIN = re.compile(rb'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(rb"\}\s*,\s*\{")
NEAR_THE_END = 256 * 1024
MOST_TRIES = 8

E = TypeVar("E")
Decode = Callable[[bytes], tuple[list[E], int] | None]


class TraceDocument(Generic[E]):
    """One trace file. `batches` goes through its events; all else is complete after that."""

    def __init__(self, path: Path, decoder: Decoder[E]) -> None:
        self.path = path
        self._decoder = decoder
        self.metadata: dict[str, Any] = {}
        """What stands beside the events."""
        self.dropped = 0
        """Events that are none, and in no batch: no object, or times that are no numbers."""
        self.truncated = False
        """The events are whole, and what should stand behind them is not."""
        self._bare = False
        """The document is the array of the events."""

    def batches(self) -> Iterator[list[E]]:
        """The events in the order of the file. Raises DataError for a file that is no trace, or not whole."""
        try:
            with opened(self.path) as file:
                rest = self._head(file)
                while piece := self._piece(file):
                    events, rest = self._whole(rest + piece)
                    yield events
                yield self._tail(rest)
        except MemoryError:
            raise self._too_large() from None
        except lenient.Broken as broken:
            raise self._damaged(str(broken)) from None

    def _piece(self, file: IO[bytes]) -> bytes:
        if psutil.virtual_memory().available < SPARE_MEMORY:
            raise self._too_large()
        return file.read(PIECE).translate(_PLAIN)

    def _head(self, file: IO[bytes]) -> bytes:
        """Goes to the first event; what is read of the events so far."""
        text = self._piece(file).removeprefix(b"\xef\xbb\xbf").lstrip()
        if text.startswith(b"["):
            self._bare = True
            return text[1:]
        if not text.startswith(b"{"):
            raise self._no_trace()
        while not (match := _BEGIN.search(text)):
            if len(text) > MOST_PENDING:
                raise self._no_trace()
            if not (piece := self._piece(file)):
                raise self._without_events(text)
            text += piece
        before = lenient.text(text[: match.start()].rstrip().removesuffix(b",")) + "}"
        found, end = lenient.value(before)
        if end < len(before):
            raise self._damaged("its JSON is broken")
        self.metadata |= found
        return text[match.end() :]

    def _whole(self, text: bytes) -> tuple[list[E], bytes]:
        """The events that are whole, and the rest of the text, in which the next one begins."""
        if len(text) > MOST_PENDING:
            raise self._damaged(f"no event ends within {MOST_PENDING // 2**20} MiB")
        borders = _last_borders(text)
        for decode in (self._decoder.strictly, self._decoder.leniently):
            for border in borders:
                if (events := self._decoded(decode, text[: border.start() + 1])) is not None:
                    return events, text[border.end() - 1 :]
        self._check_unfinished(text)
        return [], text

    def _check_unfinished(self, text: bytes) -> None:
        """What does not decode may be mended by more text, or by none."""
        try:
            lenient.value(lenient.text(b"[" + text))
        except lenient.Broken as broken:
            if not broken.early:
                raise

    def _tail(self, rest: bytes) -> list[E]:
        """The last events, and what stands behind them."""
        text = lenient.text(b"[" + rest)
        _, end = lenient.value(text)
        self._keep(text[end:].strip())
        inside = text[1 : end - 1].encode()
        for decode in (self._decoder.strictly, self._decoder.leniently):
            if (events := self._decoded(decode, inside)) is not None:
                return events
        raise self._damaged("its JSON is broken")

    def _keep(self, behind: str) -> None:
        """Of what stands behind the events. They are whole, and so what is cut off there does not matter much."""
        if not self._bare:
            text = "{" + behind.lstrip(", ")
            try:
                found, end = lenient.value(text)
            except lenient.Broken as broken:
                if not broken.early:
                    raise
                self.truncated = True
                return
            self.metadata |= found
            behind = text[end:].strip()
        if behind:
            raise DataError(f"{self.path} goes on where its JSON ends", "one file holds one trace: take off the rest")

    def _decoded(self, decode: Decode[E], inside: bytes) -> list[E] | None:
        """The events of a piece; None if it is not whole, or not as it should be."""
        if (found := decode(b"[" + inside + b"]")) is None:
            return None
        events, dropped = found
        self.dropped += dropped
        return events

    def _without_events(self, text: bytes) -> DataError:
        """Of a file that ends before them."""
        try:
            lenient.value(lenient.text(text))
        except lenient.Broken as broken:
            if broken.early:
                return DataError(f"{self.path} ends before any traceEvents: it is cut short, or no trace", HOW)
        if b"www.speedscope.app" in text:
            return DataError(f"{self.path} is a profile in speedscope's format, as py-spy writes it, not a trace", HOW)
        return self._no_trace()

    def _no_trace(self) -> DataError:
        return DataError(f"{self.path} is not a trace: no traceEvents in it", HOW)

    def _too_large(self) -> DataError:
        return DataError(f"{self.path} does not fit in memory", "record fewer steps, or no stacks and memory")

    def _damaged(self, why: str) -> DataError:
        return DataError(f"{self.path} is cut short or damaged: {why}", "copy it again, or record anew")


def _last_borders(text: bytes) -> list[re.Match[bytes]]:
    """What looks like the border of two events, the last first."""
    return list(_BETWEEN.finditer(text, max(0, len(text) - NEAR_THE_END)))[: -MOST_TRIES - 1 : -1]
