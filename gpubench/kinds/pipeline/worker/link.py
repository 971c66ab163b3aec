"""The connection between two neighbouring ranks: a `Link` sends or receives batches, checks them, and times them.

A hand-off is a message followed by a payload. The message describes the batch and says which hand-off it is. It is sent
in frames of constant size over gloo: a head with a length and two checksums, the `Message` in MessagePack, and zeros to
the end of the last frame. The payload is the batch's tensors, sent over gloo, or from GPU to GPU over NCCL. Checksums
cover every byte.

The receiver posts the receive of a payload only after it has checked the message, because neither library checks what
it receives: gloo accepts a message that is shorter than the buffer without an error, and aborts the receiver in C++ for
a longer one.

A `Transport` is one end of a connection and lasts as long as the process. Each has its own process groups, because NCCL
runs the operations of one communicator in order: in a shared one, a receive that is posted ahead would delay the next
send. A `Link` uses a transport in one direction for one pass of samples.
"""

import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from gpubench import releases, units
from gpubench.errors import HandoffError
from gpubench.events import Handoff
from gpubench.kinds.pipeline.faults import OF_THE_RANK, Fault, FaultKind
from gpubench.kinds.pipeline.requests import Requests
from gpubench.kinds.pipeline.worker import packing
from gpubench.kinds.pipeline.worker.packing import DTYPE_NAMES, PackedBatch, checksum, tensor_of, unpack
from gpubench.kinds.pipeline.worker.sampler import Batch, Sampler

FRAME = 8192  # bytes; the 5056 bytes of a CPU generator's state fit into it
MAGIC = b"GPUBENCH"
VERSION = 2
RUN_ID = 8  # bytes
HINT = "the samples finished so far are kept, and --resume makes the others"

