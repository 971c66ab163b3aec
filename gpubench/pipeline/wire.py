"""The wire protocol between two ranks: frames with checksums, and edges over gloo and NCCL.

gloo accepts a message that is shorter than the buffer without an error, and aborts the receiver in C++ for a longer
one; neither library checks shapes or types. So a hand-over begins with frames of constant size, and the receiver posts
the receive of the payload only after it has checked them. The first frame begins with a header. The manifest (see
`gpubench.pipeline.handover`) follows, in further frames if necessary; zeros fill the last frame. Two checksums cover
every byte.

An Outbox sends hand-overs and an Inbox receives them. Each has a thread and, on a GPU, a stream, so that hand-overs are
received ahead of their use and sent while the next evaluations run on the default stream. Both hold a bounded number of
batches, so a rank that is behind makes the ranks before it wait.

An edge is one end of the connection between two ranks. Each edge has its own process groups, because NCCL runs the
operations of one communicator in order: in a shared one, a receive that is posted ahead would delay the next send.
"""

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gpubench.errors import HandoverError
from gpubench.events import Handoff
from gpubench.worker.timing import HIGH

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
    """Tests an edge, before the run has an id."""
    data = 1
    end = 2
    """The end of the stream; `sequence` is the number of hand-overs before it."""


@dataclass(frozen=True)
class Route:
    """The source and destination of hand-overs."""

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
    """Returns the sum of every byte times its position, modulo 2**32, which detects a changed byte and a swap of two.

    Positions restart at 65521, as in Adler-32 (zlib), so that the change of a byte cannot wrap around to 0.
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
        raise HandoverError("the data received is not a header of gpubench")
    if version != VERSION:
        raise HandoverError(
            f"its header is of protocol {version}, and this is protocol {VERSION}", "use one version of gpubench"
        )
    fields, (crc,) = first[: _FIELDS.size], _CRC.unpack_from(first, _FIELDS.size)
    if zlib.crc32(fields) != crc:
        raise HandoverError("its header was damaged in transit: the checksum does not fit")
    kind, source, destination, run, sequence, sample, samples, done = values
    body = first[HEAD:]
    while len(body) < manifest_bytes:
        body += more()
    if zlib.crc32(body) != body_crc:
        raise HandoverError("its manifest was damaged in transit: the checksum does not fit")
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


Clock = Callable[[], float]  # seconds since the epoch
Tell = Callable[[Handoff], None]  # called from the thread of an Inbox or Outbox


class Sizes(Protocol):
    """The bytes of a hand-over; see `gpubench.pipeline.handover`."""

    @property
    def latent_bytes(self) -> int: ...
    @property
    def state_bytes(self) -> int: ...
    @property
    def generator_bytes(self) -> int: ...


def handoff(
    route: Route,
    direction: Literal["send", "recv"],
    header: Header,
    framed: int,
    sizes: Sizes,
    time: float,
    total: float,
    waited: float,
) -> Handoff:
    """`framed` are the bytes of the frames before the payload."""
    parts = sizes.latent_bytes + sizes.state_bytes + sizes.generator_bytes
    here, peer = (route.source, route.destination) if direction == "send" else (route.destination, route.source)
    return Handoff(
        repeat=route.repeat,
        rank=here,
        peer=peer,
        direction=direction,
        sample=header.sample,
        step=header.done,
        sequence=header.sequence,
        time=time,
        total=total,
        waited=waited,
        header_bytes=framed + header.payload_bytes - parts,  # generators travel among the frames, on a GPU states may
        latent_bytes=sizes.latent_bytes,
        state_bytes=sizes.state_bytes,
        generator_bytes=sizes.generator_bytes,
    )


@contextmanager
def beside_evaluations(device: torch.device) -> Iterator[None]:
    """On a GPU, gives the calling thread a new stream on `device`, so that it does not wait for queued evaluations.

    Kernels of the stream have high priority: those of hand-overs are small, and at the same priority they would start
    only once every block of the evaluations' current kernel has been placed.
    """
    if device.type != "cuda":
        yield
        return
    # A new thread starts with GPU 0 as its current device, whatever the thread that started it had chosen.
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device, priority=HIGH)):
        yield


def record_issued(device: torch.device) -> torch.cuda.Event | None:
    """An event after all work that the calling thread's stream has been given; None on a CPU, where it is done."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


# As good as none. How long a rank waits for its first hand-over depends on all ranks before it, which only the host
# sees; and a wait of gloo's that times out closes the connection, so that no second try is left.
FOREVER = timedelta(days=365)


