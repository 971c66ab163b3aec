"""What goes before a payload: frames of one size, which say what comes.

gloo delivers a message that is shorter than the buffer in silence, and one that is longer aborts the receiver in C++;
neither library looks at shapes or types. So a hand-over begins with frames of a size that never varies, and nobody
posts the receive of a payload before they have been read and found to be what was agreed.

The first frame begins with a head, behind which the manifest (see `gpubench.pipeline.handover`) runs on, through
further frames where one does not hold it; zeros fill the last. Two checksums cover every byte.
"""

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from gpubench.errors import HandoverError

FRAME = 8192  # a CPU generator's 5056 bytes of state fit in
MAGIC = b"GPUBENCH"
VERSION = 1
RUN_ID = 8
WHAT_IS_LEFT = "the samples finished so far are kept, and --resume makes the others"
CHECKED = 1 << 32  # set in every payload checksum, so that 0 can mean that there is none

# magic, version, kind, source, destination, run, sequence, sample, samples, done, manifest and payload bytes, payload
# checksum, crc of what is behind the head; then the crc of all these
_FIELDS = struct.Struct(f"<8sHHII{RUN_ID}sQQIIQQQI")
_CRC = struct.Struct("<I")
HEAD = _FIELDS.size + _CRC.size


class Kind(IntEnum):
    hello = 0
    """An edge is being tried out, before the run has an id."""
    data = 1
    end = 2
    """Nothing follows; `sequence` is how many hand-overs did."""


@dataclass(frozen=True)
class Route:
    """Where hand-overs come from and go to."""

    run: bytes
    """RUN_ID bytes that the ranks have agreed on; see `gpubench.pipeline.handshake`."""
    repeat: int
    source: int
    destination: int


@dataclass(frozen=True)
class Header:
    """The head of a hand-over."""

    kind: Kind
    run: bytes
    source: int
    destination: int
    sequence: int
    """Hand-overs sent before on this edge in this run."""
    sample: int = 0
    """The first of the micro-batch."""
    samples: int = 0
    """How many of them, consecutive."""
    done: int = 0
    """Evaluations so far."""
    payload_bytes: int = 0
    payload_checksum: int = 0
    """See `checksum`."""


def checksum(payload: Tensor) -> int:
    """Of a one-dimensional uint8 tensor, with CHECKED: CRC-32 (zlib) on the CPU, on a GPU a sum that it can make."""
    if payload.device.type != "cpu":
        return CHECKED | weighted_sum(payload)
    return CHECKED | zlib.crc32(payload.numpy().data)


def weighted_sum(payload: Tensor) -> int:
    """Every byte times its place, modulo 2**32: no byte that changes, and no two that change places, go unseen.

    Places begin again at 65521, as in Adler-32 (zlib), so that a changed byte cannot wrap around to nothing.
    """
    places = torch.arange(payload.numel(), device=payload.device) % 65521 + 1
    return int((payload.to(torch.int64) * places).sum()) & 0xFFFFFFFF