_FIELDS = struct.Struct("<8sHQI")  # magic, version, length of the message, CRC-32 of all bytes after the head
_CRC = struct.Struct("<I")  # of these fields
HEAD = _FIELDS.size + _CRC.size


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: Literal["hello", "batch", "end"]
    """`hello` opens a connection before the run has an id, and `end` is the end of the stream."""
    run: bytes
    """The id of the pass: `RUN_ID` bytes that all ranks have agreed on."""
    source: int
    destination: int
    sequence: int
    """The number of earlier hand-offs on this link."""
    batch: PackedBatch | None = None
    checksum: int = 0
    """The checksum of the payload; see `gpubench.kinds.pipeline.worker.packing.checksum`."""

    @property
    def samples(self) -> list[int]:
        return list(self.batch.samples) if self.batch else []


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    content = _encoder.encode(message)
    size = -(-(HEAD + len(content)) // FRAME) * FRAME
    padded = content.ljust(size - HEAD, b"\0")
    fields = _FIELDS.pack(MAGIC, VERSION, len(content), zlib.crc32(padded))
    return fields + _CRC.pack(zlib.crc32(fields)) + padded


def decode(first: bytes, receive_frame: Callable[[], bytes]) -> tuple[Message, int]:
    """Returns the message that begins with the frame `first`, and the size of its frames in bytes.

    `receive_frame` is called for each further frame. Raises HandoffError for anything that `encode` did not make.
    """
    magic, version, length, crc = _FIELDS.unpack_from(first)
    if magic != MAGIC:
        raise HandoffError("the data received is not a message of gpubench")
    if version != VERSION:
        raise HandoffError(
            f"the message is of protocol {version}, and this is protocol {VERSION}",
            "use one version of gpubench on all machines",
        )
    if zlib.crc32(first[: _FIELDS.size]) != _CRC.unpack_from(first, _FIELDS.size)[0]:
        raise HandoffError("the message was damaged in transit: the checksum of its header does not match")
    content = first[HEAD:]
    while len(content) < length:
        content += receive_frame()
    if zlib.crc32(content) != crc:
        raise HandoffError("the message was damaged in transit: its checksum does not match")
    try:
        return _decoder.decode(content[:length]), HEAD + len(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HandoffError(f"the message cannot be read: {error}") from error


class Transport:
    """One end of a connection over gloo, used by one thread at a time.

    gloo sends CPU tensors only, so a payload on a GPU is staged in page-locked memory.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        """`device` is where this rank computes."""
        self.device = device
        self._group = group
        self._peer = peer

    def send_frames(self, frames: bytes) -> None:
        """Sends whole frames. Returns when the peer has taken them."""
        for frame in tensor_of(frames).split(FRAME):
            dist.send(frame, self._peer, group=self._group)

    def receive_frame(self) -> bytes:
        frame = torch.empty(FRAME, dtype=torch.uint8)
        dist.recv(frame, self._peer, group=self._group)
        return frame.numpy().tobytes()

    def stage(self, payload: Tensor) -> Tensor:
        """Returns `payload`, uint8 of shape (bytes,), in memory that `send_payload` can send from."""
        return payload if payload.device.type == "cpu" else self._buffer(payload.numel()).copy_(payload)

    def send_payload(self, payload: Tensor) -> None:
        """Returns when `payload` may be reused."""
        dist.send(payload, self._peer, group=self._group)

    def receive_payload(self, size: int) -> Tensor:
        """Returns the next payload, which must have `size` bytes, on the CPU or, with NCCL, on the device.

        Returns when all of it has arrived, and waits for no work of other streams.
        """
        payload = self._buffer(size)
        dist.recv(payload, self._peer, group=self._group)
        return payload

    def _buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda")


class NcclTransport(Transport):
    """A connection that sends its payloads over NCCL, from GPU to GPU."""

    def __init__(self, group: dist.ProcessGroup, payloads: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        super().__init__(group, peer, device)
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


# In effect no limit. The time that a rank waits for its first hand-off depends on all ranks before it, which only the
# host observes. A wait of gloo that times out closes the connection, so that it cannot be repeated.
FOREVER = timedelta(days=365)


def connect(
    rank: int, world_size: int, backend: str, device: torch.device
) -> tuple[Transport | None, Transport | None]:
    """Returns the connections with the rank before and the rank after, both tested; None at either end of the chain.

    A collective, for which the default process group must be set up. Raises HandoffError if a peer is not the rank that
    it should be.
    """
    transports: dict[int, Transport] = {}
    for source in range(world_size - 1):  # every rank takes part in making every group, and in this order
        pair = [source, source + 1]
        group = dist.new_group(pair, timeout=FOREVER, backend="gloo")
        payloads = _nccl_group(pair) if backend == "nccl" else None
        if rank in pair:
            peer = pair[1 - pair.index(rank)]
            transports[source] = (
                NcclTransport(group, payloads, peer, device) if payloads else Transport(group, peer, device)
            )
    before, after = transports.get(rank - 1), transports.get(rank)
    # A first payload opens NCCL's communicator before the timed pass.
    if after:
        after.send_frames(encode(Message("hello", bytes(RUN_ID), rank, rank + 1, 0)))
        after.send_payload(after.stage(torch.zeros(1, dtype=torch.uint8, device=device)))
    if before:
        hello, _ = decode(before.receive_frame(), before.receive_frame)
        if (hello.kind, hello.source, hello.destination) != ("hello", rank - 1, rank):
            raise HandoffError(f"rank {rank} expected a handshake from rank {rank - 1}, and got {hello}")
        before.receive_payload(1)
    return before, after


def _nccl_group(pair: list[int]) -> dist.ProcessGroup:
    """A group of high priority, as the streams of hand-offs have; see `background`."""
    if not releases.installed().keeps_events_of_ended_threads:  # the threads of `background` end with each pass
        os.environ["TORCH_NCCL_CUDA_EVENT_CACHE"] = "0"  # read when the group is made
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = FOREVER  # the argument's value, or torch warns that the two differ
    group: dist.ProcessGroup = dist.new_group(pair, timeout=FOREVER, backend="nccl", pg_options=options)
    return group


@dataclass(frozen=True)
class LinkTerms:
    """What both ends of a link have agreed on before the first hand-off."""

    run: bytes
    """The id of the pass, `RUN_ID` bytes that are equal on all ranks."""
    repeat: int
    source: int
    destination: int
    done: int
    """The number of evaluations that the source and the ranks before it make."""
    sampler: Sampler
    dtype: torch.dtype
    latent_shape: tuple[int, ...]
    """The shape of one sample's latent, without the batch dimension."""
    requests: Requests


@dataclass(frozen=True)
class Parcel:
    """A batch that is ready to be sent. It shares no memory with the batch."""

    message: Message
    payload: Tensor
    began: float
    """The time at which packing began."""


class Link:
    """The hand-offs from one rank to the next during one pass.

    The source calls `pack` and `send` for each batch and then `send_end`; the destination calls `receive` and
    `receive_end`. Each side uses one thread, and the methods return when the transfer is complete: the threads in
    `background.py` call them beside the evaluations. Torch raises RuntimeError for a broken connection.
    """

    def __init__(
        self,
        transport: Transport,
        terms: LinkTerms,
        *,
        now: Callable[[], float],
        report: Callable[[Handoff], None],
        inspect: Callable[[Batch], None] = lambda batch: None,
    ) -> None:
        """`now` gives seconds since the epoch. `report` takes the times and sizes of each hand-off.

        `inspect` is called with each batch before it is packed, and may raise an error to refuse it.
        """
        self.transferred = 0
        self.terms = terms
        self.device = transport.device
        self._transport = transport
        self._now = now
        self._report = report
        self._inspect = inspect

    def pack(self, batch: Batch) -> Parcel:
        """Prepares a batch for `send`. Raises SettingsError if its scheduler keeps something that cannot be sent."""
        began = self._now()
        self._inspect(batch)
        packed, content = packing.pack(batch, self.terms.sampler)
        payload = self._transport.stage(content)
        return Parcel(self._message("batch", packed, checksum(payload)), payload, began)

    def send(self, parcel: Parcel) -> None:
        """Returns when the peer has taken the hand-off and the batch's memory may be reused."""
        framed, waited = self._transmit(parcel)
        total = self._now() - parcel.began
        self._report(self._handoff("send", parcel.message, framed, parcel.began, total, waited))
        self.transferred += 1

    def send_end(self) -> None:
        """Sends the end of the stream. Returns when the peer has taken it."""
        self._transport.send_frames(encode(self._message("end")))

    def receive(self, samples: Sequence[int]) -> Batch:
        """Receives the batch of these samples. Raises HandoffError if anything else arrives."""
        posted = self._now()
        first = self._transport.receive_frame()
        began = self._now()
        with self._expecting(samples):
            message, framed = decode(first, self._transport.receive_frame)
            packed = self._checked(message, samples)
            assert packed is not None
            payload = self._transport.receive_payload(packed.payload_bytes)
            if checksum(payload) != message.checksum:
                raise HandoffError("its payload was damaged in transit: the checksum does not match")
            seeds = [self.terms.requests.seed(sample) for sample in samples]
            batch = unpack(packed, payload, self.terms.sampler, seeds)
        self._report(self._handoff("recv", message, framed, began, self._now() - began, began - posted))
        self.transferred += 1
        return batch

    def receive_end(self) -> None:
        """Waits for the end of the stream. Raises HandoffError if anything else arrives."""
        with self._expecting(()):
            message, _ = decode(self._transport.receive_frame(), self._transport.receive_frame)
            self._checked(message, ())

    def _message(self, kind: Literal["batch", "end"], batch: PackedBatch | None = None, payload: int = 0) -> Message:
        terms = self.terms
        return Message(kind, terms.run, terms.source, terms.destination, self.transferred, batch, payload)

    def _transmit(self, parcel: Parcel) -> tuple[int, float]:
        frames = encode(parcel.message)
        offered = self._now()
        self._transport.send_frames(frames)
        taken = self._now()
        self._transport.send_payload(parcel.payload)
        return len(frames), taken - offered

    @contextmanager
    def _expecting(self, samples: Sequence[int]) -> Iterator[None]:
        """Adds to a HandoffError which hand-off was expected, by which rank, and from which."""
        terms = self.terms
        try:
            yield
        except HandoffError as error:
            stage = (self.transferred, "hand-off") if not samples else (terms.done, "evaluation")
            expected = f"{_named(samples)} after {units.counted(*stage)} from rank {terms.source}"
            raise HandoffError(
                f"rank {terms.destination} expected {expected}, and {error.message}", error.hint or HINT
            ) from error

    def _checked(self, message: Message, samples: Sequence[int]) -> PackedBatch | None:
        """The message's batch if this is the hand-off of these samples or, without samples, None for the end."""
        terms, packed = self.terms, message.batch
        if message.run != terms.run:
            raise HandoffError(f"it is of run {message.run.hex()}, and this is run {terms.run.hex()}")
        if (message.source, message.destination) != (terms.source, terms.destination):
            raise HandoffError(f"it was sent by rank {message.source} to rank {message.destination}")
        due = ("batch" if samples else "end", self.transferred, list(samples))
        if (message.kind, message.sequence, message.samples) != due:
            found = "a hello" if message.kind == "hello" else _named(message.samples)
            raise HandoffError(
                f"got {found} (sequence {message.sequence} instead of {self.transferred}): {self._cause(message)}"
            )
        if packed is None:
            return None
        if packed.done != terms.done:
            raise HandoffError(f"got it after {packed.done}")
        packing.check(packed)
        agreed = (DTYPE_NAMES[terms.dtype], (len(samples), *terms.latent_shape))
        found_latent = (packed.latent_dtype, packed.latent_shape)
        if found_latent != agreed:
            raise HandoffError(
                f"its latent is {found_latent[0]} {list(found_latent[1])} instead of {agreed[0]} {list(agreed[1])}"
            )
        return packed

    def _cause(self, message: Message) -> str:
        if message.sequence > self.transferred:
            return "a hand-off was lost"
        if message.sequence < self.transferred:
            return "a hand-off came twice"
        return "the ranks disagree on which samples are to be made"

    def _handoff(
        self,
        direction: Literal["send", "recv"],
        message: Message,
        framed: int,
        began: float,
        total: float,
        waited: float,
    ) -> Handoff:
        terms, packed = self.terms, message.batch
        assert packed is not None
        sends = direction == "send"
        # generators are sent within the frames, and tensors in CPU memory as well
        parts = packed.latent_bytes + packed.state_bytes + packed.generator_bytes
        return Handoff(
            repeat=terms.repeat,
            rank=terms.source if sends else terms.destination,
            peer=terms.destination if sends else terms.source,
            direction=direction,
            sample=packed.samples[0],
            step=packed.done,
            sequence=message.sequence,
            time=began,
            total=total,
            waited=waited,
            header_bytes=framed + packed.payload_bytes - parts,
            latent_bytes=packed.latent_bytes,
            state_bytes=packed.state_bytes,
            generator_bytes=packed.generator_bytes,
        )


def _named(samples: Sequence[int]) -> str:
    if not samples:
        return "the end of the stream"
    return f"sample {samples[0]}" if len(samples) == 1 else f"samples {samples[0]} to {samples[-1]}"


# For each size of an element, a type of that size. A library that only counts bytes accepts it as the same.
LOOKALIKE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def sending_link(transport: Transport, terms: LinkTerms, fault: Fault | None, **options: Any) -> Link:
    """The source's end of a link, with the fault if it is one of this rank's hand-offs."""
    if fault is None or fault.rank != terms.source or fault.kind in OF_THE_RANK:
        return Link(transport, terms, **options)
    return FaultyLink(transport, terms, fault, **options)


class FaultyLink(Link):
    """A link with a fault in the hand-off of one sample, as `--inject` requests it."""

    def __init__(self, transport: Transport, terms: LinkTerms, fault: Fault, **options: Any) -> None:
        super().__init__(transport, terms, **options)
        self._fault = fault

    def pack(self, batch: Batch) -> Parcel:
        latents, began = batch.latents, self._now()
        match self._fault.kind if self._fault.sample in batch.samples else None:
            case FaultKind.late:
                time.sleep(self._fault.seconds)
            case FaultKind.shape:
                batch = replace(batch, latents=latents.unsqueeze(1))
            case FaultKind.dtype:
                batch = replace(batch, latents=latents.view(LOOKALIKE[latents.itemsize]))
        return replace(super().pack(batch), began=began)

    def _transmit(self, parcel: Parcel) -> tuple[int, float]:
        packed = parcel.message.batch
        assert packed is not None
        kind = self._fault.kind if self._fault.sample in packed.samples else None
        if kind is FaultKind.drop:
            return len(encode(parcel.message)), 0.0
        if kind is FaultKind.step:
            later = msgspec.structs.replace(packed, done=packed.done + 1)
            parcel = replace(parcel, message=msgspec.structs.replace(parcel.message, batch=later))
        if kind is FaultKind.corrupt:
            payload = parcel.payload.clone()
            payload[0] ^= 1
            parcel = replace(parcel, payload=payload)
        sent = super()._transmit(parcel)
        return super()._transmit(parcel) if kind is FaultKind.duplicate else sent