class Edge(Protocol):
    """One end of a connection between two ranks, used by one thread at a time."""

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        ...

    def send_frames(self, frames: bytes) -> None:
        """Sends whole frames; returns when the peer has taken them."""
        ...

    def receive_frame(self) -> bytes: ...

    def stage(self, payload: Tensor) -> Tensor:
        """`payload` (uint8, one-dimensional) where `send_payload` can send it from."""
        ...

    def send_payload(self, payload: Tensor) -> None:
        """Returns when `payload` may be reused."""
        ...

    def receive_payload(self, size: int) -> Tensor:
        """The next `size` bytes, where this edge has them: on the CPU, or on the device, made on the current stream.

        Returns when they are there, and waits for no work of other streams.

        `size` has to be what the peer sends: see `gpubench.pipeline.wire`.
        """
        ...


class _Framed:
    """Frames over gloo, which every edge uses for them."""

    def __init__(self, frames: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        self.device = device
        self._frames = frames
        self._peer = peer

    def send_frames(self, frames: bytes) -> None:
        for frame in torch.frombuffer(bytearray(frames), dtype=torch.uint8).split(FRAME):
            dist.send(frame, self._peer, group=self._frames)

    def receive_frame(self) -> bytes:
        frame = torch.empty(FRAME, dtype=torch.uint8)
        dist.recv(frame, self._peer, group=self._frames)
        return frame.numpy().tobytes()


class GlooEdge(_Framed):
    """Everything over gloo, which knows CPU tensors only: a payload on a GPU is staged in page-locked memory."""

    def stage(self, payload: Tensor) -> Tensor:
        if payload.device.type == "cpu":
            return payload
        return self._buffer(payload.numel()).copy_(payload)

    def send_payload(self, payload: Tensor) -> None:
        dist.send(payload, self._peer, group=self._frames)

    def receive_payload(self, size: int) -> Tensor:
        payload = self._buffer(size)
        dist.recv(payload, self._peer, group=self._frames)
        return payload

    def _buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")


class NcclEdge(_Framed):
    """Payloads over NCCL, from GPU to GPU."""

    def __init__(self, frames: dist.ProcessGroup, payloads: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        super().__init__(frames, peer, device)
        self._payloads = payloads

    def stage(self, payload: Tensor) -> Tensor:
        return payload

    def send_payload(self, payload: Tensor) -> None:
        dist.send(payload, self._peer, group=self._payloads)
        torch.cuda.current_stream(self.device).synchronize()

    def receive_payload(self, size: int) -> Tensor:
        payload = torch.empty(size, dtype=torch.uint8, device=self.device)
        dist.recv(payload, self._peer, group=self._payloads)
        torch.cuda.current_stream(self.device).synchronize()
        return payload


def open_edges(rank: int, world_size: int, backend: str, device: torch.device) -> tuple[Edge | None, Edge | None]:
    """The edges from the rank before and to the rank after, both tried out; None at either end of the chain.

    All ranks have to call this together, with the default process group set up. Raises HandoverError where a peer is
    not the rank it should be.
    """
    edges: dict[int, Edge] = {}
    for source in range(world_size - 1):  # every rank takes part in making every group, and in this order
        pair = [source, source + 1]
        frames = dist.new_group(pair, timeout=FOREVER, backend="gloo")
        payloads = _nccl_group(pair) if backend == "nccl" else None
        if rank in pair:
            peer = pair[1 - pair.index(rank)]
            edges[source] = NcclEdge(frames, payloads, peer, device) if payloads else GlooEdge(frames, peer, device)
    before, after = edges.get(rank - 1), edges.get(rank)
    if after:
        _say_hello(after, rank)
    if before:
        _hear_hello(before, rank)
    return before, after


def _nccl_group(pair: list[int]) -> dist.ProcessGroup:
    """Of high priority, as the streams of hand-overs are; see `beside_evaluations`."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = FOREVER  # the argument's value, or torch warns that the two differ
    group: dist.ProcessGroup = dist.new_group(pair, timeout=FOREVER, backend="nccl", pg_options=options)
    return group


def _say_hello(edge: Edge, rank: int) -> None:
    """Opens the connection, including NCCL's communicator, before the timed pass."""
    edge.send_frames(encode(Header(Kind.hello, bytes(RUN_ID), rank, rank + 1, 0)))
    edge.send_payload(edge.stage(torch.zeros(1, dtype=torch.uint8, device=edge.device)))


def _hear_hello(edge: Edge, rank: int) -> None:
    header, _ = decode(edge.receive_frame(), edge.receive_frame)
    if (header.kind, header.source, header.destination) != (Kind.hello, rank - 1, rank):
        raise HandoverError(f"rank {rank} expected a hello from rank {rank - 1}, and got {header}")
    edge.receive_payload(1)
