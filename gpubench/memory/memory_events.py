"""The [memory] events of a Chrome trace: one for each time that memory was given out or given back.

The keys of their `args` are those of libkineto's output_json.cpp; traces before 2022 lack addresses and totals.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw, Struct, field

from gpubench.trace import lenient
from gpubench.trace.decoding import UNREADABLE
from gpubench.trace.document import TraceDocument

NAME = "[memory]"
HOST = 0
"""c10::DeviceType::CPU."""
LARGEST = 2**48
"""Bytes; as many as a file can hold sum to an int64."""
LATEST = 2**53
"""Microseconds: beyond it a float is no longer whole."""


class About(Struct, gc=False):
    change: int = field(name="Bytes")
    """Of what is given out; negative where it is given back."""
    kind: int = field(name="Device Type")
    """A c10::DeviceType: 0 is the host, 1 CUDA or HIP."""
    device: int = field(default=-1, name="Device Id")
    address: int | None = field(default=None, name="Addr")
    allocated: int | None = field(default=None, name="Total Allocated")
    """What the device's allocator has given out, this included."""
    reserved: int | None = field(default=None, name="Total Reserved")


class MemoryEvent(Struct, gc=False):
    thread: tuple[str, str]
    """(process, thread) as the trace calls them."""
    at: float
    """Microseconds."""
    about: About


class _Any(Struct, gc=False):
    """Any event. What is not looked at is not decoded, so that it may be wrong."""

    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    args: Raw = Raw()


_events = msgspec.json.Decoder(list[_Any])
_about = msgspec.json.Decoder(About, strict=False)


class _Arguments:
    """Of an event only where it stands, and its arguments as they are."""

    def strictly(self, text: bytes) -> tuple[list[_Any], int] | None:
        try:
            return _events.decode(text), 0
        except UNREADABLE:
            return None

    def leniently(self, text: bytes) -> tuple[list[_Any], int] | None:
        return self.strictly(lenient.text(text).encode())


def memory_events(path: Path) -> Iterator[MemoryEvent]:
    """In the order of the file, which need not be that of time. Raises DataError for what is no trace, or not whole."""
    for batch in TraceDocument(path, _Arguments()).batches():
        for event in batch:
            if event.name == NAME and (found := _read(event)):
                yield found


def _read(event: _Any) -> MemoryEvent | None:
    """None of what makes no sense."""
    try:
        about, at = _about.decode(event.args), float(event.ts)
    except (*UNREADABLE, TypeError, ValueError):
        return None
    sizes = (abs(about.change), about.allocated or 0, about.reserved or 0)
    if not (0 <= at < LATEST and all(0 <= size < LARGEST for size in sizes)):
        return None
    return MemoryEvent((str(event.pid), str(event.tid)), at, about)