def frames_size(manifest: bytes) -> int:
    """Bytes of the frames that go before a payload: whole frames."""
    return -(-(HEAD + len(manifest)) // FRAME) * FRAME


def encode(header: Header, manifest: bytes = b"") -> bytes:
    """The frames, one after the other."""
    body = manifest.ljust(frames_size(manifest) - HEAD, b"\0")
    fields = _FIELDS.pack(
        MAGIC,
        VERSION,
        header.kind,
        header.source,
        header.destination,
        header.run,
        header.sequence,
        header.sample,
        header.samples,
        header.done,
        len(manifest),
        header.payload_bytes,
        header.payload_checksum,
        zlib.crc32(body),
    )
    return fields + _CRC.pack(zlib.crc32(fields)) + body


def decode(first: bytes, more: Callable[[], bytes]) -> tuple[Header, bytes]:
    """The header and manifest that begin in the frame `first`; `more` gives the next frame where one is needed.

    Raises HandoverError with the bare reason for anything that `encode` did not make: see `Expected.named`.
    """
    magic, version, *values, manifest_bytes, payload_bytes, payload_checksum, body_crc = _FIELDS.unpack_from(first)
    if magic != MAGIC:
        raise HandoverError("what came is no header of gpubench")
    if version != VERSION:
        raise HandoverError(
            f"its header is of protocol {version}, and this is protocol {VERSION}", "use one version of gpubench"
        )
    fields, (crc,) = first[: _FIELDS.size], _CRC.unpack_from(first, _FIELDS.size)
    if zlib.crc32(fields) != crc:
        raise HandoverError("its header was damaged on the way: the checksum does not fit")
    kind, source, destination, run, sequence, sample, samples, done = values
    body = first[HEAD:]
    while len(body) < manifest_bytes:
        body += more()
    if zlib.crc32(body) != body_crc:
        raise HandoverError("its manifest was damaged on the way: the checksum does not fit")
    header = Header(
        Kind(kind), run, source, destination, sequence, sample, samples, done, payload_bytes, payload_checksum
    )
    return header, body[:manifest_bytes]


@dataclass(frozen=True)
class Expected:
    """The hand-over that a rank waits for, or the end of them."""

    route: Route
    sequence: int
    samples: Sequence[int]
    """None of them: the end of the stream."""
    done: int = 0

    def __str__(self) -> str:
        if not self.samples:
            return f"the end of the stream after {_count(self.sequence, 'hand-over')} from rank {self.route.source}"
        what = _named(self.samples[0], len(self.samples))
        return f"{what} after {_count(self.done, 'evaluation')} from rank {self.route.source}"

    @contextmanager
    def named(self) -> Iterator[None]:
        """Says of a HandoverError raised within who refused what, and from whom."""
        try:
            yield
        except HandoverError as error:
            raise HandoverError(
                f"rank {self.route.destination} refused {self}: {error.message}", error.hint or WHAT_IS_LEFT
            ) from error

    def check(self, header: Header) -> None:
        """Raises HandoverError where another hand-over came than the one expected."""
        route = self.route
        with self.named():
            if header.run != route.run:
                raise HandoverError(f"it is of run {header.run.hex()}, and this is run {route.run.hex()}")
            if (header.source, header.destination) != (route.source, route.destination):
                raise HandoverError(f"it was sent by rank {header.source} to rank {header.destination}")
        if (header.kind, header.sequence, header.sample, header.samples) != self._place():
            raise self._instead(
                f"{_what(header)} (sequence {header.sequence} instead of {self.sequence}): {self._cause(header)}"
            )
        if header.done != self.done:
            raise self._instead(f"it after {header.done}")

    def _place(self) -> tuple[Kind, int, int, int]:
        if not self.samples:
            return Kind.end, self.sequence, 0, 0
        return Kind.data, self.sequence, self.samples[0], len(self.samples)

    def _cause(self, header: Header) -> str:
        if header.sequence > self.sequence:
            return "a hand-over was lost"
        if header.sequence < self.sequence:
            return "a hand-over came twice"
        return "the ranks disagree on which samples are to be made"

    def _instead(self, got: str) -> HandoverError:
        return HandoverError(f"rank {self.route.destination} expected {self}, and got {got}", WHAT_IS_LEFT)


def _what(header: Header) -> str:
    if header.kind is Kind.data:
        return _named(header.sample, header.samples)
    return "the end of the stream" if header.kind is Kind.end else "a hello"


def _named(first: int, count: int) -> str:
    return f"sample {first}" if count == 1 else f"samples {first} to {first + count - 1}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def tensor_of(data: bytes) -> Tensor:
    """uint8, on the CPU."""
    # Of a writable copy; and frombuffer takes no empty one.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def bytes_of(content: Tensor) -> bytes:
    data: bytes = content.cpu().numpy().tobytes()
    return data
